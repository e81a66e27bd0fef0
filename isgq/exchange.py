"""Moves bytes between ranks and counts them; knows no codec.

Every method is a collective: the same calls in the same order on every rank. Byte counts are what is handed over at
this door: ``sent`` grows by this rank's message once (a ring or a tree may forward it more often), ``received`` by
what arrives from the other ranks. Padding and length exchanges count.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isgq.core.errors import ExchangeError

AT_ONCE = 4 << 20
"""Bytes from all ranks together that are gathered without a ring, at most, where gloo gathers them."""

_T = TypeVar("_T")
_COUNTING = threading.Lock()  # a server uses its channels from several threads
_LONGEST = 1 << 32  # bytes of a message, as in its header
_ROLL_CALL = 0.8  # seconds in which ranks whose collective failed find out which others are there


class Pending(Generic[_T]):
    """A transfer under way; :meth:`wait` gives its result and may be called more than once."""

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._finish = finish
        self._done: list[_T] = []

    def wait(self) -> _T:
        """Block until the transfer ends; ExchangeError where it fails."""
        if not self._done:
            self._done.append(self._finish())
        return self._done[0]


class Exchange(Protocol):
    """What a session needs of a transport.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        sent: bytes handed over by this rank so far.
        received: bytes that came from other ranks so far.
    """

    rank: int
    world_size: int
    sent: int
    received: int

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """Every rank's message (uint8 ``[n_rank]``, CPU), in rank order.

        Args:
            message: uint8 ``[n]``.
            lengths: every rank's n where all ranks know it already; otherwise an exchange of lengths goes ahead.
        """
        ...

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """What every rank has for this one, in rank order; this rank's message for itself does not travel.

        Args:
            messages: one for each rank: uint8 ``[n]``, CPU.
            lengths: of what each rank sends to this one.
        """
        ...

    def star(self) -> dict[int, "Channel"]:
        """Channels between rank 0 and each other rank: all of them on rank 0, the one to rank 0 elsewhere."""
        ...

    def beside(self) -> "Exchange":
        """Another exchange of the same ranks, with its own counts, which another thread may use at the same time."""
        ...

    def all_reduce_mean(self, x: Tensor) -> Pending[Tensor]:
        """Mean over ranks of equal-shaped tensors; may overwrite x."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Pending[Tensor]:
        """The x of rank ``source``, written into every rank's x."""
        ...


class Loopback:
    """The exchange of a single process: bytes are packed, counted and unpacked, and go nowhere."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.sent, self.received = 0, 1, 0, 0

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """The message itself."""
        self.sent += message.numel()
        return Pending(lambda: [message])

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """The message itself, which does not travel."""
        return Pending(lambda: list(messages))

    def star(self) -> dict[int, "Channel"]:
        """Refuse.

        Raises:
            ExchangeError: always.
        """
        raise ExchangeError(
            "asynchronous training takes a server and at least one worker: start 2 processes or more with "
            "torch.distributed"
        )

    def beside(self) -> "Loopback":
        """See :class:`Exchange`."""
        return Loopback()

    def all_reduce_mean(self, x: Tensor) -> Pending[Tensor]:
        """The tensor itself."""
        self.sent += x.numel() * x.element_size()
        return Pending(lambda: x)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending[Tensor]:
        """The tensor itself."""
        return Pending(lambda: x)


class TorchExchange:
    """torch.distributed over gloo (CPU) or NCCL (CUDA).

    Collectives want equal sizes on all ranks, so shorter messages are padded to the longest; the padding is counted.

    gloo gathers in a ring, whose N - 1 hops wait for each other. Where a copy of the message for each rank is no
    matter, all ranks send to all at once instead: the same bytes, one wait.

    Args:
        group: process group; the default group where None.

    Raises:
        ExchangeError: torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ExchangeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = self.received = 0
        on_cuda = "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """See :class:`Exchange`."""
        if lengths is None:
            mine = torch.tensor([message.numel()], dtype=torch.int64)
            every = self._gather(mine.view(torch.uint8)).wait()
            lengths = [int(each.view(torch.int64)) for each in every]
        sizes = list(lengths)
        longest = max(sizes)
        if min(sizes) < longest:
            message = torch.cat([message, message.new_zeros(longest - message.numel())])
        gathering = self._gather(message)
        return Pending(lambda: [part[:size] for part, size in zip(gathering.wait(), sizes, strict=True)])

    def _gather(self, message: Tensor) -> Pending[list[Tensor]]:
        self.sent += message.numel()
        self.received += message.numel() * (self.world_size - 1)
        if not message.numel():
            return Pending(lambda: [message] * self.world_size)
        message = message.contiguous().to(self._device)
        whole = message.new_empty(message.numel() * self.world_size)
        parts = list(whole.view(self.world_size, -1).unbind())
        if self._device.type == "cpu" and whole.numel() <= AT_ONCE:
            copies = message.repeat(self.world_size)
            work = self._start(lambda: dist.all_to_all_single(whole, copies, group=self._group, async_op=True))
        else:
            work = self._start(lambda: dist.all_gather(parts, message, group=self._group, async_op=True))
        return Pending(lambda: self._finish(work, lambda: [part.cpu() for part in parts]))

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """See :class:`Exchange`."""
        own = messages[self.rank]
        outgoing = [0 if to == self.rank else message.numel() for to, message in enumerate(messages)]
        incoming = [0 if source == self.rank else length for source, length in enumerate(lengths)]
        self.sent += sum(outgoing)
        self.received += sum(incoming)
        parts = [message for message, size in zip(messages, outgoing, strict=True) if size]
        data = torch.cat(parts).to(self._device) if parts else own[:0].to(self._device)
        result = torch.empty(sum(incoming), dtype=torch.uint8, device=self._device)
        work = self._start(
            lambda: dist.all_to_all_single(result, data, incoming, outgoing, group=self._group, async_op=True)
        )

        def split() -> list[Tensor]:
            received = list(torch.split(result.cpu(), incoming))
            received[self.rank] = own
            return received

        return Pending(lambda: self._finish(work, split))

    def star(self) -> dict[int, "Channel"]:
        """See :class:`Exchange`; a process group for each pair, so that one that breaks leaves the others whole."""
        if self.world_size < 2:
            return Loopback().star()
        members = [dist.get_global_rank(self._group, r) if self._group else r for r in range(self.world_size)]
        timeout = _timeout(self._group)
        groups = {r: dist.new_group([members[0], members[r]], timeout, "gloo") for r in range(1, self.world_size)}
        if self.rank:
            return {0: Channel(self, groups[self.rank], members[0], 0)}
        return {rank: Channel(self, group, members[rank], rank) for rank, group in groups.items()}

    def beside(self) -> "TorchExchange":
        """See :class:`Exchange`."""
        return TorchExchange(self.group_beside())

    def group_beside(self) -> dist.ProcessGroup:
        """Another process group of the same ranks; a collective call of these."""
        ranks, backend = dist.get_process_group_ranks(self._group), dist.get_backend(self._group)
        group: dist.ProcessGroup = dist.new_group(ranks, _timeout(self._group), backend, use_local_synchronization=True)
        return group

    def all_reduce_mean(self, x: Tensor) -> Pending[Tensor]:
        """See :class:`Exchange`; divides before adding, so that half precision does not overflow."""
        self.sent += x.numel() * x.element_size()
        self.received += x.numel() * x.element_size() if self.world_size > 1 else 0
        buffer = (x / self.world_size).contiguous().to(self._device)
        work = self._start(lambda: dist.all_reduce(buffer, group=self._group, async_op=True))
        return Pending(lambda: self._finish(work, lambda: buffer.to(x.device)))

    def broadcast(self, x: Tensor, source: int = 0) -> Pending[Tensor]:
        """See :class:`Exchange`."""
        size = x.numel() * x.element_size()
        self.sent += size if self.rank == source else 0
        self.received += size if self.rank != source else 0
        buffer = x.detach().contiguous().to(self._device)  # gloo is silently wrong on strided tensors
        root = dist.get_global_rank(self._group, source) if self._group is not None else source
        work = self._start(lambda: dist.broadcast(buffer, root, group=self._group, async_op=True))

        def write() -> Tensor:
            if buffer is not x:
                x.copy_(buffer)
            return x

        return Pending(lambda: self._finish(work, write))

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Collectives of torch.distributed inside fail with the error of these.

        Raises:
            ExchangeError: one did.
        """
        try:
            yield
        except RuntimeError as error:
            raise self._failure(error) from error

    def _start(self, launch: Callable[[], dist.Work | None]) -> dist.Work | None:
        with self.guarded():
            return launch()

    def _finish(self, work: dist.Work | None, result: Callable[[], _T]) -> _T:
        with self.guarded():
            if work is not None:
                work.wait()
        return result()

    def _failure(self, error: RuntimeError) -> ExchangeError:
        absent = self._roll_call()
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}" if absent else "some rank"
        return ExchangeError(
            f"rank {self.rank} of {self.world_size}: a collective failed; {who} is dead, stuck or did not take part in "
            f"this step within the group's timeout ({error})"
        )

    def _roll_call(self) -> list[int]:
        """Which ranks do not say, as this one does, that a collective failed; none where the store is gone, too."""
        missing = set(range(self.world_size))
        found: list[int] = []

        def ask() -> None:
            group = self._group if self._group is not None else dist.group.WORLD
            assert group is not None
            store, deadline = group.get_group_store(), time.monotonic() + _ROLL_CALL
            store.set(f"isgq/failed/{self.rank}", "1")
            while missing and time.monotonic() < deadline:
                missing.difference_update([rank for rank in missing if store.check([f"isgq/failed/{rank}"])])
                time.sleep(_ROLL_CALL / 20)
            found.extend(sorted(missing))

        def ask_quietly() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone with the rank that kept it
                ask()

        asking = threading.Thread(target=ask_quietly, daemon=True)  # a store behind a broken link may never answer
        asking.start()
        asking.join(2 * _ROLL_CALL)
        return found


def _timeout(group: dist.ProcessGroup | None) -> timedelta:
    """How long the group waits for a missing rank."""
    found = group if group is not None else dist.group.WORLD
    assert found is not None
    backend = found._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


class Channel:
    """Messages between two ranks, each preceded by its length in 8 bytes.

    Args:
        exchange: counts the bytes.
        group: of these two ranks alone.
        peer: the other one, as torch.distributed numbers it.
        rank: the other one, for errors.
    """

    def __init__(self, exchange: TorchExchange, group: dist.ProcessGroup, peer: int, rank: int) -> None:
        self._exchange, self._group, self._peer, self._rank = exchange, group, peer, rank

    def send(self, message: Tensor) -> None:
        """Hand over uint8 ``[n]``.

        Raises:
            ExchangeError: the other rank is gone.
        """
        try:
            for data in (torch.tensor([message.numel()]).view(torch.uint8), message.contiguous()):
                dist.send(data, self._peer, group=self._group)
                with _COUNTING:
                    self._exchange.sent += data.numel()
        except RuntimeError as error:
            raise self._failure(error) from error

    def receive(self) -> Tensor:
        """Wait for uint8 ``[n]``.

        Raises:
            ExchangeError: the other rank is gone, sends nothing within the group's timeout, or no sensible length.
        """
        length = int(self._take(8).view(torch.int64))
        if not 0 < length < _LONGEST:
            raise self._failure(f"it announces a message of {length} bytes")
        return self._take(length)

    def _take(self, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        try:
            dist.recv(data, self._peer, group=self._group)
        except RuntimeError as error:
            raise self._failure(error) from error
        with _COUNTING:
            self._exchange.received += size
        return data

    def _failure(self, error: RuntimeError | str) -> ExchangeError:
        return ExchangeError(f"rank {self._rank} is gone, or silent for longer than the group's timeout ({error})")
