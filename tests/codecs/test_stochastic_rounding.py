"""Stochastic rounding to a grid, its users QSGD, TernGrad and int8, and mistakes that such code is known for."""

import pytest
import torch

from isgq.codecs import grid
from isgq.codecs.buckets import Buckets
from isgq.codecs.int8 import Int8
from isgq.codecs.qsgd import QSGD
from isgq.codecs.terngrad import TernGrad
from isgq.core.keys import Key, random_int32
from tests.codecs.inputs import normal

KEY = Key("w", step=1)


@pytest.mark.parametrize("levels", [1, 2, 7, 127])
@pytest.mark.parametrize("size", [10_000, 1000, 37, 1])
def test_symbols_are_those_of_exact_arithmetic(levels: int, size: int) -> None:
    flat = normal(10_000)
    cut = Buckets(flat.numel(), size)
    norm = cut.absmax(flat)
    symbols = grid.round_stochastic(flat, norm, levels, cut, digest=99)
    # In integers: t in units of 2**-24, cut off towards zero as int() does; u the top 24 bits.
    t = (flat / cut.spread(norm) * (levels << 24)).double().trunc().long()
    u = (random_int32(99, "round", flat.numel()).long() >> 8) + (1 << 23)
    assert bool(((u >= 0) & (u < 1 << 24)).all())
    assert torch.equal(symbols.long(), (t + u).div(1 << 24, rounding_mode="floor") + levels)


@pytest.mark.parametrize("levels", [1, 4, 64])
def test_points_of_the_grid_never_move(levels: int) -> None:
    points = torch.arange(-levels, levels + 1) / levels * 8.0
    flat = points.repeat(2000)
    cut = Buckets(flat.numel(), points.numel())
    norm = cut.absmax(flat)
    for symbols in (grid.round_stochastic(flat, norm, levels, cut, 5), grid.round_nearest(flat, norm, levels, cut)):
        assert torch.equal(grid.rebuild(symbols, norm, levels, cut), flat)


def test_a_quarter_averages_to_a_quarter() -> None:
    x = torch.tensor([1.0, 0.25, -0.25, 0.75]).repeat(100_000, 1)
    for made in (QSGD(levels=1, bucket="row"), TernGrad(bucket="row"), QSGD(levels=1, bucket="tensor")):
        mean = made.decode(made.encode(x, KEY)).mean(0)
        assert mean.tolist() == pytest.approx([1.0, 0.25, -0.25, 0.75], abs=0.006)
        assert float(mean[0]) == 1.0


def test_symbols_of_the_l2_norm_are_sparser_but_noisier() -> None:
    x = normal(64, 256)
    of_max, of_l2 = (QSGD(levels=1, bucket="row", norm=norm) for norm in ("max", "l2"))
    assert float(of_l2.variance(x).sum()) > 3 * float(of_max.variance(x).sum())
    zeros = [int((c.encode(x, KEY).symbols["q"].values == 1).sum()) for c in (of_max, of_l2)]
    assert zeros[1] > 1.2 * zeros[0]


def test_clipping_makes_terngrad_biased_and_says_so() -> None:
    x = normal(512) ** 3
    clipped, plain = TernGrad(clip=1.5, bucket="row"), TernGrad(bucket="row")
    assert plain.unbiased
    assert not clipped.unbiased
    limit = 1.5 * float(x.square().mean().sqrt())
    mean = clipped.decode(clipped.encode(x.expand(20_000, 512), KEY)).mean(0)
    assert float((mean - x.clamp(-limit, limit)).norm() / x.norm()) < 0.02
    assert float((mean - x).norm() / x.norm()) > 0.2
    assert torch.allclose(clipped.mean(x[None])[0], x.clamp(-limit, limit), rtol=1e-5)
    assert float(clipped.variance(x[None]).sum()) < 0.5 * float(plain.variance(x[None]).sum())


def test_clipping_spares_constant_tensors() -> None:
    x = torch.full((50,), -0.3)
    made = TernGrad(clip=2.5)
    assert torch.allclose(made.decode(made.encode(x, KEY)), x)


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 512, 1000, 1024])
def test_blocks_are_never_padded(numel: int) -> None:
    payload = Int8(block=256).encode(normal(numel), KEY)
    assert payload.symbols["q"].values.numel() == numel
    assert payload.symbols["q"].values.dtype == torch.uint8
    assert payload.tensors["norm"].numel() == -(-numel // 256)


def test_int8_is_off_by_at_most_half_a_step() -> None:
    x = normal(10, 256) * torch.logspace(-8, 8, 10)[:, None]
    for rounding, steps in (("nearest", 0.5), ("stochastic", 1.0)):
        made = Int8(block=256, rounding=rounding)
        error = (made.decode(made.encode(x, KEY)) - x).abs()
        assert bool((error <= steps * 1.0001 * x.abs().amax(1, keepdim=True) / 127).all())
