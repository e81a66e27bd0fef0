"""The board on which nodes write their k bits, and the three ways that they may take turns."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from analysis.estimation.checks import Integers, at_least
from isgq.core.errors import OptionError

Kind = Literal["independent", "sequential", "blackboard"]


@dataclass(frozen=True, eq=False)
class Note:
    """What some nodes wrote at one time.

    Attributes:
        nodes: their numbers, int64 ``[m]``.
        values: int64 ``[m, fields]``.
    """

    nodes: Integers
    values: Integers


class Board:
    """Counts the bits of every node and holds a protocol to its rules.

    ``independent``: nobody reads before all have written. ``sequential``: a node reads what those before it wrote and
    writes once. ``blackboard``: any order, any number of times.

    Args:
        nodes: n.
        bits: k, the budget of each node.
        kind: the rules.

    Attributes:
        used: bits that each node wrote, int64 ``[n]``.
    """

    def __init__(self, nodes: int, bits: int, kind: Kind = "independent") -> None:
        if kind not in get_args(Kind):
            raise OptionError(f"kind = {kind!r} of a protocol must be one of {', '.join(get_args(Kind))}")
        self.nodes, self.bits, self.kind = at_least("nodes", nodes), at_least("bits", bits), kind
        self.used = np.zeros(nodes, np.int64)
        self._notes: list[Note] = []
        self._closed = False

    def write(self, nodes: Integers, values: Integers, width: int) -> None:
        """Write fields of ``width`` bits.

        Args:
            nodes: who writes, distinct, ``[m]``.
            values: ``[m, fields]``, each in ``0 .. 2^width - 1``.
            width: bits of a field.

        Raises:
            OptionError: a node over its budget, a value too large for its field, or writing out of turn.
        """
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < 2**width:
            raise OptionError(f"values from {values.min()} to {values.max()} do not fit fields of {width} bits")
        used = self.used[nodes]
        if self._closed or (self.kind == "sequential" and bool(used.any())):
            raise OptionError(f"a node of this {self.kind} protocol writes after its turn")
        used += width * values.shape[1]
        if int(used.max(initial=0)) > self.bits:
            raise OptionError(f"a node writes {used.max()} bits; its budget is {self.bits}")
        self.used[nodes] = used
        self._notes.append(Note(nodes, values))

    def close(self) -> None:
        """All have written: the server reads."""
        self._closed = True

    def read(self) -> list[Note]:
        """All notes so far.

        Raises:
            OptionError: an independent protocol, and not closed yet.
        """
        if self.kind == "independent" and not self._closed:
            raise OptionError("nodes of an independent protocol read nothing; use sequential or blackboard")
        return self._notes
