"""Labelled images: every pass over them in a new order, the same for all workers and cut into equal parts by rank."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from isgq import Key
from isgq.core.errors import OptionError
from isgq.core.keys import random_int32
from training.config import Config, Run


class Images:
    """See :class:`training.task.Task`. An asynchronous worker takes all samples, in an order of its own.

    Args:
        dataset: the images.
        config: the command line.
        run: one run of it.
        rank: of this process.

    Raises:
        OptionError: fewer images than one step takes.
    """

    def __init__(self, dataset: data.Dataset, config: Config, run: Run, rank: int) -> None:
        self._dataset, self._seed, self._batch = dataset, config.seed, run.batch
        size = len(dataset.train_y)
        if not 1 <= run.batch <= size // run.workers:
            raise OptionError(
                f"{run.workers} workers with {run.batch} samples each: {config.data} has 1 .. {size} for all"
            )
        alone = run.aggregate == "async"
        self._workers, self._rank, self._order = (1, 0, rank) if alone else (run.workers, rank, 0)
        self._pass_steps = size // (run.batch * self._workers)  # what is left over is dropped
        self._pass = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)
        self.epoch_steps = config.epoch_steps or size // (run.batch * run.workers)

    def _share(self, step: int) -> Tensor:
        """This worker's indices [batch]."""
        number, place = divmod(step, self._pass_steps)
        if number != self._pass:
            digest = Key("order", self._seed, number, self._order).digest
            numbers = random_int32(digest, "train.shares", len(self._dataset.train_y))
            self._pass, self._shuffled = number, torch.argsort(numbers, stable=True)
        start = (place * self._workers + self._rank) * self._batch
        return self._shuffled[start : start + self._batch]

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Cross entropy."""
        mine = self._share(step)
        return F.cross_entropy(model(self._dataset.train_x[mine]), self._dataset.train_y[mine])

    def score(self, model: nn.Module, rank: int, workers: int) -> Tensor:
        """On the test images."""
        x, y = self._dataset.test_x[rank::workers], self._dataset.test_y[rank::workers]
        outputs = torch.cat([model(part) for part in torch.split(x, 1000)]).double()
        right = (outputs.argmax(1) == y).sum()
        return torch.stack([F.cross_entropy(outputs, y, reduction="sum"), right, torch.tensor(len(y))])

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a step's samples follow from its number."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""
