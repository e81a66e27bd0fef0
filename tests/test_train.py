"""train.py from the command line: what it writes, that it repeats and resumes bit for bit, how it fails."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train import main

ROOT = Path(__file__).parent.parent
SMALL = ["--model", "fc:hidden=16", "--data", "mnist5k", "--schedule", "constant"]
KEYS = ["model", "data", "codec", "workers", "batch_per_worker", "epochs", "seed", "test_accuracy", "test_loss"]
KEYS += ["sent_bytes_per_step", "received_bytes_per_step", "dense_bytes_per_step", "compression", "seconds"]
KEYS += ["aggregate", "down", "staleness", "perplexity", "local_steps"]
GRADIENT = 4 * (784 * 16 + 16 + 16 * 10 + 10)  # bytes
FEEDBACK = "error_feedback(top_k:k=0.01)"  # has memory of its own on every rank


def start(*options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.Popen(
        [sys.executable, *launcher, "train.py", *options],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(*options: str, launcher: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and errors; without a launcher by a call, which saves what a process takes to start."""
    if launcher:
        process = start(*options, launcher=launcher)
        output, errors = process.communicate(timeout=120)
        return process.returncode, output, errors
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(io.StringIO()) as shown,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        patch.setattr(sys, "argv", ["train.py", *options])
        return main(), shown.getvalue(), said.getvalue()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Calls the command line in this process, as it refuses before it starts any other: exit code and what it says."""

    def call(*options: str) -> tuple[int, str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["train.py", *options])
        monkeypatch.setattr("train.launch", lambda *_, **__: pytest.fail("it started ranks"))
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        return main(), capsys.readouterr().err

    return call


def summary(folder: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
    return content


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def resumed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """But for some bytes: the first message of a session describes itself, and a resumed run has two of them."""
    return [
        {k: float(f"{v:.2g}") if "bytes" in k or k == "compression" else v for k, v in entry.items()}
        for entry in untimed(entries)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [checkpoint] = folder.glob("*.pt")
    content: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["model"]
    return content


def uninterrupted(out: Path, epochs: int) -> Path:
    options = ["--workers", "2", "--codec", FEEDBACK, "--epochs", str(epochs), "--out", str(out)]
    code, output, errors = train(*SMALL, *options)
    assert code == 0, errors
    assert "compression" in output
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers with memory over three epochs, uninterrupted."""
    return uninterrupted(tmp_path_factory.mktemp("whole"), 3)


def test_every_combination_is_summarised(tmp_path: Path) -> None:
    options = ["--workers", "1", "2", "--codec", "dense", "--epochs", "1", "--total-batch", "400", "--telemetry", "4"]
    code, output, errors = train(*SMALL, *options, "--out", str(tmp_path))
    assert code == 0, errors
    runs = summary(tmp_path)
    assert [list(run) for run in runs] == [KEYS] * 2
    assert [(r["codec"], r["workers"], r["batch_per_worker"]) for r in runs] == [("dense", 1, 400), ("dense", 2, 200)]
    assert all(run["dense_bytes_per_step"] == GRADIENT for run in runs)
    assert all(GRADIENT < run["sent_bytes_per_step"] < GRADIENT + 64 for run in runs)
    seen = [json.loads(line) for line in (tmp_path / "dense-2x200.telemetry.jsonl").read_text().splitlines()]
    assert sorted((line["step"], line["rank"]) for line in seen) == [(s, r) for s in (0, 4, 8) for r in (0, 1)]
    assert all(0 < run["test_accuracy"] <= 1 and run["seconds"] > 0 for run in runs)
    assert runs[0]["test_loss"] == pytest.approx(runs[1]["test_loss"], rel=1e-4)  # one total batch, one trajectory
    assert (tmp_path / "accuracy_and_bytes.png").read_bytes().startswith(b"\x89PNG")
    assert all(f"{run['test_accuracy']:.4f}" in output for run in runs)


def test_metrics_have_a_line_per_epoch_and_agree_with_the_summary(whole: Path) -> None:
    [run], lines = summary(whole), metrics(whole)
    assert run["dense_bytes_per_step"] == GRADIENT
    assert run["compression"] == pytest.approx(GRADIENT / run["sent_bytes_per_step"])
    assert run["compression"] > 5
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 31), (2, 62), (3, 93)]
    assert lines[-1]["test_accuracy"] == run["test_accuracy"]
    assert lines[-1]["sent_bytes"] == 93 * run["sent_bytes_per_step"]
    assert lines[0]["train_loss"] > lines[-1]["train_loss"]


def test_an_interrupted_run_resumes_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    options = [*SMALL, "--workers", "2", "--codec", FEEDBACK, "--out", str(tmp_path)]
    process, deadline = start(*options, "--epochs", "1000"), time.monotonic() + 60
    while not list(tmp_path.glob("*.pt")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
    errors = process.communicate(timeout=60)[1]  # returns when no rank holds the pipe any more
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("train.py: interrupted")
    assert "Traceback" not in errors
    done = max(line["epoch"] for line in metrics(tmp_path))
    if done > 2:  # the interruption came late on this machine
        whole = uninterrupted(tmp_path / "whole", done + 1)
    code, _, errors = train(*options, "--epochs", str(max(3, done + 1)), "--resume")
    assert code == 0, errors
    assert resumed(summary(tmp_path)) == resumed(summary(whole))
    assert resumed(metrics(tmp_path)) == resumed(metrics(whole))
    assert all(torch.equal(tensor, weights(tmp_path)[name]) for name, tensor in weights(whole).items())


def test_torchrun_trains_the_same_run(whole: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ["--codec", FEEDBACK, "--epochs", "3", "--out", str(tmp_path)]
    code, _, errors = train(*SMALL, *options, launcher=launcher)
    assert code == 0, errors
    assert untimed(summary(tmp_path)) == untimed(summary(whole))
    assert all(torch.equal(tensor, weights(tmp_path)[name]) for name, tensor in weights(whole).items())


def test_a_run_that_diverges_names_its_error_and_leaves_the_trace_in_a_file(tmp_path: Path) -> None:
    code, _, errors = train(*SMALL, "--workers", "2", "--lr", "1e30", "--epochs", "1", "--out", str(tmp_path))
    assert code == 1
    assert "NonFiniteError" in errors
    assert "Traceback" not in errors
    assert "Traceback" in (tmp_path / "traceback.txt").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "nope"], "unknown model 'nope'"),
        (["--codec", "isgq", "nope"], "unknown codec 'nope'"),
        (["--workers", "3"], "--total-batch 128 cannot be shared equally by 3 workers"),
        (["--local-steps", "4", "--aggregate", "two_pass"], "leave --aggregate out"),
        (["--local-steps", "4", "--codec", "rotated"], "a model's change has no factors"),
        (["--local-steps", "0"], "--local-steps 0: must be 1 or more"),
        (["--local-steps", "4", "--telemetry", "5"], "leave --telemetry out"),
        (["--telemetry", "0"], "--telemetry 0: must be 1 or more"),
        (["--seed", "-1"], "--seed -1: must be in [0, 2^63)"),
        (["--clip", "0"], "--clip 0.0: must be positive"),
        (["--sequence", "16"], "--sequence is for texts, mnist5k are images"),
        (["--data", "sotu", "--standardize"], "--standardize is for images, sotu is a text"),
        (["--data", "ptb:nowhere"], "no text in nowhere"),
        (["--model", "lstm_lm"], "lstm_lm takes texts, not images"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    refused: Callable[..., tuple[int, str]], tmp_path: Path, options: list[str], named: str
) -> None:
    code, errors = refused(*options, "--out", str(tmp_path / "new"))
    assert code == 2
    assert errors.count("\n") == 1
    assert named in errors
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_of_other_settings_is_refused(refused: Callable[..., tuple[int, str]], whole: Path) -> None:
    options = ["--workers", "2", "--codec", FEEDBACK, "--out", str(whole), "--resume"]
    code, errors = refused(*SMALL, *options, "--epochs", "4", "--lr", "0.1")
    assert code == 2
    assert "was made with lr=0.2" in errors
