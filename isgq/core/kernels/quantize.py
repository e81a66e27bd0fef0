"""Kernels of the quantizers: hash, dither, quantize and back, each in one pass.

Each writes elements ``start .. stop - 1`` of an array in which ``size`` elements share a bucket, and is the same, bit
for bit, as the chain of torch operations that stands where it is called. A stream of random numbers comes as the state
``(counter, k1, k2, k3)`` of :func:`isgq.core.keys.stream_state` at element ``start``.

Integers are cast after every operation, because Numba widens them; the compiler takes the widening out again.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from isgq.core.kernels.compiler import kernel

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint32]
State = tuple[int, int, int, int]

_U17, _U11, _U15, _U14 = np.uint32(17), np.uint32(11), np.uint32(15), np.uint32(14)
_M1, _M2, _M3 = np.uint32(0xED5AD4BB), np.uint32(0xAC4C1B51), np.uint32(0x31848BAB)
_UNIT = np.float32(2.0**-25)
_INTEGERS = np.float32(1.5 * 2**23)
_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)  # bits of float32
_LARGEST = np.float32(np.finfo(np.float32).max)


def arrays(*tensors: Tensor) -> list[NDArray[Any]]:
    """What the kernels take for tensors: contiguous ones; those that are written to have to be."""
    return [tensor.contiguous().numpy() for tensor in tensors]


@kernel
def mix(x: Any, k1: Any, k2: Any, k3: Any) -> Any:
    """The hash of :mod:`isgq.core.keys`, of uint32."""
    x = np.uint32(x ^ np.uint32(x >> _U17))
    x = np.uint32(np.uint32(x * _M1) + k1)
    x = np.uint32(x ^ np.uint32(x >> _U11))
    x = np.uint32(np.uint32(x * _M2) + k2)
    x = np.uint32(x ^ np.uint32(x >> _U15))
    x = np.uint32(np.uint32(x * _M3) + k3)
    return np.uint32(x ^ np.uint32(x >> _U14))


@kernel
def uniform(x: Any) -> Any:
    """:func:`isgq.core.keys.to_uniform` of one word."""
    return np.float32(np.int32(np.int32(np.int32(x) >> np.int32(7)) | np.int32(1))) * _UNIT


@kernel
def _round(t: Any) -> Any:
    """:func:`isgq.codecs.grid.round_` of one float32."""
    return (t + _INTEGERS) - _INTEGERS


@kernel
def _clamp(t: Any, low: Any, high: Any) -> Any:
    """``torch.clamp``: NaN stays."""
    t = low if t < low else t
    return high if t > high else t


@kernel
def words(state: State, out: _Words) -> None:
    """Random words from the first of ``out`` on."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    for i in range(len(out)):
        out[i] = mix(np.uint32(x + np.uint32(i)), k1, k2, k3)


@kernel
def uniforms(state: State, out: _Floats) -> None:
    """Random numbers in (-1/2, 1/2)."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    for i in range(len(out)):
        out[i] = uniform(mix(np.uint32(x + np.uint32(i)), k1, k2, k3))


@kernel
def flip_signs(state: State, bits: _Words) -> None:
    """Flip the sign bit of each float32 ``[n]``, seen as bits, whose bit of the words is 0; 32 of them to a word."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    for at in range((len(bits) + 31) // 32):
        word = np.uint32(~mix(np.uint32(x + np.uint32(at)), k1, k2, k3))
        part = bits[32 * at : 32 * at + 32]
        for i in range(len(part)):
            part[i] = np.uint32(part[i] ^ np.uint32(np.uint32(word >> np.uint32(i)) << np.uint32(31)))


@kernel
def dither(
    flat: _Floats, divisor: _Floats, size: int, start: int, stop: int, state: State,
    levels: int, sparse: bool, out: _Bytes,
) -> None:  # fmt: skip
    """Symbols of the codec ``dithered``, subtractive or half."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    most, zero = np.float32(levels), np.uint8(2 * levels + 1)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, counter = divisor[bucket], np.uint32(x + np.uint32(first - start))
        values, symbols = flat[first:last], out[first:last]
        for i in range(last - first):
            u = uniform(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3))
            q = _round(_clamp(values[i] / scale + u, -most, most)) + most
            symbols[i] = zero if sparse and values[i] == 0 else np.uint8(np.int32(q))


@kernel
def dither_signs(flat: _Floats, divisor: _Floats, size: int, start: int, stop: int, state: State, out: _Bytes) -> None:
    """Symbols of the codec ``dithered``, one_bit."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, counter = divisor[bucket], np.uint32(x + np.uint32(first - start))
        values, symbols = flat[first:last], out[first:last]
        for i in range(last - first):
            u = uniform(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3))
            symbols[i] = np.uint8(values[i] / scale + _TWO * u >= 0)


@kernel
def dither_part(
    flat: _Floats, size: int, state: State, levels: int, signs: bool, sparse: bool, scales: _Floats, out: _Bytes
) -> bool:
    """Scales and symbols of a tensor that is a single part; False, and nothing of use, where it is not finite."""
    bits, peaks, divisors = flat.view(np.uint32), scales.view(np.uint32), np.empty_like(scales)
    for bucket in range(len(scales)):
        most = np.uint32(0)
        for word in bits[bucket * size : (bucket + 1) * size]:
            most = max(most, np.uint32(word & _MAGNITUDE))
        if most >= _INFINITY:
            return False
        peaks[bucket] = most
        if not signs:
            scales[bucket] /= np.float32(levels)
        divisors[bucket] = _ONE if scales[bucket] == 0 else scales[bucket]
    if signs:
        dither_signs(flat, divisors, size, 0, len(flat), state, out)
    else:
        dither(flat, divisors, size, 0, len(flat), state, levels, sparse, out)
    return True


@kernel
def undither(
    symbols: _Bytes, scales: _Floats, size: int, start: int, stop: int, state: State,
    step: int, shift: int, sparse: bool, out: _Floats,
) -> None:  # fmt: skip
    """Decoded values of symbols q: ``step q - shift - step u`` in units of the scale; ``2 shift + 1`` is a zero."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    each, middle, zero = np.float32(step), np.float32(shift), np.uint8(2 * shift + 1)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, counter = scales[bucket], np.uint32(x + np.uint32(first - start))
        given, values = symbols[first:last], out[first:last]
        for i in range(last - first):
            u = uniform(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3))
            q = (each * np.float32(given[i]) - middle) - each * u
            q = _ZERO if sparse and given[i] == zero else q
            values[i] = _clamp(q * scale, -_LARGEST, _LARGEST)


@kernel
def round_stochastic(
    flat: _Floats, norm: _Floats, size: int, start: int, stop: int, state: State, levels: int, out: _Bytes
) -> None:
    """Symbols of :func:`isgq.codecs.grid.round_stochastic`."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    factor, half, middle = np.float32(levels * (1 << 24)), np.int32(1 << 23), np.int32(levels)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, counter = norm[bucket], np.uint32(x + np.uint32(first - start))
        values, symbols = flat[first:last], out[first:last]
        for i in range(last - first):
            t = np.int32(_clamp(values[i] / scale, -_ONE, _ONE) * factor)
            u = np.int32(np.int32(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3)) >> np.int32(8))
            k = np.int32(np.int32(np.int32(t + u) + half) >> np.int32(24))
            symbols[i] = np.uint8(np.int32(k + middle))


@kernel
def round_nearest(flat: _Floats, norm: _Floats, size: int, start: int, stop: int, levels: int, out: _Bytes) -> None:
    """Symbols of :func:`isgq.codecs.grid.round_nearest`."""
    factor = np.float32(levels)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, values, symbols = norm[bucket], flat[first:last], out[first:last]
        for i in range(last - first):
            k = _round(_clamp(values[i] / scale, -_ONE, _ONE) * factor) + factor
            symbols[i] = np.uint8(np.int32(k))


@kernel
def rescale(
    symbols: _Bytes, scales: _Floats, size: int, start: int, stop: int, levels: int, divisor: int, out: _Floats
) -> None:
    """``(symbol - levels) / divisor`` times the bucket's scale."""
    middle, parts = np.float32(levels), np.float32(divisor)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, given, values = scales[bucket], symbols[first:last], out[first:last]
        for i in range(last - first):
            values[i] = (np.float32(given[i]) - middle) / parts * scale


@kernel
def nest(
    flat: _Floats, divisor: _Floats, size: int, start: int, stop: int, state: State,
    levels: int, ratio: int, out: _Bytes,
) -> None:  # fmt: skip
    """Symbols of the codec ``nested_dithered``."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    most, turn, inverse, half = np.float32(levels), np.float32(ratio), np.float32(1 / ratio), np.float32(ratio // 2)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, counter = divisor[bucket], np.uint32(x + np.uint32(first - start))
        values, symbols = flat[first:last], out[first:last]
        for i in range(last - first):
            u = uniform(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3))
            n = _round(_clamp(values[i] / scale + u, -most, most))
            symbols[i] = np.uint8(np.int32(n - _round(n * inverse) * turn + half))


@kernel
def unnest(
    symbols: _Bytes, scales: _Floats, divisor: _Floats, size: int, start: int, stop: int, state: State,
    levels: int, ratio: int, out: _Floats,
) -> None:  # fmt: skip
    """Decoded values of the codec ``nested_dithered``, in the place of the receiver's guess."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    turn, half, reach = np.float32(ratio), np.float32(ratio // 2), np.float32(levels - ratio // 2)
    for bucket in range(start // size, (stop - 1) // size + 1):
        first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
        scale, step, counter = scales[bucket], divisor[bucket], np.uint32(x + np.uint32(first - start))
        given, values = symbols[first:last], out[first:last]
        for i in range(last - first):
            u = uniform(mix(np.uint32(counter + np.uint32(i)), k1, k2, k3))
            remainder = np.float32(given[i]) - half
            lowest, highest = -_round((remainder + reach) / turn), _round((-remainder + reach) / turn)
            turns = _clamp(_round((values[i] / step + u - remainder) / turn), lowest, highest)
            values[i] = _clamp((turns * turn + remainder - u) * scale, -_LARGEST, _LARGEST)
