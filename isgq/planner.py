"""Which route each parameter takes, decided from numbers that every rank shares.

Routes: ``factors`` (quantized factors, all-gathered), ``direct`` (the compressed gradient, all-gathered), ``dense``
(the gradient itself, all-reduced).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Route = Literal["factors", "direct", "dense"]
RoutePolicy = Literal["auto", "factors", "dense"]
REFUSED, UNSEEN = -1, 0
"""In place of a measured size: factors do not reproduce the gradient here; no gradient here in this step."""


@dataclass(frozen=True)
class Line:
    """One parameter's route.

    Attributes:
        name: parameter name.
        route: ``factors``, ``direct`` or ``dense``.
        reason: why.
        factor_bytes: largest measured record of any rank, weight and bias together; 0 where nothing was measured.
        dense_bytes: size of the gradient, weight and riding bias together.
        codec: what compresses it, where a session chooses among several.
    """

    name: str
    route: Route
    reason: str
    factor_bytes: int
    dense_bytes: int
    codec: str = ""


@dataclass(frozen=True)
class Plan:
    """The routes of all trainable parameters; prints as a table."""

    lines: tuple[Line, ...] = ()

    def route(self, name: str) -> Route:
        """Route of a parameter; ``dense`` for one that the plan does not know."""
        return next((line.route for line in self.lines if line.name == name), "dense")

    def __str__(self) -> str:
        rows = [("parameter", "route", "coded bytes", "dense bytes", "why")]
        for line in self.lines:
            measured = f"{line.factor_bytes:,}" if line.factor_bytes else "-"
            rows.append((line.name, line.codec or line.route, measured, f"{line.dense_bytes:,}", line.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
            for row in rows
        )


def decide(line: Line, sizes: Sequence[int], policy: RoutePolicy) -> Line:
    """Choose the route of one candidate for factors.

    Args:
        line: the candidate, with its dense size.
        sizes: per rank, measured message bytes, or REFUSED, or UNSEEN.
        policy: ``auto`` takes factors where they are fewer bytes; ``factors`` wherever they reproduce the gradient.
    """
    most = max(sizes)
    if REFUSED in sizes:
        reason = f"rank {sizes.index(REFUSED)}: the captured pairs do not make up the gradient"
        return replace(line, route="dense", reason=reason, factor_bytes=max(most, 0))
    if most == UNSEEN:
        return replace(line, route="dense", reason="no gradient yet", factor_bytes=0)
    if policy == "factors":
        return replace(line, route="factors", reason="asked for", factor_bytes=most)
    fewer = most < line.dense_bytes
    reason = f"{line.dense_bytes / most:.1f} x fewer bytes" if fewer else f"factors cost {most:,} bytes"
    return replace(line, route="factors" if fewer else "dense", reason=reason, factor_bytes=most)
