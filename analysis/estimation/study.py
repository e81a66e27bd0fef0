"""The tables of the report, each from a seed."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from analysis.estimation import bridge, information, models, priors, quantizers, schemes
from analysis.estimation.bounds import bit_entropy, finite_variance, sparse_bernoulli, tails
from analysis.estimation.cases import CASES, Point, location_risk
from analysis.estimation.checks import Array
from analysis.estimation.configurations import random_configurations
from analysis.estimation.protocols import Kind
from analysis.report import Cell, Table

Curves = dict[str, tuple[NDArray[Any], NDArray[Any]]]
"""Label -> (k, Tr I_M)."""

_ENTRIES = 1 << 23  # numbers of a Monte Carlo sample
_TRIALS = 20
_BOUND = "name of the bound"


def _row(
    quantity: str, closed: float | None, measured: float, error: float, bound: float | None, stands_on: str = ""
) -> tuple[Cell, ...]:
    deviations = (measured - closed) / error if closed is not None and error > 0 else None
    return quantity, closed, measured, error or None, deviations, bound, stands_on


def _information(
    quantity: str,
    closed: float,
    model: models.Model,
    quantizer: quantizers.Quantizer,
    bound: str,
    rng: np.random.Generator,
) -> tuple[Cell, ...]:
    count = max(1000, min(100_000, _ENTRIES // model.dim))
    found, constants, bits = information.estimate(model, quantizer, count, rng), model.constants(), quantizer.bits
    bounds = {
        "entropy": lambda: bit_entropy(constants, bits),
        "T2 sub-exponential": lambda: tails(constants, bits, 1),
    }
    return _row(quantity, closed, found.trace, found.error, bounds[bound](), bound)


def gaussian_rows(seed: int) -> Iterator[tuple[Cell, ...]]:
    """Half-space, coordinate bits and argmax of the Gaussian models."""
    rng = np.random.default_rng((seed, 1))
    location = models.GaussianLocation(np.zeros(16))
    half_space = quantizers.HalfSpace(np.ones(16) / 4)
    yield _information("N(θ, I): half-space, 1 bit, 2/π", 2 / math.pi, location, half_space, "entropy", rng)
    for k in (4, 8):
        bits = quantizers.CoordinateBits(np.arange(k), np.zeros(k))
        closed = information.coordinate_bits_trace(np.zeros(k))
        yield _information(f"N(θ, I): {k} coordinate bits, 2k/π", closed, location, bits, "entropy", rng)
    for k in (1, 2, 4, 8, 10):
        model, quantizer = models.GaussianLocation(np.zeros(2**k)), quantizers.Argmax(k)
        yield _information(f"N(θ, I): argmax of 2^{k}", information.argmax_trace(k), model, quantizer, "entropy", rng)
    for k in (1, 2, 4, 6, 8, 10):
        scales, quantizer = models.GaussianVariance(np.ones(2**k)), quantizers.Argmax(k, magnitude=True)
        closed = information.argmax_trace(k, magnitude=True)
        name = f"N(0, diag θ): argmax of x² of 2^{k}"
        yield _information(name, closed, scales, quantizer, "T2 sub-exponential", rng)
    yield _row("N(0, diag θ): ψ₁ norm of a score", None, models.psi1_norm(), 0.0, None)


def finite_rows(seed: int) -> Iterator[tuple[Cell, ...]]:
    """Categorical and Bernoulli models, exactly."""
    rng = np.random.default_rng((seed, 2))
    for d in (9, 17, 33):
        model = models.Categorical(np.append(np.full(d - 1, 1 / (2 * (d - 1))), 0.5))
        yield _row(f"categorical, d = {d}: I₀ = 4(d - 1)", 4.0 * (d - 1), model.constants().variance, 0.0, None)
    x, weights = model.support()
    yield _row("categorical, d = 33: Tr I_X", 2.0 * 33 * 32, model.constants().trace, 0.0, None)
    best, _ = information.oracle(model.score(x), weights, 3, seed=seed)
    bound = finite_variance(model.constants(), 3)
    yield _row("categorical, d = 33: best of 3 bits (k-means)", None, best.trace, 0.0, bound, "T1 finite variance")
    half = models.ProductBernoulli(np.full(8, 0.5))
    x, weights = half.support()
    for k in (1, 4):
        quantizer = quantizers.CoordinateBits(np.arange(k), np.full(k, 0.5))
        found = information.exact(half.score(x), weights, quantizer(x, rng))
        bound = bit_entropy(half.constants(), k)
        yield _row(f"Bernoulli 1/2: k = {k} coordinates as they are, 4k", 4.0 * k, found.trace, 0.0, bound, "entropy")
    for s in (1, 2):
        sparse = models.ProductBernoulli(np.full(10, s / 10))
        x, weights = sparse.support()
        for k in (1, 2, 3, 4):
            start = quantizers.CoordinateBits(np.arange(k), np.full(k, 0.5))(x, rng)
            best, _ = information.oracle(sparse.score(x), weights, k, [start], seed=seed)
            name = f"sparse Bernoulli, d = 10, s = {s}: best of {k} bits (k-means)"
            yield _row(name, None, best.trace, 0.0, sparse_bernoulli(s / 10, k), "sparse Bernoulli")
            yield _row(
                *(name.replace("best", "the same best"), None, best.trace, 0.0),
                *(bit_entropy(sparse.constants(), k), "entropy, Kearns-Saul"),
            )


def risk_rows(seed: int) -> Iterator[tuple[Cell, ...]]:
    """End to end: samples, messages on a board, estimates."""
    rng = np.random.default_rng((seed, 3))
    for n, k in ((2000, 1), (2000, 4), (2000, 16), (8000, 4)):
        worst = max(
            (
                schemes.simulate(
                    schemes.SignBits(), models.GaussianLocation(theta), theta, (n, k, "independent"), 20, rng
                )
                for theta in (np.full(64, mean) for mean in (0.0, 0.5, 1.0))
            ),
            key=lambda risk: risk.value,
        )
        bound, name = priors.gaussian_location(64).bound(n, k).value, f"risk N(θ, I), d = 64, n = {n}, k = {k}"
        yield _row(name, location_risk(64, k, n), worst.value, worst.error, bound, "van Trees")
    theta = rng.dirichlet(np.ones(64))
    for k in (1, 2, 3, 4):
        board: tuple[int, int, Kind] = (20_000, k, "independent")
        found = schemes.simulate(schemes.GroupHistogram(64), models.Categorical(theta), theta, board, 60, rng)
        closed = schemes.group_histogram_risk(theta, 20_000, k)
        best = priors.over_widths(lambda width: priors.categorical(64, width), 20_000, k).value
        yield _row(f"risk categorical, d = 64, n = 20000, k = {k}", closed, found.value, found.error, best, "van Trees")
    for d, s, ones, n in ((200, 20, 8, 50), (200, 20, 4, 50), (500, 10, 2, 100)):
        theta = rng.exponential(size=d)
        theta = np.minimum(theta * s / theta.sum(), 0.99)
        board = (n, (ones + 1) * quantizers.index_bits(d + 1), "independent")
        found = schemes.simulate(schemes.RandomOnesMean(), models.ProductBernoulli(theta), theta, board, 200, rng)
        name = f"risk sparse Bernoulli, d = {d}, s = {s}, t = {ones}, n = {n}"
        family = partial(priors.sparse_bernoulli, d, float(theta.sum()))
        best = priors.over_widths(family, n, board[1]).value
        yield _row(name, schemes.random_ones_risk(theta, ones, n), found.value, found.error, best, "van Trees")


def rtop_k_rows(seed: int) -> Iterator[tuple[Cell, ...]]:
    """rTop-k of one vector, d = 1000, k = 10: n workers' error against its closed form."""
    w = torch.from_numpy(np.random.default_rng((seed, 4)).standard_normal(1000)).float()
    energy = w.square().sort(descending=True).values.double()
    for r in (10, 50, 200, 1000):
        for n in (1, 16):
            top = float(energy[:r].sum())
            closed = float(energy.sum()) - top + (r / 10 - 1) * top / n
            measured, error = bridge.mean_error(w, r, 10, n, 100)
            yield _row(
                f"rTop-k, r = {r}, n = {n}, debiased: squared error", closed, measured, error if r > 10 else 0.0, None
            )


def reproduced(rows: Sequence[tuple[Cell, ...]]) -> Table:
    """Numbers with a closed form or a bound."""
    columns = {
        "quantity": "what it is",
        "closed_form": "its value by a formula",
        "measured": "its value by Monte Carlo or, without error, by a sum over all outcomes",
        "error": "standard error of the measurement",
        "deviations": "(measured - closed form) / error",
        "bound": "upper bound of an information, lower one of a risk",
        "stands_on": _BOUND,
    }
    return Table("reproduced", "Closed forms, measurements and bounds", columns, rows)


def information_curves() -> dict[str, Curves]:
    """Panel -> curve -> (k, Tr I_M): quantizers and bounds of three models with as many coordinates as needed."""
    k = np.arange(1, 11)
    location = models.GaussianLocation(np.zeros(1024)).constants()
    scales = models.GaussianVariance(np.ones(1024)).constants()
    d = 65
    symbols = models.Categorical(np.append(np.full(d - 1, 1 / (2 * (d - 1))), 0.5))
    x, weights = symbols.support()
    few = np.arange(1, 7)
    best = [information.oracle(symbols.score(x), weights, int(bits))[0] for bits in few]
    return {
        "Gaussian location": {
            "argmax of 2^k": (k, np.array([information.argmax_trace(int(b)) for b in k])),
            "k coordinate bits": (k, 2 * k / math.pi),
            "bound: entropy": (k, np.array([bit_entropy(location, int(b)) for b in k])),
            "bound: T2 sub-Gaussian": (k, np.array([tails(location, int(b), 2) for b in k])),
        },
        "Gaussian variance": {
            "argmax of x² of 2^k": (k, np.array([information.argmax_trace(int(b), magnitude=True) for b in k])),
            "k coordinate bits": (k, information.magnitude_bit_trace() * k),
            "bound: T2 sub-exponential": (k, np.array([tails(scales, int(b), 1) for b in k])),
            "bound: T1 finite variance": (k, np.array([finite_variance(scales, int(b)) for b in k])),
        },
        f"categorical, d = {d}": {
            "k-means": (few, np.array([found.trace for found in best])),
            "bound: T1 finite variance": (few, np.array([finite_variance(symbols.constants(), int(b)) for b in few])),
            "bound: Tr I_X": (few, np.full(len(few), symbols.constants().trace)),
        },
    }


def risk_table(found: Sequence[Point]) -> Table:
    """What the figures of risks show."""
    schemes_of = {case.model: case for case in CASES}
    columns = {
        "model": "distribution",
        "scheme": "that attains the rate, and where its risk is taken",
        "rate": "published order of the risk",
        "against": "which of d, k and n varies",
        "d": "dimension",
        "k": "bits a node",
        "n": "nodes",
        "risk": "squared error of the scheme",
        "bound": "van Trees' bound on every protocol",
        "ratio": "risk / bound",
        "stands_on": _BOUND,
        "in_regime": "whether the samples weigh more than the prior, where the bound follows the rate",
    }
    rows = [
        (
            *(p.model, schemes_of[p.model].scheme, schemes_of[p.model].rate, p.against, *p.place),
            *(p.risk, p.bound.value, p.risk / p.bound.value, p.bound.binding, bool(p.bound.in_regime)),
        )
        for p in found
    ]
    return Table("risk", "Risk of schemes that attain the rates, and van Trees' bound on every protocol", columns, rows)


def protocols_table(seed: int) -> Table:
    """The same bits under three protocols."""
    rng = np.random.default_rng((seed, 5))
    rows: list[tuple[Cell, ...]] = []
    dense, sparse = priors.gaussian_location(64), priors.sparse_gaussian_location(64, 4)
    for mean in (0.0, 0.5, 1.0):
        theta, few = np.full(64, mean), np.where(np.arange(64) < 4, mean, 0.0)
        entries: tuple[tuple[str, schemes.Scheme, Kind, Array, int, priors.Prior], ...] = (
            ("signs", schemes.SignBits(), "independent", theta, 4, dense),
            ("adaptive signs", schemes.AdaptiveSigns(), "sequential", theta, 4, dense),
            ("signs, 4 largest kept", schemes.SignBits(nonzero=4), "independent", few, 4, sparse),
            ("find, then refine", schemes.FindThenRefine(4), "blackboard", few, 4, sparse),
        )
        for name, scheme, kind, truth, k, prior in entries:
            board: tuple[int, int, Kind] = (4000, k, kind)
            risk = schemes.simulate(scheme, models.GaussianLocation(truth), truth, board, _TRIALS, rng)
            model = "dense" if prior is dense else "4-sparse"
            rows.append((model, mean, kind, name, risk.bits, risk.value, risk.error, prior.bound(4000, k).value))
    columns = {
        "means": "how many are not zero",
        "size": "of these means",
        "protocol": "who reads what others wrote",
        "scheme": "protocol and estimator",
        "bits": "most that a node wrote",
        "risk": "squared error",
        "error": "standard error of the risk",
        "bound": "van Trees' bound on the worst case",
    }
    caption = "Gaussian location, d = 64, n = 4000, k = 4: what taking turns is worth"
    return Table("protocols", caption, columns, rows)


def configurations_table(count: int, seed: int) -> Table:
    """Random configurations by family."""
    families = defaultdict(list)
    for comparison in random_configurations(count, seed):
        families[comparison.quantity, comparison.family].append(comparison)
    rows: list[tuple[Cell, ...]] = []
    for (quantity, family), members in families.items():
        least = min(members, key=lambda c: c.ratio)
        broken = sum(not c.holds() for c in members)
        median = float(np.median([c.ratio for c in members]))
        error = least.error / least.value if math.isfinite(least.ratio) else None
        rows.append((family, quantity, len(members), broken, least.ratio, error, median))
    columns = {
        "family": "model, and scheme or quantizer",
        "quantity": "information or risk",
        "configurations": "random ones that were tried",
        "beyond": "how many lie beyond their bound",
        "ratio": "least ratio; – where no message knows anything",
        "ratio_error": "its standard error, relatively",
        "median": "median ratio",
    }
    caption = "Random configurations: bound / information or risk / bound, by at most 4.5 standard errors below 1"
    return Table("configurations", caption, columns, rows)


def bridge_table(verdicts: Sequence[bridge.Verdict]) -> Table:
    """Predictions beside the truth."""
    columns = {
        "layer": "parameter",
        "d": "its entries",
        "k": "entries kept",
        "n": "workers",
        "forecast": "method that the model expects to win",
        "winner": "the one that does",
        "regret": "measured error of the forecast / that of the winner - 1",
    }
    for name in bridge.METHODS:
        for what in ("predicted", "measured"):
            columns[f"{name}_{what}"] = f"relative squared error of {name}, {what}"
    columns |= {"r_to_k": "r / k that the model chooses for rTop-k", "factor": "and what it multiplies kept entries by"}
    rows: list[tuple[Cell, ...]] = []
    for v in verdicts:
        pairs = [value for name in bridge.METHODS for value in (v.predicted[name].error, v.measured[name])]
        chosen = v.predicted["rTop-k"]
        row: tuple[Cell, ...] = (
            v.layer,
            v.size,
            v.k,
            v.n,
            v.forecast,
            v.winner,
            v.regret,
            *pairs,
            chosen.r / v.k,
            chosen.factor,
        )
        rows.append(row)
    caption = (
        "Real gradients: relative squared error of the mean of n workers, by the fitted model and by isgq's codecs"
    )
    return Table("bridge", caption, columns, rows)
