"""Plans against brute force, and the symbols' code against its model."""

import itertools
import math

import numpy as np
import pytest

from isgq.codecs.rotation_code import (
    _decay,
    decode_symbols,
    dequantize,
    digits_for,
    encode_symbols,
    quantize,
)
from isgq.codecs.rotation_plan import (
    FIXED_BITS,
    Spectrum,
    curve,
    mmse_plan_at_slope,
    plan_at_slope,
    slope_for_bits,
    slope_for_variance,
)
from isgq.codecs.rotation_sides import COARSEST, rate, standard, step_table
from isgq.core.errors import CodecError

SPECTRUM = Spectrum(0.8 ** np.arange(20), standard(30), standard(50))
RANDOM = np.random.default_rng(0)


def objective(plan, slope):
    return plan.variance + slope * plan.bits


@pytest.mark.parametrize("slope", [1e-2, 1e-3, 1e-4, 1e-6])
def test_no_other_steps_or_probabilities_are_better(slope):
    """A bound that allows sampled atoms weights and steps of their own for nothing."""
    plan = plan_at_slope(SPECTRUM, slope)
    codes = np.arange(0, 128, 2)
    noises = standard(30).noises[codes]
    kappa = (1 + noises[:, None]) * (1 + noises[None]) - 1
    bits = 30 * rate(noises)[:, None] + 50 * rate(noises)[None]
    best = 0.0
    for w in SPECTRUM.weights:
        sampled = (w**2 * ((1 + kappa) / p - 1) + slope * p * bits for p in np.linspace(0.01, 0.99, 99))
        best += min((w**2 * kappa + slope * (bits + 32)).min(), min(float(cost.min()) for cost in sampled))
    assert objective(plan, slope) <= 1.08 * (best + slope * FIXED_BITS)


def test_the_curve_is_convex_and_falls():
    c = curve(standard(30), standard(50))
    gains = -np.diff(c.kappa) / np.diff(c.bits)
    assert (gains > 0).all()
    assert (np.diff(gains) < 0).all()
    assert c.kappa[0] == pytest.approx((1 + COARSEST**2 / 12) ** 2 - 1)


def test_finer_slopes_trade_variance_for_bits():
    for planner in (plan_at_slope, mmse_plan_at_slope):
        plans = [planner(SPECTRUM, slope) for slope in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]
        assert [p.variance for p in plans] == sorted((p.variance for p in plans), reverse=True)
        assert [p.bits for p in plans] == sorted(p.bits for p in plans)


def test_one_slope_for_all_is_better_than_equal_shares():
    spectra = [
        SPECTRUM,
        Spectrum(5 * np.ones(4), standard(20), standard(10)),
        Spectrum(0.1 * 0.5 ** np.arange(9), standard(100), standard(200)),
    ]
    budget = 4000.0
    slope = slope_for_bits(spectra, budget)
    together = [plan_at_slope(s, slope) for s in spectra]
    apart = [plan_at_slope(s, slope_for_bits([s], budget / 3)) for s in spectra]
    assert sum(p.bits for p in together) == pytest.approx(budget, rel=0.01)
    assert sum(p.variance for p in together) < 0.7 * sum(p.variance for p in apart)


def test_variance_is_met_from_below():
    slope = slope_for_variance([SPECTRUM], 0.5)
    assert 0.49 < plan_at_slope(SPECTRUM, slope).variance <= 0.5


def test_steps_are_eighths_of_an_octave():
    np.testing.assert_allclose(step_table(), COARSEST * 2.0 ** (-np.arange(128) / 8), rtol=1e-14)


def test_decay_is_the_exponential():
    x = np.concatenate([np.linspace(0, 50, 10001), [1e-9, 700.0, 1e4]])
    np.testing.assert_allclose(_decay(x), np.exp(-x), rtol=2e-10, atol=1e-300)


def draw(steps, size, *, dithered):
    group = np.repeat(np.arange(len(steps)), size)
    x = RANDOM.laplace(scale=math.sqrt(0.5), size=len(group))
    dither = RANDOM.uniform(-0.5, 0.5, len(group)) if dithered else None
    return x, group, dither


@pytest.mark.parametrize("dithered", [True, False])
@pytest.mark.parametrize("step", [3.5, 2.0, 0.7, 0.05, 6e-5])
def test_symbols_come_back_in_the_bits_of_the_model(step, dithered):
    steps = np.array([step, step / 1.3])
    x, group, dither = draw(steps, 3000, dithered=dithered)
    symbols = quantize(x / steps[group], dither)
    digits = digits_for(float(np.abs(symbols).max()))
    code = encode_symbols(symbols, dither, group, steps, digits)
    np.testing.assert_array_equal(decode_symbols(code, dither, group, steps, digits), symbols)
    if dithered:  # about the mutual information of x and x + noise, a little less for a Laplace than for a Gaussian x
        expected = float(rate(steps**2 / 12).mean())
        assert 8 * len(code) / len(x) == pytest.approx(expected, abs=0.12)


def test_dithered_errors_are_uniform():
    steps = np.array([2.0])
    x, group, dither = draw(steps, 20000, dithered=True)
    error = dequantize(quantize(x / 2.0, dither), dither, group, steps) - x
    assert np.abs(error).max() <= 1.0
    assert error.mean() == pytest.approx(0, abs=0.02)
    assert error.var() == pytest.approx(4 / 12, rel=0.03)
    assert np.corrcoef(error, x)[0, 1] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("step", [0.0005, 0.3, 1.0, 2.5])
def test_dead_zone_values_are_centroids(step):
    """No other value for a symbol is closer, on average, to what became it."""
    steps = np.array([step])
    x, group, _ = draw(steps, 200000, dithered=False)
    symbols = quantize(x / step, None)
    values = dequantize(symbols, None, group, steps)
    for q in (-2, -1, 0, 1, 2):
        of_q = x[symbols == q]
        if len(of_q) > 2000:
            assert values[symbols == q][0] == pytest.approx(of_q.mean(), abs=5 * of_q.std() / math.sqrt(len(of_q)))


def test_wrong_codes_are_refused():
    steps = np.array([1.0])
    x, group, dither = draw(steps, 100, dithered=True)
    code = encode_symbols(quantize(x, dither), dither, group, steps, 6)
    for wrong in (code + b"\1", code + bytes(4), code * 2):
        with pytest.raises(CodecError):
            decode_symbols(wrong, dither, group, steps, 6)
    with pytest.raises(CodecError, match="more than 2 digits"):
        encode_symbols(np.full(100, 9), dither, group, steps, 2)
    with pytest.raises(CodecError, match="digits"):
        digits_for(1e13)


def test_golden_code():
    """The same bytes on every machine: frequencies come from IEEE operations alone."""
    symbols = np.array([0, 1, -1, 0, 2, 0, 0, -3, 0, 1] * 3)
    dither = np.array([k / 16 for k in itertools.islice(itertools.cycle((-7, -3, 0, 2, 6)), 30)])
    code = encode_symbols(symbols, dither, np.repeat([0, 1], 15), np.array([1.5, 0.75]), 4)
    assert code.hex() == "8fd577fa73f692402d74ef0b"
