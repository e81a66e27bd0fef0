"""A rank that is killed, stopped or delayed in any phase of a step: all others end in time with the same named error.

Every case has three ranks with a process group of their own, whose rank 1 suffers; cases run side by side. All harms in
all phases, and what the others waited: ``python -m tests.test_phases``.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isgq
from isgq.core.errors import RankError
from isgq.exchange import Pending, TorchExchange
from isgq.launch import launch
from tests.test_faults import CODEC, SUBSPACE, TOP_K, TWO_PASS, make, outcome, whole
from tests.test_launch import alive

JOB = 60.0  # timeout of the job's ranks for one another
PATIENCE = 3.0  # timeout of a case's ranks for one another
RANKS, VICTIM = 3, 1


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def delay() -> None:
    time.sleep(PATIENCE + 2)


def dawdle() -> None:
    time.sleep(PATIENCE / 10)


class Phase(NamedTuple):
    """Before which collective of a step the victim suffers; 0 for before its forward pass."""

    collective: int
    options: dict[str, Any]
    codec: str = CODEC


PHASES = {
    "before forward": Phase(0, {}),
    "before the header": Phase(1, {}),
    "between header and message": Phase(2, {}),
    "between its shard and the reply's header": Phase(3, TWO_PASS, TOP_K),
    "in the reply": Phase(4, TWO_PASS, TOP_K),
    "between two rounds": Phase(6, {}, SUBSPACE),
}
HARMS: dict[str, Callable[[], None]] = {"killed": kill, "stopped": stop, "delayed": delay, "a little late": dawdle}


class Harmed(TorchExchange):
    """Suffers before a certain collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.harm: Callable[[], None] | None = None
        self.left = 0

    def _comes(self) -> None:
        self.left -= 1
        if self.left == 0 and self.harm is not None:
            self.harm()

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        self._comes()
        return super().all_gather(message, lengths)

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        self._comes()
        return super().all_to_all(messages, lengths)


def suffer(cases: Sequence[tuple[str, str]]) -> tuple[str, float, list[Tensor], list[int]]:
    """What a rank says of its second step, how long that took, its gradients, and the process of every rank."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    timeout = timedelta(seconds=PATIENCE)
    groups = [dist.new_group(range(first, first + RANKS), timeout) for first in range(0, len(pids), RANKS)]
    case, rank = divmod(dist.get_rank(), RANKS)
    how, phase = cases[case][0], PHASES[cases[case][1]]
    exchange, model = Harmed(groups[case]), make()
    isgq.instrument(model, phase.codec, exchange=exchange, **phase.options)
    whole(model, rank)
    model.zero_grad()
    dist.barrier()  # so that nobody waits for a rank that is still starting
    begin = time.monotonic()
    if rank == VICTIM:
        exchange.harm, exchange.left = HARMS[how], phase.collective
        if not phase.collective:
            HARMS[how]()
    said = outcome(lambda: whole(model, rank))
    waited = time.monotonic() - begin
    if how == "stopped" and rank == 0:
        os.kill(pids[RANKS * case + VICTIM], signal.SIGKILL)  # or the job would wait for it
    return said, waited, [p.grad for p in model.parameters() if p.grad is not None], pids


def run(cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[Any]]:
    """By harm and phase, what every rank returns; a RankError in the place of what a dead one would."""
    victims = range(VICTIM, RANKS * len(cases), RANKS)
    results: list[Any] = launch(suffer, RANKS * len(cases), args=(cases,), timeout=JOB, may_fail=victims)
    return {each: results[RANKS * case : RANKS * (case + 1)] for case, each in enumerate(cases)}


CASES = [
    ("killed", "before forward"),
    ("killed", "between header and message"),
    ("killed", "between its shard and the reply's header"),
    ("killed", "in the reply"),
    ("killed", "between two rounds"),
    ("stopped", "before forward"),
    ("stopped", "in the reply"),
    ("delayed", "between header and message"),
    ("a little late", "in the reply"),
]


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], list[Any]]:
    return run(CASES)


@pytest.mark.parametrize("case", CASES[:-1], ids=" ".join)
def test_the_others_end_in_time_with_the_named_error(
    results: dict[tuple[str, str], list[Any]], case: tuple[str, str]
) -> None:
    for rank, result in enumerate(results[case]):
        if rank == VICTIM and case[0] != "delayed":
            assert isinstance(result, RankError)
            continue
        said, waited, *_ = result
        assert said.startswith(f"ExchangeError: rank {rank} of {RANKS}")
        assert waited < JOB / 2  # by the case's timeout and not by that of the job


def test_a_rank_that_is_a_little_late_changes_nothing(results: dict[tuple[str, str], list[Any]]) -> None:
    ranks = results[CASES[-1]]
    assert all(said == "fine" for said, *_ in ranks)
    for _, _, gradients, _ in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0][2], gradients, strict=True))


def test_no_process_is_left(results: dict[tuple[str, str], list[Any]]) -> None:
    assert not multiprocessing.active_children()
    assert not any(alive(pid) for pid in results[CASES[0]][0][3])


def main() -> None:
    print(f"seconds until both other ranks of {RANKS} have raised ExchangeError; their timeout is {PATIENCE:g}")
    for how in ("killed", "stopped", "delayed"):
        for (_, phase), ranks in run([(how, phase) for phase in PHASES]).items():
            others = [ranks[rank] for rank in range(RANKS) if rank != VICTIM]
            assert all(said.startswith("ExchangeError") for said, *_ in others)
            print(f"{how:8s}  {phase:42s}  {max(waited for _, waited, *_ in others):5.1f}", flush=True)


if __name__ == "__main__":
    main()
