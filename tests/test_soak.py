"""A soak in small: what it finds where all is well, and what it says where not."""

import json
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import soak
from benchmarks.soak import Config, Ended, Memory, Watch, differing, grown, main, orders
from isgq.core.errors import RankError
from isgq.launch import launch

FINE = Ended({"w": "1", "momentum of w": "2"}, Memory([1000, 1010, 1005], 0), torch.zeros(3, 2), 1.0, 30, 0.5)


def test_ranks_in_all_orders_hold_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "soak.json"
    arguments = "--workers 2 --steps 30 --check 10 --delays 0.005 --tolerance 0.5 --out"
    assert main([*arguments.split(), str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["steps"], found["workers"]) == (30, 2)
    assert found["replicas_identical"]
    assert found["complaints"] == []
    assert found["orders"] == [2] * 5  # before the step, after two layers, before two layers
    assert len(found["memory"]) == 2
    for memory in found["memory"]:
        assert len(memory["looks"]) == 3  # after 15, 20 and 30 steps
        assert 0 <= memory["growth"] == max(memory["looks"]) / memory["looks"][0] - 1 <= found["largest_growth"]
    assert min(found["sent"]) > 0
    shown = capsys.readouterr().out
    assert "30 steps of 2 workers" in shown
    assert "replicas identical: yes" in shown


def drifting(config: Config) -> Ended:
    """One rank changes its parameters a little."""
    stepped = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *arguments: Any) -> Any:
        stepped(self, *arguments)
        with torch.no_grad():
            self.param_groups[0]["params"][1][0] += 1e-6 * dist.get_rank()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        return soak.soak(config)


def test_a_drift_is_found_by_the_session_and_at_the_end() -> None:
    config = Config(workers=2, steps=6, check=3)
    with pytest.raises(RankError, match=r"rank 1, step 3, parameter '1\.bias': holds other bits than on rank 0"):
        launch(drifting, 2, args=(config,))
    ended = launch(drifting, 2, args=(replace(config, check=100),))
    assert "rank 1: 1.bias differs from rank 0's" in differing(ended)


def test_what_differs_and_what_grew_is_named() -> None:
    other = replace(FINE, contents=FINE.contents | {"momentum of w": "3"}, memory=Memory([1000, 1030, 1020], 7))
    assert differing([FINE, FINE]) == grown([FINE, FINE], 0.02) == []
    assert differing([FINE, other]) == ["rank 1: momentum of w differs from rank 0's"]
    assert grown([FINE, other], 0.02) == ["rank 1: resident memory grew by 3.00%, more than 2.00%"]


def test_a_leak_is_seen() -> None:
    watch, leaked = Watch(Config(steps=40, check=10)), []
    for step in range(1, 41):
        pages = mmap.mmap(-1, 2**20)  # and no part of what the process has had before and given back to itself
        pages.write(bytes(2**20))
        leaked.append([pages, *(object() for _ in range(1000))])
        watch.look(step)
    found = watch.found()
    assert found.looks[-1] - found.looks[0] > 15 * 2**20  # of the last 20 steps
    assert found.blocks > 15_000  # what other tests have left may be freed meanwhile
    assert len(leaked) == 40


def test_orders_are_counted_by_station() -> None:
    first = torch.tensor([[0.0, 1.0], [2.0, 9.0]])
    assert orders([first, first + torch.tensor([[0.5, 0.5], [0.5, -0.5]])]) == [1, 2]
    assert orders([first]) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 1", "--steps 1: must be 2 or more"),
        ("--delays -1", "--delays -1.0: must be in"),
        ("--codec nonsense", "nonsense"),
        ("--data digits", "digits"),
        ("--model fc:depth=3", "depth=3"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err
