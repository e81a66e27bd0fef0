"""Packing without a model, against a slow transcription of the documentation."""

import math

import pytest
import torch

from isgq.core.errors import WireError
from isgq.core.payload import symbol_dtype
from isgq.wire import bits
from isgq.wire.bits import (
    DIGITS_PER_BYTE,
    SEGMENT,
    pack_symbols,
    packed_size,
    tight_digits,
    unpack_symbols,
    whole_digits,
)
from tests.wire.records import ALPHABETS, integers, symbols

PLANNERS = {"tight": tight_digits, "whole": whole_digits}
COUNTS = (0, 1, 2, 3, 5, 7, 8, 9, 39, 40, 41, 100)


def pack_slowly(values: list[int], plan: bits.Plan, segment: int) -> bytes:
    """Symbol by symbol, digit by digit."""
    out = bytearray()
    for first in range(0, len(values), segment):
        part = values[first : first + segment]
        for base, shift, positions in plan:
            for power in range(positions):
                digits = [(value >> shift) // base**power % base for value in part]
                size = -(-len(part) // DIGITS_PER_BYTE[base])
                planes = [digits[start : start + size] for start in range(0, len(part), size)]
                out += bytes(
                    sum(plane[j] * base**c for c, plane in enumerate(planes) if j < len(plane)) for j in range(size)
                )
    return bytes(out)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_bytes_are_those_of_the_slow_packer_and_come_back(alphabet: int, planner: str) -> None:
    plan = PLANNERS[planner]
    for count in COUNTS:
        values = symbols(count, alphabet).values
        data = pack_symbols(values, alphabet, plan)
        assert bytes(data.numpy()) == pack_slowly(values.tolist(), plan(alphabet), SEGMENT)
        assert data.numel() == packed_size(count, alphabet, plan)
        back = unpack_symbols(data, count, alphabet, plan)
        assert back.dtype == symbol_dtype(alphabet)
        assert torch.equal(back, values)


def test_segments_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "SEGMENT", 40)
    for alphabet in (2, 3, 5, 6, 7, 9, 1000):
        values = symbols(123, alphabet).values
        data = pack_symbols(values, alphabet)
        assert bytes(data.numpy()) == pack_slowly(values.tolist(), tight_digits(alphabet), 40)
        assert torch.equal(unpack_symbols(data, 123, alphabet), values)


@pytest.mark.parametrize("count", [SEGMENT, SEGMENT + 1, 2 * SEGMENT + 7])
def test_long_streams_come_back(count: int) -> None:
    for alphabet in (3, 6, 256):
        values = symbols(count, alphabet).values
        assert torch.equal(unpack_symbols(pack_symbols(values, alphabet), count, alphabet), values)


def test_every_byte_of_trits_is_divided_exactly() -> None:
    for value in range(3**5):
        digits = unpack_symbols(torch.tensor([value], dtype=torch.uint8), 5, 3)
        assert sum(int(digit) * 3**c for c, digit in enumerate(digits)) == value


def test_digits_hold_the_alphabet_in_the_least_room() -> None:
    for alphabet in range(1, 5000):
        plan = tight_digits(alphabet)
        fixed = (alphabet - 1).bit_length()
        capacity = math.prod(base**positions for base, _, positions in plan)
        tenths = sum(positions * (80 // DIGITS_PER_BYTE[base]) for base, _, positions in plan)
        assert alphabet <= capacity <= 1 << fixed
        assert tenths == min(10 * i + 16 * t for t in range(5) for i in range(fixed + 1) if 2**i * 3**t >= alphabet)


@pytest.mark.parametrize(
    ("alphabet", "bits_each"),
    [(2, 1.0), (3, 1.6), (4, 2.0), (5, 2.6), (6, 2.6), (7, 3.0), (9, 3.2), (12, 3.6), (16, 4.0), (18, 4.2), (256, 8.0)],
)
def test_bits_a_symbol(alphabet: int, bits_each: float) -> None:
    assert packed_size(40_000, alphabet) * 8 / 40_000 == bits_each


@pytest.mark.parametrize(
    ("alphabet", "count", "data", "what"),
    [
        (3, 5, [243], "below 243"),
        (3, 4, [81], "below 81"),
        (3, 6, [0, 27], "below 27"),  # byte 1 holds digits 1, 3 and 5 only
        (2, 3, [8], "below 8"),
        (4, 5, [0, 16], "below 16"),
        (6, 1, [0, 3], "below 3"),
        (5, 1, [1, 2], "symbol 5"),
        (255, 1, [255], "symbol 255"),
        (1000, 1, [255, 3], "symbol 1023"),
        (3, 5, [], "1 bytes, got 0"),
        (3, 5, [0, 0], "1 bytes, got 2"),
        (1, 5, [0], "0 bytes, got 1"),
    ],
)
def test_bytes_that_no_symbols_give_are_refused(alphabet: int, count: int, data: list[int], what: str) -> None:
    with pytest.raises(WireError, match=what):
        unpack_symbols(torch.tensor(data, dtype=torch.uint8), count, alphabet)


def test_every_padding_bit_is_checked() -> None:
    """Of all values of the last byte, those that unpack are those that pack back."""
    for alphabet in (2, 3, 4, 16):
        for count in range(1, 10):
            size = packed_size(count, alphabet)
            good = 0
            for value in range(256):
                data = torch.zeros(size, dtype=torch.uint8)
                data[-1] = value
                try:
                    values = unpack_symbols(data, count, alphabet)
                except WireError:
                    continue
                good += 1
                assert torch.equal(pack_symbols(values, alphabet), data)
            assert good == alphabet ** len(range(size - 1, count, size))


def test_packing_does_not_change_the_symbols() -> None:
    for alphabet in (2, 3, 9, 256, 300):
        values = integers(1000, alphabet).to(symbol_dtype(alphabet))
        before = values.clone()
        pack_symbols(values, alphabet)
        assert torch.equal(values, before)
