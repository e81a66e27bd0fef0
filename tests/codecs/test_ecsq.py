"""Entropy-coded scalar quantization: the error it states, bytes near the entropy, and safe to decode."""

import math
from dataclasses import replace

import pytest
import torch

import isgq
from isgq.codecs.ecsq import ECSQ
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key
from isgq.testing import normal

KEY = Key("w", seed=1)


def size(payload):
    return payload.tensors["code"].numel()


@pytest.mark.parametrize("step", [0.01, 0.5, 1.0, 3.0])
def test_the_squared_error_is_a_twelfth_of_the_squared_step(step):
    x, codec = normal(1, 20, 500) * 3, ECSQ(step)
    error = codec.decode(codec.encode(x, KEY)) - x
    assert float(error.square().mean() / x.square().mean()) == pytest.approx(step**2 / 12, rel=0.05)
    assert float(error.abs().max()) <= 0.51 * step * float(x.square().mean().sqrt())


@pytest.mark.parametrize("step", [0.1, 1.0, 2.0])
def test_bytes_are_near_those_of_a_gaussian_with_a_gaussian_error(step):
    """The rate, a quarter of a bit for the uniform error, and little for the model."""
    x = normal(2, 4, 5000)
    bits = 8 * size(ECSQ(step).encode(x, KEY)) / x.numel()
    rate = 0.5 * math.log2(1 + 12 / step**2)
    assert rate < bits < rate + 0.254 + 0.12


@pytest.mark.parametrize("step", [0.5, 1.0, 2.0, 8.0])
def test_a_dead_zone_costs_fewer_bytes_and_contracts(step):
    x = normal(5, 4, 5000)
    dithered, dead = ECSQ(step), ECSQ(step, dither=False)
    payload = dead.encode(x, KEY)
    assert size(payload) < 0.98 * size(dithered.encode(x, KEY))
    error = (dead.decode(payload) - x).square().sum() / x.square().sum()
    assert error <= min(1, 1.4 * step**2 / 12)


def test_weak_rows_cost_little_and_empty_ones_nothing():
    x = normal(3, 8, 400)
    whole = size(ECSQ(1.0).encode(x, KEY))
    x[4:] *= 0.01
    weak = size(ECSQ(1.0).encode(x, KEY))
    x[4:] = 0
    empty = size(ECSQ(1.0).encode(x, KEY))
    assert 0.4 * whole < empty < 0.65 * whole  # the step is finer for the half that is left
    assert weak < 1.1 * empty
    assert not ECSQ(1.0).decode(ECSQ(1.0).encode(x, KEY))[4:].any()


def test_malformed_payloads_are_refused():
    codec = ECSQ()
    payload = codec.encode(normal(4, 3, 50), KEY)
    scales, code = payload.tensors["scales"], payload.tensors["code"]
    for tensors in (
        {"scales": scales},
        {"scales": scales[:-1], "code": code},
        {"scales": scales.float(), "code": code},
        {"scales": -scales, "code": code},
        {"scales": scales * float("nan"), "code": code},
        {"scales": scales, "code": code.short()},
        {"scales": scales, "code": torch.cat([code, code])},
        {"scales": scales, "code": torch.cat([code, code[:1] * 0])},
    ):
        with pytest.raises(CodecError):
            codec.decode(replace(payload, tensors=tensors))
    with pytest.raises(CodecError, match="cannot hold"):
        codec.decode(replace(payload, shape=(3, 1 << 28)))
    with pytest.raises(CodecError, match="digits"):
        codec.decode(
            replace(payload, tensors={"scales": scales * torch.tensor([1e-30, 1, 1, 1]).bfloat16(), "code": code})
        )


@pytest.mark.parametrize("options", ["step=0", "step=9", "step=nan", "bucket=0"])
def test_options_outside_their_range_are_named(options):
    with pytest.raises(OptionError, match=options.partition("=")[0]):
        isgq.codec(f"ecsq:{options}")
