"""Plans of efficient unbiased sparsification against a sorted oracle, linear programs and a dual certificate."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from isgq.codecs.eus_plan import (
    ChiSquared,
    Divergence,
    KullbackLeibler,
    Plan,
    Separable,
    Squared,
    threshold,
    usa,
    uwsa,
)
from isgq.core.errors import CodecError

Array = npt.NDArray[np.float64]
CASES = [(4, 2, 0), (4, 2, 1), (5, 2, 2), (5, 2, 3), (5, 3, 4), (5, 3, 5)]


def vector(n: int, seed: int) -> Array:
    """Positive; even seeds are nearly flat, odd ones skewed, with heavy entries."""
    p = np.random.default_rng(seed).exponential(size=n) ** (0.5 if seed % 2 == 0 else 2) + 0.02
    return p / p.sum()


def sorted_plan(p: Array, m: int) -> tuple[Array, int, float]:
    """The definition, by sorting: (inclusion, h, tau) with h minimal such that ``(m - h) a_{h+1} <= light mass``."""
    order = np.argsort(-p, kind="stable")
    a = p[order]
    h = 0
    while h < m and (m - h) * a[h] > math.fsum(a[h:]):
        h += 1
    tau = math.fsum(a[h:]) / (m - h)
    inclusion = np.minimum(p / tau, 1)
    inclusion[order[:h]] = 1
    return inclusion, h, tau


# -- the threshold


FAMILIES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda r, n: np.abs(r.standard_normal(n)),
    "student t2": lambda r, n: np.abs(r.standard_t(2, n)),
    "lognormal": lambda r, n: r.lognormal(0, 2, n),
    "many magnitudes": lambda r, n: r.lognormal(0, 12, n),
    "few values": lambda r, n: np.ceil(r.exponential(2, n)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [3, 30, 1000])
def test_plan_is_that_of_the_sorted_definition(family: str, n: int) -> None:
    for seed in range(5):
        p = FAMILIES[family](np.random.default_rng(seed), n)
        for m in sorted({1, 2, n // 20 + 1, n // 2, n - 1}):
            plan = usa(torch.from_numpy(p), m)
            inclusion, h, tau = sorted_plan(p, m)
            assert (plan.heavy.numel(), plan.light) in {(h, m - h), (m, 0)} or np.isclose(inclusion, 1, rtol=1e-9).any()
            np.testing.assert_allclose(plan.inclusion().numpy(), inclusion, rtol=1e-9, atol=1e-9)
            assert float(plan.inclusion().sum()) == pytest.approx(m, rel=1e-9)
            if plan.light:
                assert plan.level == pytest.approx(tau, rel=1e-9)
                assert float(plan.light_scores.max()) < plan.level


def test_float32_is_summed_in_float64() -> None:
    p = torch.full((1 << 20,), 1 / 3)
    p[:3] = 1e6
    plan = usa(p, 1000)
    assert plan.heavy.tolist() == [0, 1, 2]
    exact = (p.numel() - 3) * float(p[-1]) / 997
    assert plan.level == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_vectors(dtype: torch.dtype) -> None:
    def plan(*p: float, m: int) -> tuple[list[int], int, float]:
        found = usa(torch.tensor(p, dtype=dtype), m)
        return found.heavy.tolist(), found.light, found.level

    assert plan(m=3) == ([], 0, 0.0)
    assert plan(0, 0, 0, m=2) == ([], 0, 0.0)
    assert plan(0, 5, 0, m=1) == ([1], 0, 0.0)
    assert plan(0, 5, 0, 1e-30, m=2) == ([1, 3], 0, 0.0)  # as many as are not zero
    assert plan(0, 5, 0, 1e-30, m=3) == ([1, 3], 0, 0.0)
    assert plan(2, 2, 2, m=2) == ([], 2, 3.0)
    assert plan(4, 1, 1, 1, 1, m=2) == ([0], 1, 4.0)  # a tie at the threshold: probability 1 is heavy
    assert plan(1, 1, 1e-30, m=2) == ([0, 1], 0, 0.0)  # what rounding swallows is dropped
    heavy, light, level = plan(1e-44, 1e-44, 1e-44, m=2)
    assert (heavy, light) == ([], 2)
    assert level > 0
    heavy, light, level = plan(3e38, 3e38, 3e38, m=1)
    assert (heavy, light) == ([], 1)
    assert math.isfinite(level)


def test_never_more_than_m_heavy() -> None:
    """Near-equal entries, of which one too many lies within rounding of probability 1."""
    for m in (1, 2, 100, 50000):
        for extra in (1.0, 1e-3, 1e-7, 1e-12):
            p = torch.ones(m + 1, dtype=torch.float64)
            p[-1] = extra
            plan = usa(p, m)
            assert plan.heavy.numel() + plan.light == m
            assert float(plan.inclusion().sum()) == pytest.approx(m)


def test_only_vectors_of_magnitudes_have_plans() -> None:
    for bad in (torch.tensor([1.0, -1.0]), torch.ones(2, 2), torch.tensor([1, 2]), torch.tensor([1.0, math.nan])):
        with pytest.raises(CodecError):
            usa(bad, 1)
    with pytest.raises(CodecError):
        uwsa(torch.ones(3), 0, Squared())


# -- optimality: linear programs over all m-sparse laws on a grid


def grid_optimum(p: Array, m: int, points: list[Array], cost: Callable[[Array], Array]) -> float:
    """Least expected cost among laws of m-sparse vectors with mean p, on a grid with these points a coordinate."""
    n = len(p)
    blocks = []
    for support in itertools.combinations(range(n), m):
        mesh = np.stack(np.meshgrid(*[points[i] for i in support], indexing="ij"), -1).reshape(-1, m)
        block = np.zeros((len(mesh), n))
        block[:, support] = mesh
        blocks.append(block)
    atoms = np.unique(np.concatenate(blocks), axis=0)
    equal = np.vstack([np.ones(len(atoms)), atoms.T])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solved = linprog(cost(atoms), A_eq=equal, b_eq=np.concatenate([[1], p]), method="highs", options=tight)
    assert solved.status == 0
    return float(solved.fun)


def grid(p: Array, values: Array, count: int) -> list[Array]:
    """Points a coordinate: an even grid, the entry itself, and the value it takes when light."""
    even = np.linspace(0, p.sum(), count)
    return [np.unique(np.concatenate([even, [0, p[i], values[i]]])) for i in range(len(p))]


def entropy(q: Array) -> Array:
    return np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0)


SYMMETRIC: dict[str, Callable[[Array], Array]] = {
    "squares": lambda q: (q**2).sum(-1),
    "entropy": lambda q: entropy(q).sum(-1),
    "cubes": lambda q: (q**3).sum(-1),
    "maximum": lambda q: q.max(-1),
    "non-separable": lambda q: (1 + (q**2).sum(-1)) * (q**2).sum(-1),
    "log-sum-exp": lambda q: np.log(np.exp(2 * q).sum(-1)),
}


@pytest.mark.parametrize(("n", "m", "seed"), CASES)
def test_usa_is_optimal_for_six_symmetric_divergences_at_once(n: int, m: int, seed: int) -> None:
    p = vector(n, seed)
    plan = usa(torch.from_numpy(p), m)
    # All outcomes of USA are the same up to order: the heavy, and tau for every light entry that is drawn.
    outcome = np.zeros(n)
    outcome[:m] = [*p[plan.heavy.numpy()], *[plan.level] * plan.light]
    points = grid(p, np.full(n, plan.level), 30 if m == 2 else 12)
    for name, f in SYMMETRIC.items():
        assert float(f(outcome)) == pytest.approx(grid_optimum(p, m, points, f), abs=1e-9), name


def test_the_cases_have_heavy_and_light_entries() -> None:
    heavy = {usa(torch.from_numpy(vector(n, seed)), m).heavy.numel() for n, m, seed in CASES}
    assert {0, 1} <= heavy


WEIGHTS = np.array([0.3, 2.0, 1.0, 5.0, 0.7])

# name: (divergence for a vector of length n, f(q, p) summed over the entries)
Weighted = tuple[Callable[[int], Divergence], Callable[[Array, Array], Array]]
SEPARABLE: dict[str, Weighted] = {
    "weighted squared": (
        lambda n: Squared(torch.from_numpy(WEIGHTS[:n])),
        lambda q, p: (WEIGHTS[: len(p)] * (q - p) ** 2).sum(-1),
    ),
    "chi-squared": (lambda n: ChiSquared(), lambda q, p: ((q - p) ** 2 / p).sum(-1)),
    "KL": (lambda n: KullbackLeibler(), lambda q, p: (entropy(q) - q * np.log(p)).sum(-1)),
    "weighted KL": (
        lambda n: KullbackLeibler(torch.from_numpy(WEIGHTS[:n])),
        lambda q, p: (WEIGHTS[: len(p)] * (entropy(q) - q * np.log(p) - q + p)).sum(-1),
    ),
    "weighted cosh": (
        lambda n: Separable(
            lambda x, p: torch.from_numpy(WEIGHTS[:n]) * (x * torch.sinh(x) - torch.cosh(x) + 1),
        ),
        lambda q, p: (WEIGHTS[: len(p)] * np.cosh(q)).sum(-1),
    ),
}


def expected(plan: Plan, p: Array, f: Callable[[Array, Array], Array]) -> float:
    """E f(Q): every entry is p / pi with probability pi, else 0; f is a sum, so only marginals matter."""
    pi = plan.inclusion().numpy()
    base = float(f(np.zeros_like(p), p))
    total = base
    for i, chance in enumerate(pi):
        one = np.zeros_like(p)
        one[i] = p[i] / chance
        total += chance * (float(f(one, p)) - base)
    return total


@pytest.mark.parametrize("name", SEPARABLE)
@pytest.mark.parametrize(("n", "m", "seed"), CASES)
def test_uwsa_is_optimal_for_separable_divergences(name: str, n: int, m: int, seed: int) -> None:
    make, f = SEPARABLE[name]
    p = vector(n, seed)
    plan = uwsa(torch.from_numpy(p), m, make(n))
    points = grid(p, p / plan.inclusion().numpy(), 30 if m == 2 else 12)
    assert expected(plan, p, f) == pytest.approx(grid_optimum(p, m, points, lambda q: f(q, p)), abs=1e-9)


@pytest.mark.parametrize("name", ["weighted squared", "chi-squared", "weighted KL"])
def test_usa_is_worse_where_the_divergence_is_not_symmetric(name: str) -> None:
    make, f = SEPARABLE[name]
    p = vector(5, 2)
    symmetric, best = usa(torch.from_numpy(p), 2), uwsa(torch.from_numpy(p), 2, make(5))
    assert expected(symmetric, p, f) > expected(best, p, f) + 0.01 * abs(expected(best, p, f))


PSI: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted squared": lambda x, p: torch.from_numpy(WEIGHTS)[: len(p)] * x**2,
    "chi-squared": lambda x, p: x**2 / p,
    "KL": lambda x, p: x,
    "weighted KL": lambda x, p: torch.from_numpy(WEIGHTS)[: len(p)] * x,
}


class OnlyInverse:
    """A divergence without a score, so that its level is searched for."""

    def __init__(self, inner: Divergence) -> None:
        self.psi_inverse = inner.psi_inverse


@pytest.mark.parametrize("name", PSI)
@pytest.mark.parametrize(("n", "m", "seed"), CASES)
def test_scores_searches_and_numeric_inverses_agree(name: str, n: int, m: int, seed: int) -> None:
    p = torch.from_numpy(vector(n, seed))
    divergence = SEPARABLE[name][0](n)
    by_score = uwsa(p, m, divergence)
    for other in (OnlyInverse(divergence), Separable(PSI[name])):
        plan = uwsa(p, m, other)
        torch.testing.assert_close(plan.inclusion(), by_score.inclusion(), rtol=1e-9, atol=1e-12)
        assert plan.light == by_score.light
    for level in (1e-3, 0.4, 30.0):
        torch.testing.assert_close(
            Separable(PSI[name]).psi_inverse(level, p),
            divergence.psi_inverse(level, p).expand_as(p),
            rtol=1e-12,
            atol=0,
        )


@pytest.mark.parametrize("divergence", [Squared(), KullbackLeibler(), OnlyInverse(Squared())])
def test_without_weights_uwsa_is_usa(divergence: Divergence) -> None:
    p = torch.from_numpy(vector(5, 3))
    torch.testing.assert_close(uwsa(p, 2, divergence).inclusion(), usa(p, 2).inclusion(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("divergence", [ChiSquared(), OnlyInverse(ChiSquared())])
def test_uwsa_with_few_entries_keeps_them_all(divergence: Divergence) -> None:
    p = torch.tensor([0.0, 3.0, 0.0, 1e-9])
    for m in (2, 3, 9):
        plan = uwsa(p, m, divergence)
        assert plan.heavy.tolist() == [1, 3]
        assert plan.light == 0
        assert plan.inclusion().tolist() == [0, 1, 0, 1]


def test_a_bounded_psi_is_refused() -> None:
    with pytest.raises(CodecError, match="unbounded"):
        uwsa(torch.tensor([0.4, 0.3, 0.3]), 1, Separable(lambda x, p: x / (1 + x)))


# -- the squared error


@pytest.mark.parametrize(("n", "m", "seed"), CASES)
def test_dual_certificate_of_the_squared_error(n: int, m: int, seed: int) -> None:
    """``||q||**2 >= u.q + nu`` for every m-sparse q, of any signs, with equality in the mean."""
    p = vector(n, seed)
    plan = usa(torch.from_numpy(p), m)
    heavy = plan.heavy.numpy()
    u = np.full(n, 2 * plan.level)
    u[heavy] = 2 * p[heavy]
    nu = -((p[heavy] ** 2).sum() + plan.light * plan.level**2)
    for support in itertools.combinations(range(n), m):
        # On a support the least of ||q||**2 - u.q is at q = u / 2.
        assert -(u[list(support)] ** 2).sum() / 4 >= nu - 1e-12
    second_moment = float(plan.variance(torch.from_numpy(p))) + (p**2).sum()
    assert u @ p + nu == pytest.approx(second_moment, abs=1e-12)


def samples() -> dict[str, tuple[Array, int, float]]:
    """Vectors of n = 1000 with the number of heavy entries and the relative error at m = 50."""
    r = np.random.default_rng(2)
    return {
        "normal": (r.standard_normal(1000), 0, 11.8135),
        "Laplace": (r.laplace(size=1000), 0, 9.1096),
        "Student t2": (r.standard_t(2, 1000), 0, 7.1837),
        "lognormal": (r.lognormal(0, 2, 1000), 6, 0.4184),
    }


@pytest.mark.parametrize("name", samples())
def test_closed_form_of_the_variance(name: str) -> None:
    x, h, wanted = samples()[name]
    a = torch.from_numpy(np.abs(x))
    plan = usa(a, 50)
    assert plan.heavy.numel() == h
    light = plan.light_scores
    closed = light.sum() ** 2 / plan.light - light.square().sum()
    assert float(plan.variance(a)) == pytest.approx(float(closed), rel=1e-12)
    assert float(plan.variance(a) / a.square().sum()) == pytest.approx(wanted, rel=1e-4)


def test_threshold_of_scores_alone() -> None:
    heavy, light, level = threshold(torch.tensor([10.0, 1.0, 2.0, 3.0]), 3)
    assert (heavy.tolist(), light, level) == ([0, 3], 1, 3.0)  # 3 is the whole of what is left: a tie
