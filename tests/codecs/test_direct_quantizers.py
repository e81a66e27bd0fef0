"""The laws of all direct quantizers: shapes, dtypes, zeros, errors, reproducibility, mean, variance, contraction."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isgq.codecs import codec, spec_of
from isgq.core.codec import Codec
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.wire import pack, unpack
from tests.codecs.inputs import normal

KEY = Key("layer.weight", seed=3, step=5, rank=1)
TINY = 2.0**-126

# One spec a law-bearing variant. Buckets are rows, or as long as a row, so that a matrix of equal rows is many keys.
WIDTH = 64
SPECS = {
    "qsgd:levels=1,bucket=row": True,
    "qsgd:levels=4,bucket=row,norm=l2": True,
    "qsgd:levels=127,bucket=64": True,
    "terngrad:bucket=row": True,
    "terngrad:clip=1.5,bucket=row": False,
    "one_bit:bucket=row": False,
    "sign:bucket=row": False,
    "sign:scale=l2,bucket=row": False,
    "int8:block=64": False,
    "int8:block=64,rounding=stochastic": True,
    "fp16": False,
    "bf16": False,
    "nested_dithered:levels=2,ratio=5,bucket=row": True,
    "nested_dithered:levels=3,ratio=3,bucket=row": False,
    "qcs:block=64,rows=16,levels=2": True,
    "qcs:block=64,rows=16,levels=2,mode=mmse": False,
}
EXTRA = ("qsgd", "terngrad", "one_bit:bucket=7", "sign", "sign:bucket=5", "int8:block=5", "qcs", "qcs:block=96,rows=1")
DETERMINISTIC = ("one_bit", "sign", "int8:block=64", "fp16", "bf16")


def built(spec: str) -> Codec:
    made = codec(spec)
    assert isinstance(made, Codec)
    return made


def is_random(spec: str) -> bool:
    return "stochastic" in spec or not spec.startswith(DETERMINISTIC)


SHAPES = {
    "matrix": lambda: normal(20, 13),
    "vector": lambda: normal(33),
    "scalar": lambda: torch.tensor(-2.5),
    "one element": lambda: torch.tensor([3.0]),
    "empty": lambda: torch.zeros(0),
    "empty rows": lambda: torch.zeros(4, 0),
    "no rows": lambda: torch.zeros(0, 4),
    "constant": lambda: torch.full((5, 6), -3.0),
    "zero": lambda: torch.zeros(3, 5),
    "transposed": lambda: normal(9, 8).t(),
    "expanded": lambda: torch.ones(1).expand(4, 6),
    "every other": lambda: normal(40)[::2],
    "channels last": lambda: normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "requires grad": lambda: normal(6, 7).requires_grad_(),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("spec", [*SPECS, *EXTRA])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_dtype_comes_back(spec: str, shape: str) -> None:
    for dtype in DTYPES:
        x = SHAPES[shape]().to(dtype)
        y = built(spec).decode(built(spec).encode(x, KEY))
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert not y.requires_grad
        assert bool(y.isfinite().all())
        if not bool(x.any()):
            assert not bool(y.any())


@pytest.mark.parametrize("spec", [*SPECS, *EXTRA])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("end", ["largest", "smallest"])
def test_both_ends_of_the_range_stay_finite(spec: str, dtype: torch.dtype, end: str) -> None:
    info = torch.finfo(dtype if dtype != torch.float64 else torch.float32)
    x = normal(7, 64).sign() * normal(7, 64, seed=1).abs().clamp(max=1)
    x = (x.double() * (info.max if end == "largest" else info.tiny)).to(dtype)
    x.view(-1)[0] = info.max if end == "largest" else info.tiny
    assert bool(built(spec).decode(built(spec).encode(x, KEY)).isfinite().all())


@pytest.mark.parametrize("spec", [*SPECS, *EXTRA])
def test_memory_layout_does_not_matter(spec: str) -> None:
    x = normal(8, 9)
    view = x.t().contiguous().t()
    assert not view.is_contiguous()
    a, b = (built(spec).decode(built(spec).encode(t, KEY)) for t in (x, view))
    assert torch.equal(a, b)


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in {"fp16", "bf16"}])
def test_an_all_zero_bucket_among_others_decodes_to_zeros(spec: str) -> None:
    x = normal(3, WIDTH)
    x[1] = 0
    y = built(spec).decode(built(spec).encode(x, KEY))
    assert bool(y.isfinite().all())
    assert not bool(y[1].any())
    assert bool(y[0].any())
    assert bool(y[2].any())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(spec: str, bad: float) -> None:
    for dtype in DTYPES:
        x = normal(5, 6).to(dtype)
        x[3, 4] = bad
        with pytest.raises(NonFiniteError, match=r"layer\.weight"):
            built(spec).encode(x, KEY)
    with pytest.raises(NonFiniteError, match="float64"):
        built(spec).encode(torch.tensor([1.0, 1e300], dtype=torch.float64), KEY)
    with pytest.raises(CodecError, match="int64"):
        built(spec).encode(torch.arange(4), KEY)


def damaged(payload: Payload) -> dict[str, Payload]:
    cases = {"codec": replace(payload, codec="exact"), "dtype": replace(payload, dtype=torch.int64)}
    for name, stream in payload.symbols.items():
        others = {k: v for k, v in payload.symbols.items() if k != name}
        cases[f"{name} missing"] = replace(payload, symbols=others)
        cases[f"{name} short"] = replace(
            payload, symbols={**others, name: Symbols(stream.values[:-1], stream.alphabet)}
        )
        cases[f"{name} alphabet"] = replace(payload, symbols={**others, name: Symbols(stream.values, 300)})
    for name, tensor in payload.tensors.items():
        rest = {k: v for k, v in payload.tensors.items() if k != name}
        cases[f"{name} missing"] = replace(payload, tensors=rest)
        cases[f"{name} long"] = replace(payload, tensors={**rest, name: torch.cat([tensor, tensor])})
        cases[f"{name} dtype"] = replace(payload, tensors={**rest, name: tensor.double()})
    return cases


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_that_does_not_fit_is_refused(spec: str) -> None:
    for what, payload in damaged(built(spec).encode(normal(4, WIDTH), KEY)).items():
        with pytest.raises(CodecError):
            pytest.fail(f"accepted: {what}: {built(spec).decode(payload)}")


@pytest.mark.parametrize("spec", SPECS)
def test_only_the_key_decides(spec: str) -> None:
    x = normal(6, WIDTH)
    state = torch.random.get_rng_state()
    first, again, other = (built(spec).encode(x, key) for key in (KEY, KEY, replace(KEY, step=6)))
    assert torch.equal(state, torch.random.get_rng_state())
    a, b, c = (built(spec).decode(payload) for payload in (first, again, other))
    assert torch.equal(a, b)
    assert torch.equal(a, c) is not is_random(spec)


@pytest.mark.parametrize("spec", [*SPECS, *EXTRA])
def test_bytes_carry_everything_that_decoding_needs(spec: str) -> None:
    payload = built(spec).encode(normal(10, WIDTH).to(torch.bfloat16), KEY)
    assert torch.equal(built(spec).decode(unpack(pack(payload))), built(spec).decode(payload))


@pytest.mark.parametrize("spec", [*SPECS, *EXTRA])
def test_the_spec_string_round_trips(spec: str) -> None:
    assert codec(spec_of(codec(spec))) == codec(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "qsgd:levels=0",
        "qsgd:levels=128",
        "qsgd:bucket=0",
        "qsgd:bucket=column",
        "qsgd:norm=l1",
        "terngrad:clip=0.5",
        "terngrad:clip=inf",
        "terngrad:clip=nan",
        "terngrad:bucket=-1",
        "one_bit:bucket=all",
        "sign:scale=max",
        "sign:bucket=0",
        "int8:block=0",
        "int8:rounding=up",
        "nested_dithered:ratio=2",
        "nested_dithered:ratio=9",
        "nested_dithered:levels=0",
        "nested_dithered:levels=5000",
        "qcs:block=28",
        "qcs:block=0",
        "qcs:block=131072",
        "qcs:rows=0",
        "qcs:block=64,rows=65",
        "qcs:levels=128",
        "qcs:mode=best",
    ],
)
def test_options_outside_their_range_are_refused(spec: str) -> None:
    with pytest.raises(OptionError):
        codec(spec)


# -- laws over keys. A matrix of equal rows, each a bucket, is as good as many keys, and a single call.

KEYS = 20_000
ROWS = {
    "normal": lambda: normal(WIDTH),
    "peaky": lambda: normal(WIDTH, seed=1) ** 3,
    "half zeros": lambda: normal(WIDTH, seed=2).relu(),
}


def decoded_rows(spec: str, row: Tensor) -> Tensor:
    x = row.expand(KEYS, WIDTH)
    return built(spec).decode(built(spec).encode(x, KEY)).double()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("spec", [s for s in SPECS if hasattr(codec(s), "variance")])
def test_mean_and_variance_are_the_closed_forms(spec: str, row: str) -> None:
    made, x = built(spec), ROWS[row]()
    assert made.unbiased is SPECS[spec]
    variance = made.variance(x.unsqueeze(0)).squeeze(0).double()
    y = decoded_rows(spec, x)
    if made.unbiased or hasattr(made, "mean"):
        mean = made.mean(x.unsqueeze(0)).squeeze(0) if hasattr(made, "mean") else x
        standard_error = (variance / KEYS).sqrt()
        assert bool(((y.mean(0) - mean).abs() <= 4.5 * standard_error + 1e-6 * x.abs().max()).all())
        observed = float((y - mean).square().mean(0).sum())
        assert observed == pytest.approx(float(variance.sum()), rel=0.01)
    if not is_random(spec):
        assert float(variance.sum()) == 0


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("spec", [s for s in SPECS if hasattr(codec(s), "contraction")])
def test_the_error_keeps_the_contraction_bound(spec: str, row: str) -> None:
    made, x = built(spec), ROWS[row]()
    delta = made.contraction(x.unsqueeze(0))
    share = float((decoded_rows(spec, x) - x).square().sum(1).mean() / x.double().square().sum())
    assert share <= (1 - delta) * (1 + 1e-4)
    if spec.startswith(("one_bit", "sign")):  # there the bound is the error itself
        assert share == pytest.approx(1 - delta, rel=1e-5)
    assert made.contraction(torch.zeros(0)) <= 1
    assert made.contraction(torch.zeros(3)) <= 1


@pytest.mark.parametrize("spec", [s for s in SPECS if SPECS[s] and s.startswith("qcs")])
def test_the_mean_of_a_projection_is_the_tensor(spec: str) -> None:
    x = normal(WIDTH)
    y = decoded_rows(spec, x)
    assert bool(((y.mean(0) - x).abs() <= 4.5 * y.std(0) / KEYS**0.5).all())


# -- bytes


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("one_bit", 1),
        ("sign", 1),
        ("terngrad", 1.6),
        ("qsgd:levels=1", 1.6),
        ("qsgd:levels=7", 4),
        ("nested_dithered", 1.6),
        ("int8", 8),
        ("fp16", 16),
        ("bf16", 16),
        ("qcs", 0.4),
    ],
)
def test_symbols_take_the_bits_they_need(spec: str, bits: float) -> None:
    x = normal(64, 1024)
    payload = built(spec).encode(x, KEY)
    sides = sum(t.numel() * t.element_size() for n, t in payload.tensors.items() if n != "half")
    assert pack(payload).numel() <= x.numel() * bits / 8 + sides + 200
