"""The command isgq plan."""

import json

import pytest
from torch import nn

from isgq.cli import main


def factory() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 12))


def test_it_prints_a_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan --model fc:hidden=30 --input-shape 1,8,8 --batch 4 --workers 4 --link 1Mbit/s+1ms --steps 2"
    assert main([*arguments.split(), "--ways", "isgq;rotated"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("parameter")
    assert "all, with headers" in out
    assert "4 workers over 1Mbit/s+1ms" in out


def test_a_model_of_the_users_own_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.test_cli:factory", "--input-shape", "20", "--tokens", "50", "--json"]
    assert main([*arguments, "--classes", "12", "--link", "100Gbit/s", "--ways", "isgq"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["parameters"]] == ["0.weight", "1.weight"]
    assert found["compress"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "fc"], "give --data, or --input-shape"),
        (["--model", "nowhere:factory", "--input-shape", "3"], "names no importable function"),
        (["--model", "json:dumps", "--input-shape", "3"], "--model json:dumps"),
        (["--model", "squeezenet", "--data", "mnist5k"], "unknown model"),
        (["--model", "fc", "--data", "imagenet"], "unknown data set"),
        (["--model", "fc", "--input-shape", "1,8,8", "--batch", "0"], "--batch 0"),
        (["--model", "fc", "--input-shape", "1,8,8", "--workers", "0"], "workers=0"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--link", "1Mbit/s", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("isgq plan: ")
    assert words in err
    assert err.count("\n") == 1
