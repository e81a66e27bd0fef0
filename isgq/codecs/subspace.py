"""The common subspace: a gradient as its projections on a few directions that all ranks share.

This is PowerSGD (Vogels, Karimireddy and Jaggi, 2019) with quantized projections: what it takes to make the mean over
all ranks in two rounds, which :mod:`isgq.rounds` runs. Index legend: a gradient is the matrix ``[m, n]``, its first
dimension kept and all others flattened; ``k`` directions, as orthonormal rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.ecsq import ECSQ
from isgq.core.errors import OptionError
from isgq.core.keys import Key, uniform
from isgq.core.registry import register_codec

_FINEST, _COARSEST = 1e-5, 4.0


@register_codec("subspace")
@dataclass(frozen=True)
class Subspace:
    """Projections on directions common to all ranks, quantized, averaged in two passes, with memory of what they miss.

    For sessions alone, because the ranks make the mean together.

    Attributes:
        rank: directions of each matrix; fewer is more aggressive. What would not become smaller is sent as it is.
        step: of everything that is sent, in units of its root mean square (:class:`isgq.codecs.ecsq.ECSQ`), at most 4;
            larger is more aggressive.
        turn: the same of what turns the directions, the left round of :mod:`isgq.rounds`, over ``step``: it is fewer
            bytes, and worth more of them.
    """

    rank: int = 4
    step: float = 1.0
    turn: float = 0.6
    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise OptionError(f"rank={self.rank} of subspace must be 1 or more")
        if not _FINEST <= self.step <= _COARSEST:
            raise OptionError(f"step={self.step} of subspace must be in {_FINEST} .. {_COARSEST}")
        if not _FINEST <= self.turn * self.step <= _COARSEST:
            raise OptionError(f"turn={self.turn} of subspace: turn x step must be in {_FINEST} .. {_COARSEST}")

    @property
    def projections(self) -> ECSQ:
        """The codec of what is sent in the right round."""
        return ECSQ(step=self.step, dither=False)

    @property
    def turning(self) -> ECSQ:
        """The codec of what is sent in the left round."""
        return ECSQ(step=self.turn * self.step, dither=False)

    def directions(self, shape: Sequence[int]) -> int:
        """How many directions a gradient of this shape gets; 0 where it is sent as it is."""
        if len(shape) < 2:
            return 0
        m, n = shape[0], math.prod(shape[1:])
        k = min(self.rank, m, n)
        return k if k * (m + n) < m * n else 0


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows that span what the rows ``[k, n]`` do, and any others where those are dependent.

    On the host in float64: equal on all ranks if their numbers are.
    """
    basis: Tensor = torch.linalg.qr(rows.cpu().double().T).Q
    return basis.T.float().contiguous()


def first_basis(name: str, seed: int, k: int, n: int) -> Tensor:
    """Where the directions of a parameter start: ``[k, n]``, the same on every rank."""
    return orthonormal(uniform(Key(name, seed).digest, "subspace", (k, n)))
