"""Threads for chains of cheap operations on a large tensor.

torch shares out every single operation among its threads, which meet after each. A codec chains dozens of operations
that take microseconds on a piece that fits the cache, so here the pieces are shared out instead, once, and what is done
to a piece is too small for torch to share out (fewer than 32768 elements; round, ceil and their like alone are shared
out from 2048 on and have no place in such a chain). numpy and torch hold no lock while they compute.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

PIECE = (1 << 15) - 1
"""Elements of a piece on the CPU, at most."""

PART = 1 << 16
"""Elements that a compiled kernel works on at a time, at most, on the CPU."""

_LAUNCH = 1 << 30  # the same elsewhere, where int32 has to count them with room to spare

_CPU = torch.device("cpu")
_WORTH_A_THREAD = 8  # pieces: about as long as a thread takes to start, ten times over

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def piece_size(numel: int, device: torch.device) -> int:
    """Elements to work on together: all of them but on the CPU, up to what :func:`part_size` allows."""
    return PIECE if device.type == "cpu" else min(max(numel, 1), _LAUNCH)


def part_size(device: torch.device) -> int:
    """Elements that a compiled kernel works on at a time, at most; no boundary of a random stream lies within."""
    return PART if device.type == "cpu" else _LAUNCH


def is_one_part(x: torch.Tensor) -> bool:
    """Whether a compiled kernel on the CPU takes a tensor at once."""
    return x.device.type == "cpu" and x.numel() <= PART


def map_parts(work: Callable[[int, int], _Result], numel: int, device: torch.device = _CPU) -> list[_Result]:
    """``work(start, stop)`` for parts of ``0 .. numel - 1``, each of :func:`part_size` but the last; by threads.

    Args:
        work: as for :func:`map_pieces`; to gain from threads it must hold no lock, as compiled kernels do.
        numel: number of elements.
        device: where they are.
    """
    size = part_size(device)
    if 0 < numel <= size:
        return [work(0, numel)]
    return map_pieces(lambda start: work(start, min(start + size, numel)), range(0, numel, size))


def map_pieces(work: Callable[[_Item], _Result], pieces: Sequence[_Item]) -> list[_Result]:
    """``[work(piece) for piece in pieces]`` by up to ``torch.get_num_threads()`` threads, the caller's among them.

    Args:
        work: must not depend on the order of the pieces; an exception in any of them is raised here.
        pieces: each about :data:`PIECE` elements.
    """
    threads = min(torch.get_num_threads(), len(pieces) // _WORTH_A_THREAD)
    if threads <= 1:
        return [work(piece) for piece in pieces]
    results: list[_Result | None] = [None] * len(pieces)
    failures: list[BaseException] = []
    left = iter(enumerate(pieces))  # a built-in iterator: each piece goes to one thread
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        try:
            # Both modes belong to a thread; what the caller allocated may be written only in the caller's.
            with torch.inference_mode(inference), torch.no_grad():
                for at, piece in left:
                    if failures:
                        return
                    results[at] = work(piece)
        except BaseException as failure:
            failures.append(failure)

    helpers = [threading.Thread(target=run, name="isgq-pieces", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]
