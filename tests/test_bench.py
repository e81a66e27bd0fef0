"""What codecs cost without a link, and the bandwidths below which they are worth it."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from isgq.bench import bench, break_even
from isgq.cli import main
from isgq.core.errors import OptionError
from isgq.forecast import plan
from isgq.records import Record
from isgq.wire import unpack_message

FORWARD, BACKWARD, SIZE = 0.01, 0.02, 1e6
CODECS = ["dense", "fp16", "isgq", "rotated:ratio=50,bases=learned", "error_feedback(top_k:k=0.05)"]


@pytest.mark.parametrize("seconds", [0.005, 0.012, 0.02, 0.0299, 0.03, 0.05, 1.0])
@pytest.mark.parametrize("moved", [0.0, 1e3, 4e5, 9e5, 1e6, 2e6])
def test_below_the_bandwidth_the_codec_is_faster_and_just_above_it_is_not(seconds: float, moved: float) -> None:
    def gain(bandwidth: float) -> float:
        return FORWARD + max(BACKWARD, SIZE / bandwidth) - seconds - moved / bandwidth

    below = break_even(FORWARD, BACKWARD, SIZE, seconds, moved)
    grid = [10.0**exponent for exponent in range(12)]
    assert all(gain(bandwidth) >= -1e-12 for bandwidth in grid if bandwidth < below)
    if below == 0:
        assert moved >= SIZE
    elif math.isfinite(below):
        assert gain(0.999 * below) > 0 > gain(1.001 * below)


def test_the_bandwidth_in_numbers() -> None:
    assert break_even(0.01, 0.02, 1.1e6, 0.06, 1e5) == pytest.approx(1e6 / 0.05)
    assert break_even(0.01, 0.02, 1e6, 0.02, 0.0) == math.inf  # faster by itself
    assert break_even(0.01, 0.02, 1e6, 0.02, 1e6) == 0  # and no fewer bytes


def test_bytes_are_those_of_a_session_and_the_model_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 160), nn.ReLU(), nn.Linear(160, 10))
    before = [p.detach().clone() for p in model.parameters()]
    found = bench(model, (torch.randn(8, 120), torch.randint(10, (8,))), CODECS, workers=4)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    numbers = 120 * 160 + 160 + 160 * 10 + 10
    assert (found.workers, found.size) == (4, 4 * numbers)
    by_codec = {cost.codec: cost for cost in found.costs}
    dense, half, factors, *_ = found.costs
    header = dense.sent - found.size
    assert 0 < header < 30
    assert half.sent == pytest.approx(2 * numbers, abs=100)
    assert half.moved == 3 * half.sent
    assert dense.moved == pytest.approx(1.5 * found.size + 3 * header)
    assert dense.below == half.below == 0  # no fewer bytes than in a ring of four
    assert factors.sent < found.size / 10
    assert by_codec[CODECS[3]].sent < found.size / 40
    for cost in found.costs[2:]:
        assert cost.below > 0
        assert cost.seconds > 0


@pytest.mark.parametrize("codec", ["auto:link=1Gbit/s", "subspace"])
def test_only_codecs_in_one_pass(codec: str) -> None:
    with pytest.raises(OptionError, match="in one pass"):
        bench(nn.Linear(2, 2), (torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)), [codec], workers=2)


ARGUMENTS = ["bench", "--model", "fc:hidden=30", "--input-shape", "1,8,8", "--batch", "4", "--codecs", "dense", "isgq"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["codec", "step", "ms"]
    assert [line.split()[0] for line in lines[1:4]] == ["(plain", "dense", "isgq"]
    assert lines[4].startswith("4 workers")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json", "--workers", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["codec"] for cost in found["costs"]] == ["dense", "isgq"]
    assert found["workers"] == 2


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--workers", "0"]) == 2
    assert capsys.readouterr().err == "isgq bench: workers=0 of a bench must be 1 or more\n"


@pytest.mark.parametrize("measure", ["bench", "plan"])
def test_to_receive_is_measured_on_messages_that_are_read(monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    """A rank does not read its own message, but those of the others."""
    read, model = [], nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))

    def counted(data: torch.Tensor, **known: Any) -> list[Record]:
        read.append(data.numel())
        return unpack_message(data, **known)

    monkeypatch.setattr("isgq.correspondence.unpack_message", counted)
    batch = torch.randn(8, 40), torch.zeros(8, dtype=torch.int64)
    if measure == "bench":
        bench(model, batch, ["isgq"], workers=4)
    else:
        plan(model, batch, workers=4, link="100Mbit/s", ways="isgq")
    assert len(read) >= 3
