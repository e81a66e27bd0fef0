"""Ways to train together, by name, each with the bytes that it hands over and those that rings of them put on a link.

ddp                 DistributedDataParallel, float32
ddp:fp16            with torch's hook of that name
ddp:powersgd=R      with torch's PowerSGD hook of rank R, in one bucket: with more it deadlocks on gloo
hook:SPEC           DistributedDataParallel with :func:`isgq.ddp.comm_hook`
ahead:SPEC          a session with that codec that sends while backward goes on, in buckets of 0.01 MiB
inline:SPEC         a session with that codec whose messages travel with the headers, as far as they are small
two_pass:SPEC       a session with ``aggregate="two_pass"`` and the codec both ways
two_pass_model:SPEC the same with the whole model as one vector
auto                a session that chooses for the link; ``inline:auto`` likewise
SPEC                a session with that codec
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import data
import isgq
import models
from isgq.bandwidth import Link
from isgq.choice import Scope, choose
from isgq.core.errors import OptionError
from isgq.ddp import comm_hook
from isgq.exchange import AT_ONCE, Pending, TorchExchange

_FRAMES = 3 * 48  # bytes of gloo's own with each of its messages: two notices and a header
_ONE_BUCKET = 1 << 12  # MB
_AHEAD = 0.01  # MiB of a bucket that is sent ahead
_PLAIN_STEPS = 2  # of PowerSGD, which it wants to begin with
_TWO_PASS: dict[str, Scope] = {"two_pass": "tensor", "two_pass_model": "model"}


def gather(size: float, workers: int) -> float:
    """Bytes that a worker sends when it gathers messages of this size from all: one to each, or N - 1 hops of two."""
    frames = 1 if workers * size <= AT_ONCE else 2
    return (workers - 1) * (size + frames * _FRAMES)


def ring_reduce(size: float, workers: int) -> float:
    """The same when gloo adds vectors of this size up: 2 (N - 1) hops of an N-th, of two messages."""
    return 2 * (workers - 1) * (size / workers + 2 * _FRAMES)


def pairwise(size: float, workers: int) -> float:
    """The same when each worker has another message for each other one, of this size together."""
    return size + (workers - 1) * _FRAMES


class Counted(TorchExchange):
    """Counts, beside what is handed over, what gloo makes of it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._own, self._others = 0.0, list[Counted]()

    @property
    def wire(self) -> float:
        """Bytes that this rank has sent, without headers of TCP and below."""
        return self._own + sum(other.wire for other in self._others)

    def beside(self) -> "Counted":
        """See :class:`isgq.exchange.Exchange`."""
        self._others.append(Counted(self.group_beside()))
        return self._others[-1]

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """See :class:`isgq.exchange.Exchange`."""
        before = self.sent
        pending = super().all_gather(message, lengths)
        gathers = (lengths is None) + bool(message.numel())  # of lengths, of messages
        self._own += gather(self.sent - before, self.world_size) + (gathers - 1) * gather(0, self.world_size)
        return pending

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """See :class:`isgq.exchange.Exchange`."""
        before = self.sent
        pending = super().all_to_all(messages, lengths)
        self._own += pairwise(self.sent - before, self.world_size)
        return pending

    def all_reduce_mean(self, x: Tensor) -> Pending[Tensor]:
        """See :class:`isgq.exchange.Exchange`."""
        self._own += ring_reduce(x.numel() * x.element_size(), self.world_size)
        return super().all_reduce_mean(x)


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        method: see the module.
        link: between workers.
        model: a network by name.
        data: images by name.
        batch: samples of each worker.
        rate: learning rate of SGD.
        momentum: of SGD.
        seed: of everything random; all methods see the same samples.
        emulated: whether a step ends with waiting as long as the link would take.
    """

    method: str
    link: str
    model: str = "fc:hidden=1000-300-100"
    data: str = "fashion"
    batch: int = 16
    rate: float = 0.02
    momentum: float = 0.9
    seed: int = 0
    emulated: bool = False


def check(task: Task) -> None:
    """Raise OptionError, or ModelError or DataError of models and data, where a task cannot be."""
    Link.parse(task.link)
    kind, _, spec = task.method.partition(":")
    if kind == "ddp":
        _torch_hook(spec, 0)
    elif kind in _TWO_PASS:
        choose(spec, None, _TWO_PASS[kind], "two_pass", spec, "both")
    elif kind == "hook":
        comm_hook(spec)
    else:
        choose(_session_codec(task), None, "tensor", "gather", None, "both")
    workload(task)


def workload(task: Task) -> tuple[nn.Module, data.Dataset]:
    """The network as every method begins with it, and the images."""
    dataset = data.load(task.data).standardized()
    return models.build(task.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=task.seed), dataset


def _session_codec(task: Task) -> str:
    spec = task.method.removeprefix("ahead:").removeprefix("inline:")
    return f"auto:link={task.link}" if spec == "auto" else spec


def _torch_hook(spec: str, numel: int) -> tuple[Any, Any, Callable[[int], tuple[float, int]]]:
    """State, hook, and how many bytes are handed over in how many all-reduces by so many steps."""  # noqa: DOC501
    if not spec:
        return None, None, lambda steps: (4.0 * numel * steps, steps)
    if spec == "fp16":
        return None, default_hooks.fp16_compress_hook, lambda steps: (2.0 * numel * steps, steps)
    name, _, rank = spec.partition("=")
    if name != "powersgd" or not rank.isdecimal() or not int(rank):
        raise OptionError(f"method ddp:{spec} is none of ddp, ddp:fp16, ddp:powersgd=RANK; hook:SPEC takes a codec")
    state = powerSGD_hook.PowerSGDState(None, int(rank), start_powerSGD_iter=_PLAIN_STEPS)

    def moved(steps: int) -> tuple[float, int]:
        late = max(0, steps - _PLAIN_STEPS)
        plain = 4.0 * numel * (steps - late)
        return plain + 4.0 * state.total_numel_after_compression, 3 * late + steps - late

    return state, powerSGD_hook.powerSGD_hook, moved


class Trainer:
    """One worker; made by :func:`trainer`.

    Args:
        task: what to train.
        moved: see there, after so many steps.
        network: what to call.
        model: the network itself.
        dataset: the images.

    Attributes:
        model: the network itself.
        steps: how many it has made.
    """

    def __init__(
        self,
        task: Task,
        moved: Callable[[int], tuple[float, float]],
        network: nn.Module,
        model: nn.Module,
        dataset: data.Dataset,
    ) -> None:
        self.model, self.steps = model, 0
        self._task, self._moved, self._network = task, moved, network
        self._train, self._test = (dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)
        self._generator = torch.Generator().manual_seed(task.seed * dist.get_world_size() + dist.get_rank())
        self._optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)

    def moved(self) -> tuple[float, float]:
        """Bytes that this worker has handed over so far, and those that it has sent for that."""
        return self._moved(self.steps)

    def step(self) -> None:
        """Forward, backward with all that is exchanged in it, optimizer."""
        begun = self.moved()[1]
        x, y = self._train
        index = torch.randint(len(y), (self._task.batch,), generator=self._generator)
        F.cross_entropy(self._network(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        if self._task.emulated:
            time.sleep((self.moved()[1] - begun) / Link.parse(self._task.link).bytes_per_second)

    @torch.no_grad()
    def test_loss(self, most: int) -> float:
        """Of at most so many test images."""
        self.model.eval()
        x, y = (each[:most] for each in self._test)
        losses = [
            F.cross_entropy(self.model(a), b, reduction="sum")
            for a, b in zip(torch.split(x, 500), torch.split(y, 500), strict=True)
        ]
        self.model.train()
        return float(torch.stack(losses).sum()) / len(y)


@contextmanager
def trainer(task: Task) -> Iterator[Trainer]:
    """A worker, which shares gradients with the others for as long as the context lasts. A collective call."""
    (model, dataset), workers = workload(task), dist.get_world_size()
    kind, _, spec = task.method.partition(":")
    if kind == "ddp":
        cap = _ONE_BUCKET if "powersgd" in spec else None
        network = DistributedDataParallel(model, bucket_cap_mb=cap)
        state, hook, reduced = _torch_hook(spec, sum(p.numel() for p in model.parameters()))
        if hook is not None:
            network.register_comm_hook(state, hook)

        def rings(steps: int) -> tuple[float, float]:
            size, times = reduced(steps)
            return size, ring_reduce(size, workers) + (times - 1) * ring_reduce(0, workers)

        yield Trainer(task, rings, network, model, dataset)
        return
    exchange = Counted()
    with nullcontext() if kind == "hook" else _session(task, model, exchange):
        around: nn.Module = model
        if kind == "hook":
            around = DistributedDataParallel(model)
            around.register_comm_hook(None, comm_hook(spec, around, seed=task.seed, exchange=exchange))
        yield Trainer(task, lambda _: (exchange.sent, exchange.wire), around, model, dataset)


def _session(task: Task, model: nn.Module, exchange: Counted) -> isgq.Session:
    kind, _, spec = task.method.partition(":")
    options: dict[str, dict[str, Any]] = {"ahead": {"bucket_cap_mb": _AHEAD}, "inline": {"inline_bytes": "auto"}}
    how = options.get(kind, {})
    if kind in _TWO_PASS:
        how = {"scope": _TWO_PASS[kind], "aggregate": "two_pass", "down": spec}
    else:
        spec = _session_codec(task)
    return isgq.instrument(model, spec, seed=task.seed, exchange=exchange, **how)
