"""Random configurations: no message may know more than its bounds, and no scheme do better than its bound."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.estimation import priors, schemes
from analysis.estimation.bounds import BIT_BOUNDS, MESSAGE_BOUNDS
from analysis.estimation.checks import Array, at_least
from analysis.estimation.information import estimate, exact
from analysis.estimation.models import (
    Categorical,
    GaussianLocation,
    GaussianVariance,
    HolderDensity,
    Model,
    ProductBernoulli,
)
from analysis.estimation.priors import Prior
from analysis.estimation.protocols import Kind
from analysis.estimation.quantizers import Voronoi, index_bits

_SAMPLES = 2000
_PARAMETERS = 8
_SIMULATED = 16  # parameters of a simulated risk: its spread is known from these, so more of them and fewer trials each
_TRIALS = 2
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Comparison:
    """A value and the bound on it.

    Attributes:
        family: the model, and the scheme or quantizer.
        quantity: an information has upper bounds, a risk lower ones.
        value: measured or exact.
        error: its standard error, 0 where exact.
        bound: the sharpest that applies.
        binding: its name.
    """

    family: str
    quantity: Literal["information", "risk"]
    value: float
    error: float
    bound: float
    binding: str

    @property
    def ratio(self) -> float:
        """At least 1 where the bound holds."""
        over, under = (self.value, self.bound) if self.quantity == "risk" else (self.bound, self.value)
        return over / under if under > _ROUNDING else math.inf

    def holds(self, deviations: float = 4.5) -> bool:
        """Whether the value is on the right side, but for so many standard errors."""
        sign = 1 if self.quantity == "risk" else -1
        return sign * (self.value - self.bound) >= -deviations * self.error - _ROUNDING * max(1.0, self.bound)


def _integer(rng: np.random.Generator, low: int, high: int) -> int:
    """From low to high, both included, small numbers as likely as large ones on a logarithmic scale."""
    return min(high, int(low * math.exp(rng.random() * math.log((high + 1) / low))))


def _cells(model: Model, bits: int, rng: np.random.Generator) -> Voronoi:
    """Cells of random centres among the scores, of random spread."""
    centres = model.score(model.sample(2**bits, rng)) * rng.uniform(0.1, 1.5)
    return Voronoi(model, centres)


def _information(family: str, model: Model, bits: int, rng: np.random.Generator) -> Comparison:
    quantizer, constants = _cells(model, bits, rng), model.constants()
    if isinstance(model, ProductBernoulli | Categorical):
        x, weights = model.support()
        found = exact(model.score(x), weights, quantizer(x, rng))
    else:
        found = estimate(model, quantizer, _SAMPLES, rng)
    bounds = {name: bound(constants, bits) for name, bound in BIT_BOUNDS.items()}
    if not found.error:  # estimated probabilities are no probabilities
        bounds |= {name: bound(constants, found.probabilities) for name, bound in MESSAGE_BOUNDS.items()}
    binding = min(bounds, key=bounds.__getitem__)
    return Comparison(family, "information", found.trace, found.error, bounds[binding], binding)


def _location_information(rng: np.random.Generator) -> Comparison:
    dim = _integer(rng, 1, 32)
    return _information("Gaussian location", GaussianLocation(rng.normal(size=dim)), _integer(rng, 1, 4), rng)


def _variance_information(rng: np.random.Generator) -> Comparison:
    model = GaussianVariance(rng.uniform(0.5, 2, _integer(rng, 1, 32)))
    return _information("Gaussian variance", model, _integer(rng, 1, 4), rng)


def _bernoulli_information(rng: np.random.Generator) -> Comparison:
    dim = _integer(rng, 1, 8)
    theta = rng.uniform(0.02, 0.98, dim) if rng.random() < 0.5 else np.full(dim, rng.uniform(0.02, 0.5))
    return _information("product Bernoulli", ProductBernoulli(theta), _integer(rng, 1, 6), rng)


def _categorical_information(rng: np.random.Generator) -> Comparison:
    theta = rng.dirichlet(np.full(_integer(rng, 2, 60), 2.0))
    return _information("categorical", Categorical(theta / theta.sum()), _integer(rng, 1, 5), rng)


def _holder_information(rng: np.random.Generator) -> Comparison:
    model = HolderDensity(rng.uniform(-0.9, 0.9, _integer(rng, 1, 16)), rng.uniform(0.2, 1), 1.0)
    return _information("Hölder density", model, _integer(rng, 1, 4), rng)


def _risk(family: str, value: float, error: float, prior: Prior, nodes: int, bits: int) -> Comparison:
    bound = prior.bound(nodes, bits)
    return Comparison(family, "risk", value, error, bound.value, bound.binding)


def _mean_risk(risk: Callable[[Array], float], prior: Prior, rng: np.random.Generator) -> tuple[float, float]:
    """Of a risk in closed form over parameters of the prior, and the standard error."""
    risks = [risk(prior.sample(rng)) for _ in range(_PARAMETERS)]
    return float(np.mean(risks)), float(np.std(risks, ddof=1)) / math.sqrt(_PARAMETERS)


def _sign_bits(rng: np.random.Generator) -> Comparison:
    dim, bits, largest, sigma = _integer(rng, 1, 64), _integer(rng, 1, 16), rng.uniform(0.2, 2), rng.uniform(0.5, 2)
    nodes = _integer(rng, -(-dim // min(bits, dim)), 2000)
    prior = priors.gaussian_location(dim, sigma, largest)
    counts, times = np.unique(schemes.served(nodes, bits, dim), return_counts=True)
    one = priors.gaussian_location(32, sigma, largest).sample(rng)
    risks = np.array([schemes.sign_bits_risk(one, int(count), sigma, largest) for count in counts])
    each = times @ risks
    return _risk("signs, Gaussian location", each.mean(), each.std() / math.sqrt(len(one)), prior, nodes, bits)


def _simulated(
    family: str,
    make: Callable[[Array], Model],
    scheme: schemes.Scheme,
    prior: Prior,
    board: tuple[int, int, Kind],
    rng: np.random.Generator,
) -> Comparison:
    risks = []
    for _ in range(_SIMULATED):
        theta = prior.sample(rng)
        risks.append(schemes.simulate(scheme, make(theta), theta, board, _TRIALS, rng).value)
    mean, error = float(np.mean(risks)), float(np.std(risks, ddof=1)) / math.sqrt(_SIMULATED)
    return _risk(family, mean, error, prior, board[0], board[1])


def _adaptive_signs(rng: np.random.Generator) -> Comparison:
    dim, bits = _integer(rng, 1, 16), _integer(rng, 1, 8)
    board: tuple[int, int, Kind] = (_integer(rng, 20, 60), bits, "sequential")
    prior = priors.gaussian_location(dim)
    return _simulated("adaptive signs, Gaussian location", GaussianLocation, schemes.AdaptiveSigns(), prior, board, rng)


def _exceedances(rng: np.random.Generator) -> Comparison:
    dim, bits, low = _integer(rng, 1, 64), _integer(rng, 1, 6), rng.uniform(0.3, 1)
    high = low * rng.uniform(1.3, 4)
    scheme, prior = schemes.FirstExceedance(low, high), priors.gaussian_variance(dim, low, high)
    board: tuple[int, int, Kind] = (_integer(rng, 64, 600), bits, "independent")
    return _simulated("first exceedance, Gaussian variance", GaussianVariance, scheme, prior, board, rng)


def _verbatim(rng: np.random.Generator) -> Comparison:
    dim, bits = _integer(rng, 1, 64), _integer(rng, 1, 80)
    nodes, prior = _integer(rng, dim, 20000), priors.dense_bernoulli(dim, rng.uniform(0.05, 0.45))
    mean, error = _mean_risk(lambda theta: schemes.verbatim_bits_risk(theta, nodes, bits), prior, rng)
    return _risk("verbatim bits, product Bernoulli", mean, error, prior, nodes, bits)


def _random_ones(rng: np.random.Generator) -> Comparison:
    dim = _integer(rng, 4, 200)
    prior = priors.sparse_bernoulli(dim, rng.uniform(0.2, dim / 2), rng.uniform(0.1, 0.9))
    nodes, ones = _integer(rng, 1, 20000), _integer(rng, 1, 16)
    bits = (ones + 1) * index_bits(dim + 1)
    mean, error = _mean_risk(lambda theta: schemes.random_ones_risk(theta, ones, nodes), prior, rng)
    return _risk("random ones, sparse Bernoulli", mean, error, prior, nodes, bits)


def _histogram(rng: np.random.Generator) -> Comparison:
    symbols, bits = _integer(rng, 2, 64), _integer(rng, 1, 7)
    nodes, prior = _integer(rng, symbols, 10**6), priors.categorical(symbols, rng.uniform(0.05, 0.95))

    def risk(theta: Array) -> float:
        return schemes.group_histogram_risk(np.append(theta, 1 - theta.sum()), nodes, bits)

    mean, error = _mean_risk(risk, prior, rng)
    return _risk("group histogram, categorical", mean, error, prior, nodes, bits)


def _holder_histogram(rng: np.random.Generator) -> Comparison:
    cells, bits, smoothness = _integer(rng, 2, 32), _integer(rng, 1, 6), rng.uniform(0.3, 1)
    nodes, prior = _integer(rng, 100, 10**6), priors.holder_density(cells, smoothness, 1.0)
    bins = schemes.holder_bins(smoothness, 1.0, nodes, bits)

    def risk(theta: Array) -> float:
        return schemes.holder_risk(HolderDensity(theta, smoothness, 1.0), bins, nodes, bits)

    mean, error = _mean_risk(risk, prior, rng)
    return _risk("group histogram, Hölder density", mean, error, prior, nodes, bits)


FAMILIES: tuple[Callable[[np.random.Generator], Comparison], ...] = (
    _location_information,
    _variance_information,
    _bernoulli_information,
    _categorical_information,
    _holder_information,
    _sign_bits,
    _adaptive_signs,
    _exceedances,
    _verbatim,
    _random_ones,
    _histogram,
    _holder_histogram,
)
"""A kind of random configuration each, taken in turn."""


def random_configurations(count: int, seed: int) -> Iterator[Comparison]:
    """So many comparisons, each from a generator of its own: a prefix does not depend on the count.

    Args:
        count: how many, at least 1.
        seed: of all.
    """
    for number in range(at_least("count", count)):
        yield FAMILIES[number % len(FAMILIES)](np.random.default_rng((seed, number)))
