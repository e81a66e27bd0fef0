"""Which of top-k, random-k and rTop-k wins at which k and n: predicted by a model fitted to gradients, and measured.

The model is a sparse Gaussian location: an entry of the true gradient is zero, or N(0, tau_c^2) in one of a few classes
c, from the many small to the few large; a worker's entry adds noise N(0, nu_c^2) from its batch. Every sparsifier keeps
a worker's entries beyond a threshold t with probability k / r and sends them times a factor f, 1 or r / k, so with
``m_1`` and ``m_2`` the first two moments of g 1{|g| > t} given the true entry mu, the mean of n workers has

    E (mean - mu)^2 = (f k/r m_1 - mu)^2 + (f^2 k/r m_2 - (f k/r m_1)^2) / n.

r = k is top-k, r = d random-k. The prediction takes for each of the three the better factor, and for rTop-k the best r
of :data:`RATIOS`; what is measured is that very choice, with isgq's codecs on real gradients.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm
from torch import Tensor

from analysis.estimation.checks import Array, at_least
from analysis.gradients import capture_batches
from data.dataset import Dataset
from isgq.codecs import codec
from isgq.codecs.sparse import rtop_k, to_count
from isgq.core.errors import OptionError
from isgq.core.keys import Key

RATIOS = (2, 4, 8, 16)
"""r / k of rTop-k."""
METHODS = ("top-k", "random-k", "rTop-k")
_FITTED_ENTRIES = 20_000  # as many, evenly spread, tell the classes well enough
_EVIDENCE = 1e-30  # a variance below this share of the largest is none


@dataclass(frozen=True, eq=False)
class SparseModel:
    """The fitted model.

    Attributes:
        size: entries d.
        weights: shares of the classes, ``[c]``; the rest of the entries are always zero.
        signal: variances tau^2 of the true entries, ``[c]``.
        noise: variances nu^2 of a worker's noise, ``[c]``.
    """

    size: int
    weights: Array
    signal: Array
    noise: Array

    @property
    def energy(self) -> float:
        """Expected squared norm of the true gradient."""
        return self.size * float(self.weights @ self.signal)


def fit(gradients: Array, classes: int = 6, iterations: int = 30) -> SparseModel:
    """Fit the model by expectation maximisation on the mean and the spread of each entry over workers.

    Args:
        gradients: of several workers at one model, ``[workers, d]``.
        classes: how many.
        iterations: of EM.

    Raises:
        OptionError: fewer than 2 workers, not finite, or all zero.
    """
    if gradients.ndim != 2 or len(gradients) < 2 or not np.isfinite(gradients).all() or not gradients.any():
        raise OptionError(
            f"gradients of shape {gradients.shape} must be finite, of at least 2 workers [workers, d] and not all zero"
        )
    n, size = gradients.shape
    gradients = gradients[:, gradients.any(0)]
    occurring = gradients.shape[1] / size
    gradients = gradients[:, :: -(-gradients.shape[1] // _FITTED_ENTRIES)]
    squared_mean = gradients.mean(0) ** 2
    spread = ((gradients - gradients.mean(0)) ** 2).sum(0)
    scale = np.quantile(squared_mean + spread / n, (np.arange(at_least("classes", classes)) + 0.5) / classes)
    floor = _EVIDENCE * float((squared_mean + spread / n).max())
    total, noise = np.maximum(scale, floor), np.maximum(scale, floor)  # total: variance of the mean of n workers
    weights = np.full(classes, 1 / classes)
    for _ in range(at_least("iterations", iterations)):
        log = np.log(np.maximum(weights, 1e-300)) - 0.5 * (np.log(total) + (n - 1) * np.log(noise))
        log = log - 0.5 * (squared_mean[:, None] / total + spread[:, None] / noise)
        share = np.exp(log - log.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        mass = np.maximum(share.sum(0), 1e-9)
        weights = share.mean(0)
        noise = np.maximum(spread @ share / mass / (n - 1), floor)
        total = np.maximum(squared_mean @ share / mass, noise / n)
    return SparseModel(size, weights * occurring, total - noise / n, noise)


def predicted_error(model: SparseModel, r: int, k: int, n: int, factor: float) -> float:
    """``E |mean of n workers - true gradient|^2 / E |true gradient|^2`` of rTop-k.

    Args:
        model: the fitted model.
        r: entries to draw from, at least k.
        k: entries to keep.
        n: workers.
        factor: what kept entries are multiplied by.

    Raises:
        OptionError: not 1 <= k <= r <= d.
    """
    if not 1 <= at_least("k", k) <= r <= model.size:
        raise OptionError(f"k = {k} and r = {r} must be ordered, 1 <= k <= r <= d = {model.size}")
    t = _threshold(model, r)
    grid = np.linspace(-8, 8, 801)
    density = norm.pdf(grid) / norm.pdf(grid).sum()
    mu, sigma = np.sqrt(model.signal)[:, None] * grid, np.sqrt(model.noise)[:, None]
    a, b = (t - mu) / sigma, (-t - mu) / sigma
    beyond, edge = ndtr(-a) + ndtr(b), norm.pdf(a) - norm.pdf(b)
    first = mu * beyond + sigma * edge
    second = mu**2 * beyond + 2 * mu * sigma * edge + sigma**2 * (beyond + a * norm.pdf(a) - b * norm.pdf(b))
    kept = k / r
    mean = factor * kept * first
    errors = (mean - mu) ** 2 + (factor**2 * kept * second - mean**2) / at_least("n", n)
    return model.size * float(model.weights @ errors @ density) / model.energy


def _threshold(model: SparseModel, r: int) -> float:
    """The magnitude that r entries of a worker are beyond, on average."""
    scales = np.sqrt(model.signal + model.noise)

    def excess(log_t: float) -> float:
        return float(model.weights @ (2 * ndtr(-math.exp(log_t) / scales))) - r / model.size

    low, high = math.log(scales.min()) - 30, math.log(scales.max()) + 4
    return 0.0 if excess(low) <= 0 else math.exp(brentq(excess, low, high))


@dataclass(frozen=True)
class Choice:
    """What one of the three methods does.

    Attributes:
        r: entries to draw from.
        factor: 1 or r / k.
        error: relative squared error.
    """

    r: int
    factor: float
    error: float


def candidates(size: int, k: int) -> Mapping[str, Sequence[tuple[int, float]]]:
    """The (r, factor) that each method may choose from."""
    ranges = {"top-k": [k], "random-k": [size], "rTop-k": sorted({min(size, ratio * k) for ratio in RATIOS})}
    return {name: [(r, f) for r in rs for f in dict.fromkeys((1.0, r / k))] for name, rs in ranges.items()}


def predict(model: SparseModel, k: int, n: int) -> dict[str, Choice]:
    """Each method at its best by the model."""
    return {
        name: min(
            (Choice(r, factor, predicted_error(model, r, k, n, factor)) for r, factor in options),
            key=lambda choice: choice.error,
        )
        for name, options in candidates(model.size, k).items()
    }


def measured_errors(
    gradients: Tensor, target: Tensor, r: int, k: int, counts: Sequence[int]
) -> dict[tuple[int, float], float]:
    """Relative squared error by isgq's codecs, for each number of workers n and factor.

    Args:
        gradients: of the workers, float32 ``[workers, d]``.
        target: the true gradient, ``[d]``.
        r: entries to draw from; k of them is the codec ``top_k``, d of them ``random_k``, others ``rtop_k``.
        k: entries to keep.
        counts: numbers n; the mean is over the workers // n disjoint groups of n.
    """
    size = target.numel()
    spec = f"top_k:k={k}" if r == k else f"random_k:k={k},scale=false" if r == size else f"rtop_k:r={r},k={k}"
    coder = codec(spec)
    decoded = torch.stack([
        coder.decode(coder.encode(g, Key("bridge", rank=rank)))  # type: ignore[union-attr]
        for rank, g in enumerate(gradients)
    ])
    energy = float(target @ target)
    errors = {}
    for n in counts:
        groups = len(decoded) // n
        means = decoded[: groups * n].view(groups, n, size).mean(1)
        square, product = float(means.square().sum()) / groups, float((means @ target).sum()) / groups
        for factor in dict.fromkeys((1.0, r / k)):
            errors[n, factor] = 1 + (factor**2 * square - 2 * factor * product) / energy
    return errors


@dataclass(frozen=True)
class Verdict:
    """Prediction and truth for one layer, k and n.

    Attributes:
        layer: parameter name.
        size: its entries.
        k: entries kept.
        n: workers.
        predicted: method -> its best choice by the model, with the predicted error.
        measured: method -> the measured error of that choice.
    """

    layer: str
    size: int
    k: int
    n: int
    predicted: Mapping[str, Choice]
    measured: Mapping[str, float]

    @property
    def forecast(self) -> str:
        """The method that should win."""
        return min(self.predicted, key=lambda name: self.predicted[name].error)

    @property
    def winner(self) -> str:
        """The one that does."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def regret(self) -> float:
        """How much larger the error of the forecast is than the winner's, relatively; 0 where they agree."""
        return self.measured[self.forecast] / self.measured[self.winner] - 1


def judge(
    layer: str, fitting: Tensor, gradients: Tensor, target: Tensor, shares: Sequence[float], counts: Sequence[int]
) -> list[Verdict]:
    """Fit, predict, measure.

    Args:
        layer: parameter name.
        fitting: gradients of the workers that the model is fitted to, ``[workers, d]``.
        gradients: those of others, to measure on.
        target: the true gradient.
        shares: k as shares of d.
        counts: numbers of workers.
    """
    model = fit(fitting.double().numpy())
    verdicts = []
    for share in shares:
        k = to_count(share, model.size)
        forecasts = {n: predict(model, k, n) for n in counts}
        wanted = {choice.r for forecast in forecasts.values() for choice in forecast.values()}
        errors = {r: measured_errors(gradients, target, r, k, counts) for r in sorted(wanted)}
        for n, forecast in forecasts.items():
            measured = {name: errors[choice.r][n, choice.factor] for name, choice in forecast.items()}
            verdicts.append(Verdict(layer, model.size, k, n, forecast, measured))
    return verdicts


def worker_gradients(
    spec: str, dataset: Dataset, *, steps: int, workers: int, batch: int, target_batch: int, least: int = 1000
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of many workers and of one large batch, at one state of a network in training.

    Args:
        spec: for ``models.build``.
        dataset: where the images come from.
        steps: of SGD with momentum before.
        workers: how many draw a batch each.
        batch: images of a worker and of a step, drawn with replacement.
        target_batch: images whose gradient stands for the true one.
        least: weights of fewer entries are left out.

    Returns:
        Parameter name -> gradients ``[workers, d]`` and the true one ``[d]``.
    """
    batches = [*itertools.repeat(batch, workers), target_batch]
    caught = [
        {layer.name: layer.gradient.reshape(-1) for layer in layers if layer.gradient.numel() >= least}
        for layers in capture_batches(spec, dataset, steps=steps, batch=batch, batches=batches)
    ]
    return {
        name: (torch.stack([gradients[name] for gradients in caught[:-1]]), caught[-1][name]) for name in caught[-1]
    }


def mean_error(w: Tensor, r: int, k: int, n: int, draws: int) -> tuple[float, float]:
    """``|(1/n) sum_i (r/k) rTop_k(w) - w|^2`` of n workers with one and the same vector: mean and standard error.

    The closed form is ``|w - top_r w|^2 + (r/k - 1) |top_r w|^2 / n``.
    """
    errors = []
    for step in range(draws):
        found = torch.zeros_like(w)
        for rank in range(n):
            kept = rtop_k(w, r, k, Key("identity", step=step, rank=rank).digest)
            found[kept] += w[kept] * (r / k / n)
        errors.append(float((found - w).square().sum()))
    return float(np.mean(errors)), float(np.std(errors, ddof=1)) / math.sqrt(draws)
