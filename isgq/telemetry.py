"""What compression does to each parameter's gradient on this rank, on a schedule, as lines of JSON.

    isgq.Telemetry(session, every=50, path="telemetry.jsonl")

All ranks may write to one file: every observed step of every rank is one line, appended whole. ::

    {"step": 50, "rank": 0, "staleness": 0, "parameters": {"0.weight": {"bytes": 812, "gradient": 0.31, ...}}}

A step that the ranks refused, or that a resumed run takes again, has its line again: the last one counts. Nothing is
measured, kept or written in the steps between, and a session without telemetry does not know of it.

With ``alarm=``, a gradient whose compression leaves out more than that on this rank travels whole from then on, and
with it what was left out before; soon after on all ranks, see :mod:`isgq.doubts`.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from isgq.aggregate import Gather, Step
from isgq.core.errors import OptionError
from isgq.records import Carrier, Record, ledger_name
from isgq.session import Session

_IN_A_ROW = 3


class ScalarWriter(Protocol):
    """What takes curves: ``torch.utils.tensorboard.SummaryWriter``, for instance."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Add a point to a curve."""
        ...


@dataclass(frozen=True)
class Measure:
    """Of one parameter (a weight and its riding bias together) in one step of this rank.

    Attributes:
        bytes: handed over for it.
        gradient: norm of this rank's gradient g.
        nmse: ``|s - g|^2 / |g|^2``, where s is what this rank's records say; None where g is zero.
        cosine: of the angle between s and g; None where one of them is zero.
        memory: norm of what compression has left out so far, this step's included.
    """

    bytes: int
    gradient: float
    nmse: float | None
    cosine: float | None
    memory: float

    @property
    def left_out(self) -> tuple[str, float]:
        """What tells best how much of the gradient is left out, and how much; relative to its squared norm."""
        if self.memory and self.gradient:
            return "memory", (self.memory / self.gradient) ** 2
        return "NMSE", self.nmse or 0.0


@dataclass
class _Sums:
    """Squared norms and the inner product, over all records about a parameter."""

    gradient: float = 0.0
    said: float = 0.0
    error: float = 0.0
    product: float = 0.0

    def add(self, gradient: Tensor, said: Tensor) -> None:
        g, s = gradient.double(), said.double()
        self.gradient += float(g.square().sum())
        self.said += float(s.square().sum())
        self.error += float((s - g).square().sum())
        self.product += float((s * g).sum())

    def measure(self, size: int, memory: float = 0.0) -> Measure:
        both = math.sqrt(self.gradient) * math.sqrt(self.said)
        return Measure(
            bytes=size,
            gradient=math.sqrt(self.gradient),
            nmse=self.error / self.gradient if self.gradient else None,
            cosine=self.product / both if both else None,
            memory=math.sqrt(memory),
        )


def measure(
    step: Step, records: Sequence[tuple[Carrier, Record]], sizes: Mapping[str, int], memory: Mapping[str, Tensor]
) -> dict[str, Measure]:
    """What a step's records say of this rank's gradients, by parameter.

    Args:
        step: the step, with this rank's gradients.
        records: this rank's, each with its carrier.
        sizes: bytes by parameter.
        memory: what compression has left out, by carrier.
    """
    sums: dict[str, _Sums] = {}
    for carrier, record in records:
        said = torch.cat(carrier.means([carrier.decode(record)], 1))
        gradient = torch.cat([rows.of(step.gradients[rows.name]).reshape(-1) for rows in carrier.rows])
        sums.setdefault(ledger_name(carrier), _Sums()).add(gradient, said)
    left_out: dict[str, float] = defaultdict(float)
    owners = {carrier.name: ledger_name(carrier) for carrier in step.carriers}
    for name, tensor in memory.items():
        if not name.endswith("/u"):  # momentum, which is no rest
            name = name.removesuffix("/v")
            left_out[owners.get(name, name)] += float(tensor.double().square().sum())
    found = {name: each.measure(sizes[name], left_out[name]) for name, each in sums.items()}
    carried = {name for carrier in step.carriers for name in carrier.names}
    for name, used in zip(step.names, step.used, strict=True):
        if used and name not in carried:  # travels as it is
            gradient = step.gradients[name]
            plain = _Sums()
            plain.add(gradient, gradient)
            found[name] = plain.measure(gradient.numel() * gradient.element_size())
    return found


class Telemetry:
    """Observes a session from now on; every rank may have its own, or none.

    Args:
        session: the session.
        every: how many steps are between two that are observed.
        path: takes one line a step; None for none.
        alarm: what may be left out of a gradient: its NMSE or, where there is memory, the squared norm of that over
            the gradient's. If it is more in three observed steps in a row, the gradient travels whole from then on, on
            this rank at once and on the others within some steps, which all sessions' logs say once. None for never.
        board: takes ``isgq/WHAT/PARAMETER`` as curves, e.g. ``torch.utils.tensorboard.SummaryWriter()``, which needs
            the package ``tensorboard``. None for none.

    Raises:
        OptionError: ``every`` or ``alarm`` is not positive, the file cannot be written, or the session's messages are
            of a common subspace, where no record is one of a gradient.
    """

    def __init__(
        self,
        session: Session,
        every: int = 50,
        path: str | Path | None = "telemetry.jsonl",
        alarm: float | None = None,
        board: ScalarWriter | None = None,
    ) -> None:
        if every < 1:
            raise OptionError(f"every={every} of Telemetry must be 1 step or more")
        if alarm is not None and not alarm > 0:
            raise OptionError(f"alarm={alarm} of Telemetry must be a positive NMSE, or None")
        if session.messages().rounds > 1:
            raise OptionError("telemetry is for records of gradients: it cannot observe a session with codec subspace")
        self._every, self._alarm, self._board = every, alarm, board
        self._above: dict[str, int] = defaultdict(int)  # observed steps in a row above the alarm, by parameter
        self._session = session
        self._path = Path(path) if path is not None else None
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("ab").close()
        except OSError as error:
            raise OptionError(
                f"telemetry cannot be written to {path}: {error.strerror}; choose another path"
            ) from error
        session.observe(self._observe)

    def _observe(self, aggregate: Gather, step: Step, records: Sequence[tuple[Carrier, Record]]) -> None:
        if step.number % self._every:
            return
        found = measure(step, records, aggregate.sizes, aggregate.save_memories().get("up", {}))
        if self._alarm is not None:
            self._watch(step, found, self._alarm)
        line = {
            "step": step.number,
            "rank": aggregate.rank,
            "staleness": aggregate.staleness,
            "parameters": {name: asdict(each) for name, each in found.items()},
        }
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to lose the training
            warnings.warn(f"isgq: telemetry ends at step {step.number}: {self._path}: {error.strerror}", stacklevel=2)
            self._path = None
        if self._board is not None:
            for name, each in found.items():
                for what, value in asdict(each).items():
                    if value is not None:
                        self._board.add_scalar(f"isgq/{what}/{name}", value, step.number)

    def _watch(self, step: Step, found: Mapping[str, Measure], alarm: float) -> None:
        for carrier in step.carriers:
            each = found.get(ledger_name(carrier))
            if each is None or carrier.distrusted:
                continue
            what, share = each.left_out
            self._above[carrier.name] = self._above[carrier.name] + 1 if share > alarm else 0
            if self._above[carrier.name] == _IN_A_ROW:
                reason = f"its {what} has been above {alarm:g} up to step {step.number}"
                self._session.doubt(carrier.names[0], reason)
                step.say(f"{carrier.name} travels whole from now on: {reason}")

    def _append(self, line: bytes) -> None:
        """In one piece, so that lines of several ranks do not mix."""
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
