"""Information from k bits: models, quantizers and bounds, against closed forms and known numbers."""

import math

import numpy as np
import pytest
from scipy.integrate import quad

from analysis.estimation import bounds, information, models, priors, quantizers
from analysis.estimation.configurations import FAMILIES, random_configurations
from isgq.core.errors import OptionError


def rng(seed=0):
    return np.random.default_rng(seed)


MODELS = {
    "location": models.GaussianLocation(np.array([0.3, -1.0]), 2.0),
    "variance": models.GaussianVariance(np.array([0.5, 2.0])),
    "bernoulli": models.ProductBernoulli(np.array([0.1, 0.5, 0.8])),
    "categorical": models.Categorical(np.array([0.2, 0.3, 0.5])),
    "holder": models.HolderDensity(np.array([0.9, -0.5, 0.0]), 0.7),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_score_has_mean_zero_and_the_information_of_its_constants(name):
    model = MODELS[name]
    scores = model.score(model.sample(100_000, rng()))
    assert scores.shape == (100_000, model.dim)
    assert (np.abs(scores.mean(0)) < 5 * scores.std(0) / math.sqrt(len(scores))).all()
    covariance, constants = np.cov(scores.T), model.constants()
    slack = 1.001 if name == "holder" else 1.0  # its constants are bounds away from theta = 0
    assert np.trace(covariance) == pytest.approx(constants.trace / slack, rel=0.03)
    assert np.linalg.eigvalsh(covariance)[-1] == pytest.approx(constants.variance, rel=0.05)


def test_every_direction_has_the_moments_that_the_constants_promise():
    draws = rng().standard_normal((400_000, 2))
    for u in (np.array([1.0, 0.0]), np.array([-1.0, 0.0]), np.array([0.6, 0.8]), np.array([0.6, -0.8])):
        scale = models.GaussianVariance(np.ones(2))
        assert np.exp(scale.score(draws) @ u / math.sqrt(scale.constants().psi1)).mean() <= 2
        for q in (0.02, 0.3, 0.5, 0.9):
            coin = models.ProductBernoulli(np.full(2, q))
            x, weights = coin.support()
            for t in (-2.0, -0.3, 0.01, 0.5, 3.0):
                moment = weights @ np.exp(t * coin.score(x) @ u)
                assert math.log(moment) <= coin.constants().proxy * t**2 / 2 + 1e-12


def test_gaussian_norms():
    assert models.GaussianLocation(np.zeros(3)).constants().psi2 == pytest.approx(8 / 3)
    assert models.psi1_norm() == pytest.approx(1.2087, abs=1e-4)


def test_argmax_of_gaussian_coordinates():
    found = [information.argmax_trace(k) for k in (1, 2, 4, 8, 10)]
    assert found == pytest.approx([2 / math.pi, 1.414, 3.327, 8.03, 10.59], rel=4e-3)
    assert bounds.bit_entropy(models.GaussianLocation(np.zeros(1)).constants(), 10) == pytest.approx(13.86, abs=0.01)
    assert found[-1] / 13.86 == pytest.approx(0.76, abs=0.01)
    squares = [information.argmax_trace(k, magnitude=True) for k in (1, 2, 4, 6, 8, 10)]
    assert squares == pytest.approx([0.202, 0.720, 3.35, 8.88, 17.7, 30.0], rel=5e-3)


@pytest.mark.parametrize(
    ("quantizer", "closed"),
    [
        (quantizers.HalfSpace(np.full(16, 0.25)), 2 / math.pi),
        (quantizers.CoordinateBits(np.arange(4), np.zeros(4)), 8 / math.pi),
        (quantizers.CoordinateBits(np.arange(2), np.ones(2)), information.coordinate_bits_trace(np.ones(2))),
        (quantizers.Argmax(4), information.argmax_trace(4)),
    ],
)
def test_monte_carlo_agrees_with_closed_forms(quantizer, closed):
    found = information.estimate(models.GaussianLocation(np.zeros(16)), quantizer, 40_000, rng(1))
    assert abs(found.trace - closed) <= 4 * found.error
    assert found.error < 0.02 * closed
    assert found.trace < bounds.bit_entropy(models.GaussianLocation(np.zeros(16)).constants(), quantizer.bits)


def test_best_bit_of_a_variance_is_at_the_threshold_that_the_scheme_uses():
    quantizer = quantizers.CoordinateBits(np.arange(1), np.array([1.4758]), magnitude=True)
    found = information.estimate(models.GaussianVariance(np.ones(1)), quantizer, 100_000, rng(2))
    assert abs(found.trace - information.magnitude_bit_trace()) <= 4 * found.error


@pytest.mark.parametrize(("d", "largest"), [(9, 32), (17, 64), (33, 128)])
def test_categorical_information_is_four_times_the_free_symbols(d, largest):
    model = models.Categorical(np.append(np.full(d - 1, 1 / (2 * (d - 1))), 0.5))
    assert model.constants().variance == pytest.approx(largest)
    if d == 33:
        assert model.constants().trace == pytest.approx(2112)
        x, weights = model.support()
        best, _ = information.oracle(model.score(x), weights, 3)
        assert best.trace >= 455.8
        assert bounds.finite_variance(model.constants(), 3) == pytest.approx(1024)


@pytest.mark.parametrize(("s", "least", "per_bit"), [(1, (11.1, 30.1, 49.7), 49.4), (2, (6.25, 15.2, 23.7), 21.4)])
def test_sparse_bernoulli_partitions_and_bounds(s, least, per_bit):
    model = models.ProductBernoulli(np.full(10, s / 10))
    x, weights = model.support()
    for k, known in enumerate(least, 1):
        start = quantizers.CoordinateBits(np.arange(k), np.full(k, 0.5))(x, rng())
        best, _ = information.oracle(model.score(x), weights, k, [start])
        sharper = bounds.bit_entropy(model.constants(), k)
        assert known - 1e-9 <= best.trace <= bounds.message_entropy(model.constants(), best.probabilities) <= sharper
        assert sharper < bounds.sparse_bernoulli(s / 10, k) == pytest.approx(per_bit * k, rel=2e-3)


def test_a_start_saves_k_means_from_a_local_optimum():
    model = models.ProductBernoulli(np.full(6, 0.5))
    x, weights = model.support()
    start = quantizers.CoordinateBits(np.arange(1), np.array([0.5]))(x, rng())
    assert information.oracle(model.score(x), weights, 1, [start], restarts=1)[0].trace >= 4 - 1e-9


def test_the_oracle_as_a_quantizer_beats_coordinate_bits():
    model = models.GaussianLocation(np.zeros(4))
    start = quantizers.CoordinateBits(np.arange(2), np.zeros(2))
    best = information.oracle_quantizer(model, 2, 4000, rng(3), [start])
    assert information.estimate(model, best, 40_000, rng(4)).trace > 4 / math.pi


def test_verbatim_coordinates_of_fair_coins():
    model = models.ProductBernoulli(np.full(6, 0.5))
    x, weights = model.support()
    for k in (1, 3, 6):
        found = information.exact(
            model.score(x), weights, quantizers.CoordinateBits(np.arange(k), np.full(k, 0.5))(x, rng())
        )
        assert found.trace == pytest.approx(4 * k)
        assert bounds.bit_entropy(model.constants(), k) == pytest.approx(8 * math.log(2) * k)


def test_random_ones_and_symbol_groups_are_messages_of_their_bits():
    x = models.ProductBernoulli(np.full(9, 0.3)).sample(500, rng())
    quantizer = quantizers.RandomOnes(9, 3)
    messages = quantizer(x, rng())
    assert quantizer.bits == 16
    assert 0 <= messages.min() <= messages.max() < 2**16
    assert (messages >> 12 == x.sum(1)).all()
    symbols = np.arange(10.0)
    assert quantizers.SymbolGroup(2, 1)(symbols, rng()).tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0]


def test_the_prior_has_the_information_that_van_trees_needs():
    def density(t):
        return math.cos(math.pi * t / 2) ** 2

    def integrand(t):
        return (math.pi * math.sin(math.pi * t / 2)) ** 2  # (density' / density)^2 * density

    assert quad(density, -1, 1)[0] == pytest.approx(1)
    assert quad(integrand, -1, 1)[0] == pytest.approx(9.8696, abs=1e-4)
    drawn = priors.gaussian_location(100_000).sample(rng())
    assert drawn.var() == pytest.approx(1 / 3 - 2 / math.pi**2, rel=0.01)


def test_van_trees_bounds_of_known_value_and_regime():
    prior = priors.gaussian_location(64)
    assert [prior.bound(n, k).value for n, k in ((2000, 1), (2000, 4), (2000, 16), (8000, 4))] == pytest.approx(
        [1.203, 0.349, 0.0910, 0.0910], abs=6e-4
    )
    assert prior.bound(2000, 1).in_regime
    assert not prior.bound(2, 1).in_regime
    assert prior.bound(2000, 64).binding == "Tr I_X"


def test_no_message_and_no_scheme_is_beyond_its_bound_in_1000_random_configurations():
    found = list(random_configurations(1000, seed=0))
    assert [c for c in found if not c.holds()] == []
    assert len({(c.family, c.quantity) for c in found}) == len(FAMILIES)
    assert min(c.ratio for c in found if c.error == 0) >= 1 - 1e-9
    assert all(math.isfinite(c.bound) and c.value >= -4.5 * c.error for c in found)


def test_configurations_do_not_depend_on_how_many_follow():
    assert list(random_configurations(13, 7))[:12] == list(random_configurations(12, 7))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: priors.gaussian_location(0), "dim = 0 must be an integer of at least 1"),
        (lambda: priors.gaussian_location(4).bound(10, 0), "bits = 0"),
        (lambda: priors.gaussian_location(4).bound(0, 1), "nodes = 0"),
        (lambda: models.GaussianLocation(np.zeros(0)), "at least one number"),
        (lambda: models.GaussianLocation(np.zeros(1), 0.0), "sigma = 0.0"),
        (lambda: models.GaussianVariance(np.array([1.0, -1.0])), "values from -1 to 1"),
        (lambda: models.ProductBernoulli(np.array([0.5, 1.0])), "strictly between 0 and 1"),
        (lambda: models.ProductBernoulli(np.full(20, 0.5)).support(), "too many to list"),
        (lambda: models.Categorical(np.array([0.5, 0.4])), "sums to 0.9"),
        (lambda: models.HolderDensity(np.zeros(1), 1.5), "smoothness = 1.5"),
        (lambda: models.HolderDensity(np.zeros(1), 1.0, 10.0), "density negative"),
        (lambda: priors.sparse_bernoulli(10, 6.0), "outside of the regime"),
        (lambda: priors.sparse_gaussian_location(4, 5), "at most dim = 4"),
        (lambda: priors.dense_bernoulli(4, 0.5), "half_width = 0.5"),
        (lambda: priors.gaussian_variance(4, 2.0, 1.0), "low = 2.0"),
        (lambda: priors.categorical(1), "symbols = 1"),
        (lambda: bounds.sparse_bernoulli(0.6, 1), "outside of the bound's regime"),
        (lambda: bounds.tails(MODELS["location"].constants(), 1, 3), "p must be 1"),
        (lambda: quantizers.Argmax(3)(np.zeros((2, 4)), rng()), "needs 8 coordinates; x has 4"),
        (lambda: quantizers.CoordinateBits(np.arange(2), np.zeros(1)), "a threshold each"),
        (lambda: quantizers.RandomOnes(1000, 7), "no int64"),
        (lambda: information.oracle(np.zeros((3, 1)), np.full(3, 1 / 3), 2), "4 messages"),
    ],
)
def test_bad_input_is_refused_with_its_value(call, message):
    with pytest.raises(OptionError, match=message):
        call()
