"""Kernels of :mod:`isgq.codecs.rotation_code` and ``rotation_grid``: dithered entries of a Laplace distribution.

Arithmetic is that of the plain code, operation by operation, so frequencies and bytes are the same; the coder is that
of ``constriction`` (its ``AnsCoder``: a state of 64 bits that starts from 0, words of 32 bits, the last symbol first).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isgq.core.kernels.compiler import kernel
from isgq.core.kernels.quantize import State, mix, uniform

_Reals = NDArray[np.float64]
_Ints = NDArray[np.int64]
_Words = NDArray[np.uint32]
_Floats = NDArray[np.float32]

_HALF_TOTAL = np.float64(1 << 23)
_MOST = np.float64((1 << 23) - 1)
_TOTAL, _WHOLE = np.uint64(1 << 24), np.float64(1 << 24)
_QUANTILE = np.uint64((1 << 24) - 1)
_TOTAL_BITS, _WORD_BITS, _FULL_SHIFT = np.uint64(24), np.uint64(32), np.uint64(64 - 24)
_WORD = np.uint64(0xFFFFFFFF)
_ZERO = np.uint64(0)
_LOG2_E = np.float64(1.4426950408889634)
_LN_2 = np.float64(0.6931471805599453)
_T11, _T10, _T9, _T8, _T7, _T6, _T5, _T4, _T3, _T2, _T1, _T0 = (1 / math.factorial(i) for i in range(12))
_LARGEST = np.float64(np.finfo(np.float32).max)
_FAR = np.float64(1000)
_BLOCK = 1024  # symbols whose frequencies are worked out together, which takes less time than one by one


@kernel
def _lay_out(place: Any, classes: Any, state: Any, group: Any, dither: Any) -> None:
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    for i in range(len(dither)):
        dither[i] = np.float64(uniform(mix(np.uint32(x + np.uint32(i)), k1, k2, k3)))
    for vector in range(len(place)):
        first, row = place[vector], group[vector * len(classes) : (vector + 1) * len(classes)]
        for i in range(len(classes)):
            row[i] = first + classes[i]


@kernel
def lay_out(
    place: _Ints, left: _Ints, right: _Ints, left_state: State, right_state: State, group: _Ints, dither: _Reals
) -> None:  # fmt: skip
    """Group and dither of each entry of vectors; see :func:`isgq.codecs.rotation_grid._lay_out`."""
    split = len(place) * len(left)
    _lay_out(place[:, 0], left, left_state, group[:split], dither[:split])
    _lay_out(place[:, 1], right, right_state, group[split:], dither[split:])


@kernel
def _quantize(vectors: Any, dither: Any, group: Any, steps: Any, out: Any) -> None:
    length, entries = np.sqrt(np.float64(vectors.shape[1])), vectors.reshape(-1)
    for i in range(len(out)):
        y = entries[i] * length / steps[np.uint64(group[i])] + dither[i]
        size = np.floor(np.abs(y) + 0.5)
        out[i] = np.int64(-size if y < 0 else size)


@kernel
def quantize_dithered(
    left: _Reals, right: _Reals, dither: _Reals, group: _Ints, steps: _Reals, out: _Ints
) -> None:  # fmt: skip
    """Symbols of vectors ``[k, o]`` and ``[k, p]``; see :func:`isgq.codecs.rotation_code.quantize`."""
    _quantize(left, dither[: left.size], group[: left.size], steps, out[: left.size])
    _quantize(right, dither[left.size :], group[left.size :], steps, out[left.size :])


@kernel
def dequantize_dithered(symbols: _Ints, dither: _Reals, group: _Ints, steps: _Reals, out: _Reals) -> None:
    """Entries of symbols; see :func:`isgq.codecs.rotation_code.dequantize`."""
    for i in range(len(out)):
        out[i] = (np.float64(symbols[i]) - dither[i]) * steps[np.uint64(group[i])]


@kernel
def _narrow(x: Any) -> Any:
    x = -_LARGEST if x < -_LARGEST else x
    return np.float32(_LARGEST if x > _LARGEST else x)


@kernel
def scale(left: _Reals, right: _Reals, weights: _Reals, one: _Floats, other: _Floats) -> None:
    """See :func:`isgq.codecs.rotation_grid.scale`."""
    left_length, right_length = np.sqrt(np.float64(left.shape[1])), np.sqrt(np.float64(right.shape[1]))
    for vector in range(len(weights)):
        row, narrowed, gain = left[vector], one[vector], weights[vector] / left_length
        for i in range(len(row)):
            narrowed[i] = _narrow(row[i] * gain)
        row, narrowed = right[vector], other[vector]
        for i in range(len(row)):
            narrowed[i] = _narrow(row[i] / right_length)


@kernel
def _decay(x: _Reals, bits: _Ints) -> None:
    """``exp(-x)`` in the place of x, as :func:`isgq.codecs.rotation_code._decay` makes it; bits is room for as many."""
    powers = bits.view(np.float64)
    for i in range(len(x)):
        y = x[i] * _LOG2_E
        whole = np.floor(y)
        f = (y - whole) * -_LN_2
        total = _T0 * f + _T1
        total = total * f + _T2
        total = total * f + _T3
        total = total * f + _T4
        total = total * f + _T5
        total = total * f + _T6
        total = total * f + _T7
        total = total * f + _T8
        total = total * f + _T9
        total = total * f + _T10
        x[i] = total * f + _T11
        bits[i] = (np.int64(1023) - np.int64(whole if whole < _FAR else _FAR)) << np.int64(52)
    for i in range(len(x)):
        x[i] *= powers[i]


@kernel
def _tables(exponents: _Reals, digits: Any) -> Any:
    """``exp(-exponents)``, and the frequency of the digit 0: ``[digits, g]``; ``rotation_code._digits``."""
    g = len(exponents)
    odds, zeros = np.empty((max(digits, 1), g)), np.empty((digits, g), dtype=np.uint64)
    for place in range(len(odds)):
        odds[place] = exponents * np.float64(np.int64(1) << np.int64(place))
    flat = odds.reshape(-1)
    _decay(flat, np.empty(len(flat), dtype=np.int64))
    for place in range(digits):
        for i in range(g):
            one = np.floor(odds[place, i] / (1 + odds[place, i]) * _WHOLE)
            one = one if one > 1.0 else 1.0
            zeros[place, i] = _TOTAL - np.uint64(np.int64(one if one < _HALF_TOTAL else _HALF_TOTAL))
    return odds[0], zeros


@kernel
def _frequencies(
    dither: _Reals, group: _Ints, exponents: _Reals, beyond: _Reals, below: _Reals, above: _Reals, bits: _Ints
) -> None:
    """:func:`isgq.codecs.rotation_code._signs`: of the signs - and +; in loops that compilers turn into vectors."""
    n = len(dither)
    for i in range(n):  # what is looked up, alone: no vector does that
        below[i], above[i] = exponents[np.uint64(group[i])], beyond[np.uint64(group[i])]
    for i in range(n):
        below[i] *= dither[i] + 0.5
    _decay(below[:n], bits)
    for i in range(n):
        low, high = np.floor(below[i] * _HALF_TOTAL), np.floor(above[i] / below[i] * _HALF_TOTAL)
        low, high = (low if low > 1.0 else 1.0), (high if high > 1.0 else 1.0)
        below[i], above[i] = (low if low < _MOST else _MOST), (high if high < _MOST else _MOST)


@kernel
def _push(state: Any, size: Any, out: Any, start: Any, frequency: Any) -> Any:
    """Code a symbol with this frequency and so much below it: the new state and number of words."""
    if (state >> _FULL_SHIFT) >= frequency:
        out[size] = np.uint32(state & _WORD)
        size += 1
        state >>= _WORD_BITS
    quotient = state // frequency
    return (quotient << _TOTAL_BITS) + start + (state - quotient * frequency), size


@kernel
def encode_dithered(
    symbols: _Ints, dither: _Reals, group: _Ints, exponents: _Reals, digits: int, out: _Words
) -> int:  # fmt: skip
    """Signs and digits of symbols; see :func:`isgq.codecs.rotation_code.encode_symbols`.

    Args:
        symbols: ``[n]``.
        dither: ``[n]``.
        group: ``[n]``.
        exponents: ``[g]``.
        digits: of the largest magnitude less 1.
        out: room for ``(digits + 1) n + 2`` words.

    Returns:
        The number of words; 0 less the largest magnitude if it has more digits.
    """
    state, size, n, large = _ZERO, 0, len(symbols), 0
    beyond, zeros = _tables(exponents, digits)
    magnitudes, places = np.empty(n + 1, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    largest = np.int64(0)
    for i in range(n):
        largest = max(largest, abs(symbols[i]))
    if largest and (largest - 1) >> np.int64(digits):
        return -int(largest)
    for i in range(n):  # those that have digits, without a branch that nobody foresees
        magnitudes[large], places[large] = abs(symbols[i]) - 1, group[i]
        large += symbols[i] != 0
    for place in range(digits - 1, -1, -1):
        shift, table = np.int64(place), zeros[place]
        for i in range(large - 1, -1, -1):
            zero = table[np.uint64(places[i])]
            one = bool((magnitudes[i] >> shift) & 1)
            state, size = _push(state, size, out, zero if one else _ZERO, _TOTAL - zero if one else zero)
    below, above, bits = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK, dtype=np.int64)
    for first in range((n - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        last = min(first + _BLOCK, n)
        _frequencies(dither[first:last], group[first:last], exponents, beyond, below, above, bits)
        for i in range(last - first - 1, -1, -1):
            q, low, high = symbols[first + i], np.uint64(np.int64(below[i])), np.uint64(np.int64(above[i]))
            middle = _TOTAL - low - high
            start = _ZERO if q < 0 else low + (middle if q > 0 else _ZERO)
            state, size = _push(state, size, out, start, low if q < 0 else high if q > 0 else middle)
    while state:
        out[size] = np.uint32(state & _WORD)
        size += 1
        state >>= _WORD_BITS
    return size


@kernel
def decode_dithered(
    words: _Words, dither: _Reals, group: _Ints, exponents: _Reals, digits: int, out: _Ints
) -> bool:  # fmt: skip
    """Inverse of :func:`encode_dithered`: fills ``out``.

    Returns:
        Whether the words hold exactly these symbols.
    """
    left, state, n, large = len(words), _ZERO, len(out), 0
    beyond, zeros = _tables(exponents, digits)
    for _ in range(min(2, left)):
        left -= 1
        state = state << _WORD_BITS | np.uint64(words[left])
    below, above, bits = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK, dtype=np.int64)
    index = np.empty(n + 1, dtype=np.int64)
    for first in range(0, n, _BLOCK):
        last = min(first + _BLOCK, n)
        _frequencies(dither[first:last], group[first:last], exponents, beyond, below, above, bits)
        for i in range(last - first):
            low, high = np.uint64(np.int64(below[i])), np.uint64(np.int64(above[i]))
            middle, quantile = _TOTAL - low - high, state & _QUANTILE
            above_low, above_middle = np.uint64(quantile >= low), np.uint64(quantile >= low + middle)
            # sums of products, so that there is no branch that nobody foresees
            start = above_low * low + above_middle * middle
            frequency = low + above_low * (middle - low) + above_middle * (high - middle)
            state = (state >> _TOTAL_BITS) * frequency + (quantile - start)
            if state <= _WORD and left > 0:
                left -= 1
                state = state << _WORD_BITS | np.uint64(words[left])
            q = np.int64(above_low + above_middle) - np.int64(1)
            out[first + i] = q
            index[large] = first + i
            large += int(q & 1)
    magnitudes = np.ones(large, dtype=np.int64)
    for place in range(digits):
        shift, table = np.int64(place), zeros[place]
        for i in range(large):
            zero = table[np.uint64(group[index[i]])]
            quantile = state & _QUANTILE
            one = np.uint64(quantile >= zero)
            state = (state >> _TOTAL_BITS) * (zero + one * (_TOTAL - zero - zero)) + (quantile - one * zero)
            if state <= _WORD and left > 0:
                left -= 1
                state = state << _WORD_BITS | np.uint64(words[left])
            magnitudes[i] += np.int64(one) << shift
    for i in range(large):
        out[index[i]] *= magnitudes[i]
    return left == 0 and state == _ZERO
