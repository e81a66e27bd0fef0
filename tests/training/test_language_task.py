"""The task of predicting the next word: which words each worker reads when, and with which state."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import models
from isgq.core.errors import OptionError
from tests.training.texts import WORDS, write
from training.config import Config, Run
from training.language import Language
from training.task import evaluate, load, optimizer_of

T = 4


class Recorder(nn.Module):
    """Notes what it is given; its state counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, float]] = []
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = torch.zeros(()) if state is None else state
        self.calls.append((tokens, float(before)))
        return F.one_hot(tokens, 30) * self.weight, before + 1 + 0 * self.weight


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(data=write(tmp_path), sequence=T, model="lstm_lm:width=8")


def text_of(config: Config) -> data.Text:
    text = load(config)
    assert isinstance(text, data.Text)
    return text


def read(config: Config, workers: int, batch: int, rank: int, steps: int) -> list[Tensor]:
    task, model = Language(text_of(config), config, Run("dense", workers, batch), rank), Recorder()
    for step in range(steps):
        task.loss(model, step)
    return [tokens for tokens, _ in model.calls]


def test_workers_have_contiguous_shards_and_together_read_what_one_would(config: Config) -> None:
    train = text_of(config).train
    whole = read(config, 1, 6, 0, 5)
    parts = [read(config, 3, 2, rank, 5) for rank in range(3)]
    for step, tokens in enumerate(whole):
        assert torch.equal(torch.cat([part[step] for part in parts]), tokens)
    column = len(train) // 6
    assert torch.equal(torch.cat([step[0] for step in parts[1]]), train[2 * column : 2 * column + 5 * T])


def test_the_state_is_carried_without_gradient_until_the_text_begins_anew(config: Config) -> None:
    task, model = Language(text_of(config), config, Run("dense", 1, 6), 0), Recorder()
    steps = task.epoch_steps
    assert steps == (len(text_of(config).train) // 6 - 1) // T
    for step in range(2 * steps + 1):
        task.loss(model, step).backward()  # would fail if it reached into the step before
    assert [state for _, state in model.calls] == [*range(steps), *range(steps), 0]
    assert torch.equal(model.calls[0][0], model.calls[steps][0])


def test_the_loss_is_that_of_the_next_words(config: Config) -> None:
    text = text_of(config)
    task = Language(text, config, Run("dense", 1, 2), 0)
    model = models.build(config.model, classes=text.classes, in_shape=(T,))
    columns = text.train[: 2 * (len(text.train) // 2)].view(2, -1)
    losses = [task.loss(model, step) for step in range(3)]
    logits, _ = model(columns[:, : 3 * T])
    expected = F.cross_entropy(logits.flatten(0, 1), columns[:, 1 : 3 * T + 1].flatten())
    torch.testing.assert_close(torch.stack(losses).mean(), expected)


def test_the_score_is_the_same_on_any_number_of_workers(config: Config) -> None:
    text = text_of(config)
    task = Language(text, config, Run("dense", 1, 2), 0)
    model = models.build(config.model, classes=text.classes, in_shape=(T,))
    loss, accuracy = evaluate(task, model, 0, 1)
    with torch.no_grad():
        sums = sum(task.score(model, rank, 40) for rank in range(40))
    torch.testing.assert_close(sums[:2] / sums[2], torch.tensor([loss, accuracy], dtype=torch.float64))
    columns = min(32, len(text.valid) // (T + 1))
    assert sums[2] == columns * (len(text.valid) // columns - 1)


def test_too_little_text_is_refused(config: Config) -> None:
    with pytest.raises(OptionError, match=r"200 samples of 4 tokens .* the training part of ptb:.* has 600 tokens"):
        Language(text_of(config), config, Run("dense", 2, 100), 0)


@pytest.mark.parametrize("spec", ["lstm_lm:width=16", "transformer_lm:width=16,layers=1"])
def test_language_models_learn_which_word_follows(config: Config, spec: str) -> None:
    text = text_of(config)
    task = Language(text, config, Run("dense", 1, 10), 0)
    model = models.build(spec, classes=text.classes, in_shape=(T,))
    optimizer = optimizer_of(model, replace(config, lr=0.5, clip=1.0))
    for step in range(200):
        task.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss, _ = evaluate(task, model, 0, 1)
    assert loss < math.log(WORDS) - 0.5  # two of the eight words may follow


def test_an_asynchronous_worker_reads_its_shard(config: Config) -> None:
    worker = Language(text_of(config), config, Run("dense", 2, 3, "async"), 2)
    second = Language(text_of(config), config, Run("dense", 2, 3), 1)
    one, other = Recorder(), Recorder()
    worker.loss(one, 0)
    second.loss(other, 0)
    assert torch.equal(one.calls[0][0], other.calls[0][0])
