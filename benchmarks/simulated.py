"""Ranks as threads of one process, with an exchange through memory: for what takes part in collective calls."""

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
    """

    def __init__(self, rank: int, board: list[Sequence[Tensor]], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world_size = rank, len(board)
        self._board, self._barrier = board, barrier

    def _swap(self, messages: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        self._board[self.rank] = messages
        self._barrier.wait()
        every = list(self._board)
        self._barrier.wait()
        return every

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
    barrier = threading.Barrier(ranks)
    return [Memory(rank, board, barrier) for rank in range(ranks)]


def together(work: Callable[[int], _T], ranks: int) -> list[_T]:
    """Every rank's result, each computed in a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
