"""Compiled kernels against the plain code: the same bits from every codec, whatever the tensor."""

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from isgq.codecs import codec, rotation_code, rotation_plan
from isgq.codecs.bases import Known
from isgq.codecs.eus_sample import systematic
from isgq.codecs.nested import NestedDithered
from isgq.codecs.rotation_grid import Grid, scale
from isgq.codecs.rotation_plan import Spectrum, plan_at_slope, slope_for_bits, slope_for_variance
from isgq.codecs.rotation_sides import Side, standard
from isgq.core.errors import CodecError
from isgq.core.kernels import compiled, disabled
from isgq.core.keys import Key, random_int32, uniform
from isgq.core.parallel import PART
from isgq.core.payload import Payload

SPECS = [
    *(f"dithered:levels={levels},bucket=row" for levels in (1, 2, 7, 127, 128, 4095)),
    *(f"dithered:levels=3,bucket={bucket}" for bucket in (1, 2, 7, 512, "tensor")),
    "dithered:levels=127,sparse=false",
    "dithered:levels=5,mode=half,bucket=100",
    "dithered:mode=one_bit",
    *(f"qsgd:levels={levels},bucket={bucket}" for levels in (1, 4, 127) for bucket in (3, "row")),
    "qsgd:levels=4,norm=l2",
    "terngrad",
    "terngrad:clip=2.5,bucket=row",
    "int8",
    "int8:block=1,rounding=stochastic",
    *(f"nested_dithered:levels={levels},ratio={ratio}" for levels, ratio in ((1, 3), (3, 7), (9, 5), (300, 255))),
    "nested_dithered:levels=200,ratio=401,bucket=row",
    "nested_dithered:levels=4,ratio=3,bucket=5",
    "lloyd_max:levels=1",
    "lloyd_max:levels=4",
    "lloyd_max:levels=16,sparse=false",
    "lloyd_max:levels=17",
    "qcs",
    "qcs:block=96,rows=17,levels=3,mode=mmse",
    "sign:bucket=row",
    "one_bit",
    "random_k:k=0.1",
]


def hard() -> dict[str, Tensor]:
    """Tensors that break careless arithmetic."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(37, 131, generator=generator)
    most, least = torch.finfo(torch.float32).max, 2.0**-149
    return {
        "normal": normal,
        "wide": normal * 10.0 ** (76 * torch.rand(37, 131, generator=generator) - 45),
        "denormal": torch.randint(-9, 10, (20, 33), generator=generator) * least,
        "extreme": most * torch.randint(-1, 2, (16, 50), generator=generator).float(),
        "nearly extreme": most * torch.rand(9, 70, generator=generator) * normal[:9, :70].sign(),
        "zeros": torch.zeros(5, 40) * normal[:5, :40].sign(),
        "minus zeros": -torch.zeros(5, 40),
        "zero rows": torch.where(torch.arange(37)[:, None] % 3 == 0, 0.0, normal),
        "sparse": normal.clamp(min=0),
        "halves": torch.randint(-6, 7, (30, 65), generator=generator) / 6,
        "one": torch.tensor([-2.5]),
        "scalar": torch.tensor(0.75),
        "empty": torch.empty(0, 3),
        "strided": normal.T,
        "float16": normal.half(),
        "bfloat16": normal.bfloat16(),
        "float64": normal.double(),
        "long": torch.randn(3, PART + 17, generator=generator),
    }


def parts(payload: Payload) -> dict[str, bytes]:
    """All that a payload holds, to the bit."""
    streams = {name: (s.alphabet, s.values.numpy().tobytes()) for name, s in payload.symbols.items()}
    tensors = {name: t.contiguous().view(-1).numpy().tobytes() for name, t in payload.tensors.items()}
    return streams | tensors | {"": (payload.shape, payload.dtype, payload.digest)}


def bits(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def test_kernels_are_at_work() -> None:
    assert compiled("quantize", torch.device("cpu")) is not None
    with disabled():
        assert compiled("quantize", torch.device("cpu")) is None
    assert compiled("quantize", torch.device("meta")) is None


@pytest.mark.parametrize("spec", SPECS)
def test_symbols_and_values_are_those_of_plain_code(spec: str) -> None:
    coder = codec(spec)
    for at, (name, x) in enumerate(hard().items()):
        key = Key(name, seed=at)
        payload, again = coder.encode(x, key), coder.encode(x, key)
        with disabled():
            plain = coder.encode(x, key)
            expected = coder.decode(plain)
        assert parts(payload) == parts(again) == parts(plain), name
        assert bits(coder.decode(payload)) == bits(expected), name


def test_side_information_serves_alike() -> None:
    coder = NestedDithered(levels=6, ratio=3, bucket=50)
    for name, x in hard().items():
        payload = coder.encode(x, Key(name))
        side = x * 0.9
        decoded = coder.decode_with(payload, side)
        with disabled():
            assert bits(coder.decode_with(payload, side)) == bits(decoded), name
        assert torch.equal(side, x * 0.9), "the guess is the caller's"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", ["dithered", "int8", "qcs", "lloyd_max", "nested_dithered", "sign", "exact"])
def test_what_is_not_finite_is_refused_alike(spec: str, bad: float) -> None:
    x = torch.zeros(5, 2 * PART // 3)
    x[3, 77] = bad
    messages = []
    for plain in (False, True):
        with disabled() if plain else torch.no_grad(), pytest.raises(Exception, match="1 NaN or Inf") as caught:
            codec(spec).encode(x, Key("w"))
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("start", [0, 1, 31, (1 << 31) - 5, (1 << 31) - 3 * PART, 5 << 31, (1 << 33) + 12345])
def test_streams_are_the_same_integers(start: int) -> None:
    for n, draw in itertools.product((0, 1, 15, 64, 1000, 3 * PART + 1), (random_int32, uniform)):
        digest = 0xFEDCBA9876543210 + n
        shape = n if draw is random_int32 else (n,)
        ours = draw(digest, "role", shape, start=start)
        with disabled():
            assert torch.equal(ours, draw(digest, "role", shape, start=start))


@pytest.mark.parametrize("count", [0, 1, 2, 100, 3000])
@pytest.mark.parametrize("steps", [[2.0], [3.5, 1e-3, 0.4], [1e-6]])
def test_atoms_are_coded_alike(count: int, steps: list[float]) -> None:
    generator = np.random.default_rng(count)
    each, group = np.array(steps), generator.integers(0, len(steps), count)
    dither, entries = generator.uniform(-0.5, 0.5, count), generator.laplace(size=count) / math.sqrt(2)
    symbols = rotation_code.quantize(entries / each[group], dither)
    digits = rotation_code.digits_for(np.abs(symbols).max(initial=1))
    code = rotation_code.encode_symbols(symbols, dither, group, each, digits)
    assert (rotation_code.decode_symbols(code, dither, group, each, digits) == symbols).all()
    with disabled():
        assert rotation_code.encode_symbols(symbols, dither, group, each, digits) == code
        assert (rotation_code.decode_symbols(code, dither, group, each, digits) == symbols).all()
    for other in (code[:-1].rstrip(b"\0"), code[:-1] + b"\xff", code + b"\1\0\0\1"):
        outcomes = []
        for context in (nullcontext(), disabled()):
            with context:
                try:
                    outcomes.append(rotation_code.decode_symbols(other, dither, group, each, digits).tolist())
                except CodecError as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_too_large_symbols_are_refused_alike() -> None:
    symbols, dither, group = np.array([1, -9, 8]), np.zeros(3), np.zeros(3, dtype=np.int64)
    for context in (nullcontext(), disabled()):
        with context, pytest.raises(CodecError, match="symbol of magnitude 9 has more than 3 digits"):
            rotation_code.encode_symbols(symbols, dither, group, np.ones(1), 3)


@pytest.mark.parametrize("count", [0, 1, 5, 200])
@pytest.mark.parametrize("learned", [False, True])
def test_vectors_have_the_same_grid_and_symbols(count: int, learned: bool) -> None:
    generator = np.random.default_rng(count)
    sizes = (40, 7)
    if learned:
        turn = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q
        sides = Side(40, np.sort(generator.integers(60, 100, 40)), turn), standard(7)
    else:
        sides = standard(40), standard(7)
    codes = generator.integers(0, 128, (count, 2))
    left, right = (generator.standard_normal((count, size)) / math.sqrt(size) for size in sizes)
    results = []
    for context in (nullcontext(), disabled()):
        with context:
            grid = Grid.of(codes, Known(*sides), 0xFEDCBA9876543210)
            assert grid.dither is not None
            symbols = grid.symbols(np.asfortranarray(left), right)
            code = grid.write(symbols)
            assert np.array_equal(grid.read(code), symbols)
            arrays = grid.ladder.steps, grid.ladder.relative, grid.group, grid.dither, *grid.vectors(symbols)
            results.append([code, *(array.tobytes() for array in arrays), *(array.shape for array in arrays)])
    assert results[0] == results[1]
    steps = grid.ladder.steps[grid.group[: left.size]].reshape(left.shape)
    assert (np.abs(grid.vectors(symbols)[0] - left * math.sqrt(40)) <= steps * 0.5001).all()


def test_decoded_vectors_are_the_same_and_within_float32() -> None:
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((6, 50)) * 1e30, generator.standard_normal((6, 7)) * 1e38
    weights = 10.0 ** np.array([-320.0, -45, 0, 8, 10, 38])
    for one, other in (
        (left, right),
        (np.asfortranarray(left), right * 100),
        (left[:0], right[:0]),
        (left[:, :0], right),
    ):
        found = scale(one, other, weights[: len(one)])
        assert all(side.dtype == torch.float32 and bool(side.isfinite().all()) for side in found)
        with disabled():
            plain = scale(one, other, weights[: len(one)])
        assert list(map(bits, plain)) == list(map(bits, found))


def test_one_slope_for_all_spectra_is_the_same_number() -> None:
    generator = np.random.default_rng(0)
    spectra = [
        Spectrum(np.sort(generator.random(count) ** power)[::-1].copy(), standard(left), standard(right))
        for count, power, left, right in ((64, 5, 300, 40), (0, 1, 5, 4), (1, 1, 7, 900), (200, 1, 1000, 300))
    ]
    energy = math.fsum(spectrum.energy for spectrum in spectra)
    for asked in (1e-6, 0.01, 0.3, 1.0, 7.0, 1e9):
        slopes = []
        for context in (nullcontext(), disabled()):
            with context:
                slopes.append((slope_for_variance(spectra, asked * energy), slope_for_bits(spectra, 1e4 * asked)))
        assert slopes[0] == slopes[1]


@pytest.mark.parametrize("power", [-40, 0, 3, 90])
def test_totals_are_those_of_the_plans(power: int) -> None:
    spectra = [Spectrum(np.array(w), standard(9), standard(30)) for w in ([], [2.0], [3.0, 1.0, 1.0, 1e-3])]
    found = rotation_plan._totals(spectra, plan_at_slope)(2.0**-power)
    plans = [plan_at_slope(spectrum, 2.0**-power) for spectrum in spectra]
    assert found.tolist() == [[plan.variance for plan in plans], [plan.bits for plan in plans]]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_same_entries_are_drawn(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for digest in range(300):
        weights = torch.rand(64 + digest, dtype=torch.float64, generator=generator) ** (1 + digest % 3) + 0.3
        weights[digest % 64] = 0.0
        if digest % 5 == 0:
            weights = weights.float()[::2]
        drawn = systematic(weights, min(count, len(weights) // 3), digest)
        with disabled():
            assert torch.equal(systematic(weights, min(count, len(weights) // 3), digest), drawn)
