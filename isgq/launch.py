"""Starts the ranks of a job as processes of this machine, and ends all of them when one fails.

    results = launch(train, 4, args=(config,))      # train(config) runs on every rank, torch.distributed is ready

Used by ``train.py`` and by the tests. ``fn`` and its result must be picklable (a module-level function).
"""

import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isgq.core.errors import RankError

_T = TypeVar("_T")
_GRACE = 2.0  # seconds that the other ranks get to report their own view of a failure


def launch(
    fn: Callable[..., _T],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    backend: str = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
) -> list[_T]:
    """Run ``fn(*args)`` on every rank.

    Args:
        fn: module-level function; finds its rank by ``torch.distributed.get_rank()``.
        world_size: number of ranks.
        args: arguments, the same for all ranks.
        backend: of torch.distributed.
        timeout: seconds that a collective waits for a missing rank.
        threads: torch threads of each rank.

    Returns:
        Every rank's result, in rank order.

    Raises:
        RankError: a rank raised or died; all others have been ended. The message has every known cause, first first.
    """
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="isgq-") as folder:
        job = (fn, tuple(args), world_size, backend, timeout, threads, str(Path(folder) / "rendezvous"))
        ranks = [context.Process(target=_run, args=(rank, reports, *job), daemon=True) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            return _collect(ranks, reports)
        finally:
            _end(ranks)


def _run(
    rank: int,
    reports: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    timeout: float,
    threads: int,
    rendezvous: str,
) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks; they need no trace of their own
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(*args)
        reports.put((rank, True, result))
        dist.destroy_process_group()
    except BaseException as error:  # whatever it is, the parent must hear of it
        summary = f"{type(error).__name__}: {error}"
        reports.put((rank, False, (summary, traceback.format_exc())))
        reports.close()
        reports.join_thread()
        os._exit(1)  # without waiting for a process group whose other members may be gone


def _collect(ranks: Sequence[BaseProcess], reports: Any) -> list[Any]:
    """Wait for all results, or for the first failure and what follows within a moment."""
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    deadline = float("inf")
    while len(results) + len(failures) < len(ranks) and time.monotonic() < deadline:
        try:
            rank, good, content = reports.get(timeout=0.1)
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode not in {None, 0} and rank not in failures and rank not in results:
                    code = process.exitcode
                    cause = f"killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
                    failures[rank] = (cause, "")
        else:
            (results if good else failures)[rank] = content
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE
    if failures:
        lines = [f"rank {rank} of {len(ranks)}: {summary}" for rank, (summary, _) in failures.items()]
        first = next(iter(failures.values()))[1]
        raise RankError("\n".join(lines) + (f"\n{first}" if first else ""))
    return [results[rank] for rank in range(len(ranks))]


def _end(ranks: Sequence[BaseProcess]) -> None:
    """Leave no process behind."""
    for process in ranks:
        process.join(timeout=0 if process.exitcode is None and not process.is_alive() else 1.0)
        if process.is_alive():
            process.terminate()
    for process in ranks:
        process.join(timeout=3.0)
        if process.is_alive():
            process.kill()
            process.join()
