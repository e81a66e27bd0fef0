"""Buckets: the runs of elements that share one scale.

A tensor is seen as its elements in row-major order, cut into buckets of equal size; only the last may be shorter, and
none is ever padded. ``tensor`` is one bucket; ``row`` is one bucket for each index of the first dimension (one bucket
in all for tensors of fewer than two dimensions, where a row would be a single number).

Work goes by *pieces*: blocks ``[buckets, elements of each]`` that fit the cache of a CPU core, so that a chain of
elementwise operations passes through the memory once; threads share out the pieces (:mod:`isgq.core.parallel`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from isgq.core.errors import OptionError
from isgq.core.extremes import absmax
from isgq.core.parallel import map_pieces, piece_size

Bucket = int | Literal["tensor", "row"]
"""A number of elements, or one of the two words."""

_T = TypeVar("_T")


def check_bucket(bucket: Bucket) -> None:
    """Refuse what is no bucket.

    Raises:
        OptionError: neither ``tensor`` nor ``row`` nor an integer >= 1.
    """
    if bucket not in {"tensor", "row"} and not (isinstance(bucket, int) and bucket >= 1):
        raise OptionError(f"bucket={bucket!r} must be 'tensor', 'row' or a number of elements >= 1")


@dataclass(frozen=True, slots=True)
class Buckets:
    """How the elements of a tensor are cut.

    Attributes:
        numel: number of elements.
        size: elements of a bucket, at least 1; the last bucket may have fewer.
    """

    numel: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], bucket: Bucket) -> "Buckets":
        """Cut a tensor of this shape as the option ``bucket`` says."""
        numel = math.prod(shape)
        if isinstance(bucket, int):
            return cls(numel, bucket)
        rows = shape[0] if bucket == "row" and len(shape) >= 2 and numel else 1
        return cls(numel, max(numel // rows, 1))

    @property
    def count(self) -> int:
        """Number of buckets."""
        return -(-self.numel // self.size)

    @property
    def _whole(self) -> int:
        return self.numel // self.size * self.size

    def pieces(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Cut the work: ``(elements, buckets)`` of whole buckets, or of a part of one."""
        limit = piece_size(self.numel, device)
        first = 0
        while first < self.numel:
            bucket = first // self.size
            if self.size <= limit and first < self._whole:
                last = min(first + limit // self.size * self.size, self._whole)
            else:
                last = min(first + limit, (bucket + 1) * self.size, self.numel)
            yield slice(first, last), slice(bucket, -(-last // self.size))
            first = last

    def blocks(self, flat: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
        """The pieces of a flat tensor ``[numel]``, as views ``[buckets, elements of each]``."""
        for elements, buckets in self.pieces(flat.device):
            yield flat[elements].view(buckets.stop - buckets.start, -1), elements, buckets

    def map(self, flat: Tensor, work: Callable[[Tensor, slice, slice], _T]) -> list[_T]:
        """``work(*piece)`` for each piece of :meth:`blocks`, by several threads: the results in order."""
        return map_pieces(lambda piece: work(*piece), list(self.blocks(flat)))

    def sizes(self, device: torch.device) -> Tensor:
        """Elements of each bucket: int64 ``[count]``."""
        sizes = torch.full((self.count,), self.size, device=device)
        if self.numel % self.size:
            sizes[-1] = self.numel % self.size
        return sizes

    def absmax(self, flat: Tensor) -> Tensor:
        """Largest absolute value of each bucket: ``[count]``, in the dtype of ``flat`` ``[numel]``."""
        return absmax(flat, self.size)

    def l2(self, flat: Tensor, largest: Tensor) -> Tensor:
        """Euclidean norm of each bucket: float32 ``[count]``, never below :meth:`absmax` and never infinite.

        Args:
            flat: ``[numel]``.
            largest: its :meth:`absmax`.
        """
        norm = self._relative_sums(flat, largest, torch.square).sqrt_().mul_(largest)
        return torch.maximum(norm.clamp_(max=torch.finfo(torch.float32).max).to(torch.float32), largest)

    def mean_abs(self, flat: Tensor, largest: Tensor) -> Tensor:
        """Mean absolute value of each bucket: float64 ``[count]``; arguments as of :meth:`l2`."""
        return self._relative_sums(flat, largest, torch.abs).div_(self.sizes(flat.device)).mul_(largest)

    def _relative_sums(self, flat: Tensor, largest: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Sums of a function of ``x / largest``, which cannot overflow: float64 ``[count]``."""
        divisor = nonzero(largest).unsqueeze(1)
        total = torch.zeros(self.count, dtype=torch.float64, device=flat.device)
        parts = self.map(flat, lambda block, _, buckets: (buckets, of(block / divisor[buckets]).sum(1)))
        for buckets, part in parts:  # in order, so that the sums are the same for any number of threads
            total[buckets] += part
        return total

    def spread(self, each: Tensor) -> Tensor:
        """Repeat one number a bucket for all its elements: ``[count]`` to ``[numel]``."""
        return each.repeat_interleave(self.size)[: self.numel]


def nonzero(scale: Tensor) -> Tensor:
    """A scale that can be divided by: 1 where it is 0."""
    return scale.masked_fill(scale == 0, 1.0)
