"""What a codec does to real gradients: size, error and bias."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.gradients import LayerGradient
from isgq.codecs import AnyCodec, codec
from isgq.core.codec import PairCodec
from isgq.core.keys import Key
from isgq.core.payload import Factors, LowRank, PairPayload, Payload
from isgq.wire import pack

_DOUBT = 8  # few errors understate their deviation, the more so as one stops when it looks small


def encode(coder: AnyCodec, layer: LayerGradient, step: int) -> Payload | PairPayload:
    """Compress a layer's gradient or, with a pair codec, its factors."""
    key = Key(layer.name, step=step)
    if isinstance(coder, PairCodec):
        return coder.encode_pair(layer.factors, layer.contract, key)
    return coder.encode(layer.gradient, key)


def decode(coder: AnyCodec, payload: Payload | PairPayload) -> Tensor | Factors | LowRank:
    """Rebuild what was compressed."""
    if isinstance(coder, PairCodec):
        assert isinstance(payload, PairPayload)
        return coder.decode_pair(payload)
    assert isinstance(payload, Payload)
    return coder.decode(payload)


def rebuild(coder: AnyCodec, payload: Payload | PairPayload, layer: LayerGradient) -> Tensor:
    """The layer's gradient from a payload: float64, flat; as a sum of outer products with the bias's, row by row."""
    value = decode(coder, payload)
    if isinstance(value, LowRank):
        gradient = value.left.T @ value.right
    else:
        gradient = layer.contract(value.x, value.d) if isinstance(value, Factors) else value
    return gradient.reshape(-1).double()


def target(layer: LayerGradient, size: int) -> Tensor:
    """What a rebuilt gradient of that size should be: float64, flat."""
    if size == layer.gradient.numel():
        return layer.gradient.reshape(-1).double()
    return torch.cat([layer.gradient.flatten(1), layer.bias.unsqueeze(1)], 1).reshape(-1).double()


def streams(payload: Payload | PairPayload) -> Iterator[tuple[str, Tensor, int]]:
    """Name, symbols and alphabet of each stream; those of a pair are called ``x.name`` and ``d.name``."""
    parts = {"x.": payload.x, "d.": payload.d} if isinstance(payload, PairPayload) else {"": payload}
    for prefix, part in parts.items():
        for name, symbols in part.symbols.items():
            yield prefix + name, symbols.values, symbols.alphabet


def entropy(symbols: Tensor) -> float:
    """Empirical entropy in bits per symbol; 0 of no symbols."""
    if not symbols.numel():
        return 0.0
    share = torch.unique(symbols, return_counts=True)[1].double() / symbols.numel()
    return max(0.0, -float((share * share.log2()).sum()))


def raw_bits(payload: Payload | PairPayload) -> int:
    """Bits of the tensors that are sent as they are, scales and values."""
    parts = (payload.x, payload.d) if isinstance(payload, PairPayload) else (payload,)
    return sum(8 * t.numel() * t.element_size() for part in parts for t in part.tensors.values())


@dataclass(frozen=True)
class Quality:
    """A codec on one layer.

    Attributes:
        size: bytes of the packed message, headers counted (key 0).
        symbols: stream -> number of symbols, bits by the alphabet's logarithm, bits by empirical entropy (key 0).
        raw_bits: bits of what is no symbol.
        keys: how many keys the means are over.
        norm: squared norm of the gradient.
        error: mean squared error.
        deviation: standard error of that mean.
        offset: squared norm of the mean over keys of the error.
        noise: what ``offset`` would be about without any bias.
        cosine: mean cosine of decoded and true gradient; 0 where either is zero.
    """

    size: int
    symbols: Mapping[str, tuple[int, float, float]]
    raw_bits: int
    keys: int
    norm: float
    error: float
    deviation: float
    offset: float
    noise: float
    cosine: float


def measure(spec: str, layer: LayerGradient, keys: int, *, precision: float = math.inf, most: int = 0) -> Quality:
    """Measure a codec on a layer; one with memory begins with an empty one at every key.

    Args:
        spec: the codec.
        layer: the gradient.
        keys: how many keys to take at least, 2 or more.
        precision: go on until the standard error of the mean error is that share of it,
        most: but for no more keys than that.
    """
    errors: list[float] = []
    cosine = 0.0
    true = first = total = torch.empty(0, dtype=torch.float64)
    norm = size = raw = 0.0
    symbols: dict[str, tuple[int, float, float]] = {}
    for step in _steps(errors, keys, precision, most):
        coder = codec(spec)  # a fresh one: codecs with memory must not remember the key before
        payload = encode(coder, layer, step)
        rebuilt = rebuild(coder, payload, layer)
        if step == 0:
            true = target(layer, rebuilt.numel())
            norm, size, raw = float(true.square().sum()), pack(payload).numel(), raw_bits(payload)
            first = rebuilt - true
            total = torch.zeros_like(true)  # of the differences to the first error, so that equal ones cancel exactly
            for name, values, alphabet in streams(payload):
                n = values.numel()
                symbols[name] = (n, n * math.log2(alphabet), n * entropy(values))
        own = float(rebuilt @ rebuilt)
        product = float(rebuilt @ true)
        cosine += product / math.sqrt(own * norm) if own and norm else 0.0
        rebuilt -= true
        errors.append(float(rebuilt @ rebuilt))
        total += rebuilt.sub_(first)
    count = len(errors)
    mean, shift = _mean(errors), total / count
    offset = float((first + shift).square().sum())
    same = not total.any()
    noise = 0.0 if same else max(0.0, mean - offset) / (count - 1)
    return Quality(
        int(size), symbols, int(raw), count, norm, mean, _error_of_mean(errors), offset, noise, cosine / count
    )


def _steps(errors: list[float], keys: int, precision: float, most: int) -> Iterator[int]:
    """Keys until the errors so far tell their mean, which reads all of them: it is asked after an eighth more each."""
    done = 0
    while True:
        yield from range(done, keys)
        doubt = 1 + _DOUBT / (keys - 1)
        if keys >= most or _error_of_mean(errors) * doubt <= precision * _mean(errors):
            return
        done, keys = keys, min(most, keys + max(1, keys // 8))


def _mean(values: list[float]) -> float:
    """The mean; exact where all are equal."""
    return values[0] + math.fsum(v - values[0] for v in values) / len(values)


def _error_of_mean(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
