"""Long runs on real processes, which show that nothing leaks, drifts or hangs; on Linux.

    python -m benchmarks.soak [--steps 10000] [--codec SPEC] [--delays SECONDS] [--out FILE]

All workers train one model on samples of their own. Every ``--check`` steps the session compares the replicas bit for
bit, and each rank reads its resident memory; at the end parameters and momenta are compared once more. With
``--delays`` a rank waits somewhere in most of its steps: before it, in the forward pass after a layer, or in the
backward pass before a layer, so that ranks pass each of these stations in all orders. When and where is a function of
seed, rank and step. A rank that hangs fails all others by the group's timeout.

Exit code 1: a replica differs, memory grew by more than ``--tolerance`` after it had settled, or a rank failed.

torch.distributed remembers its last 2000 collectives, about 1 KiB each, so the first thousand steps or so add 2 MiB to
a process whatever it does; ``TORCH_FR_BUFFER_SIZE=0`` leaves that out.
"""

import gc
import hashlib
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import data
import isgq
import models
from isgq.choice import choose
from isgq.core.errors import IsgqError, OptionError
from isgq.core.keys import random_int32, uniform
from isgq.launch import launch


@dataclass(frozen=True)
class Config:
    """A long run: nothing may leak, drift or hang."""

    workers: int = 4
    """number of ranks"""
    steps: int = 10_000
    """of training"""
    codec: str = "isgq"
    """of the session"""
    bucket_cap_mb: float | None = None
    """MiB of gradients whose messages leave while backward goes on; None: when it ends"""
    inline_bytes: int | Literal["auto"] = 0
    """bytes of a message that travel with the header"""
    model: str = "fc:hidden=32"
    """a network by name"""
    data: str = "mnist5k"
    """images by name"""
    batch: int = 8
    """samples of each rank in a step"""
    lr: float = 0.02
    """learning rate of SGD, with momentum 0.9"""
    delays: float = 0.0
    """mean of a delay, seconds; 0 for none"""
    check: int = 100
    """steps between two comparisons of the replicas, and between two looks at the memory"""
    settled: int = 500
    """steps after which memory may not grow; with fewer than twice as many, half of all steps"""
    tolerance: float = 0.02
    """growth of resident memory that is allowed from then on, relative"""
    timeout: float = 60.0
    """seconds that a rank is waited for"""
    seed: int = 0
    """of everything random"""
    out: Path | None = None
    """write the report here, as JSON"""


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's process.

    Attributes:
        looks: resident bytes, first when settled, last after the last step.
        blocks: by how many the interpreter holds more blocks than when settled, garbage collected both times.
    """

    looks: Sequence[int]
    blocks: int

    @property
    def growth(self) -> float:
        """Of resident memory, relative, at its highest."""
        return max(self.looks) / self.looks[0] - 1


@dataclass(frozen=True)
class Ended:
    """What a rank has when its run is over.

    Attributes:
        contents: a hash of each parameter and of each momentum, by name.
        memory: of its process.
        passed: when it left each station, seconds of the machine's clock: float64 ``[steps, stations]``.
        seconds: of all steps.
        sent: bytes of all steps.
        accuracy: on the test images.
    """

    contents: Mapping[str, str]
    memory: Memory
    passed: Tensor
    seconds: float
    sent: int
    accuracy: float


class Stations:
    """Where a rank comes by in a step: it waits at one of them, or at none, and notes when it left each."""

    def __init__(self, model: nn.Module, config: Config, rank: int) -> None:
        self._config, self._rank = config, rank
        layers = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
        self._count = 1 + 2 * len(layers)
        for i, layer in enumerate(layers):
            layer.register_forward_hook(lambda *call, i=i: self._layer_called(call[-1], 1 + i, self._count - 1 - i))
        # Filled, so that all its memory is resident from the beginning.
        self.passed = torch.full((config.steps, self._count), math.nan, dtype=torch.float64)

    def begin(self, step: int) -> None:
        """Pass the first station of a step."""
        where, long = (
            uniform(isgq.Key("delay", self._config.seed, step, self._rank).digest, "soak", (2,)) + 0.5
        ).tolist()
        self._step, self._where = step, int(where * (self._count + 1))
        self._wait = -self._config.delays * math.log(long)
        self._pass(0)

    def _layer_called(self, output: Tensor, forward: int, backward: int) -> None:
        if output.requires_grad:
            self._pass(forward)
            output.register_hook(lambda _: self._pass(backward))  # type: ignore[no-untyped-call]

    def _pass(self, station: int) -> None:
        if station == self._where and self._wait:
            time.sleep(self._wait)
        self.passed[self._step, station] = time.monotonic()


class Watch:
    """Looks at the memory of this process after some of so many steps."""

    def __init__(self, config: Config) -> None:
        self._every, self._last = config.check, config.steps
        self._settles = min(config.settled, config.steps // 2)
        self._looks: list[int] = []
        self._blocks = 0

    def look(self, steps: int) -> None:
        """After so many steps, if it is time."""
        if steps == self._settles:
            self._blocks = blocks()
        if steps >= self._settles and (steps == self._settles or steps % self._every == 0 or steps == self._last):
            self._looks.append(resident())

    def found(self) -> Memory:
        """What was seen."""
        return Memory(self._looks, blocks() - self._blocks)


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def blocks() -> int:
    """Blocks of memory that the interpreter holds, without garbage."""
    gc.collect()
    return sys.getallocatedblocks()


def soak(config: Config) -> Ended:
    """The run of one rank. A collective call."""
    rank, images = dist.get_rank(), data.load(config.data, seed=config.seed).standardized()
    model = models.build(config.model, classes=images.classes, in_shape=images.in_shape, seed=config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    watch = Watch(config)
    options: dict[str, Any] = {"bucket_cap_mb": config.bucket_cap_mb, "inline_bytes": config.inline_bytes}
    with isgq.instrument(model, config.codec, seed=config.seed, check_replicas=config.check, **options) as session:
        stations = Stations(model, config, rank)
        start = time.perf_counter()
        for step in range(config.steps):
            key = isgq.Key("samples", config.seed, step, rank)
            mine = random_int32(key.digest, "soak", config.batch).long() % len(images.train_y)
            stations.begin(step)
            F.cross_entropy(model(images.train_x[mine]), images.train_y[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            watch.look(step + 1)
        seconds = time.perf_counter() - start
        memory = watch.found()
    with torch.no_grad():
        accuracy = float((model(images.test_x).argmax(1) == images.test_y).float().mean())
    sent = session.traffic.sent - session.traffic.setup
    return Ended(contents(model, optimizer), memory, stations.passed, seconds, sent, accuracy)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of each parameter and of its momentum, by name."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {f"momentum of {name}": optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return {
        name: hashlib.blake2b(tensor.numpy().tobytes(), digest_size=16).hexdigest() for name, tensor in tensors.items()
    }


def differing(ranks: Sequence[Ended]) -> list[str]:
    """What some rank holds other bits of than the first one."""
    return [
        f"rank {rank}: {name} differs from rank 0's"
        for rank, ended in enumerate(ranks)
        for name, content in ended.contents.items()
        if content != ranks[0].contents[name]
    ]


def grown(ranks: Sequence[Ended], tolerance: float) -> list[str]:
    """Whose memory has grown by more than the tolerance."""
    return [
        f"rank {rank}: resident memory grew by {ended.memory.growth:.2%}, more than {tolerance:.2%}"
        for rank, ended in enumerate(ranks)
        if ended.memory.growth > tolerance
    ]


def orders(passed: Sequence[Tensor]) -> list[int]:
    """In how many different orders the ranks left each station, of times ``[steps, stations]`` by rank."""
    ranked = torch.stack(list(passed)).argsort(0)
    return [torch.unique(ranked[:, :, station], dim=1).shape[1] for station in range(ranked.shape[2])]


def report(config: Config, ranks: Sequence[Ended]) -> dict[str, Any]:
    """All that was found, as JSON takes it."""
    return {
        "steps": config.steps,
        "workers": config.workers,
        "replicas_identical": not differing(ranks),
        "complaints": [*differing(ranks), *grown(ranks, config.tolerance)],
        "memory": [asdict(ended.memory) | {"growth": ended.memory.growth} for ended in ranks],
        "largest_growth": max(ended.memory.growth for ended in ranks),
        "orders": orders([ended.passed for ended in ranks]),
        "seconds": max(ended.seconds for ended in ranks),
        "sent": [ended.sent for ended in ranks],
        "accuracy": ranks[0].accuracy,
    }


def text(found: Mapping[str, Any]) -> str:
    """The report, to be read."""
    steps, workers, each = found["steps"], found["workers"], max(found["sent"]) / found["steps"]
    seen = f"{min(found['orders'])} to {max(found['orders'])} of {math.factorial(workers)}"
    lines = [
        f"{steps:,} steps of {workers} workers in {found['seconds']:.0f} s, {each:,.0f} bytes sent a step and worker, "
        f"test accuracy {found['accuracy']:.4f}",
        f"replicas identical: {'yes' if found['replicas_identical'] else 'NO'}",
        f"orders in which ranks left a station: {seen} at each of {len(found['orders'])} stations",
        f"largest growth of resident memory once settled: {found['largest_growth']:.2%}",
        "",
        "| rank | MiB, settled | highest | at the end | growth | more blocks of the interpreter |",
        "|---|---|---|---|---|---|",
    ]
    for rank, memory in enumerate(found["memory"]):
        looks = memory["looks"]
        sizes = " | ".join(f"{size / 2**20:.2f}" for size in (looks[0], max(looks), looks[-1]))
        lines.append(f"| {rank} | {sizes} | {memory['growth']:.2%} | {memory['blocks']:,} |")
    return "\n".join([*lines, *(["", *found["complaints"]] if found["complaints"] else [])])


def check(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        OptionError: a value outside its range, a codec that is none, or another system than Linux.
        DataError: unknown data.
        ModelError: unknown network.
    """
    for name, least in (("workers", 1), ("steps", 2), ("batch", 1), ("check", 1), ("settled", 1)):
        if getattr(config, name) < least:
            raise OptionError(f"--{name} {getattr(config, name)}: must be {least} or more")
    if not 0 <= config.delays < config.timeout / 100:
        # The longest of many delays is some 17 times their mean.
        raise OptionError(f"--delays {config.delays}: must be in [0, a hundredth of --timeout {config.timeout})")
    if not Path("/proc/self/statm").exists():
        raise OptionError("a soak reads its memory from /proc/self/statm: run it on Linux")
    choose(config.codec, None, "tensor", "gather", None, "both")
    images = data.load(config.data, seed=config.seed)
    models.build(config.model, classes=images.classes, in_shape=images.in_shape, seed=config.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the file; 1 if anything is wrong, 2 for a mistake in the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config = tyro.cli(Config, args=given)
    try:
        check(config)
    except (IsgqError, data.DataError, models.ModelError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "benchmarks.soak", *given])
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "isgq": isgq.__version__}
    print(f"{command}\n{', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    try:
        found = report(config, launch(soak, config.workers, args=(config,), timeout=config.timeout))
    except IsgqError as error:
        print(f"a rank failed\n{error}")
        return 1
    print(text(found))
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"schema": 1, "command": command, "versions": versions, **found}
        config.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(found["complaints"]))


if __name__ == "__main__":
    sys.exit(main())
