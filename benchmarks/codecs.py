"""Every codec on real gradients: bytes, error, bias and speed, as a table and as JSON.

    python -m benchmarks.codecs [--quick] [--out FILE] [--codecs SPEC ...] [--data NAME]

*Quality* is measured on the weight gradients of ``fc`` and ``lenet`` after some training steps, each layer compressed
on its own as in training. A pair codec compresses the layer's factors; its error is that of the rebuilt gradient, and
its bits are counted per element of the gradient too. Codecs with memory begin with an empty one at every key.

*Speed* is measured on one large weight gradient of a wide ``fc`` (direct codecs) or on the factors of one layer at a
large batch (pair codecs), with as many float32 elements in either case. Rates are bytes of these inputs a second.

The JSON file is one object::

    schema      1
    command     how it was made
    versions    {python, torch, numpy, isgq}
    threads     torch's threads
    quick       whether it is a short run, whose numbers mean little
    data        name of the data set
    keys        keys that means are taken over
    repeats     timed repetitions
    gradients   network -> {layers, elements}
    codecs      list of
        spec, unbiased, pair     the codec; what it says of itself; whether it takes factors
        quality    network -> {
            bytes              of isgq.wire.pack, headers counted, summed over the layers (key 0)
            bits_per_element   the same for each element of the gradients
            symbols            stream -> {count, alphabet_bits, entropy_bits}: number of symbols; log2 of the alphabet
                               and empirical entropy, mean per symbol (key 0). Neither is a measured size, and the
                               entropy of few symbols of a large alphabet is underestimated
            nmse               |decoded - g|^2 / |g|^2, mean over keys
            bias               |mean over keys of decoded - g| / |g|
            bias_noise         what ``bias`` would be about without any bias: |standard error of that mean| / |g|
        }
        speed      {
            elements           float32 elements of the input
            bytes              of the packed payload
            encode, pack, unpack, decode, encode_pack
                               {seconds, gb_per_s, best_gb_per_s}: median, its rate, and the rate of the fastest
                               repetition; 1 GB is 10^9 bytes
            top_k              null, or for codecs that keep k entries {k, seconds, ratio}: ``torch.topk(g.abs(), k)``
                               timed in turns with encode, and the ratio encode / topk of the medians
        }
"""

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import data
import isgq
from analysis.gradients import LayerGradient, capture_gradients, weight_numel
from analysis.measure import decode, encode
from analysis.measure import measure as measure_layer
from analysis.methods import SPECS
from isgq.codecs import AnyCodec, codec
from isgq.core.codec import PairCodec
from isgq.core.errors import OptionError
from isgq.wire import pack, unpack

NETWORKS = ("fc", "lenet")
STAGES = ("encode", "pack", "unpack", "decode", "encode_pack")
_BATCH = 64
_MIDDLE = 1  # of the three layers of the networks that are timed on
_PAIR_NETWORK = "fc:hidden=400-250"
_PAIR_WIDTH = 400 + 250  # elements of both factors of its middle layer for each sample

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Quality = dict[str, Any]
_Speed = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        steps: training steps before gradients are captured.
        keys: keys that means are taken over, at least 2.
        repeats: timed repetitions, after one that is not counted.
        direct_network: the network whose middle layer direct codecs are timed on; it has ``elements`` weights.
        elements: float32 elements to time on.
    """

    steps: int
    keys: int
    repeats: int
    direct_network: str
    elements: int


FULL = Effort(steps=48, keys=30, repeats=5, direct_network="fc:hidden=3200-3125", elements=10_000_000)
QUICK = Effort(steps=12, keys=2, repeats=2, direct_network="fc:hidden=400-250", elements=100_000)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that is measured on.

    Attributes:
        networks: name -> weight gradients of its layers.
        direct: the layer that direct codecs are timed on.
        pair: the layer that pair codecs are timed on.
    """

    networks: Mapping[str, Sequence[LayerGradient]]
    direct: LayerGradient
    pair: LayerGradient


def capture_inputs(dataset: data.Dataset, effort: Effort) -> Inputs:
    """Train, and capture the gradients."""

    def capture(model: str, last_batch: int) -> list[LayerGradient]:
        return capture_gradients(model, dataset, steps=effort.steps, batch=_BATCH, last_batch=last_batch)

    networks = {name: capture(name, _BATCH) for name in NETWORKS}
    direct = capture(effort.direct_network, _BATCH)[_MIDDLE]
    return Inputs(networks, direct, capture(_PAIR_NETWORK, effort.elements // _PAIR_WIDTH)[_MIDDLE])


def measure_quality(spec: str, layers: Sequence[LayerGradient], keys: int) -> _Quality:
    """Size, error and bias of a codec on the layers of a network; the module says what the entries mean."""
    found = [measure_layer(spec, layer, keys) for layer in layers]
    symbols = dict[str, list[float]]()
    for row in (row for quality in found for row in quality.symbols.items()):
        symbols[row[0]] = [a + b for a, b in zip(symbols.get(row[0], [0, 0, 0]), row[1], strict=True)]
    size, norm = sum(q.size for q in found), math.fsum(q.norm for q in found)
    return {
        "bytes": size,
        "bits_per_element": 8 * size / weight_numel(layers),
        "symbols": {
            name: {"count": int(count), "alphabet_bits": most / max(count, 1), "entropy_bits": bits / max(count, 1)}
            for name, (count, most, bits) in symbols.items()
        },
        "nmse": math.fsum(q.error for q in found) / norm,
        "bias": math.sqrt(math.fsum(q.offset for q in found) / norm),
        "bias_noise": math.sqrt(math.fsum(q.noise for q in found) / norm),
    }


def kept(coder: AnyCodec, numel: int) -> int | None:
    """How many entries of a tensor the codec, or the one inside it, keeps; None where it keeps all."""
    inner = getattr(coder, "codec", coder)
    amount = getattr(inner, "k", getattr(inner, "m", None))
    if amount is None:
        return None
    return max(1, round(amount * numel)) if isinstance(amount, float) else min(amount, numel)


def measure_speed(spec: str, inputs: Inputs, repeats: int) -> _Speed:
    """Seconds and rates of each stage; the module says what the entries mean."""
    coder = codec(spec)
    pair = isinstance(coder, PairCodec)
    layer = inputs.pair if pair else inputs.direct
    numel = layer.factors.x.numel() + layer.factors.d.numel() if pair else layer.gradient.numel()
    k = None if pair else kept(coder, numel)
    seconds: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "top_k")}
    size = 0
    for step in range(1 + repeats):
        if k is not None:
            taken, _ = _timed(_largest_entries, layer.gradient, k)
            seconds["top_k"].append(taken)
        encoding, payload = _timed(encode, coder, layer, step)
        packing, message = _timed(pack, payload)
        unpacking, received = _timed(unpack, message)
        decoding, _ = _timed(decode, coder, received)
        taken_by_stage = (encoding, packing, unpacking, decoding, encoding + packing)
        for stage, taken in zip(STAGES, taken_by_stage, strict=True):
            seconds[stage].append(taken)
        size = message.numel()
    counted = {stage: taken[1:] for stage, taken in seconds.items() if taken}
    result: _Speed = {"elements": numel, "bytes": size, "top_k": None}
    result |= {stage: _rates(counted[stage], 4 * numel) for stage in STAGES}
    if k is not None:
        median = statistics.median(counted["top_k"])
        result["top_k"] = {"k": k, "seconds": median, "ratio": result["encode"]["seconds"] / median}
    return result


def _largest_entries(gradient: Tensor, k: int) -> Tensor:
    return torch.topk(gradient.reshape(-1).abs(), k).indices


def _timed(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> tuple[float, _T]:
    start = time.perf_counter()
    result = work(*args, **kwargs)
    return time.perf_counter() - start, result


def _rates(seconds: Sequence[float], size: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"seconds": median, "gb_per_s": size / median / 1e9, "best_gb_per_s": size / min(seconds) / 1e9}


def measure(spec: str, inputs: Inputs, effort: Effort) -> dict[str, Any]:
    """One entry of ``codecs`` in the JSON file."""
    coder = codec(spec)
    return {
        "spec": spec,
        "unbiased": coder.unbiased,
        "pair": isinstance(coder, PairCodec),
        "quality": {name: measure_quality(spec, layers, effort.keys) for name, layers in inputs.networks.items()},
        "speed": measure_speed(spec, inputs, effort.repeats),
    }


_HEADER = (
    *("codec", "network", "bytes", "bits/el", "alphabet", "entropy", "NMSE", "bias", "noise"),
    *("encode", "pack", "unpack", "decode", "enc+pack", "best", "x topk"),
)


def table(codecs: Sequence[Mapping[str, Any]]) -> str:
    """The measurements as aligned text: a line for each codec and network, with the speed on the codec's first.

    Alphabet and entropy are bits of all symbols for each element of the gradient; speeds are in GB/s, medians but for
    ``best``, the fastest encode and pack; ``x topk`` is the time of encode in times that of ``torch.topk``.
    """
    rows = [_HEADER]
    for entry in codecs:
        speed = entry["speed"]
        rates = [f"{speed[stage]['gb_per_s']:.3f}" for stage in STAGES]
        fast = f"{speed['encode_pack']['best_gb_per_s']:.3f}"
        ratio = f"{speed['top_k']['ratio']:.2f}" if speed["top_k"] else "-"
        first = (entry["spec"], *rates, fast, ratio)
        for network, q in entry["quality"].items():
            elements = 8 * q["bytes"] / q["bits_per_element"]
            bits = [
                sum(s["count"] * s[name] for s in q["symbols"].values()) / elements
                for name in ("alphabet_bits", "entropy_bits")
            ]
            rows.append((
                *(first[0], network, f"{q['bytes']:,}", f"{q['bits_per_element']:.3f}"),
                *(f"{bits[0]:.3f}", f"{bits[1]:.3f}"),
                *(f"{q[name]:.2e}" for name in ("nmse", "bias", "bias_noise")),
                *first[1:],
            ))
            first = ("",) * len(first)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the JSON file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description="Bytes, error and speed of codecs")
    parser.add_argument("--quick", action="store_true", help="a few seconds; the numbers mean little")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/codecs.json"), help="JSON file to write")
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", default=list(SPECS), help="e.g. dithered:levels=2")
    parser.add_argument("--data", default="fashion", help="a data set by name (default: %(default)s)")
    options = parser.parse_args(given)
    try:
        for spec in options.codecs:
            codec(spec)
        dataset = data.load(options.data).standardized()
    except (OptionError, data.DataError) as error:
        parser.error(str(error))
    effort = QUICK if options.quick else FULL
    inputs = capture_inputs(dataset, effort)
    bar = tqdm(options.codecs, unit="codec", file=sys.stderr)
    codecs = [measure(spec, inputs, effort) for spec in bar]
    report = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "benchmarks.codecs", *given]),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "isgq": isgq.__version__,
        },
        "threads": torch.get_num_threads(),
        "quick": options.quick,
        "data": options.data,
        **{name: value for name, value in asdict(effort).items() if name in {"keys", "repeats"}},
        "gradients": {
            name: {"layers": len(layers), "elements": weight_numel(layers)} for name, layers in inputs.networks.items()
        },
        "codecs": codecs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(codecs))
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
