"""Schemes that attain the rates. Each writes on a board what n nodes make of a sample each; the server sees no more.

A scheme is ``scheme(x, board, rng) -> estimate``, x the samples ``[n, ...]``; what else it needs are its attributes.
Functions named ``*_risk`` are exact squared errors.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from analysis.estimation.checks import Array, Integers, at_least, within
from analysis.estimation.models import HolderDensity, Model
from analysis.estimation.protocols import Board, Kind
from analysis.estimation.quantizers import chosen_ones, group_message, index_bits
from isgq.core.errors import OptionError

_GAIN = math.sqrt(2 * math.pi)  # 1 / phi(0), the best gain of stochastic approximation


class Scheme(Protocol):
    """Protocol and estimator in one."""

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """The estimate from samples ``[n, ...]``."""


@dataclass(frozen=True)
class Risk:
    """A Monte Carlo risk.

    Attributes:
        value: mean squared error.
        error: its standard error.
        bits: most bits that a node wrote.
    """

    value: float
    error: float
    bits: int


def simulate(
    scheme: Scheme, model: Model, truth: Array, board: tuple[int, int, Kind], trials: int, rng: np.random.Generator
) -> Risk:
    """Squared error of a scheme over independent trials.

    Args:
        scheme: the scheme.
        model: where nodes draw their samples from.
        truth: what is estimated.
        board: nodes, bits and kind of protocol.
        trials: at least 2.
        rng: source of samples and private choices.
    """
    errors, used = [], 0
    for _ in range(at_least("trials", trials, 2)):
        written = Board(*board)
        found = scheme(model.sample(board[0], rng), written, rng)
        errors.append(float(((found - truth) ** 2).sum()))
        used = max(used, int(written.used.max()))
    return Risk(float(np.mean(errors)), float(np.std(errors, ddof=1)) / math.sqrt(trials), used)


# -- bits of coordinates, in turn


def in_turn(nodes: int, bits: int, dim: int) -> Integers:
    """The coordinates of each node, all served alike: int64 ``[nodes, min(bits, dim)]``."""
    width = min(at_least("bits", bits), at_least("dim", dim))
    return np.arange(at_least("nodes", nodes) * width).reshape(nodes, width) % dim


def served(nodes: int, bits: int, dim: int) -> Integers:
    """How many bits each coordinate gets of :func:`in_turn`: int64 ``[dim]``.

    Raises:
        OptionError: none for some.
    """
    written = at_least("nodes", nodes) * min(at_least("bits", bits), at_least("dim", dim))
    counts = written // dim + (np.arange(dim) < written % dim)
    if written < dim:
        raise OptionError(
            f"{nodes} nodes of {bits} bits do not reach all {dim} coordinates; nodes * bits must be >= dim"
        )
    return counts


def _write_shares(above: Array, board: Board, bits: int) -> Array:
    """Write 0/1 entries ``[n, d]`` in turn; the share of ones of each coordinate."""
    n, dim = above.shape
    counts, turn = served(n, bits, dim), in_turn(n, bits, dim)
    board.write(np.arange(n), np.take_along_axis(above, turn, 1).astype(np.int64), 1)
    if board.kind == "independent":
        board.close()
    written = board.read()[-1].values
    return np.asarray(np.bincount(turn.ravel(), written.ravel(), dim) / counts)


@dataclass(frozen=True)
class VerbatimBits:
    """Product Bernoulli: k coordinates as they are. Attains ``d^2 / (n k)``."""

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """The shares of ones."""
        return _write_shares(x, board, board.bits)


def verbatim_bits_risk(theta: Array, nodes: int, bits: int) -> float:
    """``sum_j theta_j (1 - theta_j) / m_j``, m_j the bits of a coordinate."""
    return float((theta * (1 - theta) / served(nodes, bits, len(theta))).sum())


@dataclass(frozen=True)
class SignBits:
    """Gaussian location: signs of k coordinates. Attains ``sigma^2 d^2 / (n k)`` for means of order sigma.

    Attributes:
        sigma: standard deviation.
        largest: means are in ``-largest .. largest``.
        nonzero: keep this many means of largest magnitude, the rest are 0; None keeps all.
    """

    sigma: float = 1.0
    largest: float = 1.0
    nonzero: int | None = None

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """Quantiles of the shares of positive signs."""
        means = _from_shares(_write_shares((x > 0).astype(float), board, board.bits), self.sigma, self.largest)
        return means if self.nonzero is None else np.where(_is_large(means, self.nonzero), means, 0.0)


def _from_shares(share: Array, sigma: float, largest: float) -> Array:
    return np.clip(sigma * ndtri(share), -largest, largest)


def _is_large(means: Array, count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    large = np.zeros(len(means), bool)
    large[np.argsort(-np.abs(means), kind="stable")[:count]] = True
    return large


def sign_bits_risk(theta: Array, count: int, sigma: float = 1.0, largest: float = 1.0) -> Array:
    """Exact squared error of one coordinate from the signs of ``count`` nodes, a sum over the binomial.

    Args:
        theta: means, ``[m]``; the result has this shape.
        count: signs.
        sigma: standard deviation.
        largest: estimates are clipped to ``-largest .. largest``.
    """
    positive = np.arange(at_least("count", count) + 1)
    found = _from_shares(positive / count, sigma, largest)
    chance = binom.pmf(positive, count, ndtr(theta / sigma)[:, None])
    return np.asarray((chance * (found - theta[:, None]) ** 2).sum(1))


@dataclass(frozen=True)
class AdaptiveSigns:
    """Gaussian location, sequential: signs about the estimate so far, by stochastic approximation.

    Attains ``(pi / 2) sigma^2 d^2 / (n k)`` asymptotically at every mean, as :class:`SignBits` does at 0 only.
    """

    sigma: float = 1.0
    largest: float = 1.0

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """One step of every coordinate in each sweep of ceil(d / k) nodes; the last fills up what it has left."""
        n, dim = x.shape
        served(n, board.bits, dim)
        width = min(board.bits, dim)
        sweep = -(-dim // width)
        turn = np.minimum(np.arange(sweep * width), dim - 1).reshape(sweep, width)
        means = np.zeros(dim)
        for step in range(n // sweep):
            nodes = np.arange(step * sweep, (step + 1) * sweep)
            board.write(nodes, (x[nodes[:, None], turn] > means[turn]).astype(np.int64), 1)
            signs = board.read()[-1].values.ravel()[:dim] - 0.5
            means = np.clip(means + _GAIN * self.sigma * signs / (step + 1), -self.largest, self.largest)
        return means


@dataclass(frozen=True)
class FindThenRefine:
    """Sparse Gaussian location on a blackboard: half of the bits find s large means, the others measure these.

    Attributes:
        nonzero: s.
        sigma: standard deviation.
        largest: means are in ``-largest .. largest``.
    """

    nonzero: int
    sigma: float = 1.0
    largest: float = 1.0

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """Signs in turn, then signs about the estimates of those found; OptionError for less than 2 bits."""
        first = at_least("bits of FindThenRefine", board.bits, 2) // 2
        rough = _from_shares(_write_shares((x > 0).astype(float), board, first), self.sigma, self.largest)
        found = np.flatnonzero(_is_large(rough, self.nonzero))
        share = _write_shares((x[:, found] > rough[found]).astype(float), board, board.bits - first)
        means = np.zeros(x.shape[1])
        means[found] = np.clip(
            rough[found] + _from_shares(share, self.sigma, self.largest), -self.largest, self.largest
        )
        return means


# -- groups of coordinates or symbols


def groups(nodes: int, bits: int, size: int) -> tuple[int, Array]:
    """Groups of ``2^bits - 1`` things, nodes assigned in turn.

    Returns:
        The number of groups (node i has group i modulo it), and how many nodes each thing has, ``[size]``.

    Raises:
        OptionError: fewer nodes than groups.
    """
    each = min(2 ** at_least("bits", bits) - 1, at_least("size", size))
    count = -(-size // each)
    if at_least("nodes", nodes) < count:
        raise OptionError(f"{nodes} nodes are fewer than the {count} groups of {each} that {bits} bits can tell apart")
    return count, (nodes // count + (np.arange(size) // each < nodes % count)).astype(float)


@dataclass(frozen=True)
class GroupHistogram:
    """Categorical: each node has a group of 2^k - 1 symbols. Attains ``d / (n 2^k)``.

    Attributes:
        symbols: d.
    """

    symbols: int

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """Frequencies, ``[d]``; unbiased."""
        n = len(x)
        count, nodes_of = groups(n, board.bits, self.symbols)
        group = np.arange(n) % count
        board.write(np.arange(n), group_message(x.astype(np.int64), group, board.bits)[:, None], board.bits)
        board.close()
        message = board.read()[-1].values[:, 0]
        seen = (group * (2**board.bits - 1) + message - 1)[message > 0]
        return np.asarray(np.bincount(seen, minlength=self.symbols) / nodes_of)


def group_histogram_risk(theta: Array, nodes: int, bits: int) -> float:
    """``sum_i theta_i (1 - theta_i) / n_i``, n_i the nodes of a symbol's group: about groups * (1 - |theta|^2) / n."""
    return float((theta * (1 - theta) / groups(nodes, bits, len(theta))[1]).sum())


def holder_guarantee(smoothness: float, length: float, bins: int, nodes: int, bits: int) -> float:
    """Largest squared L2 error of a histogram over the class. Attains ``(n 2^k)^(-s/(s+1))`` at the best bins.

    Within a bin of width h ``Var f(U) = E (f(U) - f(U'))^2 / 2 <= L^2 h^(2s) / ((2s + 1) (2s + 2))``, U and U' uniform,
    and the variance is at most that of a uniform density with the fewest nodes of a group for every bin.
    """
    nodes_of = groups(nodes, bits, bins)[1]
    bias = length**2 * bins ** (-2 * smoothness) / ((2 * smoothness + 1) * (2 * smoothness + 2))
    return float(bias + (bins - 1) / nodes_of.min())


def holder_bins(smoothness: float, length: float, nodes: int, bits: int) -> int:
    """The number of bins of the least guarantee, by groups that are full."""
    each = 2 ** at_least("bits", bits) - 1
    bins = np.unique(np.geomspace(1, at_least("nodes", nodes), 200).astype(int))
    bins = np.unique(np.concatenate([bins[bins < each], (bins + each - 1) // each * each]))
    count = -(-bins // each)
    bins, count = bins[count <= nodes], count[count <= nodes]
    bias = length**2 * bins ** (-2.0 * smoothness) / ((2 * smoothness + 1) * (2 * smoothness + 2))
    return int(bins[np.argmin(bias + bins * count / nodes)])


def holder_risk(model: HolderDensity, bins: int, nodes: int, bits: int) -> float:
    """Squared L2 error of the histogram of bins at a density, by a fine grid."""
    fine = -(-4096 // bins)
    f = model.density((np.arange(bins * fine) + 0.5) / (bins * fine)).reshape(bins, fine)
    bias = float(f.var(axis=1).mean())
    return bias + bins * group_histogram_risk(f.mean(1) / bins, nodes, bits)


@dataclass(frozen=True)
class FirstExceedance:
    """Gaussian variance: which of 2^k - 1 coordinates is the first beyond a threshold. Attains ``d^2 / (n k^2)``.

    One in 2^k - 1 coordinates is beyond it, where a chance tells most about the scale: hence k^2 and not k.

    Attributes:
        low: variances are above this.
        high: and below this.
    """

    low: float
    high: float

    def threshold(self, size: int) -> float:
        """At which ``1 / size`` of coordinates of middle variance are beyond, at most 0.14, best for a single one."""
        within("low", self.low, 0, self.high)
        return float(math.sqrt((self.low + self.high) / 2) * -ndtri(min(0.14, 1 / size) / 2))

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """Chances of being the first, given that none before it is, and the variances that have them."""
        n, dim = x.shape
        size = min(2**board.bits - 1, dim)
        count, nodes_of = groups(n, board.bits, dim)
        group = np.arange(n) % count
        columns = group[:, None] * size + np.arange(size)
        inside = columns < dim
        tau = self.threshold(size)
        beyond = inside & (np.abs(np.take_along_axis(x, np.minimum(columns, dim - 1), 1)) > tau)
        message = np.where(beyond.any(1), beyond.argmax(1) + 1, 0)
        board.write(np.arange(n), message[:, None], board.bits)
        board.close()
        message = board.read()[-1].values[:, 0]
        first = np.bincount((group * size + message - 1)[message > 0], minlength=dim).astype(float)
        starts = np.arange(dim) // size * size
        before = np.concatenate([[0.0], first.cumsum()])
        left = nodes_of - (before[:-1] - before[starts])
        chance = np.divide(first, left, out=np.zeros(dim), where=left > 0)
        quantile = -ndtri(np.clip(chance, 1e-300, 1) / 2)
        return np.asarray(np.clip((tau / np.maximum(quantile, 1e-9)) ** 2, self.low, self.high))


# -- random ones


@dataclass(frozen=True)
class RandomOnesMean:
    """Sparse Bernoulli: the number N of ones and t of their indices at random. Attains ``s^2 log d / (n k)``."""

    def __call__(self, x: Array, board: Board, rng: np.random.Generator) -> Array:
        """``(1/n) sum_i (N_i / t_i) 1{j chosen by i}``, ``[d]``; unbiased."""
        n, dim = x.shape
        ones, width = random_ones(board.bits, dim), index_bits(dim + 1)
        nodes = np.arange(n)
        board.write(nodes, np.column_stack([x.sum(1).astype(np.int64), chosen_ones(x, ones, rng)]), width)
        board.close()
        read = board.read()[-1].values
        number, chosen = read[:, 0], read[:, 1:]
        taken = np.minimum(number, ones)
        weight = np.divide(number, taken, out=np.zeros(n), where=taken > 0)
        return np.asarray(np.bincount(chosen.ravel(), np.repeat(weight, ones), dim + 1)[:dim] / n)


def random_ones(bits: int, dim: int) -> int:
    """How many indices fit into k bits beside the number of ones, ``ceil(log2 (d + 1))`` bits each.

    Raises:
        OptionError: none.
    """
    width = index_bits(at_least("dim", dim) + 1)
    count = at_least("bits", bits) // width - 1
    if count < 1:
        raise OptionError(
            f"bits = {bits} hold no index beside the number of ones; d = {dim} needs at least {2 * width}"
        )
    return count


def random_ones_risk(theta: Array, ones: int, nodes: int) -> float:
    """``(E[N^2 / min(N, t)] - |theta|^2) / n``, N Poisson-binomial; exact."""
    chance = np.ones(1)
    for q in theta:
        chance = np.convolve(chance, [1 - q, q])
    number = np.arange(1, len(chance))
    second = float((chance[1:] * number**2 / np.minimum(number, at_least("ones", ones))).sum())
    return (second - float((theta**2).sum())) / at_least("nodes", nodes)
