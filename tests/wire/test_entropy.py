"""Entropy coders, against a slow decoder of asymmetric numeral systems and the histogram's entropy."""

import math

import numpy as np
import pytest
import torch

from isgq.core.errors import OptionError, WireError
from isgq.core.payload import Symbols, symbol_dtype
from isgq.wire import entropy
from isgq.wire.ans import ans_decode, ans_encode, frequencies, weight_table
from isgq.wire.bits import pack_symbols, packed_size, whole_digits
from isgq.wire.entropy import (
    EXPANSION,
    LARGE,
    Coder,
    decode_stream,
    encode_stream,
    minimum_size,
)
from isgq.wire.histogram import count_packed, count_symbols
from tests.wire.records import ALPHABETS, skewed, symbols

CPU = torch.device("cpu")


def decode(coder: Coder, body: bytes | memoryview, count: int, alphabet: int) -> torch.Tensor:
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
    return decode_stream(coder, data, count, alphabet, CPU)


def decode_slowly(data: bytes, count: int, table: list[int]) -> list[int]:
    """Asymmetric numeral systems as documented: 32-bit words, 64-bit state, frequencies that sum to 2**24."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    state, out = 0, []
    for _ in range(2):
        if words:
            state = state << 32 | words.pop()
    for _ in range(count):
        quantile, rest = state % (1 << 24), state >> 24
        symbol, below = 0, 0
        while quantile >= below + table[symbol]:
            below += table[symbol]
            symbol += 1
        out.append(symbol)
        state = rest * table[symbol] + quantile - below
        if state < 1 << 32 and words:
            state = state << 32 | words.pop()
    assert state == 0
    assert not words
    return out


@pytest.mark.parametrize("coder", ["auto", "packed", "zstd", "ans"])
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_streams_come_back(alphabet: int, coder: str) -> None:
    streams = [symbols(count, alphabet) for count in (0, 1, 2, 40, 1000)]
    streams += [skewed(1000, alphabet, zeros) for zeros in (700, 999, 1000)]
    for stream in streams:
        used, body = encode_stream(stream, coder)
        back = decode(used, body, stream.values.numel(), alphabet)
        assert back.dtype == symbol_dtype(alphabet)
        assert torch.equal(back, stream.values)


@pytest.mark.parametrize("alphabet", [2, 3, 5, 17, 256, 1000, 4096])
def test_ans_is_what_the_documentation_says(alphabet: int) -> None:
    stream = skewed(600, alphabet, 600)
    coder, body = encode_stream(stream, "ans")
    table = packed_size(alphabet, 1 << coder.weight_bits)
    codes = np.frombuffer(body[:table], dtype=np.uint8)
    if coder is Coder.ANS_COARSE:
        codes = np.concatenate([codes & 15, codes >> 4])[:alphabet]
    model = frequencies(codes, coder.weight_bits)
    assert decode_slowly(body[table:], 600, model.tolist()) == stream.values.tolist()


@pytest.mark.parametrize("alphabet", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("count", [1, 7, 600])
def test_ans_of_bytes_is_ans_of_what_zstandard_compresses(
    alphabet: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entropy, "LARGE", 1)
    stream = skewed(count, alphabet, 600)
    coder, body = encode_stream(stream, "ans")
    assert coder is Coder.ANS_BYTES
    whole = pack_symbols(stream.values, alphabet, whole_digits)
    model = frequencies(np.frombuffer(body[:256], dtype=np.uint8), 8)
    assert decode_slowly(body[256:], whole.numel(), model.tolist()) == whole.tolist()
    assert torch.equal(decode(coder, body, count, alphabet), stream.values)


def test_large_streams_choose_by_speed_too() -> None:
    for zeros, coder in ((0, Coder.PACKED), (500, Coder.ZSTD), (950, Coder.ANS_BYTES)):
        stream = skewed(LARGE, 3, zeros)
        used, body = encode_stream(stream)
        assert used is coder
        assert len(body) <= 1.08 * len(encode_stream(Symbols(stream.values[:-1], 3), "ans")[1]) + 256
        assert torch.equal(decode(used, body, LARGE, 3), stream.values)


@pytest.mark.parametrize("alphabet", [2, 3, 4, 7, 16, 17, 300])
def test_histogram_from_bytes_counts_symbols(alphabet: int) -> None:
    for count in (1, 39, 5000):
        stream = skewed(count, alphabet, 400)
        whole = pack_symbols(stream.values, alphabet, whole_digits)
        expected = np.bincount(stream.values.numpy(), minlength=alphabet)
        assert count_symbols(stream).tolist() == expected.tolist()
        if alphabet <= 16:
            assert count_packed(whole, stream)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_rise_in_even_steps(bits: int) -> None:
    weights = weight_table(bits)
    assert len(weights) == 1 << bits
    assert weights[0] == 0
    ratios = weights[2:] / weights[1:-1]
    assert (ratios > 1).all()
    assert ratios.max() <= {4: 1.5, 8: 17 / 16}[bits]


@pytest.mark.parametrize("alphabet", [2, 3, 16, 4096])
def test_frequencies_are_whole_positive_and_sum_to_the_total(alphabet: int) -> None:
    for codes in (np.full(alphabet, 255), np.arange(alphabet)[::-1] % 256, np.eye(1, alphabet, dtype=np.int64)[0]):
        table = frequencies(codes.astype(np.uint8), 8)
        assert table.min() >= 1
        assert table.sum() == 1 << 24


@pytest.mark.parametrize("alphabet", [2, 3, 9, 100, 4096])
def test_ans_reaches_the_entropy(alphabet: int) -> None:
    for zeros in (0, 500, 900, 990):
        stream = skewed(200_000, alphabet, zeros)
        shares = np.bincount(stream.values.numpy(), minlength=alphabet) / 200_000
        entropy = -200_000 / 8 * float(np.sum(shares[shares > 0] * np.log2(shares[shares > 0])))
        _, body = encode_stream(stream, "ans")
        assert len(body) <= (1.01 if alphabet < 4096 else 1.06) * entropy + alphabet + 4


def test_one_possible_symbol_costs_nothing_but_its_table() -> None:
    _, body = encode_stream(Symbols(torch.zeros(100), 3), "ans")
    assert len(body) == packed_size(3, 16)
    _, body = encode_stream(Symbols(torch.full((100,), 2), 3), "ans")
    assert len(body) <= packed_size(3, 16) + 1
    assert encode_stream(Symbols(torch.zeros(4095), 1))[1] == b""


@pytest.mark.parametrize(
    ("stream", "coder"),
    [
        (symbols(10_000, 3), Coder.PACKED),  # ANS would save 1 %
        (symbols(10_000, 256), Coder.PACKED),
        (symbols(30, 1000), Coder.PACKED),  # a table would cost more than the symbols
        (skewed(60, 5, 700), Coder.ANS_COARSE),  # three bytes of table pay even here
        (skewed(500, 5, 700), Coder.ANS_COARSE),
        (skewed(100_000, 17, 900), Coder.ANS_FINE),
        (skewed(400_000, 3, 500), Coder.ZSTD),  # within 2 % of ANS, and faster
        (symbols(20_000, 5000), Coder.PACKED),
        (skewed(20_000, 5000, 900), Coder.ZSTD),  # too many symbols for a table
    ],
)
def test_auto_chooses_by_size_and_speed(stream: Symbols, coder: Coder) -> None:
    assert encode_stream(stream)[0] is coder


@pytest.mark.parametrize("alphabet", [2, 3, 5, 16, 255, 1000])
@pytest.mark.parametrize("count", [1, 10, 100, 1000, 30_000])
def test_auto_is_never_larger_than_packed_and_near_the_best(alphabet: int, count: int) -> None:
    for zeros in (0, 500, 950):
        stream = skewed(count, alphabet, zeros)
        sizes = {coder: len(encode_stream(stream, coder)[1]) for coder in ("auto", "packed", "ans")}
        assert sizes["auto"] <= sizes["packed"]
        assert sizes["auto"] <= sizes["ans"] / 0.97 + 2


def test_names_are_checked() -> None:
    with pytest.raises(OptionError, match=r"huffman.*auto, packed, zstd, ans"):
        encode_stream(symbols(3, 3), "huffman")  # type: ignore[arg-type]


def test_what_a_byte_decodes_into_is_bounded() -> None:
    for alphabet in (1, 3, 300, 1 << 20, 1 << 40):
        for count in (0, 1, 4095, 4096, 10**6, 10**15):
            assert count * symbol_dtype(alphabet).itemsize < (minimum_size(count, alphabet) + 1) * EXPANSION
            assert packed_size(count, alphabet) >= minimum_size(count, alphabet) or alphabet == 1


ZSTD = bytes(encode_stream(skewed(400, 5, 700), "zstd")[1])


@pytest.mark.parametrize(
    ("coder", "body", "count", "alphabet", "what"),
    [
        (Coder.ANS_COARSE, b"\x01\x02", 5, 5, "3 bytes, the stream has only 2"),
        (Coder.ANS_COARSE, b"\x00\x00\x00\x01", 5, 5, "all 5 weights .* zero"),
        (Coder.ANS_COARSE, b"\x11\x11\x10\x01", 5, 5, "padding"),
        (Coder.ANS_COARSE, b"\x11\x11\x01\x01\x00", 5, 5, "zero byte"),
        (Coder.ANS_COARSE, b"\x11\x11\x01" + b"\x01" * 40, 5, 5, "more than its 5"),
        (Coder.ANS_FINE, bytes(range(1, 6)) + b"\x01" * 40, 5, 5, "more than its 5"),
        (Coder.ANS_FINE, bytes(5000), 5, 5000, "takes 4096 at most"),
        (Coder.ANS_FINE, b"\x01", 5, 1, "no information"),
        (Coder.ANS_BYTES, bytes(256), 5, 17, "takes 16 at most"),
        (Coder.ANS_BYTES, bytes(255), 5, 3, "256 bytes, the stream has only 255"),
        (Coder.ANS_BYTES, bytes(255) + b"\x01\xff", 5, 3, "byte 255 in a packed stream"),
        (Coder.ZSTD, b"", 0, 5, "no information"),
        (Coder.ZSTD, b"", 5, 5, "damaged"),
        (Coder.ZSTD, b"\x00" * 20, 40, 5, "announces"),
        (Coder.ZSTD, ZSTD, 401, 5, "announces 200 bytes.* 201 bytes"),
        (Coder.ZSTD, ZSTD + b"\x00", 400, 5, "damaged"),
        (Coder.ZSTD, ZSTD[:-1], 400, 5, "damaged"),
        (Coder.PACKED, b"\x01", 5, 5, "3 bytes|2 bytes"),
    ],
)
def test_malformed_bodies_are_refused(coder: Coder, body: bytes, count: int, alphabet: int, what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode(coder, body, count, alphabet)


def test_another_number_of_symbols_is_noticed() -> None:
    values = skewed(400, 5, 700).values
    values[[200, 399]] = 4  # zeros at the end would not take any room
    coder, body = encode_stream(Symbols(values, 5), "ans")
    assert coder is Coder.ANS_COARSE
    for count in (0, 1, 200, 399):
        with pytest.raises(WireError):
            decode(coder, body, count, 5)


def test_models_of_any_origin_can_be_used() -> None:
    table = np.array([1, 3, (1 << 24) - 4])
    values = skewed(50, 3, 100).values.numpy()
    assert (ans_decode(ans_encode(values, table), 50, table) == values).all()


def test_zstd_windows_beyond_the_content_are_refused() -> None:
    """A frame may ask for a window of gigabytes; none larger than the content is granted."""
    body = bytes([0b01100000, 0xFF]) + (400 - 256).to_bytes(2, "little") + b"\x03\x00\x00"
    with pytest.raises(WireError, match=r"window [0-9]+"):
        decode(Coder.ZSTD, body, 800, 5)


def test_expected_bits_follow_the_model() -> None:
    """A fair coin costs one bit, table and end of the stream aside."""
    _, body = encode_stream(symbols(80_000, 2), "ans")
    assert math.isclose(len(body), 10_000, rel_tol=1e-3)
