"""Dithered quantization: the error is uniform, independent of the tensor, and as large as stated."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from isgq.codecs.dithered import Dithered
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.kernels import disabled
from isgq.core.keys import Key, uniform
from isgq.core.payload import Symbols
from isgq.testing import normal

KEY = Key("w", seed=1, step=2, rank=3)
MODES = ["subtractive", "half", "one_bit"]


def send(c, x, key=KEY):
    return c.decode(c.encode(x, key))


def slow(c, x, key):
    """One element at a time, in float64, from the definition."""
    flat = x.double().reshape(-1)
    n = flat.numel()
    rows = x.shape[0] if x.dim() > 1 else 1
    size = {"row": n // rows, "tensor": n}.get(c.bucket, c.bucket)
    u = uniform(key.digest, "dither", (n,)).double()
    out = torch.zeros(n, dtype=torch.float64)
    for e in range(n):
        peak = flat[e // size * size : e // size * size + size].abs().max()
        if peak == 0:
            continue
        if c.mode == "one_bit":
            sigma = 2 * peak
            q = 1 if flat[e] / sigma + u[e] >= 0 else -1
            out[e] = sigma * (q / 2 - u[e])
        elif not (c.sparse and flat[e] == 0):
            s = peak / c.levels
            q = torch.floor(flat[e] / s + u[e] + 0.5)
            out[e] = s * (q - (0 if c.mode == "half" else u[e]))
    return out.view(x.shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bucket", ["row", "tensor", 7, 1000, 1])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("levels", [1, 5])
def test_equals_the_definition(mode, bucket, sparse, levels):
    c = Dithered(1 if mode == "one_bit" else levels, bucket, sparse, mode)
    x = normal(1, 5, 3, 11)
    x[normal(2, 5, 3, 11) < 0] = 0
    x[3] = 0
    assert torch.allclose(send(c, x).double(), slow(c, x, KEY), atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 200_000), (100_000, 3), (400_001,)])
def test_large_tensors_equal_their_parts(shape):
    """The pieces that large tensors are worked on in change nothing."""
    x = normal(3, *shape)
    y = send(Dithered(levels=2), x)
    rows = x.reshape(shape[0] if len(shape) > 1 else 1, -1)
    u = uniform(KEY.digest, "dither", rows.shape)
    s = rows.abs().amax(1, keepdim=True) / 2
    assert torch.allclose(y.view(rows.shape), s * (torch.floor(rows / s + u + 0.5) - u), atol=1e-5)


def test_error_is_uniform_and_independent():
    """Kolmogorov's distance to U(-1/2, 1/2), and no correlation with the tensor in value or size."""
    n = 1 << 18
    x = normal(4, n) ** 3
    step = x.abs().max() / 3
    error = ((send(Dithered(levels=3, bucket="tensor"), x) - x) / step).double()
    distance = (error.sort().values - (torch.arange(n).double() / n - 0.5)).abs().max()
    assert distance * n**0.5 < 1.95  # the level of 0.1 %
    assert error.abs().max() <= 0.5 + 1e-5
    assert abs(error.var() * 12 - 1) < 0.01
    for a, b in ((error, x), (error**2, x**2), (error, x.sign()), (error**2, x.abs())):
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) * n**0.5 < 4.5


@pytest.mark.parametrize("mode", MODES)
def test_error_never_exceeds_its_cell(mode):
    x = normal(5, 50, 40)
    bound = {"subtractive": 0.5, "half": 1.0, "one_bit": 1.0}[mode] * x.abs().amax(1, keepdim=True)
    assert ((send(Dithered(mode=mode), x) - x).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("value", "levels"), [(1.0, 1), (-1.0, 1), (0.1, 3), (3e38, 1), (-3e38, 7), (1e-45, 1), (1e-40, 4)]
)
def test_peak_does_not_overload(value, levels):
    """The peak itself, for every dither: codes stay within -L .. L, numbers within float32."""
    x = torch.full((1000, 30), value)
    payload = Dithered(levels, sparse=False).encode(x, KEY)
    symbols = payload.symbols["levels"]
    assert symbols.alphabet == 2 * levels + 1
    assert int(symbols.values.max()) <= 2 * levels
    assert torch.isfinite(Dithered(levels, sparse=False).decode(payload)).all()


def test_closest_dither_to_one_half_at_the_peak():
    """1 + u rounds to 3/2 in float32, and 3/2 to 2: the code must not become 2."""
    c = Dithered(sparse=False)
    x = torch.tensor([[1.0]])
    symbol = torch.empty(1, 1, dtype=torch.uint8)
    c._quantize(x, x, torch.tensor([[0.5 - 2.0**-25]]), symbol)
    assert int(symbol) == 2  # q + L = 1 + 1
    c._quantize(-x, x, torch.tensor([[-0.5 + 2.0**-25]]), symbol)
    assert int(symbol) == 0


@pytest.mark.parametrize(
    ("options", "alphabet"),
    [
        ({}, 4),
        ({"sparse": False}, 3),
        ({"levels": 7}, 16),
        ({"levels": 127}, 256),
        ({"levels": 128}, 258),
        ({"mode": "half"}, 3),
        ({"mode": "one_bit"}, 2),
        ({"mode": "one_bit", "sparse": False}, 2),
    ],
)
def test_alphabet(options, alphabet):
    c = Dithered(**options)
    payload = c.encode(normal(6, 4, 50), KEY)
    assert payload.symbols["levels"].alphabet == alphabet
    assert int(payload.symbols["levels"].values.long().max()) < alphabet


@pytest.mark.parametrize("options", [{"sparse": True}, {"mode": "half"}])
def test_zeros_stay_zero(options):
    x = normal(7, 30, 40).relu()
    assert (send(Dithered(**options), x)[x == 0] == 0).all()


@pytest.mark.parametrize("levels", [1, 62, 127])
@pytest.mark.parametrize("kernels", [True, False])
def test_half_stays_finite_at_the_largest_numbers(levels, kernels):
    x = torch.full((300,), torch.finfo(torch.float32).max)
    with nullcontext() if kernels else disabled():
        c = Dithered(levels=levels, mode="half")
        assert c.decode(c.encode(x, KEY)).isfinite().all()


def test_half_needs_no_digest():
    assert Dithered(mode="half").encode(normal(1, 3, 4), KEY).digest == 0
    assert Dithered().encode(normal(1, 3, 4), KEY).digest == KEY.digest


@pytest.mark.parametrize(
    ("shape", "bucket", "scales"),
    [
        ((4, 6), "row", 4),
        ((4, 6), "tensor", 1),
        ((4, 6), 5, 5),
        ((24,), "row", 1),
        ((), "row", 1),
        ((2, 3, 4), "row", 2),
        ((0, 3), "row", 0),
        ((3, 0), "row", 0),
        ((0,), "tensor", 0),
        ((0,), 5, 0),
    ],
)
def test_one_scale_a_bucket(shape, bucket, scales):
    assert Dithered(bucket=bucket).encode(normal(1, *shape), KEY).tensors["scales"].shape == (scales,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bucket", ["row", "tensor", 9])
def test_variance_is_that_of_many_draws(mode, bucket):
    """Entry by entry, within what chance allows (Bernstein: half mode seldom moves an entry near a level)."""
    c = Dithered(1 if mode == "one_bit" else 2, bucket, True, mode)
    x = normal(8, 4, 9)
    x[1, :5] = 0
    draws = torch.stack([send(c, x, Key("w", step=t)) for t in range(1000)]).double()
    squares, expected = (draws - x).square(), c.variance(x).double()
    assert ((squares.mean(0) - expected).abs() <= 5 * squares.std(0) / 1000**0.5 + 25 * squares.max() / 3000).all()
    assert abs(squares.mean(0).sum() / expected.sum() - 1) < 0.05
    assert ((draws.mean(0) - x).abs() <= 5 * (expected / 1000).sqrt() + 1e-6).all()


def test_other_roles_other_errors():
    x = normal(9, 4, 500)
    errors = [(send(Dithered(), x, KEY.child(part)) - x).reshape(-1) for part in "xd"]
    assert abs(torch.corrcoef(torch.stack(errors))[0, 1]) < 0.1


@pytest.mark.parametrize("change", ["count", "alphabet", "scales", "dtype", "codec", "nothing"])
def test_refuses_what_does_not_fit(change):
    c = Dithered()
    payload = c.encode(normal(1, 4, 6), KEY)
    levels = payload.symbols["levels"]
    scales = payload.tensors["scales"]
    bad = {
        "count": {"symbols": {"levels": Symbols(levels.values[:-1], 4)}},
        "alphabet": {"symbols": {"levels": Symbols(levels.values, 5)}},
        "scales": {"tensors": {"scales": scales[:-1]}},
        "dtype": {"tensors": {"scales": scales.double()}},
        "codec": {"codec": "exact"},
        "nothing": {"symbols": {}},
    }[change]
    with pytest.raises(CodecError):
        c.decode(replace(payload, **bad))


def test_float64_beyond_float32():
    with pytest.raises(NonFiniteError):
        Dithered().encode(torch.tensor([1e300], dtype=torch.float64), KEY)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", MODES)
def test_devices_agree(mode):
    x = normal(1, 300, 700)
    c = Dithered(mode=mode)
    assert torch.equal(send(c, x), send(c, x.cuda()).cpu())
