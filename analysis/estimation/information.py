"""``Tr I_M = sum_m p(m) |E[S | m]|^2``: exact, in closed form, or by Monte Carlo; and its maximum by k-means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_array
from scipy.special import ndtr
from scipy.stats import norm
from sklearn.cluster import KMeans

from analysis.estimation.checks import Array, Integers, at_least
from analysis.estimation.models import Model
from analysis.estimation.quantizers import Quantizer, Voronoi
from isgq.core.errors import OptionError


@dataclass(frozen=True, eq=False)
class Information:
    """The information of a message.

    Attributes:
        trace: ``Tr I_M``.
        error: its standard error, 0 where exact.
        probabilities: of the messages that occur.
    """

    trace: float
    error: float
    probabilities: Array


def exact(scores: Array, weights: Array, messages: Integers) -> Information:
    """Over a finite law.

    Args:
        scores: ``[m, dim]``.
        weights: probabilities ``[m]`` of sum 1.
        messages: ``[m]``.
    """
    sums, inverse = _sums(scores * weights[:, None], messages)
    p = np.bincount(inverse, weights).astype(float)
    occurring = p > 0
    trace = float(((sums[occurring] ** 2).sum(1) / p[occurring]).sum())
    return Information(trace, 0.0, p[occurring])


def _sums(rows: Array, messages: Integers) -> tuple[Array, Integers]:
    """Sums of the rows of equal messages ``[cells, dim]``, and the cell of each row."""
    _, inverse = np.unique(messages, return_inverse=True)
    count = len(rows)
    members = csr_array((np.ones(count), (inverse, np.arange(count))), shape=(int(inverse.max()) + 1, count))
    return np.asarray(members @ rows), inverse


def estimate(model: Model, quantizer: Quantizer, count: int, rng: np.random.Generator) -> Information:
    """Monte Carlo over pairs of samples with the same message: ``(|sum S|^2 - sum |S|^2) / (size - 1)`` in each cell.

    It has no bias, but for messages that come up once: take many more samples than there are messages.

    Args:
        model: the distribution.
        quantizer: the quantizer.
        count: samples, at least 2.
        rng: source of the samples.
    """
    x = model.sample(at_least("count", count, 2), rng)
    scores = model.score(x)
    sums, cell = _sums(scores, quantizer(x, rng))
    size = np.bincount(cell)
    squares = np.bincount(cell, (scores**2).sum(1))
    pairs = ((sums**2).sum(1) - squares) / np.maximum(size - 1, 1)
    means = sums / size[:, None]
    influence = 2 * (scores * means[cell]).sum(1) - (means**2).sum(1)[cell]
    return Information(float(pairs.sum()) / count, float(influence.std()) / math.sqrt(count), size / count)


def oracle(
    scores: Array, weights: Array, bits: int, starts: Sequence[Integers] = (), *, restarts: int = 10, seed: int = 0
) -> tuple[Information, Array]:
    """The best partition that k-means finds: ``Tr I_M`` is what its clusters explain of ``Tr I_X``.

    k-means ends in local optima, so it begins with the given partitions, too.

    Args:
        scores: of a finite law or of samples, ``[m, dim]``.
        weights: probabilities ``[m]``.
        bits: k.
        starts: messages ``[m]`` of quantizers to improve.
        restarts: random beginnings (k-means++), at least 1.
        seed: of these.

    Returns:
        The information, and the centres ``[2^k, dim]`` or fewer.

    Raises:
        OptionError: more messages than points to tell apart, or bits or restarts below 1.
    """
    clusters = 2 ** at_least("bits", bits)
    distinct = len(np.unique(scores, axis=0)) if len(scores) < 1 << 12 else len(scores)
    if clusters > distinct:
        raise OptionError(f"bits = {bits} make {clusters} messages, and there are just {distinct} scores to tell apart")
    inits: list[Array] = []
    for start in starts:
        sums, cell = _sums(scores * weights[:, None], start)
        centres = sums / np.bincount(cell, weights)[:, None]
        if len(centres) == clusters:
            inits.append(centres)
    fits = [KMeans(clusters, init=init, n_init=1).fit(scores, sample_weight=weights) for init in inits]
    random = KMeans(clusters, n_init=at_least("restarts", restarts), random_state=seed)
    fits.append(random.fit(scores, sample_weight=weights))
    best = min(fits, key=lambda fit: float(fit.inertia_))
    return exact(scores, weights, best.labels_.astype(np.int64)), best.cluster_centers_


def oracle_quantizer(
    model: Model, bits: int, count: int, rng: np.random.Generator, starts: Sequence[Quantizer] = ()
) -> Voronoi:
    """The k-means oracle fitted to samples, as a quantizer for others: measure it on fresh ones."""
    x = model.sample(at_least("count", count, 2), rng)
    messages = [quantizer(x, rng) for quantizer in starts]
    scores = model.score(x)
    _, centres = oracle(scores, np.full(count, 1 / count), bits, messages, restarts=2)
    return Voronoi(model, centres)


def coordinate_bits_trace(thresholds: Array) -> float:
    """Of a standard Gaussian location: ``sum_j phi(t_j)^2 / (Phi(t_j) (1 - Phi(t_j)))``; 2 / pi for each at 0."""
    return float((norm.pdf(thresholds) ** 2 / (norm.cdf(thresholds) * norm.sf(thresholds))).sum())


def magnitude_bit_trace() -> float:
    """Of the best bit ``|x| > tau`` of the Gaussian variance model at 1: ``(tau phi(tau))^2 / (q (1 - q))``."""

    def negative(tau: float) -> float:
        q = 2 * norm.sf(tau)
        return -float((tau * norm.pdf(tau)) ** 2 / (q * (1 - q)))

    return -float(minimize_scalar(negative, bounds=(0.5, 3), method="bounded").fun)


def _density(z: float) -> float:
    """Of a standard Gaussian; ``norm.pdf`` takes a hundred times as long for a single number."""
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def argmax_trace(bits: int, *, magnitude: bool = False) -> float:
    """Of the argmax of N = 2^k coordinates by quadrature: ``N / (N - 1) E[S_max]^2``, as the scores' mean is 0.

    Args:
        bits: k.
        magnitude: of ``x_j^2`` in the Gaussian variance model at 1, instead of x_j in the location model.
    """
    n = 2 ** at_least("bits", bits)

    def density(z: float) -> float:
        return float(2 * n * _density(z) * (2 * ndtr(z) - 1) ** (n - 1))

    if magnitude:
        mean = quad(lambda z: (z * z - 1) / 2 * density(z), 0, 12, limit=200)[0]
    else:
        mean = quad(lambda z: z * n * _density(z) * ndtr(z) ** (n - 1), -12, 12, limit=200)[0]
    return float(n / (n - 1) * mean**2)
