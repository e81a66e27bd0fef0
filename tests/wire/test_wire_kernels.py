"""Compiled kernels of the wire against the plain code: the same bytes, the same symbols, the same refusals."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from isgq.core.errors import CodecError, WireError
from isgq.core.kernels import disabled
from isgq.core.payload import Symbols, symbol_dtype
from isgq.wire import entropy
from isgq.wire.ans import ans_decode, ans_encode, frequencies, weight_codes
from isgq.wire.bits import SEGMENT, pack_symbols, tight_digits, unpack_symbols, whole_digits
from isgq.wire.entropy import CoderName, encode_stream
from isgq.wire.histogram import count_packed

ALPHABETS = [1, 2, 3, 4, 5, 6, 7, 9, 10, 16, 17, 27, 81, 100, 243, 255, 256, 257, 4000]
SIZES = [0, 1, 2, 4, 5, 7, 8, 39, 40, 41, 4095, 4097, 70_001]


def stream(size: int, alphabet: int, skew: float = 1.0) -> torch.Tensor:
    generator = np.random.default_rng((size, alphabet))
    return torch.from_numpy((generator.random(size) ** skew * alphabet).astype(np.int64)).to(symbol_dtype(alphabet))


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_packing_gives_the_same_bytes(alphabet: int) -> None:
    for planner in (tight_digits, whole_digits):
        for size in [*SIZES, *([SEGMENT + 3] if alphabet in {3, 10, 16} else [])]:
            values = stream(size, alphabet)
            packed = pack_symbols(values, alphabet, planner)
            with disabled():
                assert torch.equal(packed, pack_symbols(values, alphabet, planner))
            assert torch.equal(unpack_symbols(packed, size, alphabet, planner), values)


@pytest.mark.parametrize("alphabet", [2, 3, 5, 7, 16])
def test_unpacking_refuses_the_same_bytes(alphabet: int) -> None:
    generator = np.random.default_rng(alphabet)
    for size in (1, 9, 41, 999):
        packed = pack_symbols(stream(size, alphabet), alphabet)
        for _ in range(20):
            damaged = packed.clone()
            damaged[generator.integers(len(packed))] = int(generator.integers(256))
            outcomes = []
            for plain in (False, True):
                try:
                    with disabled() if plain else torch.no_grad():
                        outcomes.append(unpack_symbols(damaged, size, alphabet).tolist())
                except WireError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("skew", [1.0, 3.0, 40.0, 2000.0])
@pytest.mark.parametrize("alphabet", [2, 3, 7, 255, 256])
def test_entropy_coding_gives_the_same_bytes(alphabet: int, skew: float) -> None:
    for size in (1, 2, 3, 50, 3000, 100_000):
        values = stream(size, alphabet, skew).numpy()
        counts = np.bincount(values, minlength=alphabet)
        for bits in (4, 8):
            codes = weight_codes(counts, bits)
            table = frequencies(codes, bits)
            data = ans_encode(values, table)
            decoded = ans_decode(data, size, table)
            with disabled():
                assert np.array_equal(codes, weight_codes(counts, bits))
                assert np.array_equal(table, frequencies(codes, bits))
                assert data == ans_encode(values, table)
            assert np.array_equal(decoded, values)


def test_a_table_of_zeros_and_words_left_over_are_refused() -> None:
    codes = np.array([3, 1, 0], dtype=np.uint8)
    table = frequencies(codes, 4)
    data = ans_encode(np.array([0, 1, 2, 1] * 30, dtype=np.uint8), table)
    with pytest.raises(WireError, match="more than its 3 symbols"):
        ans_decode(data, 3, table)
    with pytest.raises(WireError, match="all 3 weights"):
        frequencies(np.zeros(3, dtype=np.uint8), 4)


@pytest.mark.parametrize("alphabet", [2, 4, 7, 100, 300])
@pytest.mark.parametrize("skew", [1.0, 8.0, 300.0])
def test_the_same_coder_is_chosen(alphabet: int, skew: float) -> None:
    for size in (5, 300, 20_000, (1 << 20) + 1):
        symbols = Symbols(stream(size, alphabet, skew), alphabet)
        coder, body = encode_stream(symbols)
        with disabled():
            plain, expected = encode_stream(symbols)
        assert coder is plain
        assert bytes(body) == bytes(expected)


@pytest.mark.parametrize("alphabet", [2, 3, 4, 5, 16])
def test_symbols_are_counted_in_bytes(alphabet: int) -> None:
    for size in (1, 31, 32, 33, 1001, SEGMENT + 7):
        symbols = Symbols(stream(size, alphabet), alphabet)
        whole = pack_symbols(symbols.values, alphabet, whole_digits)
        expected = np.bincount(symbols.values.numpy(), minlength=alphabet)
        assert np.array_equal(count_packed(whole, symbols)[0], expected)
        with disabled():
            assert np.array_equal(count_packed(whole, symbols)[0], expected)


@pytest.mark.parametrize("coder", ["auto", "packed", "zstd", "ans"])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 4, 7, 16, 17, 255, 257, 5000])
def test_symbols_outside_the_alphabet_are_refused(
    alphabet: int, coder: CoderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    for large in (1, 1 << 20):
        monkeypatch.setattr(entropy, "LARGE", large)
        for place, value in itertools.product((0, 7, 39, 40), (alphabet, min(alphabet + 40, 255))):
            values = stream(41, alphabet)
            values[place] = value
            if value >= alphabet:
                for plain in (False, True):
                    with (
                        disabled() if plain else nullcontext(),
                        pytest.raises(CodecError, match=rf"\.\. {value}, allowed are 0 \.\. {alphabet - 1}$"),
                    ):
                        encode_stream(Symbols(values, alphabet), coder)
