"""What is learned: the data cut into steps for each worker, the loss of a step, and the score of a model."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
import models
from isgq.core.errors import OptionError
from isgq.exchange import TorchExchange
from training.config import Config, Run
from training.images import Images
from training.language import SEQUENCE, Language


class Task(Protocol):
    """One worker's part.

    Attributes:
        epoch_steps: steps between two evaluations.
    """

    epoch_steps: int

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Mean loss over this worker's samples of a step, counted from the run's start; steps come in order."""
        ...

    def score(self, model: nn.Module, rank: int, workers: int) -> Tensor:
        """Sum of losses, number of right answers, number of answers, on this worker's share of what is held out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What goes on from one step to the next, on this worker."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        ...


def load(config: Config) -> data.Dataset | data.Text:
    """The data.

    Raises:
        OptionError: an option that is not for them.
    """
    if data.is_text(config.data):
        if config.standardize:
            raise OptionError(f"--standardize is for images, {config.data} is a text")
        return data.load_text(config.data, seed=config.seed)
    if config.sequence is not None:
        raise OptionError(f"--sequence is for texts, {config.data} are images")
    dataset = data.load(config.data, seed=config.seed)
    return dataset.standardized() if config.standardize else dataset


def build(config: Config, source: data.Dataset | data.Text) -> nn.Module:
    """A new model for the data."""
    in_shape = (config.sequence or SEQUENCE,) if isinstance(source, data.Text) else source.in_shape
    return models.build(config.model, classes=source.classes, in_shape=in_shape, seed=config.seed)


def task_of(source: data.Dataset | data.Text, config: Config, run: Run, rank: int) -> Task:
    """The part of one process of a run; OptionError if there are too few data for so many workers."""
    if isinstance(source, data.Text):
        return Language(source, config, run, rank)
    return Images(source, config, run, rank)


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.SGD:
    """SGD, after clipping if that is wanted: of the mean over workers, of the local gradient where steps are local."""
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    if config.clip is not None:
        limit = config.clip

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)

        optimizer.register_step_pre_hook(clip)
    return optimizer


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, rank: int, workers: int) -> tuple[float, float]:
    """Mean loss and accuracy of the first worker's model; each worker takes its share. Collective if there are several.

    Buffers, such as batch norm's statistics, become the first worker's: gradients in training do not depend on them.
    """
    if workers > 1:
        with TorchExchange().guarded():
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
    model.eval()
    sums = task.score(model, rank, workers).double()
    model.train()
    if workers > 1:
        with TorchExchange().guarded():
            dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / count, right / count


def mean_over_workers(*values: float) -> list[float]:
    """The same numbers on every worker; waits for all of them."""
    mean = torch.tensor(values, dtype=torch.float64)
    with TorchExchange().guarded():
        dist.all_reduce(mean)
    return [value / dist.get_world_size() for value in mean.tolist()]
