"""How few bytes a step can take: training with real messages, several workers simulated in one process.

    python -m benchmarks.frontier [--methods SPEC ...] [--sizes NxB ...] [--rates R ...] [--seeds S ...] [--out FILE]

By default FC 784-300-100-10 on Fashion-MNIST, SGD with momentum 0.9, learning rate 0.02 falling as a cosine to 0, two
epochs. One forward and backward pass serves all workers: each takes its own rows. The methods, and what is counted, are
those of :mod:`benchmarks.methods`.
"""

import argparse
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

import data
import isgq
import models
from analysis.report import draw, style
from benchmarks.methods import Share, build
from isgq.core.keys import Key, random_int32
from isgq.core.payload import Factors
from isgq.layers.capture import Capture, find_units

MOMENTUM = 0.9
METHODS = ("dense", "rotated:ratio=800", "isgq", "error_feedback(top_k:k=0.001)", "powersgd:rank=2")


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


def train(spec: str, workers: int, batch: int, rate: float, seed: int, options: argparse.Namespace) -> Result:
    """One run."""
    dataset = data.load(options.data, seed=seed)
    dataset = dataset.standardized() if options.standardize else dataset
    model = models.build(options.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    units, _ = find_units(model, skip=lambda name: False)
    parameters = dict(model.named_parameters())
    method = build(spec, units, parameters, workers, seed, routes="factors")
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
        shares = [Share.of(units, {n: Factors(f.x[r], f.d[r] * workers) for n, f in caught.items()}) for r in rows]
        mean, *sizes = method(shares, step)
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
    parser.add_argument("--figure", type=Path, help="draw loss against bytes, a PNG")
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
    if options.figure is not None:
        options.figure.write_bytes(draw("frontier", "Loss against bytes", lambda axes: _paint(axes, results)).png)


def _paint(axes: Axes, results: Sequence[Result]) -> None:
    """Loss against bytes, a point a run."""
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a worker sends and receives in a step")
    axes.set_ylabel("loss on test images")
    for i, method in enumerate(dict.fromkeys(r.method for r in results)):
        mine = [r for r in results if r.method == method]
        look = style(i) | {"linestyle": "none", "label": method}
        axes.plot([r.moved for r in mine], [r.test_loss for r in mine], **look)


if __name__ == "__main__":
    main(sys.argv[1:])
