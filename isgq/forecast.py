"""plan(): what a step would take, per gradient and in all, before any second worker is started.

One backward pass of this process stands for every worker's. Bytes and codec times are measured on it (see
:mod:`isgq.probe`), forward and backward passes too; the time on the link is a model of rings (:mod:`isgq.bandwidth`),
and so is DistributedDataParallel, whose all-reduce is taken to hide behind backward as far as it fits.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isgq.auto import Auto
from isgq.backward import BackwardWatch
from isgq.bandwidth import Link, Messages, Moved, predict, shared
from isgq.core.errors import OptionError
from isgq.core.payload import Factors
from isgq.costs import DENSE, Estimate, ddp_seconds, explain, step_seconds
from isgq.exchange import Loopback
from isgq.instrumented import check_free
from isgq.instrumenting import instrument
from isgq.layers.capture import Capture, Unit, find_units
from isgq.probe import items_of, timed
from isgq.routing import Decision, decide_automatically, look, measure_chosen
from isgq.windows import Window
from isgq.wire.format import FRAME_BYTES
from isgq.wire.header import header_size

_ROUNDS = 4  # passes, of which the fastest counts
_SUBSPACE = "subspace"


@dataclass(frozen=True)
class InSubspace:
    """What a step takes in a common subspace (:mod:`isgq.rounds`), whose error no single step tells.

    Attributes:
        moved: bytes of a worker.
        codec: seconds, measured.
    """

    moved: Moved
    codec: float

    def seconds(self, link: Link) -> float:
        """Codec, and link as a model."""
        return self.codec + link.seconds(self.moved)


@dataclass(frozen=True)
class Forecast:
    """The predicted step of a model; prints as a table.

    Attributes:
        codec: the session's codec that would choose so.
        workers: how many.
        link: of each.
        decision: ways, chosen and not.
        parameters: number of trainable parameters.
        forward: seconds, measured.
        backward: seconds, measured.
        hooks: seconds that a session adds to them without any codec, measured.
        subspace: what another kind of session would take.
    """

    codec: str
    workers: int
    link: Link
    decision: Decision
    parameters: int
    forward: float
    backward: float
    hooks: float
    subspace: InSubspace

    @property
    def dense_size(self) -> int:
        """Bytes of all gradients."""
        return round(sum(options[0].plain for options in self.decision.options))

    @property
    def moved(self) -> Moved:
        """Bytes of a worker and step, as the ledger counts them."""
        size, plain = (round(sum(getattr(e, part) for e in self.decision.chosen)) for part in ("size", "plain"))
        messages = Messages([size + FRAME_BYTES if size else 0], [], plain, self.parameters)
        return predict("gather", messages, self.workers, 0)

    @property
    def error(self) -> float:
        """Expected squared error of the mean over workers, over one worker's squared gradient."""
        energy = sum(self.decision.energies)
        return sum(each.error_of_mean(self.workers) for each in self.decision.chosen) / energy if energy else 0.0

    @property
    def codec_and_link(self) -> tuple[float, float]:
        """Seconds of a step besides forward, backward and hooks."""
        overhead = header_size(self.parameters) + FRAME_BYTES
        return step_seconds(self.decision.chosen, overhead, self.workers, self.link)

    @property
    def seconds(self) -> float:
        """A step of the session."""
        return self.forward + self.backward + self.hooks + sum(self.codec_and_link)

    @property
    def ddp(self) -> float:
        """A step of DistributedDataParallel."""
        return ddp_seconds(self.dense_size, self.forward, self.backward, self.workers, self.link)

    @property
    def compress(self) -> bool:
        """Whether a session is faster than DistributedDataParallel."""
        return self.seconds < self.ddp

    @property
    def verdict(self) -> str:
        """The advice, in one sentence."""
        ours, theirs = f"{1e3 * self.seconds:.1f} ms", f"{1e3 * self.ddp:.1f} ms"
        if self.compress:
            return f'{ours} a step instead of {theirs} with plain DDP: isgq.instrument(model, "{self.codec}")'
        return f"do not compress: a step takes {theirs} with plain DDP, and {ours} with the fastest session"

    def __str__(self) -> str:
        rows = [("parameter", "route", "up", "down", "error", "codec ms", "ms", "why")]
        for name, energy, options, best in self._lines():
            sizes = f"{best.size + best.plain:,.0f}", f"{(self.workers - 1) * best.size + best.plain:,.0f}"
            error = best.error_of_mean(self.workers) / energy if energy else 0.0
            codec, seconds = best.codec_seconds(self.workers), best.seconds(self.workers, self.link)
            why = explain(options, best, self.workers, self.link)
            rows.append((name, best.way, *sizes, f"{error:.3f}", f"{1e3 * codec:.2f}", f"{1e3 * seconds:.2f}", why))
        codec, link = (1e3 * seconds for seconds in self.codec_and_link)
        sizes = f"{self.moved.sent:,}", f"{self.moved.received:,}"
        rows.append(("all, with headers", "", *sizes, f"{self.error:.3f}", f"{codec:.2f}", f"{codec + link:.2f}", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, "<<>>>>><", widths, strict=True)) for row in rows]
        parts = {"forward": self.forward, "backward": self.backward, "hooks": self.hooks}
        computing = " + ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in parts.items())
        total = f"{self.workers} workers over {self.link}: {computing} + codec {codec:.1f} + link {link:.1f} ms"
        moved, common = self.subspace.moved, 1e3 * self.subspace.seconds(self.link)
        other = (
            f"in a common subspace instead: {moved.sent:,} bytes up, {moved.received:,} down, {common:.1f} ms of codec "
            f'and link; what it leaves out it makes up for later: isgq.instrument(model, "{_SUBSPACE}")'
        )
        return "\n".join([*map(str.rstrip, lines), total, other, self.verdict])

    def _lines(self) -> Sequence[tuple[str, float, Sequence[Estimate], Estimate]]:
        decision = self.decision
        names = [item.name for item in decision.items]
        return list(zip(names, decision.energies, decision.options, decision.chosen, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types, for JSON."""
        codec, link = self.codec_and_link
        return {
            "codec": self.codec,
            "workers": self.workers,
            "link": {"bytes_per_second": self.link.bytes_per_second, "latency": self.link.latency},
            "parameters": [
                {"name": name, "route": best.way, "energy": energy, "ways": [vars(each) for each in options]}
                for name, energy, options, best in self._lines()
            ],
            "seconds": {
                "forward": self.forward,
                "backward": self.backward,
                "hooks": self.hooks,
                "codec": codec,
                "link": link,
                "all": self.seconds,
                "ddp": self.ddp,
            },
            "bytes": {"sent": self.moved.sent, "received": self.moved.received, "dense": self.dense_size},
            "subspace": {
                "codec": _SUBSPACE,
                "sent": self.subspace.moved.sent,
                "received": self.subspace.moved.received,
                "seconds": self.subspace.seconds(self.link),
            },
            "error": self.error,
            "compress": self.compress,
        }


def plan(
    model: nn.Module,
    batch: tuple[Any, Any],
    *,
    workers: int,
    link: str | Link,
    ways: str | None = None,
    error: float | None = None,
    timed: bool = True,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    seed: int = 0,
) -> Forecast:
    """Predict a training step: which way each gradient takes, bytes, error and time.

    The model stays as it is; a copy is run. What is measured takes the time of some tens of steps.

    Args:
        model: the model, best after some training: gradients of the first steps are not like the later ones.
        batch: inputs and targets of one worker.
        workers: how many there will be.
        link: of each, e.g. ``"100Mbit/s+1ms"``.
        ways: codecs to choose from, e.g. ``"isgq;rotated:nmse=0.5;qsgd"``; by default those of ``"auto"``.
        error: largest error, as in ``"auto:error=0.25"``.
        timed: whether codecs' times count when ways are chosen, as in ``"auto:timed=false"``.
        loss: of the model's output and the targets.
        seed: of the codecs' random numbers.

    Raises:
        OptionError: no workers, or a malformed link, way or error.
        InstrumentError: a model that cannot be instrumented.
    """
    if workers < 1:
        raise OptionError(f"workers={workers} of a plan must be 1 or more")
    found = link if isinstance(link, Link) else Link.parse(link)
    options = f"link={found}" + (f",error={error}" if error is not None else "")
    options += "" if timed else ",timed=false"
    spec = f"auto{'' if ways is None else f'({ways})'}:{options}"
    auto = Auto.parse(spec)
    check_free(model)
    inputs, targets = batch
    with torch.random.fork_rng():
        copied = copy.deepcopy(model)

        def forward() -> Tensor:
            copied.zero_grad()
            return loss(copied(inputs), targets)

        forwards, backwards = pass_times(forward)
        with instrument(copied, DENSE, exchange=Loopback()):
            with_hooks = sum(pass_times(forward))
        with instrument(copied, _SUBSPACE, exchange=Loopback(), seed=seed) as session:
            common, messages = sum(pass_times(forward)), session.messages()
        units, reasons = find_units(copied, lambda name: False)
        windows = {name: Window(name, p) for name, p in copied.named_parameters() if p.requires_grad}
        _capture(copied, units, windows, forward)
        items = items_of(units, windows, reasons)
        decision = decide_automatically(items, look(items, auto, windows, seed)[None], auto, windows, workers)
        decision = measure_chosen(decision, auto, windows, seed)
    hooks = max(0.0, with_hooks - forwards - backwards)
    moved = predict("two_pass", shared(messages, workers), workers, 0)
    subspace = InSubspace(moved, max(0.0, common - forwards - backwards))
    return Forecast(spec, workers, found, decision, len(windows), forwards, backwards, hooks, subspace)


def pass_times(forward: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds of a forward pass and of a backward pass, the fastest of several, as on an idle machine.

    Args:
        forward: makes the loss.
    """
    rounds = []
    for _ in range(_ROUNDS):
        seconds, value = timed(forward)
        rounds.append((seconds, timed(value.backward)[0]))
    forwards, backwards = zip(*rounds, strict=True)
    return min(forwards), min(backwards)


def _capture(
    model: nn.Module, units: Sequence[Unit], windows: dict[str, Window], forward: Callable[[], Tensor]
) -> None:
    """Run one step and leave gradients and factors in the windows."""
    watch = BackwardWatch(model, windows.values(), lambda: None)

    def sink(unit: Unit, factors: Factors) -> None:
        watch.begins()
        windows[unit.name].pending.append(factors)

    capture = Capture(units, sink, watch.forward_begins)
    forward().backward()  # type: ignore[no-untyped-call]
    capture.close()
