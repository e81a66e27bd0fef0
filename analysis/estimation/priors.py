"""Boxes of parameters with van Trees' cos^2 prior, the constants over them, and the bounds on the risk they give."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from analysis.estimation.bounds import RiskBound, sharpest, van_trees
from analysis.estimation.checks import Array, at_least, within
from analysis.estimation.models import (
    Constants,
    GaussianLocation,
    GaussianVariance,
    HolderDensity,
    ProductBernoulli,
)
from isgq.core.errors import OptionError

WIDTHS = tuple(np.geomspace(0.02, 0.98, 30))
"""Relative half-widths that :func:`best_bound` tries where information grows with the box."""

_GRID = np.linspace(-1, 1, 4097)
_CUMULATED = (_GRID + np.sin(math.pi * _GRID) / math.pi + 1) / 2


@dataclass(frozen=True)
class Prior:
    """A product of cos^2 densities.

    Attributes:
        dim: free parameters d.
        centre: of each.
        half_width: B.
        constants: bounds on a score's constants at every parameter of the box.
        scale: squared loss per unit of ``|estimate - theta|^2``; not 1 for densities only.
    """

    dim: int
    centre: float
    half_width: float
    constants: Constants
    scale: float = 1.0

    def sample(self, rng: np.random.Generator) -> Array:
        """A parameter: float64 ``[d]``."""
        return self.centre + self.half_width * np.interp(rng.random(self.dim), _CUMULATED, _GRID)

    def bound(self, nodes: int, bits: int) -> RiskBound:
        """What no protocol of n nodes with k bits each can do better than."""
        binding, single = sharpest(self.constants, bits)
        information = at_least("nodes", nodes) * single
        value = self.scale * van_trees(self.dim, information, self.half_width)
        return RiskBound(value, binding, information, self.dim * math.pi**2 / self.half_width**2)


def best_bound(priors: Iterable[Prior], nodes: int, bits: int) -> RiskBound:
    """The largest of the bounds of several priors: each holds, so the largest does."""
    return max((prior.bound(nodes, bits) for prior in priors), key=lambda bound: bound.value)


def over_widths(family: Callable[[float], Prior], nodes: int, bits: int) -> RiskBound:
    """The largest bound of a family of priors over :data:`WIDTHS`."""
    return best_bound(map(family, WIDTHS), nodes, bits)


def gaussian_location(dim: int, sigma: float = 1.0, half_width: float = 1.0) -> Prior:
    """N(theta, sigma^2 I), |theta_j| <= half_width. Rate ``sigma^2 max(d^2 / (n k), d / n)``."""
    constants = GaussianLocation(np.zeros(at_least("dim", dim)), sigma).constants()
    return Prior(dim, 0.0, half_width, constants)


def sparse_gaussian_location(dim: int, nonzero: int, sigma: float = 1.0, half_width: float = 1.0) -> Prior:
    """N(theta, sigma^2 I) with at most s nonzero means, for which the server knows where they are.

    The risk without that knowledge is no smaller, so the bound holds; its rate ``s^2 / (n k)`` misses
    a factor d / s of the ``s d / (n k)`` that is published for this class.

    Raises:
        OptionError: s > d.
    """
    if at_least("nonzero", nonzero) > at_least("dim", dim):
        raise OptionError(f"nonzero = {nonzero} must be at most dim = {dim}")
    return gaussian_location(nonzero, sigma, half_width)


def gaussian_variance(dim: int, low: float, high: float) -> Prior:
    """N(0, diag theta), low <= theta_j <= high. Rate ``low^2 max(d^2 / (n k^2), d / n)``."""
    within("low", low, 0, high)
    constants = GaussianVariance(np.full(at_least("dim", dim), low)).constants()
    return Prior(dim, (low + high) / 2, (high - low) / 2, constants)


def dense_bernoulli(dim: int, half_width: float = 0.25) -> Prior:
    """Product Bernoulli, |theta_j - 1/2| <= half_width < 1/2. Rate ``max(d^2 / (n k), d / n)``.

    The constants are those of a corner, where all three are largest.
    """
    within("half_width", half_width, 0, 0.5)
    constants = ProductBernoulli(np.full(at_least("dim", dim), 0.5 - half_width)).constants()
    return Prior(dim, 0.5, half_width, constants)


def sparse_bernoulli(dim: int, total: float, width: float = 0.5) -> Prior:
    """Product Bernoulli, ``sum theta_j <= s <= d / 2``: rTop-k's model. Rate ``s^2 log(d/s) / (n k)`` and ``s / n``.

    The box is ``theta (1 - width) .. theta (1 + width)`` with ``theta = s / (d (1 + width))``; the constants are those
    of its lower corner, where all three are largest.

    Raises:
        OptionError: total outside of (0, d/2], or width outside of (0, 1).
    """
    if not 0 < total <= at_least("dim", dim) / 2:
        raise OptionError(f"total = {total!r} is outside of the regime, (0, d/2] with d = {dim}")
    centre = total / dim / (1 + within("width", width, 0, 1))
    constants = ProductBernoulli(np.full(dim, centre * (1 - width))).constants()
    return Prior(dim, centre, width * centre, constants)


def categorical(symbols: int, width: float = 0.5) -> Prior:
    """Distributions on d >= 2 symbols. Rate ``max(d / (n 2^k), 1 / n)``.

    Around ``theta_i = 1 / (2 (d - 1))``, ``theta_d = 1/2``, with half-width ``width / (2 (d - 1))``; the loss of
    the first d - 1 is at most that of all. ``max 1 / theta_i + (d - 1) / theta_d`` bounds the largest eigenvalue.
    """
    free = at_least("symbols", symbols, 2) - 1
    centre = 1 / (2 * free)
    low, rest = centre * (1 - within("width", width, 0, 1)), 0.5 * (1 - width)
    constants = Constants(free / low + free / rest, 1 / low + free / rest)
    return Prior(free, centre, width * centre, constants)


def holder_density(cells: int, smoothness: float, length: float) -> Prior:
    """Hölder densities on [0, 1] in L2 loss. Rate ``max(n^(-2s/(2s+1)), (n 2^k)^(-s/(s+1)))`` at the best cells.

    The bumps are orthogonal, so that a density's loss is at least ``int g^2`` times that of its heights.
    """
    model = HolderDensity(np.zeros(at_least("cells", cells)), smoothness, length)
    worst = model.energy / (1 - model.peak**2)
    return Prior(cells, 0.0, 1.0, Constants(cells * worst, worst), model.energy)
