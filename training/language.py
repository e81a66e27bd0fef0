"""Predicting the next word: the text as long columns side by side, read on from step to step.

The training part is cut into as many contiguous columns as all workers together have samples; each worker has those of
one contiguous shard. A step reads the next ``sequence`` tokens of each column, with the state that the model had at the
end of the step before and no gradient into it (truncated backpropagation through time). At the end of the columns all
begin anew, with no state. So the same total batch sees the same words on any number of workers.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from isgq.core.errors import OptionError
from training.config import Config, Run

SEQUENCE = 32
_HELD_OUT = 32  # columns of the validation part, whatever the batch, so that scores compare


class Language:
    """See :class:`training.task.Task`. The models are those of :mod:`models` that take texts.

    Args:
        text: the text.
        config: the command line.
        run: one run of it.
        rank: of this process; an asynchronous run's workers begin with 1.

    Raises:
        OptionError: less text than one step takes.
    """

    def __init__(self, text: data.Text, config: Config, run: Run, rank: int) -> None:
        self._sequence = config.sequence or SEQUENCE
        total, worker = run.batch * run.workers, max(0, rank - (run.aggregate == "async"))
        for part, ids, count in (("training", text.train, total), ("validation", text.valid, 1)):
            if not 1 <= count * (self._sequence + 1) <= len(ids):
                raise OptionError(
                    f"{count} samples of {self._sequence} tokens and the next one: the {part} part of {config.data} "
                    f"has {len(ids):,} tokens"
                )
        self._columns = _columns(text.train, total)[worker * run.batch : (worker + 1) * run.batch]
        self._held_out = _columns(text.valid, min(_HELD_OUT, len(text.valid) // (self._sequence + 1)))
        self._pass_steps = (self._columns.shape[1] - 1) // self._sequence  # what is left over is dropped
        self._state: Tensor | None = None
        self.epoch_steps = config.epoch_steps or self._pass_steps

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Cross entropy of the next words."""
        place = step % self._pass_steps
        x, y = self._read(self._columns, place * self._sequence)
        logits, state = model(x, self._state if place else None)
        self._state = None if state is None else state.detach()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def score(self, model: nn.Module, rank: int, workers: int) -> Tensor:
        """On the validation part."""
        columns, state = self._held_out[rank::workers], None
        sums = torch.zeros(3, dtype=torch.float64)
        for start in range(0, columns.shape[1] - 1, self._sequence) if len(columns) else ():
            x, y = self._read(columns, start)
            logits, state = model(x, state)
            logits, y = logits.flatten(0, 1), y.flatten()
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([F.cross_entropy(logits, y, reduction="sum").double(), right, torch.tensor(len(y))])
        return sums

    def _read(self, columns: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Tokens [b, t] from a place on, and those that follow each; t is less at the end."""
        tokens = columns[:, start : start + self._sequence + 1]
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The model's state after the last step; the place in the text follows from the step's number."""
        return {"state": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`training.task.Task`."""
        self._state = state["state"]


def _columns(ids: Tensor, count: int) -> Tensor:
    """[n] to [count, n // count]; what is left over is dropped."""
    length = len(ids) // count
    return ids[: count * length].view(count, length)
