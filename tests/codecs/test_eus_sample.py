"""Samplers: exactly m distinct positions, exact marginals, and every pair has a chance."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import root
from torch import Tensor

from isgq.codecs import eus_sample
from isgq.codecs.eus_sample import SAMPLERS, Sampler, systematic, systematic_points
from isgq.core.errors import CodecError
from isgq.core.keys import Key, random_int32

PI = torch.tensor([0.9, 0.3, 0.0, 0.05, 0.75, 0.5, 0.5], dtype=torch.float64)  # sums to 3


def digests(draws: int) -> list[int]:
    return [Key("w", step=step).digest for step in range(draws)]


def draw(sampler: Sampler, weights: Tensor, count: int, draws: int) -> Tensor:
    """Bool ``[draws, n]``: what was drawn."""
    drawn = torch.zeros(draws, weights.numel(), dtype=torch.bool)
    for row, digest in zip(drawn, digests(draws), strict=True):
        positions = sampler(weights, count, digest)
        assert positions.dtype == torch.int64
        assert positions.numel() == count
        assert bool((positions.diff() > 0).all())
        assert bool((weights[positions] > 0).all())
        row[positions] = True
    return drawn


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_marginals(name: str, dtype: torch.dtype) -> None:
    draws = 600
    drawn = draw(SAMPLERS[name], (7.3 * PI).to(dtype), 3, draws)  # any multiple of pi will do
    deviation = (PI * (1 - PI) / draws).sqrt()
    assert bool(((drawn.double().mean(0) - PI).abs() <= 4.5 * deviation).all())


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_pair_has_a_chance(name: str) -> None:
    drawn = draw(SAMPLERS[name], torch.ones(8), 2, 400).double()
    assert bool((drawn.T @ drawn > 0).all())


def test_every_pair_has_a_chance_in_rows_of_several_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eus_sample, "_ROWS", 8)
    weights = torch.cat([torch.ones(20), torch.tensor([3.0])])
    drawn = draw(systematic, weights, 3, 2000).double()
    assert bool((drawn.T @ drawn > 0).all())
    pi = 3 * weights.double() / weights.sum()
    assert bool(((drawn.mean(0) - pi).abs() <= 4.5 * (pi * (1 - pi) / 2000).sqrt()).all())


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([1.0], 0),
        ([0.0, 0.0], 0),
        ([], 0),
        ([1.0, 1.0], 1),
        ([1.0, 0.0, 1.0], 1),
        ([1 - 1e-9, 1e-9], 1),
        ([1 - 1e-9, 1 - 1e-9, 2e-9], 2),
        ([1e-30, 1e-30, 1e-30], 2),
        ([1e-44, 2e-44, 1.5e-44], 2),
        ([1e37, 2e37, 1.5e37], 2),
    ],
)
def test_extreme_weights(name: str, weights: list[float], count: int) -> None:
    for dtype in (torch.float32, torch.float64):
        draw(SAMPLERS[name], torch.tensor(weights, dtype=dtype), count, 20)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_draw_depends_on_its_digest_alone(name: str) -> None:
    weights = torch.linspace(0.1, 0.2, 100)
    first = [SAMPLERS[name](weights, 5, digest).tolist() for digest in digests(5)]
    assert first == [SAMPLERS[name](weights, 5, digest).tolist() for digest in digests(5)]
    assert len(set(map(tuple, first))) == 5


# -- systematic


def cumulated_in_order(pi: Tensor, order: Tensor, offsets: list[int]) -> tuple[list[int], list[float]]:
    """Positions in the documented order, one by one, and their cumulated probability."""
    rows, entries = order.numel(), []
    for row in order.tolist():
        for place, offset in enumerate(offsets):
            t = (row - offset) % rows
            if place * rows + t < min(pi.numel(), (place + 1) * rows):
                entries.append(place * rows + t)
    assert sorted(entries) == list(range(pi.numel()))
    return entries, list(itertools.accumulate(pi[entries].tolist()))


@pytest.mark.parametrize(("n", "rows", "count"), [(7, 7, 3), (23, 6, 4), (24, 6, 9), (40, 5, 1), (30, 1, 5)])
def test_systematic_mean_is_exact_over_all_breakpoints(n: int, rows: int, count: int) -> None:
    """Between breakpoints the set drawn is constant, so the mean over the offset is a finite sum."""
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) + 0.1
    weights[n // 2] = 0
    pi = count * weights / weights.sum()
    assert float(pi.max()) < 1
    digest = Key("w").digest
    order = random_int32(digest, "order", rows).argsort()
    offsets = (random_int32(digest, "offsets", math.ceil(n / rows)).long() % rows).tolist()
    entries, ends = cumulated_in_order(pi, order, offsets)
    breaks = sorted({0.0, 1.0, *(end % 1 for end in ends)})
    mean = torch.zeros_like(pi)
    for low, high in itertools.pairwise(breaks):
        if high - low > 1e-12:
            middle = (low + high) / 2
            drawn = systematic_points(weights, count, middle, order, offsets)
            points = [middle + j for j in range(count)]
            oracle = {entries[next(i for i, end in enumerate(ends) if end > point)] for point in points}
            assert set(drawn.nonzero().flatten().tolist()) == oracle
            mean += (high - low) * drawn.double()
    torch.testing.assert_close(mean, pi, rtol=0, atol=1e-11)


def test_systematic_on_many_entries() -> None:
    n, count = (1 << 20) + 12345, 5000
    weights = torch.randn(n, generator=torch.Generator().manual_seed(0)).abs() ** 3
    weights[::7] = 0
    pi = count * weights.double() / weights.double().sum()
    assert float(pi.max()) < 1
    drawn = draw(systematic, weights, count, 6).double().sum(0)
    # Expected numbers by size of the weight and by position; sampling without replacement only lowers the variance.
    for groups in (weights.argsort().split(n // 20), torch.arange(n).split(n // 20)):
        for group in groups:
            mean = 6 * float(pi[group].sum())
            assert abs(float(drawn[group].sum()) - mean) <= 4.5 * math.sqrt(mean) + 1


@pytest.mark.parametrize("start", [2.0**-53, 1e-12, 0.5, 1 - 1e-12, 1 - 2.0**-53])
def test_systematic_draws_exactly_m_at_any_offset(start: float) -> None:
    for seed in range(10):
        weights = torch.rand(1000, generator=torch.Generator().manual_seed(seed)) ** 8
        order = random_int32(seed, "order", 250).argsort()
        for count in (1, 2, 37):
            drawn = systematic_points(weights, count, start, order, [0, 249, 7, 100])
            assert int(drawn.sum()) == count


# -- conditional Poisson


def test_conditional_poisson_draws_from_the_law_of_largest_entropy() -> None:
    """P(S) is proportional to a product of odds; the odds are found here by enumeration."""
    pi = np.array([0.85, 0.3, 0.15, 0.7, 0.55, 0.45])
    sets = list(itertools.combinations(range(6), 3))
    member = np.array([[i in s for i in range(6)] for s in sets], dtype=float)

    def law(log_odds: np.ndarray) -> np.ndarray:
        weight = np.exp(member @ log_odds)
        return weight / weight.sum()

    found = root(lambda v: np.append((law(np.append(v, 0)) @ member - pi)[:-1], []), np.zeros(5), tol=1e-13)
    probability = law(np.append(found.x, 0))
    np.testing.assert_allclose(probability @ member, pi, atol=1e-9)
    draws = 1500
    counts = dict.fromkeys(sets, 0)
    for digest in digests(draws):
        counts[tuple(SAMPLERS["conditional_poisson"](torch.from_numpy(pi), 3, digest).tolist())] += 1
    expected = draws * probability
    observed = np.array(list(counts.values()))
    assert ((observed - expected) ** 2 / expected).sum() < 51  # 19 degrees of freedom: 99.99 % point


def test_conditional_poisson_finds_its_odds_on_real_sizes() -> None:
    for n, m, seed in ((1000, 50, 0), (200, 150, 1), (50, 1, 2), (300, 3, 3)):
        weights = torch.randn(n, generator=torch.Generator().manual_seed(seed)).abs() + 0.01
        weights = weights.clamp(max=float(weights.sum()) / m * 0.999 * (0.5 if m > n / 2 else 1))
        if float(m * weights.max() / weights.sum()) < 1:
            assert SAMPLERS["conditional_poisson"](weights, m, 5).numel() == m


def test_conditional_poisson_refuses_what_is_too_large_for_it() -> None:
    with pytest.raises(CodecError, match="systematic"):
        SAMPLERS["conditional_poisson"](torch.ones(5000), 10, 0)
    with pytest.raises(CodecError, match="pivotal"):
        SAMPLERS["conditional_poisson"](torch.ones(3000), 1000, 0)
