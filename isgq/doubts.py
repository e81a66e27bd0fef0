"""Gradients that travel whole because some rank does not trust their compression any more, agreed by all ranks.

Whoever doubts sends the gradient whole at once, as a record says itself how to read it, and says so in the headers of
its next steps, a parameter in each (:mod:`isgq.wire.header`). From the step after, every rank sends it whole.
"""

from collections.abc import Callable, Mapping, Sequence

from isgq.core.errors import InstrumentError
from isgq.records import Carrier
from isgq.wire.header import NEW_PLAN, NO_PARAMETER, Header, Status


class Doubts:
    """What the ranks of a session doubt.

    Args:
        names: of all parameters, in the order of the headers' bitmaps.
        whole: whether a gradient can travel whole; not in a common subspace.

    Attributes:
        reasons: by parameter name; this rank's, and those of other ranks that have been heard.
    """

    def __init__(self, names: Sequence[str], *, whole: bool) -> None:
        self._names, self._whole = names, whole
        self.reasons: dict[str, str] = {}
        self._untold: list[str] = []

    def add(self, name: str, reason: str) -> None:
        """This rank doubts a parameter's compression.

        Raises:
            InstrumentError: there is no parameter of that name, or none can travel whole.
        """
        if not self._whole:
            raise InstrumentError(f"{name!r} cannot travel whole: in a common subspace no record is its own")
        if name not in self._names:
            raise InstrumentError(f"no trainable parameter is called {name!r}; there are {', '.join(self._names)}")
        if name not in self.reasons:
            self.reasons[name] = reason
            self._untold.append(name)

    def load(self, reasons: Mapping[str, str]) -> None:
        """Replace them."""
        self.reasons, self._untold = {}, []
        for name, reason in reasons.items():
            self.add(name, reason)

    def next(self) -> int:
        """Position of a parameter to tell of; NO_PARAMETER where there is none, or none that a header can name."""
        position = self._names.index(self._untold[0]) if self._untold else NO_PARAMETER
        return position if position < NEW_PLAN else NO_PARAMETER

    def hear(self, headers: Sequence[Header], carriers: list[Carrier], rank: int, say: Callable[[str], None]) -> None:
        """Every rank's header of a step that is applied.

        Args:
            headers: in rank order.
            carriers: of the session.
            rank: this one.
            say: told what other ranks doubt.
        """
        for source, header in enumerate(headers):
            if header.status is not Status.OK or header.parameter >= NEW_PLAN:
                continue
            name = self._names[header.parameter]
            if source == rank:
                self._untold.remove(name)
            elif name not in self.reasons:
                self.reasons[name] = f"rank {source} does not trust its compression any more"
                say(f"{name} travels whole from now on: {self.reasons[name]}")
        self.apply(carriers)

    def apply(self, carriers: list[Carrier]) -> list[Carrier]:
        """Let the carriers of what is doubted send it whole; returns them."""
        for carrier in carriers if self.reasons else ():
            for name in carrier.names:
                carrier.distrusted = carrier.distrusted or self.reasons.get(name, "")
        return carriers
