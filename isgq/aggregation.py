"""Which aggregation a choice of codecs takes."""

from collections.abc import Mapping

from isgq.aggregate import Gather
from isgq.asynchronous import SERVER, Worker
from isgq.choice import Choice
from isgq.exchange import Channel, Exchange
from isgq.overlap import Overlapped
from isgq.rounds import Rounds
from isgq.two_pass import TwoPass
from isgq.windows import Window


def aggregation(
    choice: Choice,
    exchange: Exchange,
    windows: Mapping[str, Window] | None = None,
    channels: Mapping[int, Channel] | None = None,
    bucket_cap_mb: float | None = None,
) -> Gather:
    """The aggregation of a choice.

    Args:
        choice: of codecs, passes and servers.
        exchange: the transport.
        windows: of all trainable parameters; for ``async`` and ``bucket_cap_mb``.
        channels: for ``async``, see :meth:`~isgq.exchange.Exchange.star`.
        bucket_cap_mb: see :mod:`isgq.overlap`; None for no overlap.
    """
    windows = windows or {}
    if choice.subspace is not None:
        return Rounds(exchange, choice)
    if choice.aggregate == "async":
        if exchange.rank == SERVER:
            return Gather(exchange)
        parameters = {name: window.parameter for name, window in windows.items()}
        return Worker(exchange, (channels or {})[SERVER], choice.direct, choice.down, parameters)
    if choice.aggregate != "gather":
        servers = exchange.world_size if choice.aggregate == "two_pass" else 1
        return TwoPass(exchange, choice.direct, choice.down, servers)
    if bucket_cap_mb is not None:
        return Overlapped(exchange, choice.direct, choice.pair, windows, bucket_cap_mb, choice.inline_bytes)
    return Gather(exchange, choice.direct, choice.pair, choice.inline_bytes)
