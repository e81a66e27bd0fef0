"""Whole runs on two workers: language models and federated rounds learn, repeat, resume bit for bit, and save bytes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analysis.runs import Summary, table
from isgq.launch import launch
from tests.training.texts import write
from train import run_one
from training.config import Config, Run
from training.task import optimizer_of

WARM_UP = "error_feedback(top_k:k=0.5->0.01@8)"
GRADIENT = 4 * (10 * 8 + 2 * (2 * 8 * 32 + 32) + 9 * 10)  # bytes of lstm_lm:width=8
WAYS = {"every step": None, "federated": 3}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    lstm = {"model": "lstm_lm:width=8", "data": write(tmp_path), "sequence": 4, "total_batch": 4}
    return Config(**lstm, lr=0.5, clip=1.0, epochs=2, epoch_steps=5, schedule="constant", out=tmp_path)


def run(config: Config, codec: str = WARM_UP, workers: int = 2) -> Summary:
    config.out.mkdir(exist_ok=True)
    this = Run(codec, workers, config.batch_of_each(workers), config.aggregate, local_steps=config.local_steps)
    results: list[Summary] = launch(run_one, this.processes, args=(config, this))
    return results[0]


def left(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    [checkpoint] = folder.glob("*.pt")
    content = torch.load(checkpoint, weights_only=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return content, lines


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("local_steps", WAYS.values(), ids=WAYS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(config: Config, local_steps: int | None) -> None:
    """Ends and begins in the middle of the text, with hidden state, momentum and compression's memory."""
    config = replace(config, local_steps=local_steps)
    whole, parts = replace(config, out=config.out / "whole"), replace(config, out=config.out / "parts")
    summary = run(whole)
    run(replace(parts, epochs=1))
    assert run(replace(parts, resume=True)).test_loss == summary.test_loss
    (content, lines), (again, others) = left(whole.out), left(parts.out)
    assert [line["test_loss"] for line in lines] == [line["test_loss"] for line in others]
    for key in ("model", "optimizer"):
        assert equal(content[key], again[key])
    for mine, theirs in zip(content["workers"], again["workers"], strict=True):
        assert equal(mine["task"], theirs["task"])
        assert equal(mine["road"], theirs["road"])
        assert mine["task"]["state"].any()
    assert summary.perplexity == math.exp(summary.test_loss)
    assert lines[1]["sent_bytes"] < 1.5 * lines[0]["sent_bytes"]  # compression has warmed up
    assert summary.local_steps == local_steps


def test_the_same_total_batch_is_the_same_run_on_any_number_of_workers(config: Config) -> None:
    one, two = (run(config, "dense", workers) for workers in (1, 2))
    assert two.test_loss == pytest.approx(one.test_loss, rel=1e-4)
    assert two.dense_bytes_per_step == GRADIENT


def test_one_local_step_without_momentum_is_training_at_every_step(config: Config) -> None:
    every = replace(config, momentum=0.0, clip=None)
    federated = replace(every, local_steps=1)
    assert run(federated, "dense").test_loss == pytest.approx(run(every, "dense").test_loss, rel=1e-5)


def test_local_steps_save_bytes(config: Config) -> None:
    summary = run(replace(config, local_steps=3), "dense")  # rounds of 3 and 2 steps in an epoch of 5
    assert summary.dense_bytes_per_step == GRADIENT
    assert GRADIENT * 2 / 5 < summary.sent_bytes_per_step < GRADIENT * 2 / 5 + 1000
    assert "3 local steps" in table([summary])
    assert f"{summary.perplexity:.1f}" in table([summary])


def test_an_asynchronous_server_takes_language_models(config: Config) -> None:
    summary = run(replace(config, aggregate="async"), "dense")
    assert sum(summary.staleness.values()) == 2 * 5 * 2
    assert math.isfinite(summary.test_loss)


def test_batch_norm_of_a_resumed_run_is_the_first_workers(tmp_path: Path) -> None:
    config = Config(model="resnet18:width=1", data="mnist5k", epoch_steps=1, epochs=1, total_batch=8, out=tmp_path)
    summary = run(replace(config, schedule="constant"), "dense")
    again = run(replace(config, schedule="constant", resume=True), "dense")
    assert again.test_loss == pytest.approx(summary.test_loss, rel=1e-12)


@pytest.mark.parametrize(("limit", "length"), [(0.5, 0.5), (100.0, 5.0), (None, 5.0)])
def test_clipping_shortens_the_whole_gradient(limit: float | None, length: float) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    optimizer = optimizer_of(model, Config(lr=0.1, momentum=0.0, clip=limit))
    before = [p.detach().clone() for p in model.parameters()]
    for parameter, value in zip(model.parameters(), (3.0, 0.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    steps = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(-steps / 0.1, torch.tensor([0.6, 0.0, 0.8]) * length)
