"""bench(): what codecs cost on this machine, and the bandwidth below which each makes a step faster. The command too.

    isgq bench --model lenet --data fashion --batch 32 --workers 4 --codecs isgq rotated:ratio=800

Measured, in one process without a link: a plain step; a session's step, which decodes the process' own records; and
what it takes longer to unpack the others' messages and to decode and average those of all workers. That on a link a
step takes c + a / W with bandwidth W, a the bytes that rings move, is a model (:mod:`isgq.bandwidth`), and so is
DistributedDataParallel (:func:`isgq.costs.ddp_seconds`).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isgq.aggregate import Gather, Step
from isgq.bandwidth import Link, Messages, predict
from isgq.choice import choose
from isgq.core.errors import OptionError
from isgq.correspondence import Correspondence
from isgq.costs import DENSE
from isgq.exchange import Loopback
from isgq.forecast import pass_times
from isgq.instrumented import check_free
from isgq.instrumenting import instrument
from isgq.planner import table
from isgq.probe import timed
from isgq.records import Carrier, Record

CODECS = (DENSE, "fp16", "isgq", "rotated:ratio=800", "error_feedback(top_k:k=0.01)")
_WARM = 3  # steps that plan, and after which messages leave out what both sides know
_ROUNDS = 3  # of receiving, of which the fastest counts
_UNIT = Link(1.0)  # on which seconds are bytes


class Receiver:
    """Observes one step of a session and measures what it takes to receive such messages.

    Attributes:
        workers: from how many.
        more: seconds that messages of all workers take longer than one; None before the step.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.more: float | None = None

    def __call__(self, gather: Gather, step: Step, ready: Sequence[tuple[Carrier, Record]]) -> None:
        """See :data:`isgq.aggregate.Observer`."""
        carriers, records = [carrier for carrier, _ in ready], [record for _, record in ready]
        here, there, keys = Correspondence(), Correspondence(), step.keys(carriers, gather.rank)
        for _ in range(2):  # the first message says what those after it leave out
            message, _ = here.write(carriers, records, keys)
            there.read(message, carriers, keys)
            for known in (here, there):
                known.commit()

        def receive(workers: int) -> None:
            every = [records, *(there.read(message, carriers, keys) for _ in range(workers - 1))]
            for carrier, own in zip(carriers, zip(*every, strict=True), strict=True):
                carrier.means([carrier.decode(record) for record in own], workers)

        one, all_ = (min(timed(receive, workers)[0] for _ in range(_ROUNDS)) for workers in (1, self.workers))
        self.more = max(0.0, all_ - one)


@dataclass(frozen=True)
class Cost:
    """A step with a codec, on this machine and without a link.

    Attributes:
        codec: which.
        seconds: forward and backward passes included.
        sent: bytes that a worker hands over, plain gradients among them.
        moved: bytes that a worker sends in rings of all of them.
        below: bandwidth below which it is faster than DistributedDataParallel, bytes a second; 0 for none at all.
    """

    codec: str
    seconds: float
    sent: int
    moved: float
    below: float


@dataclass(frozen=True)
class Bench:
    """What was measured; prints as a table.

    Attributes:
        workers: how many share gradients.
        forward: seconds.
        backward: seconds.
        size: bytes of all gradients.
        costs: of each codec.
    """

    workers: int
    forward: float
    backward: float
    size: int
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        plain = self.forward + self.backward
        rows = [("codec", "step ms", "x plain", "bytes sent", "x fewer", "faster than DDP below")]
        rows.append(("(plain step)", f"{1e3 * plain:.2f}", "1.00", f"{self.size:,}", "1.0", ""))
        for c in self.costs:
            times = f"{1e3 * c.seconds:.2f}", f"{c.seconds / plain:.2f}"
            rows.append((c.codec, *times, f"{c.sent:,}", f"{self.size / c.sent:.1f}", _words(c.below)))
        return (
            f"{table(rows, numbers=(1, 2, 3, 4, 5))}\n{self.workers} workers; times without a link, bandwidths a model"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON, where a bandwidth without end is null."""
        costs = [asdict(c) | {"below": None if math.isinf(c.below) else c.below} for c in self.costs]
        return asdict(self) | {"costs": costs}


def _words(below: float) -> str:
    if math.isinf(below):
        return "any bandwidth"
    return f"{8e-6 * below:,.1f} Mbit/s" if below else "none"


def break_even(forward: float, backward: float, size: float, seconds: float, moved: float) -> float:
    """Bandwidth below which a step with a codec is faster than with DistributedDataParallel.

    A step takes ``seconds + moved / W`` with a codec, and ``forward + max(backward, size / W)`` without: its all-reduce
    hides behind backward as far as it goes.

    Args:
        forward: seconds of the pass.
        backward: seconds of the pass.
        size: bytes that a worker sends in the ring of plain gradients.
        seconds: of a step with the codec, passes included, without a link.
        moved: bytes that a worker sends in it.

    Returns:
        Bytes a second; 0 if there is no such bandwidth, infinity if every one is.
    """
    if moved >= size:
        return 0.0
    rest = seconds - forward
    if rest <= 0:
        return math.inf
    bandwidth = (size - moved) / rest
    # Where the all-reduce hides behind backward, a codec that is faster by itself stays faster on faster links.
    return math.inf if rest < backward and bandwidth * backward >= size else bandwidth


def moved_in_rings(messages: Messages, workers: int) -> float:
    """Bytes that a worker sends when all messages go around in one pass."""
    sent = predict("gather", messages, workers, 0).sent - messages.dense
    return _UNIT.gather_seconds(sent, workers) + _UNIT.reduce_seconds(messages.dense, workers)


def measure(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], codec: str, workers: int, **options: Any
) -> tuple[float, Messages]:
    """Seconds of a step with a codec, passes included, and what a worker sends in it.

    Args:
        model: stays as it is; a copy is run.
        forward: makes the loss of a model.
        codec: as for :func:`isgq.instrument`.
        workers: whose messages are received, in one pass.
        options: more for :func:`isgq.instrument`.
    """
    own = copy.deepcopy(model)
    with instrument(own, codec, exchange=Loopback(), log=lambda _: None, **options) as session:
        for _ in range(_WARM):
            forward(own).backward()  # type: ignore[no-untyped-call]
        seconds, messages, receiver = sum(pass_times(lambda: forward(own))), session.messages(), Receiver(workers)
        if workers > 1 and any(messages.up) and not messages.down:
            session.observe(receiver)
            forward(own).backward()  # type: ignore[no-untyped-call]
        return seconds + (receiver.more or 0.0), messages


def bench(
    model: nn.Module,
    batch: tuple[Any, Any],
    codecs: Sequence[str] = CODECS,
    *,
    workers: int,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
) -> Bench:
    """Measure a plain step and one with each codec, and where they are even on a link.

    The model stays as it is; copies are run.

    Args:
        model: the model.
        batch: inputs and targets of one worker.
        codecs: as for :func:`isgq.instrument`.
        workers: how many there will be.
        loss: of the model's output and the targets.

    Raises:
        OptionError: no workers, an unknown codec, or one that is not for one pass.
        InstrumentError: a model that cannot be instrumented.
    """
    if workers < 1:
        raise OptionError(f"workers={workers} of a bench must be 1 or more")
    for codec in codecs:
        choice = choose(codec, None, "tensor", "gather", None, "both")
        if choice.auto is not None or choice.subspace is not None:
            raise OptionError(f"bench() measures codecs of factors or gradients in one pass, not {codec!r}")
    check_free(model)
    inputs, targets = batch

    def forward(own: nn.Module) -> Tensor:
        own.zero_grad()
        return loss(own(inputs), targets)

    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    ring, costs = _UNIT.reduce_seconds(size, workers), []
    with torch.random.fork_rng():
        plain = copy.deepcopy(model)
        passes = pass_times(lambda: forward(plain))
        for codec in codecs:
            seconds, messages = measure(model, forward, codec, workers)
            sent, moved = predict("gather", messages, workers, 0).sent, moved_in_rings(messages, workers)
            costs.append(Cost(codec, seconds, sent, moved, break_even(*passes, ring, seconds, moved)))
    return Bench(workers, *passes, size, tuple(costs))
