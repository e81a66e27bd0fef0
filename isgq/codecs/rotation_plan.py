"""How many atoms, and how finely: the closed form of variance and bits, and the best trade between them.

An atom ``w u v^T`` with unit vectors ``u [o]`` and ``v [p]`` is sent with dithered steps ``s_u / sqrt(o)`` and
``s_v / sqrt(p)``: steps in units of the entries' root mean square. Dithered errors are independent and uniform, so with
noises ``N = s^2 / 12`` (the expected squared error of a vector of length 1) its error is

    w^2 kappa,   kappa = (1 + N_u) (1 + N_v) - 1

An atom that is sent with probability ``w / tau``, with weight tau then, has the variance ``w tau (1 + kappa) - w^2``.
Entries cost about ``log2(1 + 1 / N) / 2 + 0.254`` bits: the rate of a Gaussian with a Gaussian error, and what a
uniform error costs above it (Zamir and Feder, "On lattice quantization noise", 1996).

Minimise ``variance + slope * bits`` over everything, heavy atoms being those with w >= tau:

* light: probability and steps part. The steps minimise ``(1 + kappa) bits``, whatever the weight, and the probability
  is ``w / tau`` with ``tau^2 = slope bits / (1 + kappa)``;
* heavy: the steps minimise ``w^2 kappa + slope bits``. At w = tau they are those of the light ones.

So one number, the slope, in squared gradient a bit, decides everything; one slope for all tensors (and workers) is the
best use of their bits together.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from isgq.codecs.eus_plan import usa
from isgq.codecs.eus_sample import systematic
from isgq.codecs.rotation_sides import COARSEST, FINEST_CODE, Ints, Reals, Side, step_table
from isgq.core.kernels import compiled

ATOM_BITS = 32
"""What a heavy atom takes besides its symbols: weight and step codes."""

FIXED_BITS = 16 + 32 + 40
"""What every record takes: counts, the entry of the light atoms, and about what the frame takes."""

_HOST = torch.device("cpu")
_DEAD_ZONE_EXCESS = 0.05  # bits of an entry above the rate of a Gaussian


@dataclass(frozen=True, slots=True)
class Curve:
    """The useful pairs of steps of one shape: lower convex hull of (bits, kappa), from few bits to many.

    Attributes:
        bits: ``[c]`` of an atom.
        kappa: ``[c]`` relative variance of an atom that is sent.
        codes: ``[c, 2]`` of left and right.
        light: which is best for light atoms.
        losses: ``[c - 1]``: kappa's (negative) growth for a bit, from each pair to the next.
    """

    bits: Reals
    kappa: Reals
    codes: Ints
    light: int
    losses: Reals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # kappa falls by less and less for a bit: take bits while a bit takes away slope / w^2 or more
        object.__setattr__(self, "losses", np.diff(self.kappa) / np.diff(self.bits))

    @property
    def of_light(self) -> tuple[float, float]:
        """Kappa and symbols' bits of a light atom."""
        return float(self.kappa[self.light]), float(self.bits[self.light]) - ATOM_BITS

    def heavy(self, squares: Reals, slope: float) -> Ints:
        """Which pair is best for each heavy atom, by the squares of their weights."""
        chosen: Ints = self.losses.searchsorted(-slope / squares, side="right")
        return chosen


@functools.lru_cache(maxsize=256)
def curve(left: Side, right: Side) -> Curve:
    """The curve of two sides."""
    codes = np.arange(FINEST_CODE + 1)
    kappa = ((1 + left.noises[:, None]) * (1 + right.noises[None]) - 1).reshape(-1)
    bits = (left.bits[:, None] + right.bits[None]).reshape(-1) + ATOM_BITS
    order = np.lexsort((kappa, bits))
    hull: list[int] = []
    for i in order[_falling(kappa[order])]:
        while len(hull) > 1:
            a, b = hull[-2:]
            if (kappa[b] - kappa[a]) * (bits[i] - bits[a]) < (kappa[i] - kappa[a]) * (bits[b] - bits[a]):
                break
            hull.pop()
        hull.append(i)
    index = np.array(hull)
    light = int(np.argmin((1 + kappa[index]) * (bits[index] - ATOM_BITS)))
    return Curve(bits[index], kappa[index], np.stack(np.divmod(index, len(codes)), 1), light)


def _falling(values: Reals) -> npt.NDArray[np.bool_]:
    """Which values are below all before them."""
    return values < np.concatenate([[np.inf], np.minimum.accumulate(values)[:-1]])


@dataclass(frozen=True)
class Spectrum:
    """The weights of a gradient's atoms, falling, and the sides that their vectors have."""

    weights: Reals
    left: Side
    right: Side

    @functools.cached_property
    def energy(self) -> float:
        """Squared norm of the gradient."""
        return float(self.squares.sum())

    @functools.cached_property
    def squares(self) -> Reals:
        """Of the weights."""
        return np.square(self.weights)

    @functools.cached_property
    def rests(self) -> tuple[Reals, Reals]:
        """Sums of the weights, and of their squares, from each on: ``[j + 1]``, the last 0."""
        weights, squares = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (self.weights, self.squares))
        return weights, squares

    @functools.cached_property
    def rising(self) -> Reals:
        """The weights, negated."""
        return -self.weights


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent of a spectrum.

    Attributes:
        heavy: how many of the heaviest atoms are sent always.
        codes: int64 ``[heavy, 2]``: their step codes, left and right.
        light_codes: int64 ``[2]``: those of light atoms.
        tau: the weight of a light atom that is sent; 0 where none can be.
        variance: expected squared error.
        bits: expected.
    """

    heavy: int
    codes: Ints
    light_codes: Ints
    tau: float
    variance: float
    bits: float


def plan_of_atoms(spectrum: Spectrum, count: int, step: float) -> Plan:
    """As many atoms as asked for, with one step: efficient unbiased sparsification of the spectrum."""
    w = spectrum.weights
    chosen = usa(torch.from_numpy(w), count) if len(w) else None
    heavy, tau = (len(chosen.heavy), chosen.level) if chosen is not None else (0, 0.0)
    code = np.full(2, np.abs(step_table() - step).argmin())
    kappa = float((1 + spectrum.left.noises[code[0]]) * (1 + spectrum.right.noises[code[1]]) - 1)
    light, sent = w[heavy:], count - heavy if tau else 0
    variance = (
        (w[:heavy] ** 2).sum() * kappa + (light * tau * (1 + kappa) - light**2).sum() if tau else kappa * (w**2).sum()
    )
    bits = curve(spectrum.left, spectrum.right).bits[0] * (heavy + sent)
    return Plan(heavy, np.tile(code, (heavy, 1)), code, tau, float(variance), float(bits))


Planner = Callable[[Spectrum, float], Plan]
"""``(spectrum, slope) -> plan``; bits fall and variance grows with the slope."""


def plan_at_slope(spectrum: Spectrum, slope: float) -> Plan:
    """The plan that minimises ``variance + slope * bits``.

    Args:
        spectrum: of the gradient.
        slope: squared gradient a bit, positive.
    """
    c = curve(spectrum.left, spectrum.right)
    kappa, bits = c.of_light
    tau = math.sqrt(slope * bits / (1 + kappa))
    heavy = int(spectrum.rising.searchsorted(-tau, side="right"))
    squares = spectrum.squares[:heavy]
    chosen = c.heavy(squares, slope)
    light, energy = (float(rest[heavy]) for rest in spectrum.rests)
    variance = _sum(squares * c.kappa[chosen]) + light * tau * (1 + kappa) - energy
    total = _sum(c.bits[chosen]) + light / tau * bits + FIXED_BITS
    return Plan(heavy, c.codes[chosen], c.codes[c.light], tau, variance, total)


def _sum(values: Reals) -> float:
    """One after the other, as the kernel adds, which numpy's sum does not."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def mmse_plan_at_slope(spectrum: Spectrum, slope: float) -> Plan:
    """The plan of least ``error + slope * bits`` where nothing is random: atoms are sent finely enough, or not at all.

    Reverse water-filling: noises ``N = slope * size / (2 ln 2 w^2)``, the same step in the gradient's units for every
    entry of every vector; a decoder that knows the noise errs by ``D = N / (1 + N)``. An atom is sent if it takes more
    error away than its bits are worth.

    Args:
        spectrum: of the gradient.
        slope: squared gradient a bit, positive.
    """
    sizes, table = np.array([spectrum.left.size, spectrum.right.size]), step_table()
    wanted = np.sqrt(12 * slope / (2 * math.log(2)) * sizes / spectrum.weights[:, None] ** 2)
    codes = np.clip(np.rint(8 * np.log2(COARSEST / wanted)), 0, FINEST_CODE).astype(np.int64)
    noises = table[codes] ** 2 / 12
    errors = 1 - (1 / (1 + noises)).prod(1)
    bits = (sizes * (np.log2(1 + 1 / noises) / 2 + _DEAD_ZONE_EXCESS)).sum(1) + ATOM_BITS
    energies = spectrum.weights**2
    count = int((energies * (1 - errors) > slope * bits).cumprod().sum())
    error = (energies[:count] * errors[:count]).sum() + energies[count:].sum()
    return Plan(count, codes[:count], codes[:0].sum(0), 0.0, float(error), float(bits[:count].sum()) + FIXED_BITS)


def slope_for_bits(spectra: Sequence[Spectrum], bits: float, planner: Planner = plan_at_slope) -> float:
    """The smallest slope at which the plans of all spectra together take no more bits, if any is large enough."""
    return _bisect(spectra, planner, lambda totals: math.fsum(totals[1]) <= bits)[1]


def slope_for_variance(spectra: Sequence[Spectrum], variance: float, planner: Planner = plan_at_slope) -> float:
    """The largest slope at which the plans of all spectra together have no more variance."""
    return _bisect(spectra, planner, lambda totals: math.fsum(totals[0]) > variance)[0]


def _bisect(spectra: Sequence[Spectrum], planner: Planner, above: Callable[[Reals], bool]) -> tuple[float, float]:
    """Two slopes 1.0003 apart, between which ``above`` of the plans' variances and bits ``[2, spectra]`` turns true."""
    energy, totals = math.fsum(spectrum.energy for spectrum in spectra), _totals(spectra, planner)
    low, high = -70.0, 40.0  # log2, in units of the energy
    for _ in range(18):
        middle = (low + high) / 2
        if above(totals(energy * 2.0**middle)):
            high = middle
        else:
            low = middle
    return energy * float(2.0**low), energy * float(2.0**high)


def _totals(spectra: Sequence[Spectrum], planner: Planner) -> Callable[[float], Reals]:
    """Variance and bits of the plan of each spectrum, by the slope: ``[2, spectra]``."""
    totals = np.empty((2, len(spectra)))
    kernels = compiled("choose", _HOST) if planner is plan_at_slope else None
    if kernels is None:

        def by_plans(slope: float) -> Reals:
            plans = [planner(spectrum, slope) for spectrum in spectra]
            totals[:] = [plan.variance for plan in plans], [plan.bits for plan in plans]
            return totals

        return by_plans
    weights = np.concatenate([spectrum.weights for spectrum in spectra])
    ends = np.cumsum([len(spectrum.weights) for spectrum in spectra])
    curves = _curves(tuple((spectrum.left, spectrum.right) for spectrum in spectra))

    def by_kernel(slope: float) -> Reals:
        kernels.plan_totals(weights, ends, *curves, slope, FIXED_BITS, totals)
        return totals

    return by_kernel


@functools.lru_cache(maxsize=16)
def _curves(sides: tuple[tuple[Side, Side], ...]) -> tuple[Reals, Reals, Reals, Ints, Reals, Reals]:
    """What the kernel takes of all curves."""
    curves = [curve(*each) for each in sides]
    losses, kappa, bits = (np.concatenate([getattr(c, name) for c in curves]) for name in ("losses", "kappa", "bits"))
    places = np.cumsum([0, *(len(c.bits) for c in curves)])
    light_kappa, light_bits = np.array([c.of_light for c in curves]).T.copy()
    return losses, kappa, bits, places, light_kappa, light_bits


def expected_bits(spectrum: Spectrum, plan: Plan, light: int) -> float:
    """Bits of a plan of which so many light atoms were drawn."""
    if not plan.tau:
        return plan.bits
    c = curve(spectrum.left, spectrum.right)
    surplus = light - spectrum.weights[plan.heavy :].sum() / plan.tau
    return plan.bits + float(surplus * (c.bits[c.light] - ATOM_BITS))


def draw(weights: torch.Tensor, plan: Plan, digest: int) -> tuple[Ints, Reals]:
    """Atoms that are sent, heavy ones first, and their weights.

    Light ones are drawn with probability ``w / tau``; where these sum to no integer, an atom that does not exist makes
    up for what is missing, and is not sent.

    Args:
        weights: float64 ``[j]`` of the spectrum, on the host.
        plan: of the same.
        digest: names the draw.
    """
    light = weights[plan.heavy :]
    index, sent = np.arange(plan.heavy), weights[: plan.heavy].numpy()
    if plan.tau and light.numel():
        expected = float(light.sum()) / plan.tau
        count = max(1, math.ceil(expected - 1e-9))
        pool = np.append(light.numpy(), max(0.0, count - expected) * plan.tau)
        drawn = systematic(torch.from_numpy(pool), count, digest).numpy()
        drawn = drawn[: drawn.searchsorted(light.numel())]
        index = np.concatenate([index, plan.heavy + drawn])
        sent = np.concatenate([sent, np.full(len(drawn), plan.tau)])
    return index, sent
