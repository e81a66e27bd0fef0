"""Distributions of one node's sample: how to draw it, its score, and the constants that the bounds need.

The score is ``S(x) = grad log p(x)`` in theta, ``[count, dim]`` for ``count`` samples, and ``I_X = E S S^T``.
Dense and sparse models are the same distributions at other parameters: see :mod:`analysis.estimation.priors`.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq

from analysis.estimation.checks import Array, parameters, within
from isgq.core.errors import OptionError

_MAX_SUPPORT = 1 << 16


@dataclass(frozen=True)
class Constants:
    """What is known of a score, over all unit vectors u; inf where nothing is.

    Attributes:
        trace: ``Tr I_X``.
        variance: largest ``Var <u, S>``, the largest eigenvalue of I_X.
        proxy: a rho^2 with ``E exp(t <u, S>) <= exp(rho^2 t^2 / 2)`` for every t.
        psi1: a c^2 with ``E exp(<u, S> / c) <= 2``. The squared Orlicz norm psi_1 is one; the bounds' proof needs no
            more than this one-sided moment.
    """

    trace: float
    variance: float
    proxy: float = math.inf
    psi1: float = math.inf

    @property
    def psi2(self) -> float:
        """A c^2 with ``E exp(<u, S>^2 / c^2) <= 2``: 8/3 rho^2, with equality for a Gaussian.

        For any score with that proxy ``E exp(a <u, S>^2) <= (1 - 2 a rho^2)^(-1/2)``: average ``exp(t <u, S>)`` over a
        Gaussian t of variance 2a.
        """
        return 8 / 3 * self.proxy


class Model(Protocol):
    """A distribution at one value of its parameter."""

    @property
    def dim(self) -> int:
        """Number of free parameters."""

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Independent samples, ``[count, ...]``."""

    def score(self, x: Array) -> Array:
        """Scores of samples: float64 ``[count, dim]``."""

    def constants(self) -> Constants:
        """The score's constants."""


@dataclass(frozen=True, eq=False)
class GaussianLocation:
    """N(theta, sigma^2 I): ``S = (x - theta) / sigma^2``.

    Attributes:
        theta: the mean, ``[d]``.
        sigma: standard deviation of every coordinate, positive.
    """

    theta: Array
    sigma: float = 1.0

    def __post_init__(self) -> None:
        parameters("GaussianLocation", self.theta, -math.inf, math.inf)
        within("sigma", self.sigma, 0, math.inf)

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return len(self.theta)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """``[count, d]``."""
        return self.theta + self.sigma * rng.standard_normal((count, self.dim))

    def score(self, x: Array) -> Array:
        """``[count, d]``."""
        return (x - self.theta) / self.sigma**2

    def constants(self) -> Constants:
        """All exact."""
        precision = self.sigma**-2
        return Constants(self.dim * precision, precision, precision)


@dataclass(frozen=True, eq=False)
class GaussianVariance:
    """N(0, diag theta): ``S_j = (x_j^2 / theta_j - 1) / (2 theta_j)``.

    Attributes:
        theta: the variances, ``[d]``, positive.
    """

    theta: Array

    def __post_init__(self) -> None:
        parameters("GaussianVariance", self.theta, 0, math.inf)

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return len(self.theta)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """``[count, d]``."""
        return np.sqrt(self.theta) * rng.standard_normal((count, self.dim))

    def score(self, x: Array) -> Array:
        """``[count, d]``."""
        return (x**2 / self.theta - 1) / (2 * self.theta)

    def constants(self) -> Constants:
        """Trace and variance are exact; psi1 is that of a coordinate at the smallest theta.

        ``log E exp(t S_1) = f(t) = -(t + log(1 - t)) / 2`` at theta = 1, and f(t) / t^2 increases, so that
        ``sum_j f(t u_j) <= f(|t|) sum_j u_j^2``: no unit vector has a larger exponential moment than a coordinate.
        """
        low = float(self.theta.min())
        return Constants(float((self.theta**-2.0).sum()) / 2, low**-2 / 2, psi1=(psi1_norm() / low) ** 2)


@cache
def psi1_norm() -> float:
    """The Orlicz norm psi_1 of ``(Z^2 - 1) / 2`` for a standard Gaussian Z: c with ``E exp(|.| / c) = 2``."""

    def excess(c: float) -> float:
        def integrand(z: float) -> float:
            return math.exp(abs(z * z - 1) / (2 * c) - z * z / 2)

        halves = quad(integrand, 0, 1)[0] + quad(integrand, 1, 60)[0]
        return float(halves * math.sqrt(2 / math.pi)) - 2

    return float(brentq(excess, 1.05, 2, xtol=1e-12))


@dataclass(frozen=True, eq=False)
class ProductBernoulli:
    """Independent coordinates in {0, 1} with means theta_j: ``S_j = (x_j - theta_j) / (theta_j (1 - theta_j))``.

    Attributes:
        theta: the means, ``[d]``, in (0, 1).
    """

    theta: Array

    def __post_init__(self) -> None:
        parameters("ProductBernoulli", self.theta, 0, 1)

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return len(self.theta)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """``[count, d]``."""
        return (rng.random((count, self.dim)) < self.theta).astype(float)

    def score(self, x: Array) -> Array:
        """``[count, d]``."""
        return (x - self.theta) / (self.theta * (1 - self.theta))

    def constants(self) -> Constants:
        """All exact; the proxy of ``x_j - theta_j`` is Kearns and Saul's (:func:`kearns_saul`)."""
        q = self.theta
        precision = 1 / (q * (1 - q))
        return Constants(float(precision.sum()), float(precision.max()), float((kearns_saul(q) * precision**2).max()))

    def support(self) -> tuple[Array, Array]:
        """All 2^d samples ``[2^d, d]`` and their probabilities.

        Raises:
            OptionError: too many to list.
        """
        if 2**self.dim > _MAX_SUPPORT:
            raise OptionError(f"2^{self.dim} samples are too many to list; use Monte Carlo, or at most 16 coordinates")
        x = (np.arange(2**self.dim)[:, None] >> np.arange(self.dim) & 1).astype(float)
        return x, np.where(x == 1, self.theta, 1 - self.theta).prod(1)


def kearns_saul(q: Array) -> Array:
    """The least rho^2 with ``E exp(t (X - q)) <= exp(rho^2 t^2 / 2)``, X in {0, 1} of mean q.

    ``(1 - 2 q) / (2 log(1/q - 1))``, 1/4 at 1/2 (Kearns and Saul, UAI 1998).
    """
    centred = np.abs(1 - 2 * q)
    return np.asarray(np.where(centred < 1e-4, 0.25, centred / (4 * np.arctanh(np.maximum(centred, 1e-4)))))


@dataclass(frozen=True, eq=False)
class Categorical:
    """One of d symbols 0 .. d-1; the probabilities of all but the last are the free parameters.

    Attributes:
        theta: the probabilities, ``[d]``, positive, of sum 1; d at least 2.
    """

    theta: Array

    def __post_init__(self) -> None:
        parameters("Categorical", self.theta, 0, 1)
        if abs(float(self.theta.sum()) - 1) > 1e-9:
            raise OptionError(f"theta of Categorical sums to {self.theta.sum():g}; it must sum to 1")

    @property
    def dim(self) -> int:
        """Number of free parameters, d - 1."""
        return len(self.theta) - 1

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Symbols ``[count]``."""
        return rng.choice(len(self.theta), count, p=self.theta / self.theta.sum()).astype(float)

    def score(self, x: Array) -> Array:
        """``S_i = 1{x = i} / theta_i - 1{x = d} / theta_d``: ``[count, d - 1]``."""
        one_hot = np.eye(len(self.theta))[x.astype(int)]
        return np.asarray(one_hot[:, :-1] / self.theta[:-1] - one_hot[:, -1:] / self.theta[-1])

    def constants(self) -> Constants:
        """Exact: ``I_X = diag(1 / theta_i) + 1 1^T / theta_d``."""
        information = np.diag(1 / self.theta[:-1]) + 1 / self.theta[-1]
        return Constants(float(np.trace(information)), float(np.linalg.eigvalsh(information)[-1]))

    def support(self) -> tuple[Array, Array]:
        """All symbols and their probabilities."""
        return np.arange(len(self.theta), dtype=float), self.theta


@dataclass(frozen=True, eq=False)
class HolderDensity:
    """Densities ``1 + sum_i theta_i g_i`` on [0, 1]: one bump in each of d cells of width h = 1 / d.

    ``g_i(x) = L 2^(1-s) h^s w((x - i h) / h)`` with the wave w of slopes +-1 that rises to 1/4, falls to -1/4 and
    rises to 0 again. Sums of bumps with |theta_i| <= 1 differ by at most ``L 2^(1-s) h^s min(|t|, 1/2)`` at distance
    ``h t``, hence by at most ``L |x - y|^s``: they are Hölder of smoothness s with constant L.

    Attributes:
        theta: heights, ``[d]``, in (-1, 1).
        smoothness: s in (0, 1].
        length: L, positive, small enough for a positive density.
    """

    theta: Array
    smoothness: float = 1.0
    length: float = 1.0

    def __post_init__(self) -> None:
        parameters("HolderDensity", self.theta, -1, 1)
        within("length", self.length, 0, math.inf)
        if not 0 < self.smoothness <= 1:
            raise OptionError(f"smoothness = {self.smoothness!r} must be in (0, 1]")
        if self.peak >= 1:
            raise OptionError(
                f"bumps of height {self.peak:.3g} make the density negative: take more cells than {self.dim} or a "
                f"smaller length than {self.length:g}"
            )

    @property
    def dim(self) -> int:
        """Number of cells."""
        return len(self.theta)

    @property
    def peak(self) -> float:
        """Largest value of a bump."""
        return float(self.length * 2 ** (1 - self.smoothness) * self.dim**-self.smoothness / 4)

    @property
    def energy(self) -> float:
        """``int g_i^2``: peak^2 h / 3."""
        return self.peak**2 / self.dim / 3

    def bump(self, x: Array) -> Array:
        """The bump of x's own cell at x, with theta = 1."""
        t = x * self.dim % 1
        return 4 * self.peak * (np.abs(np.abs(t - 0.25) - 0.5) - 0.25)

    def density(self, x: Array) -> Array:
        """The density at x."""
        return 1 + self.theta[self.cell(x)] * self.bump(x)

    def cell(self, x: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The cell of each sample."""
        return np.minimum((x * self.dim).astype(np.int64), self.dim - 1)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """``[count]``: a bump moves mass within its cell, from t to t + 1/2 or back, so no draw is wasted."""
        x = rng.random(count)
        moved = 2 * rng.random(count) > self.density(x)  # density(x) + density(x +- h/2) = 2
        t = x * self.dim
        other = np.floor(t) + (t % 1 + 0.5) % 1
        return np.where(moved, np.minimum(other / self.dim, np.nextafter(1, 0)), x)

    def score(self, x: Array) -> Array:
        """``S_i = g_i / density``: ``[count, d]``, one entry a row."""
        scores = np.zeros((len(x), self.dim))
        scores[np.arange(len(x)), self.cell(x)] = self.bump(x) / self.density(x)
        return scores

    def constants(self) -> Constants:
        """``Var <u, S>`` is at most ``int g^2 / (1 - (theta peak)^2)``, with equality at theta = 0."""
        cells = self.energy / (1 - (self.theta * self.peak) ** 2)
        return Constants(float(cells.sum()), float(cells.max()))
