"""Efficient unbiased sparsification: which entries to keep, with what probability, and at what value.

Source: Barnes, Cameron, Chow, Cohen, Frankston, Howard, Kochman, Scheinerman and VanderKam, "Efficient Unbiased
Sparsification" (ISIT 2024). For p >= 0 in R^n, an unbiased m-sparsification is a random Q with E Q = p and at most m
nonzero entries; an *efficient* one minimises E Div(Q, p). The best law keeps the *heavy* entries as they are and each
*light* entry i with probability pi_i < 1 at the value p_i / pi_i, exactly m in all. Signs are put back afterwards.

* USA: for every convex divergence that is symmetric in the entries, such as squared error or Kullback-Leibler, at
  once. All light entries take one value tau, so the l1 norm is kept in every draw.
* UWSA: for a sum of strictly convex f_i, through ``psi_i(x) = x f_i'(x) - f_i(x) + f_i(0)``. A light entry takes the
  value ``psi_i^-1(lambda)``, where the multiplier lambda solves ``sum_i min(1, p_i / psi_i^-1(lambda)) = m``.

A plan holds the probabilities; a sampler (:mod:`isgq.codecs.eus_sample`) draws positions with these marginals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isgq.core.errors import CodecError

_REACH = 16.0  # how far the level may fall before the entries are looked through again
_CHUNK = 1 << 16  # elements a piece of a sum on the CPU
_ITERATIONS = 2100  # of a bisection over all positive float64 numbers; most end long before


@dataclass(frozen=True, slots=True)
class Plan:
    """What to keep of a vector p of n nonnegative entries.

    Attributes:
        scores: ``[n]``: a light entry is kept with probability ``score / level``.
        heavy: int64 ``[h]``, increasing: the entries that are always kept, at their own value.
        light: how many of the others are kept in every draw, m - h.
        level: above the score of every light entry; for USA this is tau, the value that all light entries take. 0
            where none is kept.
    """

    scores: Tensor
    heavy: Tensor
    light: int
    level: float

    @property
    def light_scores(self) -> Tensor:
        """``[n]``: the scores, with 0 for the heavy; proportional to what a sampler is to keep."""
        return self.scores.index_fill(0, self.heavy, 0.0) if self.heavy.numel() else self.scores

    def inclusion(self) -> Tensor:
        """The probability that an entry is kept: float64 ``[n]``, 1 for the heavy, 0 for zeros, with the sum m."""
        scores = self.scores.to(torch.float64)
        pi = scores / self.level if self.light else torch.zeros_like(scores)
        return pi.index_fill_(0, self.heavy, 1.0)

    def variance(self, p: Tensor) -> Tensor:
        """Closed form of ``E ||Q - p||**2 = sum_i p_i**2 (1 / pi_i - 1)``: float64 scalar.

        For USA this is ``(sum of light)**2 / (m - h) - sum of light**2``.

        Args:
            p: the vector ``[n]`` that the plan was made for.
        """
        pi = self.inclusion()
        return torch.where(pi > 0, p.to(torch.float64).square() * (1 / pi - 1), 0.0).sum()


def _almost_one(m: int) -> float:
    """Probabilities from here on count as 1, so that rounding can never make a sampler draw an entry twice.

    The gap covers the errors of float64 sums over any vector that fits in memory. It stays below 1 / m, so that no
    more than m entries can count as heavy.
    """
    return 1 - min(2.0**-36 + m * 2.0**-46, 1 / (4 * m))


def _sum(scores: Tensor) -> float:
    """Sum in float64; in pieces on the CPU, where torch would make a float64 copy of the whole."""
    size = _CHUNK if scores.device.type == "cpu" else max(scores.numel(), 1)
    return float(torch.stack([part.sum(dtype=torch.float64) for part in torch.split(scores, size)]).sum())


def threshold(scores: Tensor, m: int) -> tuple[Tensor, int, float]:
    """Find the level s with ``sum_i min(1, scores_i / s) = m``, without sorting.

    1. s <- (sum of the scores) / m, nothing heavy.
    2. heavy <- what has a score of s or more; s <- (sum of the others) / (m - h).
    3. Repeat 2 until no score becomes heavy. s only falls, so at most m times, in practice a few.

    Only scores above s / 16 are looked at again, until s falls below that. Sums are float64 throughout.

    Args:
        scores: ``[n]``, nonnegative and finite.
        m: how many to keep.

    Returns:
        Positions of the heavy (int64, increasing), the number of others to keep, and s (0 if that number is 0).
    """
    almost_one = _almost_one(m)
    level, floor = _sum(scores) / m, math.inf
    none = torch.arange(0, device=scores.device)
    if level == 0 or float(scores.amax()) < level * almost_one:
        return none, m if level else 0, level
    while level < floor:
        floor = level / _REACH
        reached = scores >= floor
        near, rest = reached.nonzero().squeeze(1), _sum(scores.masked_fill(reached, 0.0))
        light = scores[near].to(torch.float64)  # a level must not be rounded to float32 to be compared
        is_light = torch.ones_like(near, dtype=torch.bool)
        left, known = m, -1
        while level >= floor and known < m - left:
            known = m - left
            is_light &= light < level * almost_one
            left = m - int((~is_light).sum())
            mass = rest + _sum(light[is_light])
            # Nothing is left to share where rounding has swallowed what is light, or where m entries or fewer are
            # nonzero: everything then counts as heavy or as zero.
            if left <= 0 or mass == 0:
                return near[~is_light], 0, 0.0
            level = mass / left
    return near[~is_light], left, level


def _check(p: Tensor, m: int) -> None:
    if p.ndim != 1 or not p.is_floating_point():
        raise CodecError(f"a plan is made for a 1-d floating-point vector, got {p.dtype} of shape {tuple(p.shape)}")
    if m < 1:
        raise CodecError(f"a plan keeps at least one entry, got m={m}")
    if p.numel() and not float(p.amin()) >= 0:
        raise CodecError("a plan is made for magnitudes: p has a negative or NaN entry")


def usa(p: Tensor, m: int) -> Plan:
    """The plan that is optimal for all symmetric convex divergences at once (Barnes et al. 2024, USA).

    Args:
        p: ``[n]``, nonnegative and finite.
        m: how many entries to keep. With m or fewer nonzero entries, all are heavy.

    Raises:
        CodecError: p is no nonnegative vector, or m < 1.
    """
    _check(p, m)
    return Plan(p, *threshold(p, m))


class Divergence(Protocol):
    """A sum of strictly convex functions ``f_i(q_i)``, minimal at ``q = p``, with ``f_i(0)`` finite."""

    def psi_inverse(self, level: float, p: Tensor) -> Tensor:
        """The x with ``psi_i(x) = x f_i'(x) - f_i(x) + f_i(0) = level``: broadcastable to ``[n]``, increasing."""
        ...


class ScaledDivergence(Divergence, Protocol):
    """A divergence whose ``psi_inverse`` grows by one common factor with the level.

    The inclusion probabilities are then ``min(1, score / s)`` for some s, and no search for the level is needed.
    """

    def score(self, p: Tensor) -> Tensor:
        """``p / psi_inverse(1, p)``: ``[n]``, 0 where p is 0."""
        ...


@dataclass(frozen=True, slots=True)
class Squared:
    """``sum g_i (q_i - p_i)**2``; without weights the plan is USA's. psi(x) = g x**2.

    Attributes:
        weight: g, positive: a number or ``[n]``.
    """

    weight: Tensor | float = 1.0

    def psi_inverse(self, level: float, p: Tensor) -> Tensor:
        """sqrt(level / g)."""
        return (level / (torch.ones_like(p) * self.weight)).sqrt()

    def score(self, p: Tensor) -> Tensor:
        """P sqrt(g)."""
        return p * (torch.ones_like(p) * self.weight).sqrt()


@dataclass(frozen=True, slots=True)
class KullbackLeibler:
    """``sum w_i (q_i log(q_i / p_i) - q_i + p_i)``; without weights the plan is USA's. psi(x) = w x.

    Attributes:
        weight: w, positive: a number or ``[n]``.
    """

    weight: Tensor | float = 1.0

    def psi_inverse(self, level: float, p: Tensor) -> Tensor:
        """Level / w."""
        return level / (torch.ones_like(p) * self.weight)

    def score(self, p: Tensor) -> Tensor:
        """P w."""
        return p * self.weight


@dataclass(frozen=True, slots=True)
class ChiSquared:
    """``sum (q_i - p_i)**2 / p_i``, the relative error: not symmetric, so the plan is not USA's. psi(x) = x**2 / p."""

    def psi_inverse(self, level: float, p: Tensor) -> Tensor:
        """sqrt(level p)."""
        return (level * p).sqrt()

    def score(self, p: Tensor) -> Tensor:
        """sqrt(p)."""
        return p.sqrt()


@dataclass(frozen=True, slots=True)
class Separable:
    """Any sum of strictly convex functions, given by psi, which is inverted numerically.

    Attributes:
        psi: ``(x, p) -> x f_i'(x) - f_i(x) + f_i(0)``, all ``[n]`` float64: increasing and unbounded in x, and 0 at 0.
    """

    psi: Callable[[Tensor, Tensor], Tensor]

    def psi_inverse(self, level: float, p: Tensor) -> Tensor:
        """Bisection for every entry at once.

        Raises:
            CodecError: psi stays below the level.
        """
        low, high = torch.zeros_like(p), torch.ones_like(p)
        for _ in range(1024):
            short = self.psi(high, p) < level
            if not short.any():
                break
            low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
        else:
            raise CodecError(f"psi of the divergence never reaches {level}; it must be unbounded")
        for _ in range(_ITERATIONS):
            middle = (low + high) / 2
            if ((middle == low) | (middle == high)).all():
                break
            short = self.psi(middle, p) < level
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        return high


def _searched(p: Tensor, m: int, divergence: Divergence) -> Plan:
    """The plan for a divergence of which only ``psi_inverse`` is known; bisection for log2 of the level."""
    positive = p > 0

    def inclusion(log_level: float) -> Tensor:
        x = divergence.psi_inverse(2.0**log_level, p).expand_as(p)
        return torch.where(positive, p / x, 0.0).clamp(max=1.0)

    low, high = -1.0, 1.0
    while low > -512 and float(inclusion(low).sum()) < m:
        low *= 2
    while high < 512 and float(inclusion(high).sum()) > m:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if float(inclusion(middle).sum()) > m else (low, middle)
    probability = inclusion(high)
    heavy = (probability >= _almost_one(m)).nonzero().squeeze(1)
    light = m - heavy.numel()
    # What the bisection leaves is spread over the light, so that the sum of their probabilities is an integer.
    rest = float(probability.index_fill(0, heavy, 0.0).sum())
    return Plan(probability, heavy, light, rest / light if light else 0.0)


def uwsa(p: Tensor, m: int, divergence: Divergence) -> Plan:
    """The optimal plan for a sum of strictly convex functions of the entries (Barnes et al. 2024, UWSA).

    Args:
        p: ``[n]``, nonnegative and finite.
        m: how many entries to keep. With m or fewer nonzero entries, all are heavy.
        divergence: what to minimise. With a ``score`` the level is found as in USA, otherwise by bisection.

    Raises:
        CodecError: p is no nonnegative vector, m < 1, or the divergence's psi is bounded.
    """
    _check(p, m)
    score = getattr(divergence, "score", None)
    if score is not None:
        scores = score(p)
        return Plan(scores, *threshold(scores, m))
    nonzero = p.nonzero().squeeze(1)
    if nonzero.numel() <= m:
        return Plan(p, nonzero, 0, 0.0)
    return _searched(p.to(torch.float64), m, divergence)
