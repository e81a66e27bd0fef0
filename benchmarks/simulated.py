"""Ranks as threads of one process, with an exchange through memory: for what takes part in collective calls.

One of them computes at a time, and the next one where it waits for the others: threads that compete for the interpreter
take twice the processor time.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from isgq.exchange import Loopback, Pending

_T = TypeVar("_T")


class Memory(Loopback):
    """The exchange of one of several ranks in a process; counts as that of torch.distributed would, padding included.

    Args:
        rank: this rank.
        board: where each rank leaves what it has for the others.
        barrier: of all ranks.
        turn: held by the rank that computes.
    """

    def __init__(
        self, rank: int, board: list[Sequence[Tensor]], barrier: threading.Barrier, turn: threading.Lock
    ) -> None:
        super().__init__()
        self.rank, self.world_size, self.turn = rank, len(board), turn
        self._board, self._barrier = board, barrier

    def _swap(self, messages: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        self._board[self.rank] = messages
        self.turn.release()
        try:
            self._barrier.wait()
            every = list(self._board)
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return every

    def leave(self) -> None:
        """Let the others wait no more."""
        self._barrier.abort()

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """See :class:`isgq.exchange.Exchange`."""
        every = [each for [each] in self._swap([message])]
        longest = max(each.numel() for each in every)
        self.sent += longest
        self.received += longest * (self.world_size - 1)
        return Pending(lambda: every)

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """See :class:`isgq.exchange.Exchange`."""
        every = [each[self.rank] for each in self._swap(messages)]
        self.sent += sum(m.numel() for to, m in enumerate(messages) if to != self.rank)
        self.received += sum(m.numel() for source, m in enumerate(every) if source != self.rank)
        return Pending(lambda: every)


def exchanges(ranks: int) -> list[Memory]:
    """Those of so many ranks."""
    board: list[Sequence[Tensor]] = [()] * ranks
    barrier, turn = threading.Barrier(ranks), threading.Lock()
    return [Memory(rank, board, barrier, turn) for rank in range(ranks)]


def together(work: Callable[[int], _T], ends: Sequence[Memory]) -> list[_T]:
    """Every rank's result, each computed in a thread of its own.

    Args:
        work: given a rank.
        ends: what the ranks exchange by.

    Raises:
        Exception: what one of them raised; the others end with a broken barrier.
    """

    def take_part(end: Memory) -> _T:
        with end.turn:
            try:
                return work(end.rank)
            except BaseException:
                end.leave()
                raise

    with ThreadPoolExecutor(len(ends)) as pool:
        working = [pool.submit(take_part, end) for end in ends]
    failures = [error for each in working if (error := each.exception()) is not None]
    for failure in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise failure  # the first cause, not what it broke
    return [each.result() for each in working]
