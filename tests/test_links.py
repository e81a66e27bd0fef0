"""Measuring on shaped links: interfaces count what the ledger lets expect, failures end, and the report's form."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import isgq
from benchmarks.contenders import Task, gather, ring_reduce
from benchmarks.links import Steps, main, measure, reached, row, table
from benchmarks.machines import launch_on, machines, reason_against
from benchmarks.scale import moved
from isgq.bandwidth import Link, Messages, shared
from isgq.core.errors import OptionError, RankError
from isgq.launch import launch

SMALL = Task("ddp", "100Mbit/s", model="fc:hidden=100-50", data="mnist5k", batch=4)
METHODS = (
    *("ddp", "ddp:powersgd=2", "hook:error_feedback(top_k:k=0.01)", "two_pass_model:one_bit"),
    *("ahead:isgq", "inline:isgq"),
)
AGAINST = reason_against()
rooted = pytest.mark.skipif(bool(AGAINST), reason=AGAINST)


def several(methods: tuple[str, ...]) -> list[Steps]:
    return [measure(Task(**{**vars(SMALL), "method": method}), 6, 60.0, True) for method in methods]


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.barrier()


@rooted
def test_interfaces_count_what_the_ledger_lets_expect() -> None:
    with machines(3, Link.parse("100Mbit/s")) as found:
        ranks = launch_on(found, several, args=(METHODS,))
    for steps in ranks:
        for method, each in zip(METHODS, steps, strict=True):
            assert each.ratio == pytest.approx(1.0, abs=0.05), method
            assert len(each.seconds) == 6
    ddp, powersgd, sparse, *_ = ranks[0]
    numbers = 784 * 100 + 100 + 100 * 50 + 50 + 50 * 10 + 10
    assert ddp.sent == 4 * numbers
    assert powersgd.sent == 4 * (2 * (784 + 100 + 100 + 50 + 50 + 10) + 100 + 50 + 10)
    assert sparse.sent < ddp.sent / 10


@rooted
def test_a_rank_that_fails_ends_all_and_leaves_no_machine() -> None:
    with machines(2, Link.parse("1Gbit/s")) as found:
        with pytest.raises(RankError, match="rank 1 of 2: ValueError: no more"):
            launch_on(found, one_fails)
        assert all(Path(f"/proc/{machine.holder}").exists() for machine in found)
    assert not any(Path(f"/proc/{machine.holder}").exists() for machine in found)


KILLED = """
import sys
from benchmarks.machines import machines
from isgq.bandwidth import Link
if __name__ == "__main__":
    with machines(2, Link.parse("1Gbit/s")) as found:
        print(*(machine.holder for machine in found), flush=True)
        sys.stdin.read()
"""


@rooted
def test_machines_go_with_the_process_that_is_killed() -> None:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    holders = [int(pid) for pid in process.stdout.readline().split()]
    assert len(holders) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{holder}/ns").exists() for holder in holders):
        assert time.monotonic() < deadline, "a machine is left"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 1000])
def test_the_number_of_machines_has_bounds(workers: int) -> None:
    with pytest.raises(OptionError, match=f"workers={workers}"), machines(workers, Link(1e6)):
        pass


def test_what_gloo_makes_of_messages() -> None:
    assert gather(1000, 1) == ring_reduce(1000, 1) == 0
    assert gather(2_000_000, 4) == 3 * 2_000_000 + 864  # as counted on an interface, headers of TCP/IP left out
    assert gather(1000, 4) == 3 * 1000 + 432
    assert ring_reduce(4_000_000, 4) == 6_000_000 + 1728


def test_when_a_loss_is_reached_and_what_a_row_says() -> None:
    assert reached([3.0, 2.0, 1.0], 5, 2.0) == 10
    assert reached([3.0, 2.0], 5, 1.9) is None
    steps = Steps([0.3, 0.1, 0.2], 10.0, 100.0, 166.0, 1.0)
    fast, slow = (row(task, steps, [2.0, 1.0], 5, loss) for task, loss in ((SMALL, 2.0), (SMALL, 0.5)))
    assert (fast["seconds_to_loss"], fast["ratio"]) == (pytest.approx(1.0), 1.0)
    assert fast["link_seconds"] == pytest.approx(100 / 12.5e6)
    assert slow["seconds_to_loss"] is None
    failed = {"link": "1Gbit/s", "method": "x", "failed": "rank 1"}
    lines = table([fast, {**slow, "method": "y"}, failed]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| 200.0 | 0.0 | 10 | 166 | 1.000 | 1.0000 | 5 | 1.00 | 1.0 |" in lines[2]
    assert "| - | - | - |" in lines[3]


def test_an_emulated_link_takes_as_long_as_its_bytes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "links.json"
    chosen = ["--methods", "ddp", "--links", "8Mbit/s", "--model", "fc:hidden=20", "--data", "mnist5k"]
    assert main([*chosen, "--quick", "--emulate", "--workers", "2", "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["link"].startswith("emulated")
    assert "link emulated" in capsys.readouterr().out
    [only] = report["rows"]
    assert (only["counted"], only["ratio"], only["steps_to_loss"] is None) == (None, None, False)
    assert only["seconds_per_step"] > only["wire"] / 1e6
    assert len(only["losses"]) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "ddp:fp8"], "ddp:fp8 is none of"),
        (["--methods", "hook:nothing"], "nothing"),
        (["--links", "fast"], "link 'fast'"),
        (["--model", "squeezenet"], "squeezenet"),
        (["--workers", "0"], "--workers 0"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", "mnist5k", *arguments])
    assert words in capsys.readouterr().err


# ---- benchmarks.scale


CASES: dict[str, dict[str, Any]] = {
    "gather": {"codec": "fp16"},
    "two_pass": {"codec": "fp16", "aggregate": "two_pass", "down": "fp16", "memory": "none"},
    "server": {"codec": "fp16", "aggregate": "server", "down": "bf16", "memory": "none"},
}


def counted(case: str) -> tuple[float, float, Any]:
    """Bytes that this rank sends and receives in a step, and its messages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 400), nn.ReLU(), nn.Linear(400, 200))
    with isgq.instrument(model, **CASES[case]) as session:
        before = (0, 0)
        for _ in range(2):
            before = (session.traffic.sent, session.traffic.received)
            model.zero_grad()
            F.cross_entropy(model(torch.randn(4, 60)), torch.zeros(4, dtype=torch.long)).backward()
        traffic = session.traffic
        return traffic.sent - before[0], traffic.received - before[1], session.messages()


def all_cases() -> dict[str, Any]:
    return {case: counted(case) for case in CASES}


def test_bytes_at_scale_are_those_of_the_ledger_for_few_workers() -> None:
    workers = 3
    alone = {case: counted(case)[2] for case in CASES}
    ranks = launch(all_cases, workers)
    for case, options in CASES.items():
        each = [max(sent, received) for sent, received, _ in (rank[case] for rank in ranks)]
        aggregate = options.get("aggregate", "gather")
        model = moved(aggregate, alone[case], workers)
        if aggregate == "two_pass":  # rows are not cut, so that shards are level but for a row
            assert model == pytest.approx(sum(each) / workers, rel=0.01), case
        else:
            assert model == max(each), case


def test_parts_are_all_there_is() -> None:
    cut = shared(Messages([105], [110], 3, 2), 4)
    assert (cut.up, cut.dense) == ([30, 30, 30, 30], 3)
    assert sum(cut.down) == 105 + 4 * 5
