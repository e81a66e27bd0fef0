"""Training as ``train.py`` does it, with several workers simulated in one process and real messages between them.

Every worker makes its own forward and backward pass, on the samples that it would have in a process of its own, in the
same order; what is averaged, and what is counted, is that of :mod:`benchmarks.methods`. So a run of plain gradients is
that of ``train.py`` up to the order of sums. Buffers, such as batch norm's statistics, are those of the first worker,
whose model is evaluated, on a text with a quarter of its validation part. With local steps every worker has a model and
an optimizer of its own, and the changes of the models are averaged instead of gradients; they have no factors.
"""

import copy
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

import data
from benchmarks.methods import Share, build
from isgq.core.payload import Factors
from isgq.layers.capture import Capture, find_units, merge
from training import task
from training.config import Config, Run, learning_rate
from training.task import Task, optimizer_of, task_of

_TEXT_SHARE = 4
"""One in so many columns of a text's validation part is read: all would take longer than many a run."""


@dataclass(frozen=True)
class Point:
    """The state after an epoch; losses are means over the epoch, and those on what is held out."""

    step: int
    train_loss: float
    test_loss: float
    test_accuracy: float


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        config: what was asked for, with one codec (any method) and one number of workers.
        points: one an epoch; fewer where the loss became infinite.
        sent: bytes that a worker sends in a step, in the mean.
        moved: the same, sent and received.
        parameters: of the model.
        seconds: of computing.
    """

    config: Config
    points: Sequence[Point]
    sent: float
    moved: float
    parameters: int
    seconds: float

    @property
    def method(self) -> str:
        """The method."""
        return self.config.codecs[0]

    @property
    def loss(self) -> float:
        """The last loss on what is held out; infinite if the run diverged."""
        complete = len(self.points) == self.config.epochs
        return self.points[-1].test_loss if complete else math.inf

    @property
    def accuracy(self) -> float:
        """The last accuracy; 0 if the run diverged."""
        return self.points[-1].test_accuracy if math.isfinite(self.loss) else 0.0

    @property
    def compression(self) -> float:
        """Bytes of float32 gradients at every step over those sent."""
        return 4 * self.parameters / self.sent if self.sent else math.inf


class _Team(Protocol):
    """All workers; the first one's model is evaluated."""

    model: nn.Module

    def step(self, number: int, rate: float, ends_epoch: bool) -> tuple[float, float, float]:
        """Mean loss, and bytes sent and moved by a worker."""
        ...


class _InStep:
    """One model, the mean of all gradients at every step."""

    def __init__(self, config: Config, model: nn.Module, tasks: Sequence[Task]) -> None:
        self.model, self._tasks = model, tasks
        self._optimizer = optimizer_of(model, config)
        self._parameters = dict(model.named_parameters())
        self._units, _ = find_units(model, skip=lambda name: False)
        self._method = build(config.codecs[0], self._units, self._parameters, len(tasks), config.seed)

    def step(self, number: int, rate: float, ends_epoch: bool) -> tuple[float, float, float]:
        """See :class:`_Team`."""
        shares, losses, buffers = [], 0.0, []
        for worker, own in enumerate(self._tasks):
            share, loss = self._share(own, number)
            shares.append(share)
            losses += loss / len(self._tasks)
            if worker == 0:
                buffers = [buffer.clone() for buffer in self.model.buffers()]
        for buffer, first in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(first)
        if not math.isfinite(losses):
            return losses, 0.0, 0.0
        mean, sent, moved = self._method(shares, number)
        for name, parameter in self._parameters.items():
            parameter.grad = mean[name]
        _take(self._optimizer, rate)
        return losses, sent, moved

    def _share(self, own: Task, number: int) -> tuple[Share, float]:
        """One worker's gradients and factors, and its loss."""
        caught: dict[str, list[Factors]] = {}
        capture = Capture(self._units, lambda u, f: caught.setdefault(u.name, []).append(f), lambda: None)
        loss = own.loss(self.model, number)
        loss.backward()  # type: ignore[no-untyped-call]
        capture.close()
        gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self._parameters.items()}
        self.model.zero_grad()
        return Share(gradients, {name: merge(pairs) for name, pairs in caught.items()}), loss.item()


class _Apart:
    """A model for each worker, the mean of their changes after some steps."""

    def __init__(self, config: Config, model: nn.Module, tasks: Sequence[Task], every: int) -> None:
        self.model, self._tasks, self._every = model, tasks, every
        self._models = [model, *(copy.deepcopy(model) for _ in tasks[1:])]
        self._optimizers = [optimizer_of(each, config) for each in self._models]
        self._parameters = [dict(each.named_parameters()) for each in self._models]
        self._common = {name: p.detach().clone() for name, p in self._parameters[0].items()}
        self._method = build(config.codecs[0], [], self._parameters[0], len(tasks), config.seed)
        self._local, self._round = 0, 0

    def step(self, number: int, rate: float, ends_epoch: bool) -> tuple[float, float, float]:
        """See :class:`_Team`."""
        losses = 0.0
        for own, model, optimizer in zip(self._tasks, self._models, self._optimizers, strict=True):
            loss = own.loss(model, number)
            loss.backward()  # type: ignore[no-untyped-call]
            _take(optimizer, rate)
            losses += loss.item() / len(self._tasks)
        self._local += 1
        if not math.isfinite(losses) or not (ends_epoch or self._local == self._every):
            return losses, 0.0, 0.0
        return losses, *self._meet()

    @torch.no_grad()
    def _meet(self) -> tuple[float, float]:
        """End a round."""
        changes = [{n: p - self._common[n] for n, p in own.items()} for own in self._parameters]
        mean, sent, moved = self._method([Share(change, {}) for change in changes], self._round)
        for name, common in self._common.items():
            common += mean[name]
            for own in self._parameters:
                own[name].copy_(common)
        self._local, self._round = 0, self._round + 1
        return sent, moved


def _take(optimizer: torch.optim.Optimizer, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _score(own: Task, model: nn.Module, share: int) -> tuple[float, float]:
    """Loss and accuracy on one share of what is held out."""
    model.eval()
    loss, right, count = own.score(model, 0, share).double().tolist()
    model.train()
    return loss / count, right / count


@functools.lru_cache(maxsize=2)
def _source(name: str, standardize: bool, seed: int) -> data.Dataset | data.Text:
    return task.load(Config(data=name, standardize=standardize, seed=seed))


def simulate(config: Config) -> Outcome:
    """One run.

    Args:
        config: with one codec, which is any method of :mod:`benchmarks.methods`, and one number of workers.
    """
    [method], [workers] = config.codecs, config.workers
    started = time.perf_counter()
    source = _source(config.data, config.standardize, config.seed)
    run = Run(method, workers, config.batch_of_each(workers), local_steps=config.local_steps)
    tasks = [task_of(source, config, run, rank) for rank in range(workers)]
    model = task.build(config, source)
    team: _Team = (
        _InStep(config, model, tasks)
        if config.local_steps is None
        else _Apart(config, model, tasks, config.local_steps)
    )
    steps, points, sent, moved = tasks[0].epoch_steps, [], 0.0, 0.0
    for epoch in range(config.epochs):
        losses = 0.0
        for step in range(epoch * steps, (epoch + 1) * steps):
            rate = learning_rate(config, step / (config.epochs * steps))
            loss, *sizes = team.step(step, rate, ends_epoch=step + 1 == (epoch + 1) * steps)
            losses, sent, moved = losses + loss, sent + sizes[0], moved + sizes[1]
            if not math.isfinite(losses):
                break
        test_loss, accuracy = _score(tasks[0], team.model, 1 if isinstance(source, data.Dataset) else _TEXT_SHARE)
        if not math.isfinite(losses + test_loss):
            break
        points.append(Point((epoch + 1) * steps, losses / steps, test_loss, accuracy))
    taken = config.epochs * steps
    size = sum(p.numel() for p in model.parameters())
    return Outcome(config, points, sent / taken, moved / taken, size, time.perf_counter() - started)
