"""Closed forms against Monte Carlo, and what is measured where the truth is known."""

import math

import pytest
import torch
from torch import nn

from analysis.gradients import LayerGradient
from analysis.measure import measure
from analysis.reconstruction import effective_rank, factors_table
from analysis.theory import predict
from isgq.codecs import codec
from isgq.codecs.variance import product_variance
from isgq.core.payload import Factors
from isgq.layers.capture import find_units
from isgq.testing import normal


def layer(module, x, d):
    [unit], _ = find_units(nn.Sequential(module), skip=lambda name: False)
    return LayerGradient.of(unit, Factors(x, d))


LAYERS = {
    "linear": layer(nn.Linear(14, 6), normal(1, 5, 14).relu(), normal(2, 5, 6)),
    "convolution": layer(nn.Conv2d(2, 4, 3, stride=2, padding=1), normal(3, 3, 2, 6, 6).relu(), normal(4, 3, 4, 3, 3)),
    "groups": layer(nn.Conv2d(4, 4, 3, groups=2), normal(5, 3, 4, 5, 5), normal(6, 3, 4, 3, 3).relu()),
}
EXACT = [
    "separate(dithered:levels=1,bucket=row)",
    "separate(dithered:levels=2,bucket=tensor;dithered:mode=one_bit)",
    "separate(exact;qsgd:levels=2)",
    "rotated",
    "dithered:levels=2",
    "dithered:levels=2,mode=half",
    "qsgd:levels=1",
    "terngrad",
    "int8:rounding=stochastic",
    "nested_dithered:levels=1,ratio=3",
    "top_k:k=7",
    "rtop_k:r=20,k=5",
    "rtop_k:r=20,k=5,debias=true",
    "random_k:k=0.3",
    "random_k:k=9,scale=false",
    "eus:m=9",
    "eus:m=9,divergence=chi_squared",
    "sign",
    "one_bit",
    "exact",
    "error_feedback(top_k:k=7)",
    "momentum_correction(sign)",
]


@pytest.mark.parametrize("spec", EXACT)
def test_closed_forms_agree_with_monte_carlo(spec):
    for name, each in LAYERS.items():
        expected = predict(codec(spec), each)
        assert expected is not None
        assert expected.exact
        found = measure(spec, each, 60)
        assert abs(found.error - expected.error) <= 4.5 * found.deviation + 1e-5 * found.norm, name


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "qcs", "qcs:mode=mmse"])
def test_bounds_hold(spec):
    for each in LAYERS.values():
        expected = predict(codec(spec), each)
        assert expected is not None
        assert not expected.exact
        found = measure(spec, each, 40)
        assert found.error <= expected.error + 4.5 * found.deviation


@pytest.mark.parametrize("spec", ["naive", "minimum_variance", "lloyd_max", "rotated:mode=mmse", "separate(lloyd_max)"])
def test_there_is_no_form_where_none_is_known(spec):
    assert predict(codec(spec), LAYERS["linear"]) is None


def test_a_linear_layer_has_the_library_s_closed_form():
    each, coder = LAYERS["linear"], codec("dithered:levels=2")
    variances = (coder.variance(each.factors.x), coder.variance(each.factors.d))
    expected = predict(codec("separate(dithered:levels=2)"), each)
    assert expected is not None
    assert expected.error == pytest.approx(float(product_variance(each.factors, *variances)), rel=1e-6)


def test_indices_travel_without_loss():
    each = layer(nn.Embedding(5, 6), torch.tensor([3, 0, 3, 4]), normal(7, 4, 6))
    spec = "separate(dithered:levels=1,bucket=row)"
    expected, found = predict(codec(spec), each), measure(spec, each, 60)
    assert expected is not None
    assert abs(found.error - expected.error) <= 4.5 * found.deviation
    assert predict(codec("rotated"), each) is None
    assert factors_table({0: [each]}).records()[0]["x_rank"] is None


def test_more_keys_are_taken_until_the_mean_is_precise():
    each = LAYERS["linear"]
    rough, fine = (measure("qsgd:levels=1", each, 5, precision=p, most=2000) for p in (math.inf, 0.02))
    assert rough.keys == 5
    assert 5 < fine.keys < 2000
    assert fine.deviation <= 0.02 * fine.error
    assert measure("qsgd:levels=1", each, 5, precision=1e-9, most=12).keys == 12


def test_bias_and_noise():
    each = LAYERS["linear"]
    found = measure("dithered:levels=1", each, 50)
    assert 0.5 < found.offset / found.noise < 2  # unbiased: nothing but chance
    biased = measure("top_k:k=7", each, 3)
    assert biased.offset == pytest.approx(biased.error)
    assert (biased.noise, biased.deviation) == (0, 0)
    kept = each.gradient.flatten().abs().sort(descending=True).values[:7].double().square().sum()
    assert biased.cosine == pytest.approx(float((kept / found.norm).sqrt()))


def test_bits_are_kept_apart():
    each = LAYERS["linear"]
    found = measure("top_k:k=7", each, 2)
    assert found.raw_bits == 7 * 32
    low, alphabet, entropy = found.symbols["low"]
    assert low == 7
    assert entropy <= alphabet


def test_effective_rank():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.ones(3, 7)) == pytest.approx(1)
    assert effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(2)
    assert effective_rank(torch.zeros(3, 4)) == 0
