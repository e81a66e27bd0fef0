"""launch(): results in rank order, every failure named, no process left."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from isgq.core.errors import OptionError, RankError
from isgq.launch import launch

ROOT = Path(__file__).parent.parent


def total_from_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    mine = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(mine)
    return dist.get_rank(), torch.get_num_threads(), mine


def numbers() -> list[float]:
    return [random.random(), float(np.random.random())]  # noqa: NPY002


def raise_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise LookupError("no such thing")
    dist.barrier()


def raise_on_every() -> None:
    raise LookupError(f"nothing on {max(dist.get_rank(), 1)}")


def die_on_last(how: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_unless_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise LookupError("no such thing")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def unpicklable() -> object:
    return lambda: None


def wait_for_end(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


@pytest.fixture(autouse=True)
def no_process_left():
    yield
    assert not multiprocessing.active_children()


def test_results_come_in_rank_order_and_tensors_outlive_their_rank() -> None:
    results = launch(total_from_ranks, 3, args=(10,), threads=2)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert all(threads == 2 and total.tolist() == [33] for _, threads, total in results)


def test_ranks_do_not_share_random_numbers() -> None:
    drawn = [number for rank in launch(numbers, 2) for number in rank]
    assert len(set(drawn)) == 4


def test_a_raising_rank_is_named_first_with_its_traceback() -> None:
    with pytest.raises(RankError) as caught:
        launch(raise_on_last, 2)
    assert str(caught.value).startswith("rank 1 of 2: LookupError: no such thing")
    assert "in raise_on_last" in caught.value.__notes__[0]


def test_every_failed_rank_is_reported_and_the_same_cause_once() -> None:
    with pytest.raises(RankError) as caught:
        launch(raise_on_every, 3)
    assert sorted(str(caught.value).splitlines()) == [
        "rank 2 of 3: LookupError: nothing on 2",
        "ranks 0, 1 of 3: LookupError: nothing on 1",
    ]


@pytest.mark.parametrize(("how", "named"), [("exit", "ended with exit code 7"), ("kill", "killed by signal 9")])
def test_a_dead_rank_is_the_first_cause_and_ends_the_others(how: str, named: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(die_on_last, 2, args=(how,), timeout=300)
    assert str(caught.value).startswith(f"rank 1 of 2: {named}")
    assert time.monotonic() - started < 60


def test_a_rank_that_ignores_its_end_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: LookupError"):
        launch(hang_unless_last, 2)
    assert time.monotonic() - started < 60


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1: .*pickle"):
        launch(unpicklable, 1)


@pytest.mark.parametrize(
    "options", [{"world_size": 0}, {"world_size": 1, "timeout": 0}, {"world_size": 1, "threads": 0}]
)
def test_sizes_must_be_positive(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must be positive"):
        launch(raise_on_every, **options)


PARENT = """
from isgq.launch import launch
from tests.test_launch import wait_for_end
if __name__ == "__main__":
    launch(wait_for_end, 2, args=({folder!r},))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent_and_say_nothing(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(folder=str(tmp_path / "pids")))
    (tmp_path / "pids").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(pids := list((tmp_path / "pids").iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == signal.SIGINT:
        os.killpg(parent.pid, how)  # as a terminal's Ctrl-C does
    else:
        parent.kill()
    errors = parent.communicate(timeout=60)[1]
    while any(alive(int(pid.name)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert errors.count("Traceback") <= (how == signal.SIGINT)  # the parent's own


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
