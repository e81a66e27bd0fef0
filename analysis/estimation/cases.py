"""The schemes at work: what each costs at a given d, k and n, and what no protocol can do better than."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.estimation import priors, schemes
from analysis.estimation.bounds import RiskBound
from analysis.estimation.models import GaussianVariance

_VARIANCES = (0.5, 2.0)
_SPARSITY = 0.1  # s / d
_TRIALS = 4


@dataclass(frozen=True)
class Case:
    """A model with the scheme that attains its rate.

    Attributes:
        model: name.
        scheme: name, and where the risk is taken.
        rate: the published order.
        risk: ``(d, k, n) ->`` squared error; exact, but simulated for the Gaussian variance.
        bound: ``(d, k, n) ->`` van Trees' bound.
        dims: values of d to show; the middle one where another number varies. A single one where d means nothing.
        bits: the same for k.
        nodes: the same for n.
    """

    model: str
    scheme: str
    rate: str
    risk: Callable[[int, int, int], float]
    bound: Callable[[int, int, int], RiskBound]
    dims: tuple[int, ...]
    bits: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def middle(self) -> tuple[int, int, int]:
        """Where the others stay while one of d, k and n varies."""
        d, k, n = (values[len(values) // 2] for values in (self.dims, self.bits, self.nodes))
        return d, k, n


def location_risk(d: int, k: int, n: int) -> float:
    """Of :class:`schemes.SignBits`: the worst of equal means 0, 1/2 and 1, at sigma = 1."""
    counts, times = np.unique(schemes.served(n, k, d), return_counts=True)
    means = np.array([0.0, 0.5, 1.0])
    return float((times @ np.array([schemes.sign_bits_risk(means, int(count)) for count in counts])).max())


def _variance_risk(d: int, k: int, n: int) -> float:
    rng = np.random.default_rng((d, k, n))
    theta = rng.uniform(*_VARIANCES, d)
    scheme = schemes.FirstExceedance(*_VARIANCES)
    return schemes.simulate(scheme, GaussianVariance(theta), theta, (n, k, "independent"), _TRIALS, rng).value


def _sparse_risk(d: int, k: int, n: int) -> float:
    return schemes.random_ones_risk(np.full(d, _SPARSITY), schemes.random_ones(k, d), n)


def _holder_risk(d: int, k: int, n: int) -> float:
    return schemes.holder_guarantee(1.0, 1.0, schemes.holder_bins(1.0, 1.0, n, k), n, k)


def _holder_bound(d: int, k: int, n: int) -> RiskBound:
    return priors.best_bound((priors.holder_density(cells, 1.0, 1.0) for cells in range(1, 300)), n, k)


CASES = (
    Case(
        "Gaussian location",
        "signs of k coordinates; worst of theta = 0, 0.5, 1",
        "d² / (n k)",
        location_risk,
        lambda d, k, n: priors.gaussian_location(d).bound(n, k),
        (16, 32, 64, 128, 256),
        (1, 2, 4, 8, 16),
        (1000, 2000, 4000, 8000, 16000),
    ),
    Case(
        "Gaussian variance",
        "first exceedance among 2^k - 1; random theta",
        "d² / (n k²)",
        _variance_risk,
        lambda d, k, n: priors.gaussian_variance(d, *_VARIANCES).bound(n, k),
        (15, 30, 60, 120, 240),
        (1, 2, 3, 4, 5, 6),
        (2000, 4000, 8000, 16000, 32000),
    ),
    Case(
        "product Bernoulli",
        "k coordinates as they are; theta = 1/2",
        "d² / (n k)",
        lambda d, k, n: schemes.verbatim_bits_risk(np.full(d, 0.5), n, k),
        lambda d, k, n: priors.over_widths(lambda width: priors.dense_bernoulli(d, width / 2), n, k),
        (16, 32, 64, 128, 256),
        (1, 2, 4, 8, 16),
        (1000, 2000, 4000, 8000, 16000),
    ),
    Case(
        "sparse Bernoulli",
        "random-k of ones; theta = s / d, s = d / 10",
        "s² log(d/s) / (n k)",
        _sparse_risk,
        lambda d, k, n: priors.over_widths(lambda width: priors.sparse_bernoulli(d, _SPARSITY * d, width), n, k),
        (50, 100, 200, 400, 800),
        (20, 40, 80, 160, 320),
        (2000, 4000, 8000, 16000, 32000),
    ),
    Case(
        "categorical",
        "groups of 2^k - 1 symbols; uniform theta",
        "d / (n 2^k)",
        lambda d, k, n: schemes.group_histogram_risk(np.full(d, 1 / d), n, k),
        lambda d, k, n: priors.over_widths(lambda width: priors.categorical(d, width), n, k),
        (16, 32, 64, 128, 256),
        (1, 2, 3, 4, 5, 6),
        (50_000, 100_000, 200_000, 400_000, 800_000),
    ),
    Case(
        "Hölder density, s = 1",
        "histogram in groups of 2^k - 1 bins; worst case",
        "(n 2^k)^(-s/(s+1))",
        _holder_risk,
        _holder_bound,
        (8,),
        (1, 2, 3, 4, 5, 6),
        (10_000, 40_000, 160_000, 640_000, 2_560_000),
    ),
)
"""All cases; the number of symbols is the d of the categorical one."""


@dataclass(frozen=True)
class Point:
    """A case at one d, k and n.

    Attributes:
        model: the case's name.
        against: which of d, k and n varies.
        place: d, k, n.
        risk: of the scheme.
        bound: on every protocol.
    """

    model: str
    against: str
    place: tuple[int, int, int]
    risk: float
    bound: RiskBound


def points(case: Case) -> list[Point]:
    """The case along d, k and n."""
    found = []
    for axis, (name, values) in enumerate(zip("dkn", (case.dims, case.bits, case.nodes), strict=True)):
        if len(values) == 1:
            continue
        for value in values:
            d, k, n = (value if i == axis else middle for i, middle in enumerate(case.middle))
            found.append(Point(case.model, name, (d, k, n), case.risk(d, k, n), case.bound(d, k, n)))
    return found
