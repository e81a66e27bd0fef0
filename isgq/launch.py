"""Starts the ranks of a job as processes of this machine, and ends all of them when one fails.

    results = launch(train, 4, args=(config,))      # train(config) runs on every rank, torch.distributed is ready

Each rank reports once over its own pipe: its result, or why it failed. A pipe that closes without a report is a rank
that died. Ranks never outlive the caller, however it ends.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from isgq.core.errors import OptionError, RankError

_T = TypeVar("_T")
_GRACE = 2.0  # seconds: for the other ranks to report their own view of a failure, and for any rank to exit when told


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank did not finish.

    Attributes:
        rank: which one.
        when: seconds since the epoch; 0 for one that died, because what the others then see comes from that.
        what: one line.
        trace: its traceback; empty for one that died.
    """

    rank: int
    when: float
    what: str
    trace: str = ""


def launch(
    fn: Callable[..., _T],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    backend: str = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
    may_fail: Collection[int] = (),
) -> list[_T]:
    """Run ``fn(*args)`` on every rank.

    Args:
        fn: module-level function; finds its rank by ``torch.distributed.get_rank()``.
        world_size: number of ranks.
        args: picklable arguments, the same for all ranks.
        backend: of torch.distributed.
        timeout: seconds that a collective waits for a missing rank.
        threads: torch threads of each rank.
        may_fail: ranks that the others can do without.

    Returns:
        Every rank's result, which must be picklable, in rank order; a :class:`RankError` in the place of the result of
        a rank that failed and may.

    Raises:
        OptionError: world_size, timeout or threads is not positive.
        RankError: a rank raised or died; all others have been ended. The message has a line for every cause with
            the ranks that report it, the first cause first; the tracebacks are its notes.
    """
    for name, value in (("world_size", world_size), ("timeout", timeout), ("threads", threads)):
        if value <= 0:
            raise OptionError(f"{name}={value} of launch must be positive")
    context = _context()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="isgq-", ignore_cleanup_errors=True) as folder:
        init = {
            "backend": backend,
            "init_method": (Path(folder) / "rendezvous").as_uri(),
            "world_size": world_size,
            "timeout": timedelta(seconds=timeout),
        }
        ranks: list[BaseProcess] = [
            context.Process(
                target=_run,
                args=(rank, pipe, init, threads, fn, tuple(args)),
                name=f"rank {rank} of {world_size}",
                daemon=True,
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        try:
            with _interrupts_held():
                for process, (_, pipe) in zip(ranks, pipes, strict=True):
                    process.start()
                    pipe.close()  # the rank has a copy; with this one open, its death would go unseen
            results = _collect(ranks, [receiver for receiver, _ in pipes], may_fail)
            for process in ranks:
                process.join(_GRACE)
            return results
        finally:
            _end(ranks)
            for pipe in (end for both in pipes for end in both):
                pipe.close()


def _context() -> Any:
    """How processes start: forked from a server that has imported torch once for all; anew where there is no forking.

    The server is a fresh process without threads or CUDA, starts at the first launch and ends with this process.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "isgq.instrumenting",
        "torch._dynamo",
        "numba",
    ])  # so that no rank spends seconds on them
    return context


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while ranks start, so that they inherit it blocked: ending them is this process' business."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # unblocks Ctrl-C when it starts, so let it start before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    rank: int, pipe: Connection, init: dict[str, Any], threads: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # All ranks are forked with the same numbers; this one's begin anew before it is anybody's, as in a fresh process.
    np.random.seed()  # noqa: NPY002
    try:
        dist.init_process_group(rank=rank, **init)
        dist.barrier()  # none may be done, and close its connections, before all have made theirs
        result = fn(*args)
        # Plain pickle: multiprocessing's own shares a tensor's memory, which is gone when this process is.
        report = pickle.dumps((True, result))
        dist.destroy_process_group()
    except BaseException as error:  # whatever it is, the parent must hear of it
        what = f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps((False, _Failure(rank, time.time(), what, traceback.format_exc()))))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without waiting for a process group whose other members may be gone
    pipe.send_bytes(report)


def follow_parent() -> None:
    """End this process when the one that started it is gone, killed perhaps."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _collect(ranks: Sequence[BaseProcess], pipes: Sequence[Connection], may_fail: Collection[int]) -> list[Any]:
    """Wait for all results, or for the first failure and what follows within a moment.

    Raises:
        RankError: a rank failed.
    """
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = dict(enumerate(pipes))
    deadline = float("inf")
    while waiting and time.monotonic() < deadline:
        sentinels = [ranks[rank].sentinel for rank in waiting]
        wait([*waiting.values(), *sentinels], timeout=_GRACE if failures else None)
        for rank, pipe in list(waiting.items()):
            if not pipe.poll() and ranks[rank].exitcode is None:
                continue
            del waiting[rank]
            good, content = _receive(rank, ranks[rank], pipe)
            if good:
                results[rank] = content
            elif rank in may_fail:
                results[rank] = _rank_error([content], len(ranks))
            else:
                failures.append(content)
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        error = _rank_error(failures, len(ranks))
        raise error
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: int, process: BaseProcess, pipe: Connection) -> tuple[bool, Any]:
    """Whether a rank finished, and its result or failure; the parent speaks for one that died."""
    try:
        if pipe.poll():
            good, content = pickle.loads(pipe.recv_bytes())
            return bool(good), content
    except (EOFError, OSError):  # it died before or while it wrote
        pass
    process.join(_GRACE)
    code = process.exitcode or 0
    killed = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else ""
    death = killed or f"ended with exit code {code} before it was done"
    return False, _Failure(rank, 0.0, death)


def _rank_error(failures: Sequence[_Failure], world_size: int) -> RankError:
    """One error for all failed ranks, in the order of their failing; ranks that say the same share a line."""
    ordered = sorted(failures, key=lambda failure: failure.when)
    lines: dict[str, list[_Failure]] = {}
    for failure in ordered:
        lines.setdefault(failure.what, []).append(failure)
    error = RankError("\n".join(f"{_names(group, world_size)}: {what}" for what, group in lines.items()))
    for group in lines.values():
        if group[0].trace:
            error.add_note(f"{_names(group, world_size)}:\n{group[0].trace}")
    return error


def _names(group: Sequence[_Failure], world_size: int) -> str:
    ranks = sorted(failure.rank for failure in group)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world_size}"


def _end(ranks: Sequence[BaseProcess]) -> None:
    """Leave no process behind."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join(_GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()
