"""The codec of efficient unbiased sparsification: mean, error, hard cap, l1 norm and bytes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isgq.codecs import codec, spec_of
from isgq.codecs.eus import EUS
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.wire import pack, unpack
from tests.codecs.inputs import SHAPES, normal

KEY = Key("layer.weight", seed=1, step=2)
SAMPLERS = ("systematic", "pivotal", "conditional_poisson")
DIVERGENCES = ("squared", "chi_squared")
SPECS = [f"eus:m=0.1,divergence={d},sampler={s}" for d in DIVERGENCES for s in SAMPLERS]


def skewed(n: int, seed: int = 0) -> Tensor:
    """Signed, lognormal magnitudes: a few heavy entries."""
    return normal(n, seed=seed).sign() * (2 * normal(n, seed=seed + 1)).exp()


def decoded(built: EUS, x: Tensor, key: Key = KEY) -> Tensor:
    return built.decode(built.encode(x, key))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_mean_and_variance_are_those_of_the_plan(divergence: str, sampler: str) -> None:
    built, x = EUS(m=6, divergence=divergence, sampler=sampler), skewed(20)  # type: ignore[arg-type]
    draws = 400
    plan = built.plan(x.abs())
    assert plan.heavy.numel() > 0
    q = torch.stack([decoded(built, x, Key("w", step=step)) for step in range(draws)]).double()
    pi = plan.inclusion()
    deviation = x.double().abs() * ((1 / pi - 1) / draws).sqrt()
    assert bool(((q.mean(0) - x).abs() <= 4.5 * deviation + 1e-6 * x.abs()).all())
    assert torch.equal(q[:, plan.heavy].float(), x[plan.heavy].expand(draws, -1))
    error = (q - x).square().sum(1)
    assert abs(float(error.mean() - plan.variance(x.abs()))) <= 4.5 * float(error.std()) / math.sqrt(draws)


def test_squared_and_kl_have_the_same_law() -> None:
    x = skewed(500)
    squared, kl = (EUS(m=20, divergence=d).encode(x, KEY) for d in ("squared", "kl"))
    assert torch.equal(pack(squared), pack(kl))


@pytest.mark.parametrize("sampler", SAMPLERS[:2])
def test_error_at_1000_entries_is_within_one_percent_of_the_closed_form(sampler: str) -> None:
    for x in (normal(1000), skewed(1000)):
        built = EUS(m=50, sampler=sampler)  # type: ignore[arg-type]
        error = [float((decoded(built, x, Key("w", step=s)) - x).square().sum()) for s in range(200)]
        assert math.fsum(error) / len(error) == pytest.approx(float(built.plan(x.abs()).variance(x)), rel=0.01)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_draw_has_m_entries_of_the_right_sign(divergence: str, sampler: str) -> None:
    for x, m in ((normal(500), 50), (skewed(500), 50), (skewed(500), 1), (normal(501), 500)):
        built = EUS(m=m, divergence=divergence, sampler=sampler)  # type: ignore[arg-type]
        q = decoded(built, x)
        assert int(q.ne(0).sum()) == m
        assert bool((q * x >= 0).all())


def test_every_draw_keeps_the_l1_norm() -> None:
    for x, m in ((normal(500), 50), (skewed(500), 50), (skewed(500), 1)):
        for step in range(10):
            q = decoded(EUS(m=m), x, Key("w", step=step))
            assert float(q.double().abs().sum()) == pytest.approx(float(x.double().abs().sum()), rel=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_few_entries_are_kept_exactly(divergence: str) -> None:
    x = torch.zeros(1000)
    x[[3, 500, 999]] = torch.tensor([-1e-20, 7.0, 0.3])
    for m in (3, 4, 1.0):
        built = EUS(m=m, divergence=divergence)  # type: ignore[arg-type]
        assert torch.equal(decoded(built, x), x)
    full = normal(99)
    assert torch.equal(decoded(EUS(m=1.0), full), full)


def test_ranks_draw_independently() -> None:
    x = normal(1000)
    supports = [decoded(EUS(m=50), x, Key("w", rank=rank)).ne(0) for rank in range(8)]
    assert int(torch.stack(supports).any(0).sum()) > 250


# -- on the wire


@pytest.mark.parametrize("make", [normal, skewed])
def test_bytes_are_those_of_the_heavy_values_signs_and_positions(make: object) -> None:
    n, m = 20000, 1000
    x = make(n)  # type: ignore[operator]
    built = EUS(m=m)
    payload = built.encode(x, KEY)
    h = built.plan(x.abs()).heavy.numel()
    assert payload.tensors["values"].numel() == h
    assert payload.tensors["level"].numel() == 1

    def log2_choose(a: int, b: int) -> float:
        return (math.lgamma(a + 1) - math.lgamma(b + 1) - math.lgamma(a - b + 1)) / math.log(2)

    bits = 32 * (h + 1) + (m - h) + log2_choose(m, h) + log2_choose(n, m)
    assert 8 * pack(payload).numel() <= 1.05 * bits + 8 * 80
    top = codec(f"top_k:k={m}").encode(x, KEY)  # type: ignore[union-attr]
    assert pack(payload).numel() < 0.7 * pack(top).numel()


CASES = SHAPES | {"all magnitudes": skewed(64) ** 7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", SPECS)
def test_any_tensor(spec: str, name: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    x = CASES[name].double().clamp(-limit, limit).to(dtype)
    built = codec(spec)
    assert isinstance(built, EUS)
    payload = built.encode(x, KEY)
    unpacked = unpack(pack(payload))
    assert isinstance(unpacked, Payload)
    y = codec(spec_of(built)).decode(unpacked)  # type: ignore[union-attr]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert bool(torch.isfinite(y).all())
    assert torch.equal(y, built.decode(payload))
    assert not y[x == 0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_refused(bad: float) -> None:
    x = normal(20)
    x[7] = bad
    with pytest.raises(NonFiniteError, match=r"layer\.weight"):
        EUS().encode(x, KEY)


@pytest.mark.parametrize("spec", ["eus:m=0", "eus:m=1.5", "eus:m=0.0", "eus:divergence=l1", "eus:sampler=poisson"])
def test_options_outside_their_range(spec: str) -> None:
    with pytest.raises(OptionError):
        codec(spec)


def test_options_outside_their_range_in_python() -> None:
    with pytest.raises(OptionError):
        EUS(divergence="l1")  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        EUS(sampler="poisson")  # type: ignore[arg-type]


def test_malformed_payloads_are_refused() -> None:
    built = EUS(m=20)
    payload = built.encode(skewed(200), KEY)
    kind, values = payload.symbols["kind"], payload.tensors["values"]
    assert values.numel() > 0

    def with_kind(symbols: Symbols) -> Payload:
        return replace(payload, symbols={**payload.symbols, "kind": symbols})

    cases = [
        replace(payload, codec="top_k"),
        replace(payload, tensors={"values": values}),
        replace(payload, tensors={**payload.tensors, "values": values[:-1]}),
        replace(payload, tensors={**payload.tensors, "level": values.new_ones(2)}),
        replace(payload, symbols={"kind": kind}),
        replace(payload, symbols={n: s for n, s in payload.symbols.items() if n != "kind"}),
        replace(payload, shape=(20,)),
        with_kind(Symbols(kind.values[:-1], 3)),
        with_kind(Symbols(kind.values, 4)),
        with_kind(Symbols(kind.values + 1, 3)),
    ]
    for bad in cases:
        with pytest.raises(CodecError):
            built.decode(bad)
