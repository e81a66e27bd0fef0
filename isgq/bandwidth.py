"""A model of the bytes that a step moves, and of the time that a link takes for them, beside what the ledger measures.

With up_s the message about shard s, down_s the server's reply, h the header, all of them as every rank makes them:

    gather      sends h + up, receives (N-1) (h + up); of i bytes inline, up is at least i
    two_pass    rank r sends h + sum_(s != r) (4 + up_s) + h' + (N-1) down_r
                       receives (N-1) (h + 4 + up_r + h') + sum_(s != r) down_s
    server      the same with one shard, of rank 0

In a common subspace (:mod:`isgq.rounds`) there are two such rounds: three short headers h' and one h, and messages that
are those of both together.

Plain gradients of parameters that no codec carries are handed over and received once more (an all-reduce). A message
is counted once when it is handed to an all-gather, and once for each receiver when it is handed to an all-to-all. What
an asynchronous worker moves is h + 8 + up and h + 8 + down in a step of its own, whatever the number of workers.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from isgq.aggregate import AggregateName, Gather
from isgq.core.errors import OptionError
from isgq.wire.format import FRAME_BYTES
from isgq.wire.header import LENGTH_BYTES, NEWS_BYTES, header_size

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_PARTS = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_LINK = re.compile(rf"{_NUMBER} *([kmg]?)(bit|b)/s(?: *[+,] *{_NUMBER} *(s|ms|us))?", re.IGNORECASE)


@dataclass(frozen=True)
class Messages:
    """Sizes of one step's messages on one rank, in bytes.

    Attributes:
        up: about each shard; a single one where there are no shards.
        down: the reply about each shard; empty for one pass.
        dense: plain gradients that travel beside.
        parameters: number of trainable parameters.
        rounds: in how many rounds they go.
        inline: bytes that travel with the header in one pass.
    """

    up: Sequence[int]
    down: Sequence[int]
    dense: int
    parameters: int
    rounds: int = 1
    inline: int = 0


def messages_of(aggregate: Gather, dense: int, parameters: int) -> Messages:
    """Those of the last step.

    Args:
        aggregate: a session's.
        dense: see :class:`Messages`.
        parameters: see :class:`Messages`.
    """
    return Messages(aggregate.up, aggregate.down, dense, parameters, aggregate.rounds, aggregate.inline)


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank in a step.

    Attributes:
        sent: handed over.
        received: from others.
        rounds: transfers that wait for one another.
    """

    sent: int
    received: int
    rounds: int


def shared(messages: Messages, servers: int) -> Messages:
    """About what messages of two passes with one server become with so many: all but their frames is cut."""
    frames = FRAME_BYTES * messages.rounds

    def cut(size: int) -> list[int]:
        ends = [(size - frames) * i // servers for i in range(servers + 1)]
        return [frames + b - a for a, b in pairwise(ends)]

    return replace(messages, up=cut(*messages.up), down=cut(*messages.down))


def predict(aggregate: AggregateName, messages: Messages, workers: int, rank: int) -> Moved:
    """What a rank moves in a step if all ranks have messages of these sizes.

    Args:
        aggregate: see :func:`isgq.instrument`.
        messages: the sizes.
        workers: how many ranks take part.
        rank: which one; of no matter but for shards.

    Raises:
        OptionError: unknown aggregation.
    """
    others = workers - 1
    dense = messages.dense
    if aggregate == "gather":
        each = header_size(messages.parameters) + max(messages.inline, sum(messages.up))
        transfers = 1 if messages.inline >= max(1, sum(messages.up)) else 2
        return Moved(each + dense, others * each + (dense if others else 0), transfers)
    if aggregate == "async":
        head = header_size(messages.parameters) + 8
        return Moved(head + sum(messages.up), header_size(0) + 8 + sum(messages.down), 2)
    if aggregate not in {"two_pass", "server"}:
        raise OptionError(f"aggregate={aggregate!r} must be one of gather, two_pass, server, async")
    up, down = list(messages.up), list(messages.down)
    serves = rank < len(up)
    own_up, own_down = (up[rank], down[rank]) if serves else (0, 0)
    heads = header_size(messages.parameters) + (2 * messages.rounds - 1) * NEWS_BYTES
    length = messages.rounds * LENGTH_BYTES
    return Moved(
        heads + length * (len(up) - serves) + sum(up) - own_up + others * own_down + dense,
        others * (heads + length * serves + own_up) + sum(down) - own_down + (dense if others else 0),
        4 * messages.rounds,
    )


@dataclass(frozen=True)
class Link:
    """A worker's link, the same in both directions.

    Attributes:
        bytes_per_second: bandwidth of each direction.
        latency: seconds that a transfer takes besides.
    """

    bytes_per_second: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and 0 <= self.latency < math.inf):
            raise OptionError(f"a link needs a positive bandwidth and a latency of 0 or more, got {self}")

    @staticmethod
    def parse(text: str) -> "Link":
        """Read ``100Mbit/s``, ``1Gbit/s+0.2ms`` or ``12.5MB/s+50us``: bandwidth, and latency unless it is 0.

        Raises:
            OptionError: it is none of these.
        """
        found = _LINK.fullmatch(text.strip())
        if found is None:
            raise OptionError(
                f"link {text!r} must be a bandwidth in bit/s or B/s, and a latency where there is one: 100Mbit/s+1ms"
            )
        bandwidth, unit, bits, latency, seconds = found.groups(default="")
        size = _UNITS[unit.lower()] / (8 if bits.lower() == "bit" else 1)
        return Link(float(bandwidth) * size, float(latency or 0) / _PARTS[seconds.lower()])

    def __str__(self) -> str:
        latency = f"+{self.latency * 1e3:.10g}ms" if self.latency else ""
        return f"{self.bytes_per_second * 8 / 1e6:.10g}Mbit/s{latency}"

    def gather_seconds(self, size: float, workers: int) -> float:
        """Time of an all-gather of messages of this size: N - 1 copies of one, which leave one after the other.

        What is too large for :class:`isgq.exchange.TorchExchange` to do so goes around a ring, where latency counts
        N - 1 times, but hardly matters.
        """
        return (workers - 1) * size / self.bytes_per_second + (self.latency if workers > 1 else 0.0)

    def reduce_seconds(self, size: float, workers: int) -> float:
        """Time of an all-reduce of a vector of this size around a ring: 2 (N - 1) hops of an N-th of it."""
        return 2 * (workers - 1) * (size / workers / self.bytes_per_second + self.latency)

    def seconds(self, moved: Moved) -> float:
        """Communication time of a step, if nothing else uses the link."""
        return max(moved.sent, moved.received) / self.bytes_per_second + moved.rounds * self.latency
