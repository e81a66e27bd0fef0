"""Rows of gradients: how wholes are cut into what carriers hold, and put together again."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a gradient: ``gradient[start:stop]``.

    Attributes:
        name: parameter name.
        shape: of the whole gradient; one without dimensions is a single row.
        start: first row.
        stop: row after the last.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> "Rows":
        """All rows."""
        return Rows(name, tuple(shape), 0, shape[0] if len(shape) else 1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) * math.prod(self.shape[1:])

    @property
    def label(self) -> str:
        """The parameter's name, and which rows if not all."""
        complete = self == Rows.whole(self.name, self.shape)
        return self.name if complete else f"{self.name}[{self.start}:{self.stop}]"

    def of(self, gradient: Tensor) -> Tensor:
        """These rows of the whole gradient, as a view."""
        return gradient[self.start : self.stop] if self.shape else gradient


def scatter(rows: Sequence[Rows], flat: Tensor, means: MutableMapping[str, Tensor]) -> None:
    """Write what :class:`Rows` hold together, one after the other in ``flat``, to whole gradients by name."""
    place(rows, [part.clone() for part in split(rows, flat)], means)


def split(rows: Sequence[Rows], flat: Tensor) -> list[Tensor]:
    """What each of some :class:`Rows` has of a flat vector that holds them one after the other, as views."""
    return list(torch.split(flat.reshape(-1), [each.numel for each in rows]))


def place(rows: Sequence[Rows], parts: Sequence[Tensor], means: MutableMapping[str, Tensor]) -> None:
    """Put parts of gradients, one for each of the :class:`Rows`, to whole gradients by name; wholes as they are."""
    for each, part in zip(rows, parts, strict=True):
        if each == Rows.whole(each.name, each.shape):
            means[each.name] = part.reshape(each.shape)
            continue
        if each.name not in means:
            means[each.name] = part.new_zeros(each.shape)
        target = each.of(means[each.name])
        target.copy_(part.reshape(target.shape))
