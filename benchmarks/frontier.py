"""How few bytes a step can take: training with real messages, several workers simulated in one process.

    python -m benchmarks.frontier [--methods SPEC ...] [--sizes NxB ...] [--rates R ...] [--seeds S ...] [--out FILE]

By default FC 784-300-100-10 on Fashion-MNIST, SGD with momentum 0.9, learning rate 0.02 falling as a cosine to 0, two
epochs. One forward and backward pass serves all workers: each takes its own rows. What a worker would send is really
encoded, packed, unpacked and decoded; only its process and the network are simulated. Bytes are those of the message of
one worker and step (``isgq.wire.pack_message``, with a template and digests that the receiver makes itself) and of the
header that a session sends before it, 17 bytes. *Moved* is what a worker sends and receives: a message is received
from each of the others; float32 in a ring all-reduce is sent 2 (N-1)/N times and received as often.

Methods:
    dense                     float32, counted as 4 bytes a parameter
    powersgd:rank=R           PowerSGD with error feedback (Vogels, Karimireddy and Jaggi, 2019) as in torch's hook, one
                              warm-started power iteration, biases dense; counted as float32, without any header
    subspace:rank=R,step=S    a common subspace: a session's own rounds between threads, all headers included
    any other                 a codec of isgq; pair codecs take the factors, direct ones each parameter's gradient
"""

import argparse
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import isgq
import models
from benchmarks.simulated import exchanges, together
from isgq.aggregate import Step
from isgq.choice import choose
from isgq.codecs import codec, split_spec
from isgq.core.codec import Codec, PairCodec, PlansTogether, learned_by, pair_digests
from isgq.core.keys import Key, random_int32
from isgq.core.payload import Factors, PairPayload, Payload
from isgq.layers.capture import Capture, Unit, find_units
from isgq.rounds import Rounds
from isgq.routing import direct_carriers
from isgq.wire import pack_message, unpack_message
from isgq.wire.header import Header, Status
from isgq.wire.template import Template

MOMENTUM = 0.9
_FRAME_BYTES = 33  # of a message besides its records: a frame's 16 and a session's 17
METHODS = ("dense", "rotated:ratio=800", "isgq", "error_feedback(top_k:k=0.001)", "powersgd:rank=2")
Shares = Sequence[dict[str, Factors]]
"""For each worker, each unit's factors; their gradient is that of the worker's own mean loss."""
Mean = tuple[dict[str, Tensor], float, float]
"""Mean of the gradients by parameter name, bytes that a worker sends, bytes that it sends and receives."""
Method = Callable[[Shares, int], Mean]
"""``(shares, step) -> mean``."""


@dataclass(frozen=True)
class Result:
    """One run; ``bytes`` is what a worker sends in a step, ``moved`` what it sends and receives, in the mean."""

    method: str
    workers: int
    batch: int
    rate: float
    seed: int
    bytes: float
    moved: float
    compression: float
    test_accuracy: float
    test_loss: float
    seconds: float


# ---- methods


def _split(unit: Unit, flat: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter name, from weight and bias as one flat vector."""
    size = unit.weight.numel()
    parts = {unit.name: flat[:size].view_as(unit.weight)}
    return parts if unit.bias_name is None else parts | {unit.bias_name: flat[size:]}


def _gradients(units: Sequence[Unit], share: dict[str, Factors]) -> dict[str, Tensor]:
    return {name: g for u in units for name, g in _split(u, u.flat_gradient(share[u.name])).items()}


def _ring(numel: int, workers: int) -> tuple[float, float]:
    """Bytes of float32, and what of them a worker sends and receives in a ring all-reduce."""
    return 4.0 * numel, 16.0 * numel * (workers - 1) / workers


def dense(units: Sequence[Unit]) -> Method:
    """The mean itself."""

    def mean(shares: Shares, step: int) -> Mean:
        parts = [_gradients(units, share) for share in shares]
        total = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
        return total, *_ring(sum(g.numel() for g in total.values()), len(shares))

    return mean


Record = Payload | PairPayload
Encode = Callable[[int, dict[str, Factors], int], tuple[list[Record], list[Key]]]
"""``(worker, its factors, step) -> records, and the keys whose digests they have``."""


def _messages(
    encode: Encode,
    close: Callable[[list[list[Record]]], dict[str, Tensor]],
    header: int,
    pair: PairCodec | None = None,
) -> Method:
    """Records of every worker over the wire, then ``close`` makes the mean. Receivers make the digests themselves."""
    templates: list[Template] = []

    def mean(shares: Shares, step: int) -> Mean:
        received, size = [], 0
        for worker, share in enumerate(shares):
            records, keys = encode(worker, share, step)
            if not templates:
                templates.append(Template.of(records))
            digests = [key.digest if pair is None else pair_digests(pair, key) for key in keys]
            message, _ = pack_message(records, digests=digests, template=templates[0])
            size += message.numel() + header
            received.append(unpack_message(message, digests=digests, template=templates[0]))
        return close(received), size / len(shares), float(size)

    return mean


def pairs(units: Sequence[Unit], pair: PairCodec, seed: int) -> Method:
    """A pair codec on every unit; one that shares the bytes of a step out does so for each worker."""
    learned = learned_by(pair)

    def encode(worker: int, share: dict[str, Factors], step: int) -> tuple[list[Record], list[Key]]:
        keys = [Key(unit.name, seed, step, worker) for unit in units]
        if not isinstance(pair, PlansTogether) or not pair.together:
            return [pair.encode_pair(share[u.name], u.contract, k) for u, k in zip(units, keys, strict=True)], keys
        prepared = [pair.prepare(share[u.name], u.contract, k) for u, k in zip(units, keys, strict=True)]
        return list(pair.encode_together(prepared, _FRAME_BYTES, lambda _: None)), keys

    def close(received: list[list[Record]]) -> dict[str, Tensor]:
        mean = {}
        for unit, records in zip(units, zip(*received, strict=True), strict=True):
            flats = [unit.flat_gradient(pair.decode_pair(r)) for r in records if isinstance(r, PairPayload)]
            mean.update(_split(unit, torch.stack(flats).mean(0)))
        if learned is not None:
            learned.commit()
        return mean

    return _messages(encode, close, _header_size(units), pair)


def _header_size(units: Sequence[Unit]) -> int:
    names = [name for unit in units for name in (unit.name, unit.bias_name) if name is not None]
    return Header(Status.OK, 0, 0, 0, 0, [True] * len(names)).pack().numel()


def direct(units: Sequence[Unit], spec: str, workers: int, seed: int) -> Method:
    """A direct codec on every parameter's gradient; each worker has its own, with its own memory."""
    codecs = [codec(spec) for _ in range(workers)]

    def encode(worker: int, share: dict[str, Factors], step: int) -> tuple[list[Record], list[Key]]:
        own = codecs[worker]
        assert isinstance(own, Codec)
        gradients = _gradients(units, share)
        keys = [Key(name, seed, step, worker) for name in gradients]
        return [own.encode(g, k) for g, k in zip(gradients.values(), keys, strict=True)], keys

    def close(received: list[list[Record]]) -> dict[str, Tensor]:
        names = [name for u in units for name in (u.name, u.bias_name) if name is not None]
        own = codecs[0]
        assert isinstance(own, Codec)
        return {
            name: torch.stack([own.decode(r) for r in records if isinstance(r, Payload)]).mean(0)
            for name, records in zip(names, zip(*received, strict=True), strict=True)
        }

    return _messages(encode, close, _header_size(units))


def powersgd(units: Sequence[Unit], rank: int, seed: int) -> Method:
    """PowerSGD: P = mean M_w Q, made orthonormal; Q = mean M_w^T P; the mean is P Q^T, the rest goes to the memory."""
    generator = torch.Generator().manual_seed(seed)
    bases = {
        u.name: torch.randn(u.weight[0].numel(), min(rank, *u.weight.flatten(1).shape), generator=generator)
        for u in units
    }
    memory: dict[tuple[int, str], Tensor] = {}

    def mean(shares: Shares, step: int) -> Mean:
        gradients, sent, total = [_gradients(units, share) for share in shares], 0, {}
        for unit in units:
            own = [g[unit.name] + memory.get((w, unit.name), 0) for w, g in enumerate(gradients)]
            left, _ = torch.linalg.qr(sum(m.flatten(1) @ bases[unit.name] for m in own) / len(own))
            right = sum(m.flatten(1).T @ left for m in own) / len(own)
            bases[unit.name], total[unit.name] = right, (left @ right.T).view_as(unit.weight)
            memory.update({(w, unit.name): m - total[unit.name] for w, m in enumerate(own)})
            sent += left.numel() + right.numel()
            if unit.bias_name is not None:
                total[unit.bias_name] = sum(g[unit.bias_name] for g in gradients) / len(own)
                sent += total[unit.bias_name].numel()
        return total, *_ring(sent, len(shares))

    return mean


def subspace(units: Sequence[Unit], spec: str, workers: int, seed: int) -> Method:
    """A common subspace: every worker is a thread that takes part in the rounds as a rank of a session does."""
    choice = choose(spec, None, "tensor", "gather", None, "both")
    places = exchanges(workers)
    ranks = [Rounds(place, choice) for place in places]
    parameters = {name: p for unit in units for name, p in _split(unit, torch.zeros(_numel(unit))).items()}
    assert choice.direct is not None
    carriers = direct_carriers(choice.direct, parameters, "tensor", [0])

    def mean(shares: Shares, step: int) -> Mean:
        before = sum(place.sent + place.received for place in places), sum(place.sent for place in places)

        def take_part(rank: int) -> dict[str, Tensor]:
            gradients = _gradients(units, shares[rank])
            this = Step(step, 0, seed, list(gradients), [True] * len(gradients), carriers, gradients)
            outgoing = ranks[rank].encode(this)
            means = ranks[rank].reduce(this, outgoing, ranks[rank].agree(this, outgoing))
            ranks[rank].commit()
            return means

        means = together(take_part, workers)[0]
        after = sum(place.sent + place.received for place in places), sum(place.sent for place in places)
        moved, sent = ((b - a) / workers for a, b in zip(before, after, strict=True))
        return {name: means[name].view(p.shape) for name, p in parameters.items()}, sent, moved

    return mean


def _numel(unit: Unit) -> int:
    return unit.weight.numel() + (unit.bias.numel() if unit.bias is not None else 0)


def build(spec: str, units: Sequence[Unit], workers: int, seed: int) -> Method:
    """The method that a spec names."""
    name, _, options = split_spec(spec)
    if name == "dense":
        return dense(units)
    if name == "subspace":
        return subspace(units, spec, workers, seed)
    if name == "powersgd":
        [(_, rank)] = (option.split("=") for option in options)
        return powersgd(units, int(rank), seed)
    pair, _ = isgq.choose_codecs(spec, None)
    return pairs(units, pair, seed) if pair is not None else direct(units, spec, workers, seed)


# ---- training


def train(spec: str, workers: int, batch: int, rate: float, seed: int, options: argparse.Namespace) -> Result:
    """One run."""
    dataset = data.load(options.data, seed=seed)
    dataset = dataset.standardized() if options.standardize else dataset
    model = models.build(options.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    units, _ = find_units(model, skip=lambda name: False)
    method, parameters = build(spec, units, workers, seed), dict(model.named_parameters())
    caught: dict[str, Factors] = {}
    capture = Capture(units, lambda unit, factors: caught.update({unit.name: factors}), lambda: None)
    sent, moved, started = 0.0, 0.0, time.perf_counter()
    steps = options.steps or options.epochs * (len(dataset.train_y) // (workers * batch))
    for step, chosen in enumerate(itertools.islice(_batches(len(dataset.train_y), workers * batch, seed), steps)):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        loss = F.cross_entropy(model(dataset.train_x[chosen]), dataset.train_y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        rows = [slice(worker * batch, (worker + 1) * batch) for worker in range(workers)]
        # d of the mean over all rows, times the workers, is d of the mean over a worker's own
        mean, *sizes = method([{n: Factors(f.x[r], f.d[r] * workers) for n, f in caught.items()} for r in rows], step)
        sent, moved = sent + sizes[0], moved + sizes[1]
        for name, gradient in mean.items():
            parameters[name].grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    capture.close()
    test_loss, accuracy = _evaluate(model, dataset)
    full = 4 * sum(p.numel() for p in parameters.values())
    seconds = time.perf_counter() - started
    each = (sent / steps, moved / steps, full * steps / sent)
    return Result(spec, workers, batch, rate, seed, *each, accuracy, test_loss, seconds)


def _batches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Rows of all workers together, without end; what is left over of an epoch is dropped."""
    for epoch in itertools.count():
        order = torch.argsort(random_int32(Key("order", seed, epoch).digest, "frontier", n), stable=True)
        yield from order[: n // size * size].view(-1, size)


@torch.no_grad()
def _evaluate(model: nn.Module, dataset: data.Dataset) -> tuple[float, float]:
    outputs = torch.cat([model(x) for x in torch.split(dataset.test_x, 1000)]).double()
    return float(F.cross_entropy(outputs, dataset.test_y)), float((outputs.argmax(1) == dataset.test_y).double().mean())


# ---- report


def table(results: Sequence[Result]) -> str:
    """Means over seeds as Markdown, each loss also relative to dense of the same size and seeds at its best rate."""
    lines = [
        "| method | N x B | rate | seeds | bytes | moved | compression | accuracy | loss | to dense |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int, int, float], list[Result]] = {}
    for result in results:
        groups.setdefault((result.method, result.workers, result.batch, result.rate), []).append(result)
    dense: dict[tuple[int, int], list[Result]] = {}
    for (method, workers, batch, _), own in groups.items():
        best = dense.get((workers, batch), own)
        if method == "dense" and _mean(own, "test_loss") <= _mean(best, "test_loss"):
            dense[workers, batch] = own
    for (method, workers, batch, rate), own in groups.items():
        base = {r.seed: r.test_loss for r in dense.get((workers, batch), [])}
        relative = [r.test_loss / base[r.seed] - 1 for r in own if r.seed in base]
        to_dense = f"{100 * statistics.mean(relative):+.2f} %" if relative else ""
        names = ("bytes", "moved", "compression", "test_accuracy", "test_loss")
        size, moved, ratio, accuracy, loss = (_mean(own, name) for name in names)
        numbers = (f"{size:.0f}", f"{moved:.0f}", f"x{ratio:.0f}", f"{accuracy:.4f}", f"{loss:.4f}", to_dense)
        lines.append(f"| {method} | {workers}x{batch} | {rate} | {len(own)} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _mean(results: Sequence[Result], name: str) -> float:
    mean: float = statistics.mean(getattr(result, name) for result in results)
    return mean


def main(arguments: Sequence[str]) -> None:
    """Run all combinations; print the table and write the JSON after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--sizes", nargs="+", default=["4x64"], help="workers x batch of each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.02], help="learning rates at the start")
    parser.add_argument("--model", default="fc:hidden=300-100")
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="instead of epochs")
    parser.add_argument("--standardize", action="store_true", help="pixels of mean 0 and deviation 1")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    for seed, size, method, rate in itertools.product(options.seeds, options.sizes, options.methods, options.rates):
        workers, batch = map(int, size.split("x"))
        results.append(train(method, workers, batch, rate, seed, options))
        print(results[-1], file=sys.stderr, flush=True)
        if options.out is not None:
            command = shlex.join(["python", "-m", "benchmarks.frontier", *arguments])
            versions = {"torch": torch.__version__, "isgq": isgq.__version__}
            content = {"command": command, "simulated_workers": True, "versions": versions}
            options.out.write_text(json.dumps(content | {"runs": [asdict(r) for r in results]}, indent=1) + "\n")
    print(f"simulated workers: one process, real messages\n\n{table(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
