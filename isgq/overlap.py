"""Messages that leave while the backward pass goes on.

The carriers are cut into *buckets*, last layers first, as backward comes to them. As soon as all gradients of a bucket
are there, and all buckets before it have gone, its records are encoded, and a thread gathers them from all ranks, over
a process group of its own, and decodes them; so a wait never stops the backward pass. The last bucket, which is
complete when the pass is, goes as in :class:`~isgq.aggregate.Gather`; so do records that share their bytes with others.

In a step every rank gathers every bucket, in the same order, whatever happens: a rank without a bucket sends nothing in
its place. What is sent ahead is no more than an announcement. Where it does not hold in the end (the gradient was
changed after it had come, or the pass broke off and there was another), this rank sends all its records again with the
last message, which count instead; and nothing is applied before all headers have agreed.

Layout of a message: ``ceil(carriers / 8)`` bytes with a bit for each carrier, of the bucket or of the step, that has a
record in it, then the records (:mod:`isgq.wire`). No record, no bytes.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from isgq.aggregate import NOTHING, Gather, InlineBytes, Outgoing, Step
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import CodecError, ExchangeError
from isgq.exchange import Exchange
from isgq.records import Carrier, Decoded, Record, Unfinished
from isgq.windows import Window
from isgq.wire.header import Header

_T = TypeVar("_T")
_MEBI = 1 << 20


def buckets_of(carriers: Sequence[Carrier], cap_mb: float) -> list[list[Carrier]]:
    """What is sent ahead, in this order: all but the last bucket.

    Args:
        carriers: of a step, in the order of the model's parameters.
        cap_mb: MiB of float32 gradients from which a bucket is full.
    """
    alone = [carrier for carrier in reversed(carriers) if carrier.alone]
    sizes = accumulate(4 * sum(rows.numel for rows in carrier.rows) for carrier in alone)
    buckets: list[list[Carrier]] = [[]]
    full = cap_mb * _MEBI
    for carrier, size in zip(alone, sizes, strict=True):
        buckets[-1].append(carrier)
        if size >= full:
            buckets.append([])
            full = size + cap_mb * _MEBI
    last = bool(alone) and alone[-1] is carriers[0]  # is made of what comes last
    return [bucket for bucket in buckets if bucket][: -1 if last else None]


@dataclass(eq=False)
class _Bucket:
    """A bucket in one step.

    Attributes:
        carriers: of the bucket.
        missing: parameters whose gradients have not come.
        records: what this rank has sent.
        parts: every rank's, decoded, by carrier.
    """

    carriers: Sequence[Carrier]
    missing: set[str]
    records: Sequence[tuple[Carrier, Record]] = ()
    parts: Future[list[dict[str, Decoded]]] = field(default_factory=Future)


@dataclass(eq=False)
class _Ahead:
    """What is sent ahead in one step.

    Attributes:
        step: the step, as it is during backward.
        buckets: in their order.
        sent: how many of them have gone.
        size: bytes of this rank's messages.
        sizes: bytes of its records, by parameter.
        contents: of the parameters' windows when records were made.
        error: why no more are made, and the parameter it is about.
    """

    step: Step
    buckets: Sequence[_Bucket]
    sent: int = 0
    size: int = 0
    sizes: Counter[str] = field(default_factory=Counter)
    contents: dict[str, Hashable] = field(default_factory=dict)
    error: tuple[Exception, str] | None = None


class Overlapped(Gather):
    """One pass, of which part begins during backward.

    Args:
        exchange: the transport.
        codec: see :class:`~isgq.aggregate.Gather`.
        pair: see :class:`~isgq.aggregate.Gather`.
        windows: of all trainable parameters.
        cap_mb: see :func:`buckets_of`.
        inline: see :class:`~isgq.aggregate.Gather`; of what goes when backward ends.
    """

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec | None,
        pair: PairCodec | None,
        windows: Mapping[str, Window],
        cap_mb: float,
        inline: InlineBytes = 0,
    ) -> None:
        super().__init__(exchange, codec, pair, inline)
        self._beside, self._windows, self._cap = exchange.beside(), windows, cap_mb
        on_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else int
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a process that fails has to end, and not to wait for ranks that wait for it.
        threading.Thread(target=_work, args=(self._tasks, on_device), name="isgq-overlap", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)
        self._ahead: _Ahead | None = None

    # ---- during the backward pass

    def arrived(self, step: Callable[[], Step], name: str) -> None:
        """A parameter's gradient has come, in a backward pass that ends with a synchronisation."""
        ahead = self._begun(step)
        for bucket in ahead.buckets:
            bucket.missing.discard(name)
        while ahead.sent < len(ahead.buckets) and not ahead.buckets[ahead.sent].missing:
            bucket = ahead.buckets[ahead.sent]
            self._send(ahead, bucket, self._encoded(ahead, bucket))

    def _begun(self, step: Callable[[], Step]) -> _Ahead:
        if self._ahead is None:
            this = step()
            cut = buckets_of(this.carriers, self._cap) if this.planned else []
            self._ahead = _Ahead(this, [_Bucket(each, {name for c in each for name in c.names}) for each in cut])
            self.sizes = Counter()
        return self._ahead

    def _encoded(self, ahead: _Ahead, bucket: _Bucket) -> Tensor:
        """The message of what can be sent of a bucket now; never raises, the ranks agree when backward ends."""
        if ahead.error is not None:
            return NOTHING
        try:
            steady = [c for c in bucket.carriers if all(self._windows[name].steady for name in c.names)]
            for name in (name for carrier in steady for name in carrier.names):
                ahead.contents[name] = self._windows[name].content
            bucket.records = [(c, r) for c in steady if not isinstance(r := self._record(ahead.step, c), Unfinished)]
            return self._marked(ahead.step, bucket.carriers, bucket.records)
        except Exception as error:
            ahead.error, bucket.records = (error, self._about), ()
            return NOTHING

    def _send(self, ahead: _Ahead, bucket: _Bucket, message: Tensor) -> None:
        ahead.sent, ahead.size = ahead.sent + 1, ahead.size + message.numel()
        bucket.parts = self._submit(partial(self._hear, ahead.step, bucket.carriers, message))

    def _submit(self, task: Callable[[], _T]) -> Future[_T]:
        """Leave something to the thread."""
        future: Future[_T] = Future()
        self._tasks.put(partial(_fulfil, future, task))
        return future

    @torch.no_grad()
    def _hear(self, step: Step, carriers: Sequence[Carrier], message: Tensor) -> list[dict[str, Decoded]]:
        """Gather and decode a bucket, in the thread."""
        received = self._beside.all_gather(message).wait()
        return [self._parts(step, carriers, each, rank) for rank, each in enumerate(received)]

    # ---- messages

    def _marked(self, step: Step, carriers: Sequence[Carrier], records: Sequence[tuple[Carrier, Record]]) -> Tensor:
        """The message of the records of some of these carriers."""
        if not records:
            return NOTHING
        named = {carrier.name for carrier, _ in records}
        bits = np.packbits([carrier.name in named for carrier in carriers], bitorder="little")
        return torch.cat([torch.from_numpy(bits), self._message(step, records, copies=1)])

    def _parts(self, step: Step, carriers: Sequence[Carrier], message: Tensor, rank: int) -> dict[str, Decoded]:
        """What a rank says in a message about some of these carriers."""
        if not message.numel():
            return {}
        size = (len(carriers) + 7) // 8
        bits = np.unpackbits(message[:size].cpu().numpy(), count=len(carriers), bitorder="little")
        told = [carrier for carrier, bit in zip(carriers, bits, strict=True) if bit]
        records = self._read(step, told, message[size:], rank)
        return {carrier.name: carrier.decode(record) for carrier, record in zip(told, records, strict=True)}

    # ---- when the backward pass has ended

    def encode(self, step: Step) -> Outgoing:
        """The rest of this rank's records, or all of them again; raises ExchangeError alone, as nobody would hear."""
        self._end(step).sizes = self.sizes
        return super().encode(step)

    def agree(self, step: Step, outgoing: Outgoing) -> list[Header]:
        """See :class:`~isgq.aggregate.Gather`."""
        self._end(step)
        return super().agree(step, outgoing)

    def _end(self, step: Step) -> _Ahead:
        """Wait until this rank has gathered every bucket; in the place of one that has not gone, it sends nothing."""
        ahead = self._begun(lambda: step)
        for bucket in ahead.buckets[ahead.sent :]:
            self._send(ahead, bucket, NOTHING)
        failures = [bucket.parts.exception() for bucket in ahead.buckets]  # others than these are told after agreement
        self._exchange.sent, self._beside.sent = self._exchange.sent + self._beside.sent, 0
        self._exchange.received, self._beside.received = self._exchange.received + self._beside.received, 0
        for failure in failures:
            if isinstance(failure, ExchangeError):
                raise failure
        return ahead

    def _encode(self, step: Step) -> Outgoing:
        ahead = self._end(step)
        self.sizes.update(ahead.sizes)
        if any(self._windows[name].content != content for name, content in ahead.contents.items()):
            self.withdraw()
        if ahead.error is not None:
            error, self._about = ahead.error
            raise error
        said = {carrier.name for bucket in ahead.buckets for carrier, _ in bucket.records}
        return super()._encode(replace(step, carriers=[c for c in step.carriers if c.name not in said]))

    def _pack(self, step: Step, records: Sequence[tuple[Carrier, Record]]) -> Outgoing:
        return Outgoing([self._marked(step, self._end(step).step.carriers, records)])

    def _show(self, step: Step, records: Sequence[tuple[Carrier, Record]]) -> None:
        ahead = self._end(step)
        said = [each for bucket in ahead.buckets for each in bucket.records]
        super()._show(replace(step, carriers=ahead.step.carriers), [*said, *records])

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        [message] = outgoing.messages
        ahead = self._end(step)
        self.up = [ahead.size + message.numel()]
        received = self._messages(message, headers)
        heard = [bucket.parts.result() for bucket in ahead.buckets]
        decoded: dict[str, list[Decoded]] = {}
        for rank, (header, last) in enumerate(zip(headers, received, strict=True)):
            parts = {name: part for bucket in heard for name, part in bucket[rank].items()}
            parts |= self._parts(step, step.carriers, last, rank)
            for carrier in step.carriers:
                if step.sends(carrier, header.used):
                    if carrier.name not in parts:
                        raise CodecError(f"rank {rank} has sent no record of {carrier.name!r}")
                    decoded.setdefault(carrier.name, []).append(parts[carrier.name])
        return self._means(step.carriers, decoded)

    def withdraw(self) -> None:
        """Let nothing that has been sent ahead count, nor what was wrong with it."""
        super().withdraw()
        if self._ahead is not None:
            for bucket in self._ahead.buckets:
                bucket.records = ()
            self._ahead.contents.clear()
            self._ahead.error = None

    def abandon(self, step: Step) -> None:
        """See :class:`~isgq.aggregate.Gather`; waits for no rank, but each sends what the others will take."""
        ahead = self._begun(lambda: step)
        for bucket in ahead.buckets[ahead.sent :]:
            self._send(ahead, bucket, NOTHING)
        self.rollback()

    def commit(self) -> None:
        """See :class:`~isgq.aggregate.Gather`."""
        self._ahead = None
        super().commit()

    def rollback(self) -> None:
        """See :class:`~isgq.aggregate.Gather`."""
        self._ahead = None
        super().rollback()

    def close(self) -> None:
        """See :class:`~isgq.aggregate.Gather`."""
        self._tasks.put(None)


def _work(tasks: "SimpleQueue[Callable[[], None] | None]", begin: Callable[[], None]) -> None:
    """What a thread does: one task after another, until there is None; holds nobody while it waits."""
    begin()
    while (task := tasks.get()) is not None:
        task()
        del task


def _fulfil(future: Future[_T], task: Callable[[], _T]) -> None:
    try:
        result = task()
    except BaseException as error:  # whoever waits must hear of it
        future.set_exception(error)
    else:
        future.set_result(result)
