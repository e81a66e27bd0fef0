"""A gradient as a sum of atoms, its singular triples, found from the factors without forming the gradient.

Index legend: ``r`` rows of the factors, ``o`` outputs, ``p`` columns of the gradient as a matrix, ``j`` atoms.

``G = D^T X`` stays the same for any orthogonal change of the rows. With ``X X^T = E L E^T`` (``[r, r]``, eigenvalues
L) the rows of ``Q = L^-1/2 E^T X`` are orthonormal and ``K = L^1/2 E^T D`` has ``G = K^T Q``. With
``K K^T = W S^2 W^T``

    G = sum_j (K^T W_j) (W_j^T Q) = sum_j S_j u_j v_j^T

The sum is G for *any* orthogonal W: how exact the small eigenvectors are decides how small the atoms can be, not
whether they make up G. Only ``X X^T`` and ``D D^T`` are as large as the batch, and all is in float64, because Gram
matrices square the condition number.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isgq.core.errors import NonFiniteError
from isgq.core.extremes import check_finite, is_finite
from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors

_LARGEST = torch.finfo(torch.float32).max
_LEAST = 2.0**-134  # in bfloat16, float32 numbers up to here are 0
_NOISE = 1e-14  # relative: eigenvalues of a Gram matrix below are rounding errors, 1e-7 of the greatest length


@dataclass(frozen=True, slots=True)
class Vectors:
    """The rows of ``mixing @ rows``, of which those are made that are asked for: few of many are sent.

    Attributes:
        rows: float64 ``[r, n]``.
        mixing: float64 ``[j, r]``; None where the rows are the vectors.
    """

    rows: Tensor
    mixing: Tensor | None = None

    @property
    def size(self) -> int:
        """Entries of a vector."""
        return self.rows.shape[1]

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Float64 ``[k, n]``: those of these numbers."""
        return self.rows[index] if self.mixing is None else self.mixing[index] @ self.rows

    def first(self, count: int) -> "Vectors":
        """The first so many."""
        return Vectors(self.rows[:count]) if self.mixing is None else Vectors(self.rows, self.mixing[:count])


@dataclass(frozen=True, slots=True)
class Atoms:
    """Unit vectors and weights, heaviest first: ``sum_j weights_j left_j right_j^T`` is the gradient.

    The sum is as exact as float64; the lengths of very light atoms' vectors differ from 1 by some per cent.

    Attributes:
        weights: float64 ``[j]``, positive, falling.
        left: ``[j, o]``.
        right: ``[j, p]``.
    """

    weights: Tensor
    left: Vectors
    right: Vectors


def decompose(factors: Factors, contract: Contract, key: Key) -> Atoms:
    """Atoms of the gradient as a matrix ``[o, p]``, the last column that of the bias.

    From the factors where they are plain rows, fewer than the matrix is wide; otherwise from the gradient.

    Args:
        factors: floating-point.
        contract: of the layer.
        key: names the tensor in messages.

    Raises:
        NonFiniteError: NaN or Inf in a factor, or a gradient beyond float32.
    """
    x, d = factors.x.detach(), factors.d.detach()
    if x.dim() == 2 and x.shape[0] <= min(d.shape[1], x.shape[1] + 1):
        wide, deep = torch.empty(x.shape[0], x.shape[1] + 1, dtype=torch.float64, device=x.device), d.double()
        wide[:, :-1], wide[:, -1] = x, 1.0
        grams = wide @ wide.T, deep @ deep.T
        if not all(math.isfinite(gram.trace()) for gram in grams):  # which takes less than to look at all entries
            _check_finite(x, d, key)
        atoms = atoms_of_factors(wide, deep, *grams)
    else:
        _check_finite(x, d, key)
        gradient = contract(x.float(), d.float())
        if not is_finite(gradient):
            raise NonFiniteError(f"the gradient of {key.name!r} reaches beyond float32")
        channel = d.dim() - 1 if gradient.dim() == 2 else 1  # of a linear layer the last, of a convolution the second
        bias = d.double().sum([i for i in range(d.dim()) if i != channel])
        atoms = atoms_of_matrix(torch.cat([gradient.reshape(gradient.shape[0], -1).double(), bias[:, None]], 1))
    weights = atoms.weights.cpu().numpy()
    if len(weights) and not weights[0] < _LARGEST:
        raise NonFiniteError(f"the gradient of {key.name!r} reaches beyond float32")
    if not len(weights) or np.float32(weights[-1]) > _LEAST:
        return atoms
    kept = int((weights.astype(np.float32) > _LEAST).sum())
    return Atoms(atoms.weights[:kept], atoms.left.first(kept), atoms.right.first(kept))


def _check_finite(x: Tensor, d: Tensor, key: Key) -> None:
    check_finite(x, f"the input of {key.name!r}")
    check_finite(d, f"the output gradient of {key.name!r}")


def atoms_of_factors(x: Tensor, d: Tensor, xx: Tensor, dd: Tensor) -> Atoms:
    """Singular triples of ``d^T x``, in O(r^2 (o + p) + r^3).

    Args:
        x: float64 ``[r, p]``.
        d: float64 ``[r, o]``.
        xx: ``x x^T``.
        dd: ``d d^T``.
    """
    lengths, basis = _directions(xx)
    mixing = basis * lengths  # E L^1/2: K = mixing^T D
    weights, rotation = _directions(mixing.T @ dd @ mixing)
    left, right = (mixing @ rotation / weights).T, (basis / lengths @ rotation).T
    return Atoms(weights, Vectors(d, left), Vectors(x, right))


def atoms_of_matrix(gradient: Tensor) -> Atoms:
    """Singular triples of a matrix ``[o, p]``, by ``eigh`` of the smaller Gram matrix, in O(o p min(o, p))."""
    g = gradient.double()
    if g.shape[0] > g.shape[1]:
        turned = atoms_of_matrix(g.T)
        return Atoms(turned.weights, turned.right, turned.left)
    weights, rotation = _directions(g @ g.T)
    return Atoms(weights, Vectors(rotation.T), Vectors(g, (rotation / weights).T))


def _directions(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths and directions ``[r, j]`` by the rows' Gram matrix, the longest first, without those that are noise."""
    values, basis = torch.linalg.eigh(gram)
    rising = values.cpu().numpy()
    kept = len(rising) - int(rising.searchsorted(_NOISE * len(rising) * rising.max(initial=0.0), side="right"))
    return values.flip(0)[:kept].sqrt(), basis.flip(1)[:, :kept]
