"""Sets of positions: exact round trips, cost close to log2 C(d, k), and no forged stream gets through."""

import functools
import math

import pytest
import torch

from isgq.codecs.indices import HIGH, LOW, decode_indices, encode_indices, low_bits
from isgq.codecs.sparse import random_subset
from isgq.core.errors import CodecError
from isgq.core.payload import Symbols
from isgq.wire.entropy import encode_stream

CPU = torch.device("cpu")


def ideal_bits(size: int, count: int) -> float:
    """log2 C(size, count)."""
    parts = (math.lgamma(size + 1), -math.lgamma(count + 1), -math.lgamma(size - count + 1))
    return math.fsum(parts) / math.log(2)


def entropy_bits(symbols: Symbols) -> float:
    """Ideal cost of a stream under its own histogram."""
    counts = symbols.values.to(torch.int64).bincount().to(torch.float64)
    counts = counts[counts > 0]
    return float(-(counts * (counts / counts.sum()).log2()).sum())


SETS = {
    "empty": ([], 10),
    "empty of nothing": ([], 0),
    "first": ([0], 1000),
    "last": ([999], 1000),
    "far last": ([(1 << 40) - 1], 1 << 40),
    "both ends": ([0, 999], 1000),
    "all": (list(range(50)), 50),
    "all but one": ([*range(20), *range(21, 50)], 50),
    "cluster": (list(range(5000, 5100)), 10**6),
    "every other": (list(range(1, 1000, 2)), 1000),
}


@pytest.mark.parametrize("name", SETS)
def test_round_trip_of_extreme_sets(name: str) -> None:
    positions, size = SETS[name]
    indices = torch.tensor(positions, dtype=torch.int64)
    assert torch.equal(decode_indices(encode_indices(indices, size), size), indices)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 12345])
def test_round_trip_of_random_sets(size: int) -> None:
    for count in sorted({1, 2, size // 100, size // 10, size // 2, size - 1, size}):
        if 0 <= count <= size:
            indices = random_subset(size, count, count, CPU)
            assert torch.equal(decode_indices(encode_indices(indices, size), size), indices)


@functools.cache
def encoded(size: int, count: int) -> dict[str, Symbols]:
    return dict(encode_indices(random_subset(size, count, 7, CPU), size))


@pytest.mark.parametrize("count", [100, 1000, 10000])
@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.03, 0.1])
def test_cost_is_within_two_percent_of_the_ideal(count: int, share: float) -> None:
    size = round(count / share)
    symbols = encoded(size, count)
    cost = entropy_bits(symbols[HIGH]) + count * low_bits(count, size)
    assert cost <= 1.02 * ideal_bits(size, count) + 8
    assert symbols[HIGH].values.numel() <= 5.5 * count


@pytest.mark.parametrize("count", [100, 1000, 10000])
@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.1])
def test_cost_on_the_wire_is_within_five_percent(count: int, share: float) -> None:
    size = round(count / share)
    symbols = encoded(size, count)
    cost = 8 * sum(len(encode_stream(stream)[1]) for stream in symbols.values())
    assert cost <= 1.05 * ideal_bits(size, count) + 8 * 4  # the tables and word padding of two streams


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_dense_sets_cost_no_more_than_their_bitmap(share: float) -> None:
    size = 20000
    count = round(share * size)
    symbols = encode_indices(random_subset(size, count, 3, CPU), size)
    bitmap = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert symbols[LOW].alphabet == 1 or share < 0.34
    assert sum(map(entropy_bits, symbols.values())) <= 1.02 * bitmap


def forged() -> dict[str, dict[str, Symbols]]:
    good = encode_indices(torch.tensor([3, 50, 51, 700]), 1000)
    low, high = good[LOW], good[HIGH]
    zero = torch.zeros(1, dtype=torch.uint8)
    return {
        "no low": {HIGH: high},
        "no high": {LOW: low},
        "other alphabet": {LOW: Symbols(low.values, 2 * low.alphabet), HIGH: high},
        "no bits": {LOW: low, HIGH: Symbols(high.values, 3)},
        "trailing zero": {LOW: low, HIGH: Symbols(torch.cat([high.values, zero]), 2)},
        "one too many": {LOW: low, HIGH: Symbols(torch.cat([high.values, zero + 1]), 2)},
        "one too few": {LOW: low, HIGH: Symbols(high.values[:-1], 2)},
        "fewer low": {LOW: Symbols(low.values[:-1], low.alphabet), HIGH: high},
        "no position at all, but symbols": {LOW: Symbols(low.values[:0], 256), HIGH: Symbols(zero, 2)},
        "beyond the end": {LOW: low, HIGH: Symbols(torch.cat([zero.expand(40), high.values]), 2)},
        "outside the alphabet": {LOW: Symbols(low.values + low.alphabet, low.alphabet), HIGH: high},
        "no bit": {LOW: low, HIGH: Symbols(2 * high.values, 2)},
    }


@pytest.mark.parametrize("name", forged())
def test_forged_streams_are_refused(name: str) -> None:
    with pytest.raises(CodecError):
        decode_indices(forged()[name], 1000)


def test_whatever_is_accepted_is_a_set_of_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for _ in range(300):
        count = int(torch.randint(1, 6, (), generator=generator))
        size = int(torch.randint(count, 60, (), generator=generator))
        bits = low_bits(count, size)
        low = torch.randint(0, 1 << bits, (count,), generator=generator)
        high = torch.randint(0, 2, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator)
        try:
            indices = decode_indices({LOW: Symbols(low, 1 << bits), HIGH: Symbols(high, 2)}, size)
        except CodecError:
            continue
        accepted += 1
        assert indices.numel() == count
        assert bool((indices.diff() > 0).all())
        assert 0 <= int(indices[0]) <= int(indices[-1]) < size
    assert accepted >= 10
