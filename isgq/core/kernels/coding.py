"""Kernels of the wire: digits into bytes and back, histograms, asymmetric numeral systems.

Each gives what the plain code gives where it is called; streams are bytes, words and states unsigned.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isgq.core.kernels.compiler import bit_count, kernel, multiply_high

_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint32]
_Ints = NDArray[np.int64]

_BLOCK = 4096  # bytes that stay in the cache while digit after digit goes over them
_TABLES = 8  # histograms side by side: increments of one byte's count wait for one another

_TOTAL_BITS = np.uint64(24)
_QUANTILE = np.uint64((1 << 24) - 1)
_WORD_BITS = np.uint64(32)
_WORD = np.uint64(0xFFFFFFFF)
_EVEN_BITS = np.uint64(0x5555555555555555)
_FULL_SHIFT = np.uint64(64 - 24)
_ONE = np.uint64(1)
_TOP_BIT = np.uint64(1 << 63)
_HALF_TOTAL = np.uint64(1 << 23)
_BYTE = 256  # values of a byte
_LOOKUP_BITS = 10
_LOOKUP_SHIFT = np.uint64(24 - 10)
_BYTE_BITS = np.uint64(8)
_LANES = 8  # streams side by side: the next symbol of one waits for the last


@kernel
def pack_digits(digits: _Bytes, base: int, out: _Bytes) -> int:
    """Byte j is ``sum_c digits[j + c m] base**c``, m being the number of bytes: see :mod:`isgq.wire.bits`.

    Returns:
        The largest digit, which may not be below the base: the bytes mean nothing then.
    """
    size, factor, largest = len(out), np.uint8(base), np.uint8(0)
    for first in range(0, size, _BLOCK):
        total = out[first : first + _BLOCK]
        total[:] = np.uint8(0)
        for plane in range((len(digits) - 1) // size, -1, -1):
            row = digits[plane * size + first : min(plane * size + first + len(total), len(digits))]
            for j in range(len(total)):
                total[j] = np.uint8(total[j] * factor)
            for j in range(len(row)):
                total[j] = np.uint8(total[j] + row[j])
            for j in range(len(row)):
                largest = np.uint8(max(largest, row[j]))
    return int(largest)


@kernel
def unpack_digits(data: _Bytes, base: int, out: _Bytes) -> None:
    """Inverse of :func:`pack_digits`, of bytes that it may have written."""
    size, mask = len(data), np.uint8(base - 1)
    width = np.uint8(1 if base == 2 else 2 if base == 4 else 4)
    rest = np.empty(_BLOCK, dtype=np.uint8)
    for first in range(0, size, _BLOCK):
        block = data[first : first + _BLOCK]
        left = rest[: len(block)]
        left[:] = block
        for plane in range((len(out) - 1) // size + 1):
            row = out[plane * size + first : min(plane * size + first + len(block), len(out))]
            if base == 3:
                for j in range(len(row)):
                    quotient = np.uint16(np.uint16(left[j] * np.uint16(171)) >> np.uint16(9))  # by 3, below 256
                    row[j] = np.uint8(left[j] - np.uint8(3 * quotient))
                    left[j] = np.uint8(quotient)
            else:
                for j in range(len(row)):
                    row[j] = np.uint8(left[j] & mask)
                    left[j] = np.uint8(left[j] >> width)


@kernel
def count_bytes(values: _Bytes, out: _Ints) -> None:
    """How often each value occurs: 256 counts."""
    tables = np.zeros((_TABLES, 256), dtype=np.int32)
    whole = len(values) // _TABLES * _TABLES
    for i in range(0, whole, _TABLES):
        for t in range(_TABLES):
            tables[t, values[i + t]] += 1
    for value in values[whole:]:
        tables[0, value] += 1
    for t in range(_TABLES):
        for value in range(256):
            out[value] += tables[t, value]


@kernel
def count_together(values: _Bytes, ends: _Ints, alphabets: _Ints, out: _Ints, good: NDArray[np.bool_]) -> None:
    """:func:`count_bytes` of streams one after another.

    Args:
        values: their symbols.
        ends: where each stream ends.
        alphabets: of the streams.
        out: ``[streams, 256]`` counts.
        good: whether all symbols of a stream are within its alphabet.
    """
    start = 0
    for stream in range(len(ends)):
        out[stream] = 0
        count_bytes(values[start : ends[stream]], out[stream])
        start = ends[stream]
        good[stream] = not out[stream, alphabets[stream] :].any()


@kernel
def count_pairs(words: NDArray[np.uint64]) -> tuple[int, int, int]:
    """How many pairs of bits have the lower bit set, how many the upper one, and how many both."""
    low = high = both = np.uint64(0)
    for word in words:
        lower, upper = word & _EVEN_BITS, word >> _ONE & _EVEN_BITS
        low += bit_count(lower)
        high += bit_count(upper)
        both += bit_count(lower & upper)
    return int(low), int(high), int(both)


@kernel
def weight_codes(counts: _Ints, midpoints: NDArray[np.float64], largest: int, out: _Bytes) -> None:
    """Codes of the weights nearest to the counts, the largest count being given the largest weight; 0 for 0 alone."""
    factor = largest / np.max(counts)
    for symbol in range(len(counts)):
        code = np.searchsorted(midpoints, counts[symbol] * factor)
        out[symbol] = max(code, 1) if counts[symbol] > 0 else code


@kernel
def weigh_together(
    counts: _Ints, alphabets: _Ints, coarse: NDArray[np.float64], fine: NDArray[np.float64], largest: _Ints, out: Any
) -> None:
    """:func:`weight_codes` of several histograms, by both tables.

    Args:
        counts: ``[streams, 256]``.
        alphabets: of the streams.
        coarse: midpoints of the coarse weights.
        fine: midpoints of the fine ones.
        largest: the largest weight of either table.
        out: ``[streams, 2, 256]`` codes.
    """
    for stream in range(len(counts)):
        own = counts[stream, : alphabets[stream]]
        weight_codes(own, coarse, largest[0], out[stream, 0])
        weight_codes(own, fine, largest[1], out[stream, 1])


@kernel
def share(codes: _Bytes, weights: _Ints, out: _Ints) -> bool:
    """The frequencies of :func:`isgq.wire.ans.frequencies`; False where all weights are zero."""
    total = np.int64(0)
    for code in codes:
        total += weights[code]
    if total == 0:
        return False
    room, weight, given = np.int64((1 << 24) - len(codes)), np.int64(0), np.int64(0)
    for symbol in range(len(codes)):
        weight += weights[codes[symbol]]
        reached = weight * room // total
        out[symbol] = reached - given + 1
        given = reached
    return True


@kernel
def _cumulate(frequencies: _Ints) -> Any:
    sums = np.zeros(len(frequencies) + 1, dtype=np.uint64)
    for symbol in range(len(frequencies)):
        sums[symbol + 1] = sums[symbol] + np.uint64(frequencies[symbol])
    return sums


@kernel
def ans_encode(values: _Bytes, frequencies: _Ints, out: _Words) -> int:
    """Code symbols, the last first, with a state of 64 bits that starts from 0.

    Args:
        values: ``[n]``.
        frequencies: ``[alphabet]``, which sum to 2**24.
        out: room for ``n + 2`` words.

    Returns:
        The number of words.
    """
    sums = _cumulate(frequencies)
    inverse = np.empty(len(frequencies), dtype=np.uint64)
    for symbol in range(len(frequencies)):
        inverse[symbol] = ~np.uint64(0) // np.uint64(frequencies[symbol])
    state, size = np.uint64(0), 0
    for i in range(len(values) - 1, -1, -1):
        symbol = values[i]
        frequency = np.uint64(frequencies[symbol])
        if (state >> _FULL_SHIFT) >= frequency:
            out[size] = np.uint32(state & _WORD)
            size += 1
            state >>= _WORD_BITS
        # The product's upper half is the quotient or 1 less.
        quotient = multiply_high(state, inverse[symbol])
        remainder = state - quotient * frequency
        if remainder >= frequency:
            quotient += _ONE
            remainder -= frequency
        state = (quotient << _TOTAL_BITS) + sums[symbol] + remainder
    while state:
        out[size] = np.uint32(state & _WORD)
        size += 1
        state >>= _WORD_BITS
    return size


@kernel
def _divide_by(frequencies: _Ints, rows: Any) -> None:
    """What :func:`_push` needs of each symbol: its limit, an exact reciprocal (3), what is below it, what is beside it.

    A state below ``f << 40`` divided by ``f`` is ``(state + plus) * factor >> 64 >> shift``; the factor is
    ``2**(64 + shift) / f``, rounded up, or down with 1 to add, whichever is nearer. Source: T. Granlund and
    P. Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
    """
    below = np.uint64(0)
    for symbol in range(len(frequencies)):
        frequency, bits = np.uint64(frequencies[symbol]), np.uint64(0)
        while _ONE << bits < frequency:
            bits += _ONE
        rest = _TOP_BIT % frequency << bits
        up = (rest + frequency - _ONE) // frequency
        factor, plus, shift = (_TOP_BIT // frequency << bits) + up, np.uint64(0), bits - _ONE
        if frequency == _ONE:
            factor, plus, shift = ~np.uint64(0), _ONE, np.uint64(0)
        elif up * frequency - rest >= _HALF_TOTAL:
            factor, plus = factor - _ONE, _ONE
        row = rows[symbol]
        row[0], row[1], row[2], row[3] = frequency << _FULL_SHIFT, factor, plus, shift
        row[4], row[5] = below, (_ONE << _TOTAL_BITS) - frequency
        below += frequency


@kernel
def _push(state: Any, rows: Any, at: Any, out: _Words, place: Any) -> Any:
    """Code one symbol without any jump, which could not be foreseen; a word that is not yet full is overwritten."""
    full = state >= rows[at, 0]
    out[place] = np.uint32(state & _WORD)
    state = state >> _WORD_BITS if full else state
    quotient = multiply_high(state + rows[at, 2], rows[at, 1]) >> rows[at, 3]
    return state + rows[at, 4] + quotient * rows[at, 5], place + np.uint64(full)


@kernel
def ans_encode_together(values: _Bytes, fields: _Ints, frequencies: _Ints, out: _Words, sizes: _Ints) -> None:
    """:func:`ans_encode` for several streams, two at a time: the next symbol of one waits for the last.

    Args:
        values: the symbols of all streams.
        fields: ``[streams, 5]``, best the longest first: where the symbols begin and end, where the words go, and where
            the frequencies begin and end.
        frequencies: of all streams.
        out: all words; each stream needs room for two more than it has symbols, and there is one more at the end.
        sizes: the number of words of each stream.
    """
    rows = np.zeros((2 * _BYTE, 6), dtype=np.uint64)
    state, place, last = np.zeros((3, 2), dtype=np.uint64)
    left, stream, coming = np.zeros(2, dtype=np.int64), np.full(2, -1), 0
    while True:
        for lane in range(2):
            if left[lane]:
                continue
            if stream[lane] >= 0:
                while state[lane]:
                    out[place[lane]] = np.uint32(state[lane] & _WORD)
                    place[lane] += _ONE
                    state[lane] >>= _WORD_BITS
                sizes[stream[lane]] = np.int64(place[lane]) - fields[stream[lane], 2]
            stream[lane] = coming if coming < len(fields) else -1
            if coming < len(fields):
                start, stop, place[lane], low, high = fields[coming]
                left[lane], last[lane] = stop - start, stop - 1
                _divide_by(frequencies[low:high], rows[lane * _BYTE :])
            coming += 1
        for lane in range(2):
            if stream[lane] < 0:
                if stream[1 - lane] < 0:
                    return
                # A lane without a stream goes along at state 0.
                place[lane], left[lane], last[lane] = len(out) - 1, left[1 - lane], last[1 - lane]
                rows[lane * _BYTE : (lane + 1) * _BYTE] = np.uint64(0)
                rows[lane * _BYTE : (lane + 1) * _BYTE, 0] = _TOP_BIT
        steps = min(left)
        (a, b), (to_a, to_b), (from_a, from_b) = state, place, last
        for i in range(np.uint64(steps)):
            a, to_a = _push(a, rows, np.uint64(values[from_a - i]), out, to_a)
            b, to_b = _push(b, rows, np.uint64(values[from_b - i]) + np.uint64(_BYTE), out, to_b)
        state[0], state[1], place[0], place[1] = a, b, to_a, to_b
        last -= np.uint64(steps)
        left -= steps


@kernel
def _lowest(sums: Any) -> Any:
    """The first symbol that each part of the quantiles may belong to."""
    lookup = np.empty(1 << _LOOKUP_BITS, dtype=np.uint8)
    lowest = 0
    for i in range(1 << _LOOKUP_BITS):
        while sums[lowest + 1] <= np.uint64(i) << _LOOKUP_SHIFT:
            lowest += 1
        lookup[i] = lowest
    return lookup


@kernel
def ans_decode(words: _Words, frequencies: _Ints, out: _Bytes) -> bool:
    """Inverse of :func:`ans_encode`: fills ``out``.

    Returns:
        Whether the words hold exactly these symbols.
    """
    sums = _cumulate(frequencies)
    lookup = _lowest(sums)
    left, state = len(words), np.uint64(0)
    for _ in range(min(2, left)):
        left -= 1
        state = state << _WORD_BITS | np.uint64(words[left])
    for i in range(len(out)):
        quantile = state & _QUANTILE
        symbol = np.int64(lookup[quantile >> _LOOKUP_SHIFT])
        while sums[symbol + 1] <= quantile:
            symbol += 1
        out[i] = symbol
        state = (state >> _TOTAL_BITS) * np.uint64(frequencies[symbol]) + (quantile - sums[symbol])
        if state <= _WORD and left:
            left -= 1
            state = state << _WORD_BITS | np.uint64(words[left])
    return left == 0 and state == 0


@kernel
def ans_decode_together(data: _Bytes, fields: _Ints, frequencies: _Ints, out: _Bytes, good: NDArray[np.bool_]) -> None:
    """Inverse of :func:`ans_encode` for several streams at once, twice as fast as one after the other.

    Args:
        data: holds the words, little-endian, the last one of a stream without zero bytes at its end.
        fields: ``[streams, 6]``, the longest first: where the words begin and end, number of symbols, where these go,
            and where the frequencies begin and end.
        frequencies: of all streams.
        out: all symbols.
        good: whether the words of each stream hold exactly its symbols.
    """
    sums = np.empty((_LANES, 257), dtype=np.uint64)
    lookup = np.empty((_LANES, 1 << _LOOKUP_BITS), dtype=np.uint8)
    states = np.empty(_LANES, dtype=np.uint64)
    # Of the words that are left, and of the symbols; unsigned, since an index that may be negative takes longer.
    begins, ends, places = np.empty((3, _LANES), dtype=np.uint64)
    for first in range(0, len(fields), _LANES):
        lanes = min(_LANES, len(fields) - first)
        for lane in range(lanes):
            start, stop, _, places[lane], low, high = fields[first + lane]
            own = _cumulate(frequencies[low:high])
            sums[lane, : len(own)], lookup[lane] = own, _lowest(own)
            state, left = np.uint64(0), max(0, (stop - start + 3) // 4 - 2)  # two words are in the state
            for at in range(stop - 1, start + 4 * left - 1, -1):
                state = state << _BYTE_BITS | np.uint64(data[at])
            states[lane], begins[lane], ends[lane] = state, start, start + 4 * left
        done = 0
        for active in range(lanes, 0, -1):
            for i in range(np.uint64(done), np.uint64(fields[first + active - 1, 2])):
                for lane in range(np.uint64(active)):
                    state, at = states[lane], ends[lane]
                    quantile = state & _QUANTILE
                    symbol = np.uint64(lookup[lane, quantile >> _LOOKUP_SHIFT])
                    while sums[lane, symbol + _ONE] <= quantile:
                        symbol += _ONE
                    below = sums[lane, symbol]
                    out[places[lane] + i] = symbol
                    state = (state >> _TOTAL_BITS) * (sums[lane, symbol + _ONE] - below) + (quantile - below)
                    if state <= _WORD and at > begins[lane]:
                        for _ in range(4):
                            at -= _ONE
                            state = state << _BYTE_BITS | np.uint64(data[at])
                        ends[lane] = at
                    states[lane] = state
            done = fields[first + active - 1, 2]
        for lane in range(lanes):
            good[first + lane] = ends[lane] == begins[lane] and states[lane] == 0
