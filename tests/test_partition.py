"""Two ranks on machines of their own, as network namespaces, and a cable that is pulled between two steps.

Needs root, ``ip`` and ``unshare``: skipped where they are missing.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import isgq
from tests.test_faults import CODEC, make, outcome, whole

ROOT = Path(__file__).parent.parent
PATIENCE = 4.0  # of the ranks for one another
LONGEST = 120.0  # of the whole test


def command(text: str) -> None:
    subprocess.run(text.split(), check=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LONGEST
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def rank_of(rank: int, folder: Path) -> None:
    """One rank: a step, then one more when the cable is pulled; writes what it says of it."""
    dist.init_process_group(
        "gloo",
        init_method="tcp://10.77.0.1:29400",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LONGEST),
    )
    exchange = isgq.exchange.TorchExchange(dist.new_group(timeout=timedelta(seconds=PATIENCE)))
    isgq.instrument(model := make(), CODEC, exchange=exchange)
    whole(model, rank)
    (folder / f"ready{rank}").touch()
    wait_for(folder / "pulled")
    start = time.monotonic()
    said = outcome(lambda: whole(model, rank))
    (folder / f"said{rank}").write_text(f"{time.monotonic() - start:.1f} {said}")
    os._exit(0)  # without a farewell to a rank that cannot be reached


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """Commands that run something on each of two machines that a cable connects, with addresses 10.77.0.1 and 2."""
    try:
        command("unshare -n true")
        command("ip -V")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root, unshare and ip for network namespaces: {error}")
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in range(2)]
    try:
        own = os.stat("/proc/self/ns/net").st_ino
        for holder in holders:
            while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == own:
                time.sleep(0.01)
        inside = [f"nsenter -t {holder.pid} -n" for holder in holders]
        command(f"{inside[0]} ip link add cable0 type veth peer name cable1 netns {holders[1].pid}")
        for rank, enter in enumerate(inside):
            command(f"{enter} ip address add 10.77.0.{rank + 1}/24 dev cable{rank}")
            command(f"{enter} ip link set cable{rank} up")
            command(f"{enter} ip link set lo up")
        yield [enter.split() for enter in inside]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_ranks_that_lose_each_other_say_so_in_time(machines: list[list[str]], tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [*enter, sys.executable, "-m", "tests.test_partition", str(rank), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": f"cable{rank}", "OMP_NUM_THREADS": "1"},
        )
        for rank, enter in enumerate(machines)
    ]
    try:
        for rank in range(2):
            wait_for(tmp_path / f"ready{rank}")
        command(f"{' '.join(machines[1])} ip link set cable1 down")
        (tmp_path / "pulled").touch()
        assert [rank.wait(LONGEST) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in range(2):
        waited, _, said = (tmp_path / f"said{rank}").read_text().partition(" ")
        assert said.startswith(f"ExchangeError: rank {rank} of 2")
        assert float(waited) < LONGEST / 2  # by their own timeout


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_of(int(sys.argv[1]), Path(sys.argv[2]))
