"""How all ranks' records become one mean on every rank.

:class:`Gather`, one pass: every rank gets every rank's message and averages for itself.

:class:`~isgq.two_pass.TwoPass`, DoubleSqueeze (Tang et al., ICML 2019): a rank is the server of a shard of the
gradients. It averages what all ranks send of its shard, compresses the mean again, with a memory of its own, and sends
it to all. With one shard for all it is a parameter server.

Both take a step in the same stations, each a collective call: :meth:`~Gather.encode` (local), :meth:`~Gather.agree`
(fixed headers: all ranks go on or none does), :meth:`~Gather.reduce`, :meth:`~Gather.commit`. Where a step is refused,
memory goes back to what it was. Every rank decodes the same messages in rank order, so all hold the same bits.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isgq.agreement import check_headers, check_replicas, replica_digests
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec, PairCodec, Stateful, learned_by
from isgq.core.errors import MismatchError, NonFiniteError
from isgq.core.keys import Key
from isgq.correspondence import Correspondence
from isgq.exchange import Exchange
from isgq.records import Carrier, Decoded, Record, Unfinished, finish, ledger_name
from isgq.rows import place
from isgq.wire.format import FRAME_BYTES
from isgq.wire.header import (
    NEW_PLAN,
    NO_PARAMETER,
    Header,
    Status,
    header_size,
)

AggregateName = Literal["gather", "two_pass", "server", "async"]
NOTHING = torch.empty(0, dtype=torch.uint8)
InlineBytes = int | Literal["auto"]
_INLINE_MOST, _INLINE_STEP = 1 << 16, 64  # bytes up to which, and in steps of which, "auto" makes room
Observer = Callable[["Gather", "Step", Sequence[tuple[Carrier, Record]]], None]  # of what a rank is about to send


@dataclass(frozen=True)
class Step:
    """What one step is about.

    Attributes:
        number: counts the steps; the same on every rank.
        digest: of plan and codecs; the same on every rank.
        seed: of all randomness; the same on every rank.
        names: of all parameters, in the order of the headers' bitmaps.
        used: whether each got a gradient on this rank.
        carriers: the same on every rank.
        gradients: this rank's, whole, by parameter name.
        say: takes what the user should know.
        new_plan: whether this rank asks for a new plan.
        planned: whether these carriers were made before the step, so that all ranks could send some ahead.
        doubted: position of a parameter whose compression this rank does not trust any more; see :mod:`isgq.doubts`.
    """

    number: int
    digest: int
    seed: int
    names: Sequence[str]
    used: Sequence[bool]
    carriers: Sequence[Carrier]
    gradients: Mapping[str, Tensor]
    say: Callable[[str], None] = lambda _: None
    new_plan: bool = False
    planned: bool = False
    doubted: Callable[[], int] = lambda: NO_PARAMETER

    @functools.cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each parameter in ``names``."""
        return {name: i for i, name in enumerate(self.names)}

    def position(self, name: str) -> int:
        """Of a parameter in the headers; NO_PARAMETER where there is none."""
        index = self.index.get(name, NO_PARAMETER)
        return index if index < NEW_PLAN else NO_PARAMETER

    def sends(self, carrier: Carrier, used: Sequence[bool]) -> bool:
        """Whether a rank that uses these parameters has a record for the carrier."""
        return any(used[self.index[name]] for name in carrier.names)

    def key(self, name: str, rank: int) -> Key:
        """Address of a rank's tensor in this step."""
        return Key(name, self.seed, self.number, rank)

    def keys(self, carriers: Sequence[Carrier], rank: int) -> list[Key]:
        """The same for each carrier."""
        return [self.key(carrier.name, rank) for carrier in carriers]


@dataclass(frozen=True)
class Outgoing:
    """What this rank has to say in a step; or, without messages, why it cannot take part.

    Attributes:
        messages: uint8 ``[n]``, one for all ranks or one for each.
        status: whether the rank takes part.
        parameter: index of the parameter the status is about, or NO_PARAMETER.
        error: what happened.
    """

    messages: Sequence[Tensor] = ()
    status: Status = Status.OK
    parameter: int = NO_PARAMETER
    error: Exception | None = None


def refused(error: Exception, parameter: int = NO_PARAMETER) -> Outgoing:
    """What a rank has to say that cannot take part, because of an error about some parameter."""
    status = Status.NON_FINITE if isinstance(error, NonFiniteError) else Status.FAILED
    return Outgoing(status=status, parameter=parameter, error=error)


class Gather:
    """One pass: all-gather, then every rank averages.

    Args:
        exchange: the transport.
        codec: the codec of gradients, whose memory follows the fate of each step; or None.
        pair: the codec of factors, what it learns likewise; or None.
        inline: bytes of every message that travel with the header; a message that is no longer needs no transfer of
            its own. ``"auto"``: room for a message a little longer than the last step's longest, of which all ranks
            hear, or none where that is too long to fill up.

    Attributes:
        servers: how many ranks have a shard.
        rank: this one.
        sizes: bytes of this step's records that this rank has handed over, by parameter.
        up: bytes of this step's messages about each shard, this rank's own included.
        down: bytes of this step's replies about each shard.
        inline: bytes of every message that travel with the next header.
        rounds: how often the ranks exchange messages in a step.
        staleness: how many updates old this rank's last gradient was when it was applied; 0 for ranks in step.
        observer: called in every step before the ranks agree, or None.
    """

    rounds, staleness = 1, 0
    _replaces = True  # whether what this rank averages is what replaces its gradients
    observer: Observer | None = None

    def __init__(
        self, exchange: Exchange, codec: Codec | None = None, pair: PairCodec | None = None, inline: InlineBytes = 0
    ) -> None:
        self.servers, self.rank, self.sizes = 1, exchange.rank, Counter[str]()
        self.inline, self._adapts = (0, True) if inline == "auto" else (inline, False)
        self._inlined: list[Tensor] = []  # of every rank's message, what came with its header
        self.up: Sequence[int] = ()
        self.down: Sequence[int] = ()
        self._about = ""  # the parameter that is being encoded
        self._memories: dict[str, Stateful] = {}
        self._correspondence = Correspondence()
        self._exchange = exchange
        self._remember("up", memory_of(codec))
        self._remember("common", learned_by(pair))

    def _remember(self, where: str, memory: Stateful | None) -> None:
        if memory is not None:
            self._memories[where] = memory

    def encode(self, step: Step) -> Outgoing:
        """This rank's records of all carriers that have a gradient; never raises."""
        self.sizes = Counter()
        return self._told(step, lambda: self._encode(step))

    def _told(self, step: Step, make: Callable[[], Outgoing]) -> Outgoing:
        """What this rank makes, or why it cannot; never raises, the other ranks must hear of it."""
        self._about = ""
        try:
            return make()
        except Exception as error:
            return refused(error, step.position(self._about))

    def _encode(self, step: Step) -> Outgoing:
        records: list[tuple[Carrier, Record | Unfinished]] = []
        for carrier in step.carriers:
            if step.sends(carrier, step.used):
                records.append((carrier, self._record(step, carrier)))
        overhead = header_size(len(step.names)) + FRAME_BYTES * self.servers
        done = finish([record for _, record in records], overhead, step.say)
        ready = [(carrier, record) for (carrier, _), record in zip(records, done, strict=True)]
        outgoing = self._pack(step, ready)
        self._show(step, ready)
        return outgoing

    def _record(self, step: Step, carrier: Carrier) -> Record | Unfinished:
        self._about = carrier.names[0]
        return carrier.encode(step.gradients, step.key(carrier.name, self._exchange.rank))

    def _show(self, step: Step, records: Sequence[tuple[Carrier, Record]]) -> None:
        if self.observer is not None:
            self.observer(self, step, records)
            if "common" in self._memories:  # what it has decoded, no other rank has heard
                self._memories["common"].rollback()

    def _pack(self, step: Step, records: Sequence[tuple[Carrier, Record]]) -> Outgoing:
        return Outgoing([self._message(step, records, copies=1)])

    def _message(self, step: Step, records: Sequence[tuple[Carrier, Record]], copies: int) -> Tensor:
        """One message, of which so many copies are handed over."""
        if not records:
            return NOTHING
        carriers = [carrier for carrier, _ in records]
        keys = step.keys(carriers, self._exchange.rank)
        message, sizes = self._correspondence.write(carriers, [record for _, record in records], keys)
        for carrier, size in zip(carriers, sizes, strict=True):
            self.sizes[ledger_name(carrier)] += size * copies
        return message

    def agree(self, step: Step, outgoing: Outgoing) -> list[Header]:
        """Every rank's header, of which all are fine.

        Raises:
            PeerError: some rank cannot take part; the same error on every rank.
            MismatchError: the ranks are at different steps or follow different plans.
            ExchangeError: some rank is missing.
        """
        head = header_of(step, outgoing).pack()
        if self.inline:
            beginning = outgoing.messages[0][: self.inline].cpu() if outgoing.messages else NOTHING
            head = torch.cat([head, beginning, beginning.new_zeros(self.inline - beginning.numel())])
        gathered, size = self._gathered(head), header_size(len(step.names))
        self._inlined = [raw[size:] for raw in gathered]
        read = lambda: [Header.unpack(raw[:size], len(step.names)) for raw in gathered]  # noqa: E731
        headers = self._checked(step, outgoing, read)
        if self._adapts:  # here, because what comes later may fail on some ranks alone
            self.inline = _room_for(max(header.length for header in headers))
        return headers

    def _agree_again(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> list[Header]:
        """The same within a step that all ranks have agreed on, by their headers of before."""
        gathered = self._gathered(header_of(step, outgoing).news())
        return self._checked(
            step, outgoing, lambda: [header.followed_by(raw) for header, raw in zip(headers, gathered, strict=True)]
        )

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        return self._exchange.all_gather(mine, [mine.numel()] * self._exchange.world_size).wait()

    def _checked(self, step: Step, outgoing: Outgoing, read: Callable[[], list[Header]]) -> list[Header]:
        """Headers of which all are fine; or else this rank's own error, if it has one, is what theirs come from."""
        try:
            headers = read()
            check_headers(headers, step.names)
        except Exception as refusal:
            self.rollback()
            raise refusal from outgoing.error
        return headers

    def compare(self, parameters: Mapping[str, Tensor], headers: Sequence[Header]) -> None:
        """Compare hashes of the parameters between all ranks. A collective call.

        Raises:
            MismatchError: they differ.
        """
        gathered = self._gathered(replica_digests(parameters.values()))
        try:
            check_replicas(gathered, headers, list(parameters))
        except MismatchError:
            self.rollback()
            raise

    def reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        """The mean gradients by parameter name, in at least float32, of all that some rank has sent a record for.

        Raises:
            WireError: a message is corrupt.
            CodecError: a message does not fit.
            PeerError: a server cannot read or compress its shard; the same error on every rank.
        """
        try:
            return self._reduce(step, outgoing, headers)
        except BaseException:  # the other ranks may be done with the step
            self.rollback()
            raise

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        [message] = outgoing.messages
        self.up = [message.numel()]
        return self._average(step, step.carriers, headers, self._messages(message, headers))

    def _messages(self, message: Tensor, headers: Sequence[Header]) -> list[Tensor]:
        """Every rank's message, in rank order, after :meth:`agree`."""
        lengths = [header.length for header in headers]
        inline = self._inlined[0].numel()
        if not inline:
            return self._exchange.all_gather(message, lengths).wait()
        rests = [max(0, length - inline) for length in lengths]
        rest = self._exchange.all_gather(message[inline:], rests).wait()
        begun = [beginning[:length] for beginning, length in zip(self._inlined, lengths, strict=True)]
        return [torch.cat(parts) if parts[1].numel() else parts[0] for parts in zip(begun, rest, strict=True)]

    def _average(
        self, step: Step, carriers: Sequence[Carrier], headers: Sequence[Header], messages: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Decode every rank's message about the carriers and average."""
        decoded: dict[str, list[Decoded]] = {}
        for rank, (message, header) in enumerate(zip(messages, headers, strict=True)):
            sent = [carrier for carrier in carriers if step.sends(carrier, header.used)]
            for carrier, record in zip(sent, self._read(step, sent, message, rank), strict=True):
                decoded.setdefault(carrier.name, []).append(carrier.decode(record))
        return self._means(carriers, decoded)

    def _means(self, carriers: Sequence[Carrier], decoded: Mapping[str, Sequence[Decoded]]) -> dict[str, Tensor]:
        """From every rank's part, in rank order, by carrier."""
        means: dict[str, Tensor] = {}
        for carrier in carriers:
            if carrier.name in decoded:
                mean = carrier.means(decoded[carrier.name], self._exchange.world_size, self._replaces)
                place(carrier.rows, mean, means)
        return means

    def _read(self, step: Step, carriers: Sequence[Carrier], message: Tensor, rank: int) -> Sequence[Record]:
        return self._correspondence.read(message, carriers, step.keys(carriers, rank))

    def commit(self) -> None:
        """The step was applied."""
        self._correspondence.commit()
        for memory in self._memories.values():
            memory.commit()

    def rollback(self) -> None:
        """The step was not applied."""
        self._correspondence.rollback()
        self.withdraw()

    def withdraw(self) -> None:
        """Forget what this rank has encoded since the last step that was applied; nothing after one."""
        for memory in self._memories.values():
            memory.rollback()

    def abandon(self, step: Step) -> None:
        """Every rank leaves this step, wherever it is before the ranks agree."""
        self.rollback()

    def close(self) -> None:
        """There will be no further step."""

    def save_memories(self) -> dict[str, dict[str, Tensor]]:
        """This rank's memories, of codecs on the way up and down, by carrier."""
        return {where: memory.state_dict() for where, memory in self._memories.items()}

    def load_memories(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace them, and start all messages anew, as every rank does."""
        self._correspondence.forget()
        for where, memory in self._memories.items():
            memory.load_state_dict(saved.get(where, {}))


def _room_for(length: int) -> int:
    """Bytes for messages that are about as long."""
    room = -(-length * 33 // 32 // _INLINE_STEP) * _INLINE_STEP
    return room if room <= _INLINE_MOST else 0


def header_of(step: Step, outgoing: Outgoing) -> Header:
    """This rank's header; of several messages, their lengths travel apart."""
    length = outgoing.messages[0].numel() if len(outgoing.messages) == 1 else 0
    parameter = outgoing.parameter
    if outgoing.status is Status.OK:
        parameter = NEW_PLAN if step.new_plan else step.doubted()
    return Header(outgoing.status, parameter, step.number, step.digest, length, step.used)


def once(log: Callable[[str], None]) -> Callable[[str], None]:
    """Says the same words only the first time."""
    said: set[str] = set()

    def say(words: str) -> None:
        if words not in said:
            said.add(words)
            log(f"isgq: {words}")

    return say
