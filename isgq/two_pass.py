"""Two passes: ranks are servers of shards, which average and compress again (DoubleSqueeze, Tang et al., ICML 2019).

See :mod:`isgq.aggregate` for the stations of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from isgq.aggregate import NOTHING, Gather, Outgoing, Step
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec
from isgq.exchange import Exchange
from isgq.records import Carrier, DirectCarrier, Record
from isgq.rows import scatter
from isgq.wire.header import LENGTH_BYTES, Header, pack_length, unpack_length


class TwoPass(Gather):
    """Two passes: all to the servers, which average and compress again, and back to all.

    The up pass moves (N-1)/N of a payload each way where the shards are equal, the down pass as much, whatever N.

    Args:
        exchange: the transport.
        codec: see :class:`Gather`.
        down: compresses the means; with memory, this rank's memory of its shard.
        servers: how many ranks, from 0, have a shard.
    """

    _replaces = False

    def __init__(self, exchange: Exchange, codec: Codec | None, down: Codec, servers: int) -> None:
        super().__init__(exchange, codec)
        self.servers, self._down = servers, down
        self._incoming: list[int] = []  # bytes of what each rank is about to send here
        self._remember("down", memory_of(down))

    def _pack(self, step: Step, records: Sequence[tuple[Carrier, Record]]) -> Outgoing:
        messages = []
        for server in range(self._exchange.world_size):
            mine = [each for each in records if each[0].server == server]
            messages.append(self._message(step, mine, copies=int(server != self._exchange.rank)))
        return Outgoing(messages)

    def agree(self, step: Step, outgoing: Outgoing) -> list[Header]:
        """See :class:`Gather`. Each server alone is told what it will get, or headers would grow with the ranks."""
        return self._announce(outgoing, lambda: super(TwoPass, self).agree(step, outgoing))

    def _agree_again(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> list[Header]:
        return self._announce(outgoing, lambda: super(TwoPass, self)._agree_again(step, outgoing, headers))

    def _announce(self, outgoing: Outgoing, agree: Callable[[], list[Header]]) -> list[Header]:
        """Tell the servers how long this rank's messages are, and hear it as a server, while all agree."""
        ranks, serves = self._exchange.world_size, self._exchange.rank < self.servers
        sizes = [message.numel() for message in outgoing.messages] or [0] * ranks
        lengths = [pack_length(size) if to < self.servers else NOTHING for to, size in enumerate(sizes)]
        pending = self._exchange.all_to_all(lengths, [LENGTH_BYTES if serves else 0] * ranks)
        try:
            return agree()
        finally:
            told = pending.wait()
            self._incoming = [unpack_length(raw) for raw in told] if serves else [0] * ranks

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        return self._means_in(step, self._answers(step, outgoing, headers))

    def _answers(
        self, step: Step, outgoing: Outgoing, headers: Sequence[Header]
    ) -> list[tuple[list[DirectCarrier], Tensor]]:
        """What each server replies, and of which carriers."""
        received = self._exchange.all_to_all(outgoing.messages, self._incoming).wait()
        used = [any(flags) for flags in zip(*(header.used for header in headers), strict=True)]
        replies = [carrier for carrier in replies_of(step.carriers, self._down) if step.sends(carrier, used)]
        reply = self._told(step, lambda: self._reply(step, replies, headers, received))
        answers = super()._agree_again(step, reply, headers)
        mine = reply.messages[0]
        lengths = [answer.length for answer in answers]
        down = self._exchange.all_to_all([mine] * self._exchange.world_size, lengths).wait()
        self.up = [message.numel() for message in outgoing.messages[: self.servers]]
        self.down = lengths[: self.servers]
        return [([c for c in replies if c.server == server], message) for server, message in enumerate(down)]

    def _means_in(self, step: Step, answers: Sequence[tuple[Sequence[DirectCarrier], Tensor]]) -> dict[str, Tensor]:
        """The means by parameter name."""
        means: dict[str, Tensor] = {}
        for server, (served, message) in enumerate(answers):
            decode_reply(served, self._read(step, served, message, server), means)
        return means

    def _reply(
        self,
        step: Step,
        replies: Sequence[DirectCarrier],
        headers: Sequence[Header],
        received: Sequence[Tensor],
    ) -> Outgoing:
        """This server's averages, compressed again."""
        rank = self._exchange.rank
        served = [carrier for carrier in step.carriers if carrier.server == rank]
        means = self._average(step, served, headers, received)
        records: list[tuple[Carrier, Record]] = []
        for carrier in replies:
            if carrier.server == rank:
                self._about = carrier.names[0]
                records.append((carrier, carrier.encode(means, step.key(carrier.name, rank))))
        return Outgoing([self._message(step, records, copies=self._exchange.world_size - 1)])


def replies_of(carriers: Sequence[Carrier], down: Codec) -> list[DirectCarrier]:
    """Carriers of the means: the same rows as on the way up, a factored weight and its bias each by itself."""
    replies = []
    for carrier in carriers:
        if isinstance(carrier, DirectCarrier):
            replies.append(replace(carrier, codec=down, name=f"{carrier.name}/down", distrusted=""))
        else:
            replies += [DirectCarrier(down, f"{rows.label}/down", [rows], carrier.server) for rows in carrier.rows]
    return replies


def decode_reply(
    carriers: Sequence[DirectCarrier], records: Sequence[Record], into: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What a server's reply holds, as whole gradients by parameter name.

    Args:
        carriers: of the records.
        records: the reply.
        into: gradients that have rows from other servers; they are completed.
    """
    whole = {} if into is None else into
    for carrier, record in zip(carriers, records, strict=True):
        scatter(carrier.rows, carrier.decode(record).reshape(-1), whole)
    return whole
