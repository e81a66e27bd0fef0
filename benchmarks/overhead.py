"""What a session costs in one process, without a link: ``python -m benchmarks.overhead [--out FILE]``.

Every way to train (a plain loop, the same with hooks that catch each layer's input and output gradient in the manner of
Opacus and do nothing with them, DistributedDataParallel alone on gloo, sessions by codec) takes its steps in turns, so
that a slow moment of the machine slows all of them: a *step* is forward, backward with synchronisation, SGD and
``zero_grad``. Times are medians over the rounds; ratios are medians of each round's ratio to the plain step beside it,
by the clock and by the processor time of all threads, which other processes lengthen less. With one thread
(``OMP_NUM_THREADS=1``) that is the time an idle core takes; threads that wait for one another count, too.

*Memory* is that of a process which does nothing else, on Linux: the peak of its resident memory in some steps, less
what it had before the model was built, after a small model went the same way.

The JSON object has ``command``, ``versions``, ``threads``, ``rounds`` and ``rows``, a list of ``{model, way,
milliseconds, ratio, cpu_milliseconds, cpu_ratio, megabytes, memory_ratio}``.
"""

import argparse
import functools
import itertools
import json
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import data
import isgq
import models
from isgq.core.keys import uniform
from isgq.exchange import Loopback

SHAPES = {
    "fc:hidden=1000-300-100": ((1, 28, 28), 10),
    "fc:hidden=4096-4096": ((1, 32, 32), 1000),
    "lenet": ((1, 28, 28), 10),
    "fc:hidden=20": ((1, 28, 28), 10),
}
"""Model -> shape of an input, and classes."""

WAYS = ("plain", "capture", "ddp", "exact", "isgq", "rotated", "rotated:bases=learned")
_SMALL = "fc:hidden=20"
_WARM = 12  # steps that are not counted: the first plans, the next learn
_MEMORY_STEPS = 4
_BATCHES = 40


@functools.cache
def batches(side: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images of so many pixels a side and their classes; kept, so that nobody's memory counts them."""
    images, count = data.load("mnist5k").standardized(), _BATCHES * batch
    margin = (side - images.train_x.shape[-1]) // 2
    x, y = F.pad(images.train_x[:count], [margin] * 4), images.train_y[:count]
    return list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))


def catch(net: nn.Module) -> None:
    """Hooks in the manner of Opacus: keep every layer's input until its output gradient comes, then drop both."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # the first layer's input needs no gradient
    inputs: dict[nn.Module, list[torch.Tensor]] = {}

    def forward(layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        inputs.setdefault(layer, []).append(args[0].detach())

    def backward(layer: nn.Module, _: object, gradients: tuple[torch.Tensor, ...]) -> None:
        inputs[layer].pop(), gradients[0].detach()

    for layer in net.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            layer.register_forward_hook(forward)
            layer.register_full_backward_hook(backward)


@contextmanager
def training(model: str, way: str, batch: int) -> Iterator[Callable[[], None]]:
    """A function that takes one step of a model in some way."""
    shape, classes = SHAPES[model]
    net = models.build(model, classes=classes, in_shape=shape)
    turn = itertools.cycle(batches(shape[1], batch))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with ExitStack() as stack:
        run: nn.Module = net
        if way == "ddp":
            run = DistributedDataParallel(net)
        elif way == "capture":
            catch(net)
        elif way != "plain":
            stack.enter_context(isgq.instrument(net, way, exchange=Loopback(), log=lambda _: None))

        def step() -> None:
            x, y = next(turn)
            F.cross_entropy(run(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        yield step


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def seconds(model: str, ways: Sequence[str], batch: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step in each round, by the clock and of processor time, by way."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        stack.enter_context(alone())
        steps = {way: stack.enter_context(training(model, way, batch)) for way in ways}
        for at in range(_WARM + rounds):
            for way, step in steps.items():
                wall, cpu = time.perf_counter(), time.process_time()
                step()
                if at >= _WARM:
                    taken[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    return taken


def _resident(field: str) -> int:
    [kilobytes] = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def peak(model: str, way: str, batch: int) -> int:
    """Bytes of resident memory that training takes at most, besides what the process had before; in a fresh process."""
    with alone():
        batches(SHAPES[model][0][1], batch)
        uniform(0, "", (1,))  # by a kernel: what Numba takes is not a step's
        for name in (_SMALL, model):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
            before = _resident("VmRSS")
            with training(name, way, batch) as step:
                for _ in range(_MEMORY_STEPS):
                    step()
    return _resident("VmHWM") - before


def _peak_elsewhere(model: str, way: str, batch: int) -> int:
    command = [sys.executable, "-m", "benchmarks.overhead", "--batch", str(batch), "--peak", model, way]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(model: str, ways: Sequence[str], batch: int, rounds: int, memory: bool) -> list[dict[str, Any]]:
    """One row for each way."""
    taken = seconds(model, ways, batch, rounds)
    peaks = {way: _peak_elsewhere(model, way, batch) for way in ways} if memory else {}
    rows = []
    for way in ways:
        row: dict[str, Any] = {"model": model, "way": way}
        for at, kind in enumerate(("", "cpu_")):
            mine, plain = ([each[at] for each in taken[of]] for of in (way, ways[0]))
            row[f"{kind}milliseconds"] = 1e3 * statistics.median(mine)
            row[f"{kind}ratio"] = statistics.median(a / b for a, b in zip(mine, plain, strict=True))
        if peaks:
            row |= {"megabytes": peaks[way] / 1e6, "memory_ratio": peaks[way] / peaks[ways[0]]}
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    fields = ("milliseconds", "ratio", "cpu_milliseconds", "cpu_ratio", "megabytes", "memory_ratio")
    cells = [f"{row[field]:.2f}" for field in fields if field in row]
    return f"| `{row['model']}` | `{row['way']}` | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:3], metavar="MODEL")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="the first is what ratios are to")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100, help="steps of each way (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="measure the memory, too: a process for each row")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        model, way = options.peak
        print(peak(model, way, options.batch))
        return
    print(f"batch {options.batch}, {options.rounds} rounds, {torch.get_num_threads()} threads\n")
    titles = ["model", "step", "ms", "ratio", "CPU ms", "ratio", *(["MB", "ratio"] if options.memory else [])]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    rows = []
    for model in options.models:
        found = measure(model, options.ways, options.batch, options.rounds, options.memory)
        print("\n".join(map(line, found)), flush=True)
        rows += found
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.overhead", *(arguments or sys.argv[1:])]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "isgq": isgq.__version__},
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "rows": rows,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
