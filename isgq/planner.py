"""Which route each parameter takes, decided from numbers that every rank shares.

Routes: ``factors`` (quantized factors, all-gathered), ``direct`` (the compressed gradient, all-gathered), ``dense``
(the gradient itself, all-reduced).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Route = Literal["factors", "direct", "dense"]
RoutePolicy = Literal["auto", "factors", "dense"]
PAIRLESS, REFUSED, UNSEEN = -2, -1, 0
"""In place of a measured size: a gradient without captured factors; factors that do not make it up; no gradient."""
NO_PAIR = (
    "a gradient came without captured factors: its weight is used without calling its module (as MultiheadAttention "
    "does), or by code that was compiled before instrument()"
)
NO_PRODUCT = (
    "the captured factors do not make up the gradient: its weight is used outside its module, too, or has a hook, or "
    "its module's output has one"
)


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
        expected: whether a user would expect this route; otherwise it is reported.
    """

    name: str
    route: Route
    reason: str
    factor_bytes: int
    dense_bytes: int
    codec: str = ""
    expected: bool = True


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
        return table(rows, numbers=(2, 3))


def table(rows: Sequence[Sequence[str]], numbers: Collection[int]) -> str:
    """Aligned columns; those of these numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def decide(line: Line, sizes: Sequence[int], policy: RoutePolicy) -> Line:
    """Choose the route of one candidate for factors.

    Args:
        line: the candidate, with its dense size.
        sizes: per rank, measured message bytes, or PAIRLESS, REFUSED or UNSEEN.
        policy: ``auto`` takes factors where they are fewer bytes; ``factors`` wherever they reproduce the gradient.
    """
    most = max(sizes)
    for refusal, reason in ((PAIRLESS, NO_PAIR), (REFUSED, NO_PRODUCT)):
        if refusal in sizes:
            return replace(
                line,
                route="dense",
                reason=f"rank {sizes.index(refusal)}: {reason}",
                factor_bytes=max(most, 0),
                expected=False,
            )
    if most == UNSEEN:
        return replace(line, route="dense", reason="no gradient yet", factor_bytes=0)
    if policy == "factors":
        return replace(line, route="factors", reason="asked for", factor_bytes=most)
    fewer = most < line.dense_bytes
    reason = f"{line.dense_bytes / most:.1f} x fewer bytes" if fewer else f"factors cost {most:,} bytes"
    return replace(line, route="factors" if fewer else "dense", reason=reason, factor_bytes=most)


def report_plan(plan: Plan, log: Callable[[str], None] | None, say: Callable[[str], None]) -> None:
    """Tell the user what travels without factors.

    Args:
        plan: the plan.
        log: told of every parameter that travels as it is, if the user wants to know.
        say: told in one sentence of those that a user would not expect.
    """
    for line in plan.lines:
        if line.route == "dense" and log is not None:
            log(f"isgq: {line.name} travels densely: {line.reason}")
    surprises = [f"{line.name} ({line.reason})" for line in plan.lines if line.route != "factors" and not line.expected]
    if surprises:
        say(f"weights that travel without factors; isgq.doctor tells more, skip= accepts it: {'; '.join(surprises)}")
