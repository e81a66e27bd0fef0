"""The ledger: every byte handed to the exchange, by parameter, beside what dense fp32 gradients would cost."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes of this rank since the session began. ``sent == setup + sum(by_parameter) + overhead``.

    Attributes:
        steps: synchronisations so far.
        setup: bytes sent before the first step (parameters, buffers, agreement).
        sent: all bytes sent.
        received: all bytes received in steps.
        by_parameter: bytes sent for each parameter's gradient (a riding bias under its weight's name).
        overhead: bytes sent in steps that belong to no parameter: headers, padding, planning.
        dense: bytes that the plain gradients of the same steps would have been.
    """

    steps: int = 0
    setup: int = 0
    sent: int = 0
    received: int = 0
    by_parameter: Counter[str] = field(default_factory=Counter)
    overhead: int = 0
    dense: int = 0

    def record(self, sent: int, received: int, pieces: Iterable[tuple[str, int]], dense: int) -> None:
        """Count a step.

        Args:
            sent: bytes sent in all, by now.
            received: bytes received in all, by now.
            pieces: this step's bytes by parameter; the rest is overhead.
            dense: bytes of this step's plain gradients.
        """
        self.overhead += sent - self.sent
        for name, size in pieces:
            self.by_parameter[name] += size
            self.overhead -= size
        self.sent, self.received = sent, received
        self.dense += dense
        self.steps += 1

    @property
    def sent_per_step(self) -> float:
        """Mean bytes sent per step, setup left out."""
        return (self.sent - self.setup) / max(self.steps, 1)

    @property
    def received_per_step(self) -> float:
        """Mean bytes received per step."""
        return self.received / max(self.steps, 1)

    @property
    def compression(self) -> float:
        """Dense bytes over sent bytes."""
        sent = self.sent - self.setup
        return self.dense / sent if sent else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps: {self.sent_per_step:,.0f} bytes sent and {self.received_per_step:,.0f} received "
            f"per step and worker, {self.compression:.1f} x fewer than dense"
        ]
        lines += [f"  {name}: {count / max(self.steps, 1):,.0f}" for name, count in self.by_parameter.items()]
        lines.append(f"  headers, padding, planning: {self.overhead / max(self.steps, 1):,.0f}")
        return "\n".join(lines)
