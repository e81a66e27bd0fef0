"""The kernels of :mod:`isgq.core.kernels.quantize` for GPUs, in Triton: same names, arguments and bits.

Bits stay the same because neither Triton nor the assembler behind it may contract ``a * b + c`` into one rounding
(``enable_fp_fusion`` at every launch), because fractions are ``div_rn`` (``/`` is approximate there), and because
integers wrap.

A launch works on at most 2**30 elements (:func:`isgq.core.parallel.part_size`), which it counts in int32.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_State = tuple[int, int, int, int]

_BLOCK = 1024  # elements of a program: 8 of each of its 128 threads
_MOST = 1 << 30
_OPTIONS = {"enable_fp_fusion": False}  # of the compiler

_M1, _M2, _M3 = tl.constexpr(0xED5AD4BB), tl.constexpr(0xAC4C1B51), tl.constexpr(0x31848BAB)
_UNIT = tl.constexpr(2.0**-25)
_INTEGERS = tl.constexpr(1.5 * 2**23)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile at the first launch, once for all values of these numbers."""
    numbers = ("x", "k1", "k2", "k3", "first", "size", "levels", "ratio", "step", "shift", "parts")
    return triton.jit(function, do_not_specialize=numbers)


def arrays(*tensors: Tensor) -> list[Tensor]:
    """What the kernels take for tensors: contiguous ones; those that are written to have to be."""
    return [tensor.contiguous() for tensor in tensors]


def _launch(kernel: Any, n: int, out: Tensor, *arguments: Any) -> None:
    """Run a kernel for n elements on the device of ``out``, its first argument."""
    if n:
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            kernel[(-(-n // _BLOCK),)](out, *arguments, n, _BLOCK, **_OPTIONS)


def _span(size: int, start: int, stop: int) -> tuple[slice, slice, int, int]:
    """Elements, their buckets, the first element's place in its bucket, and a bucket's size, both below 2**31."""
    first = start % size
    excess = max(size - _MOST, 0)  # of a bucket as large as a launch or larger, only its end can matter
    return slice(start, stop), slice(start // size, -(-stop // size)), max(first - excess, 0), size - excess


@_kernel
def _mix(x: tl.tensor, k1: tl.tensor, k2: tl.tensor, k3: tl.tensor) -> tl.tensor:
    """The hash of :mod:`isgq.core.keys`, of uint32."""
    x = x ^ (x >> 17)
    x = x * _M1 + k1.to(tl.uint32)
    x = x ^ (x >> 11)
    x = x * _M2 + k2.to(tl.uint32)
    x = x ^ (x >> 15)
    x = x * _M3 + k3.to(tl.uint32)
    return x ^ (x >> 14)


@_kernel
def _uniform(i: tl.tensor, x: tl.tensor, k1: tl.tensor, k2: tl.tensor, k3: tl.tensor) -> tl.tensor:
    """:func:`isgq.core.keys.to_uniform` of word i from the state on."""
    word = _mix(i.to(tl.uint32) + x.to(tl.uint32), k1, k2, k3)
    return ((word.to(tl.int32, bitcast=True) >> 7) | 1).to(tl.float32) * _UNIT


@_kernel
def _round(t: tl.tensor) -> tl.tensor:
    """:func:`isgq.codecs.grid.round_` of float32."""
    return (t + _INTEGERS) - _INTEGERS


@_kernel
def _clamp(t: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """``torch.clamp``: NaN stays."""
    t = tl.where(t < low, low, t)
    return tl.where(t > high, high, t)


@_kernel
def _indices(BLOCK: tl.constexpr) -> tl.tensor:
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@_kernel
def _scale(each: tl.tensor, i: tl.tensor, first: tl.tensor, size: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The number of the bucket that element i lies in."""
    bucket = (i + first).to(tl.uint32) // size.to(tl.uint32)
    return tl.load(each + bucket.to(tl.int32), mask=inside, other=1.0)


@_kernel
def _words(
    out: tl.tensor, x: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    tl.store(out + i, _mix(i.to(tl.uint32) + x.to(tl.uint32), k1, k2, k3), mask=i < n)


@_kernel
def _uniforms(
    out: tl.tensor, x: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    tl.store(out + i, _uniform(i, x, k1, k2, k3), mask=i < n)


@_kernel
def _flip_signs(
    bits: tl.tensor, x: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    place = i.to(tl.uint32)
    word = _mix((place >> 5) + x.to(tl.uint32), k1, k2, k3) ^ 0xFFFFFFFF
    given = tl.load(bits + i, mask=i < n)
    tl.store(bits + i, given ^ ((word >> (place & 31)) << 31), mask=i < n)


@_kernel
def _dither(
    out: tl.tensor, flat: tl.tensor, divisor: tl.tensor, first: tl.tensor, size: tl.tensor, x: tl.uint32,
    k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, levels: tl.tensor, sparse: tl.constexpr, n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    value = tl.load(flat + i, mask=i < n)
    most = levels.to(tl.float32)
    t = tl.div_rn(value, _scale(divisor, i, first, size, i < n)) + _uniform(i, x, k1, k2, k3)
    q = (_round(_clamp(t, -most, most)) + most).to(tl.int32)
    if sparse:
        q = tl.where(value == 0, 2 * levels + 1, q)
    tl.store(out + i, q.to(tl.uint8), mask=i < n)


@_kernel
def _dither_signs(
    out: tl.tensor, flat: tl.tensor, divisor: tl.tensor, first: tl.tensor, size: tl.tensor, x: tl.uint32,
    k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    t = tl.div_rn(tl.load(flat + i, mask=i < n), _scale(divisor, i, first, size, i < n))
    tl.store(out + i, (t + 2.0 * _uniform(i, x, k1, k2, k3) >= 0).to(tl.uint8), mask=i < n)


@_kernel
def _undither(
    out: tl.tensor, symbols: tl.tensor, scales: tl.tensor, first: tl.tensor, size: tl.tensor, x: tl.uint32,
    k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, step: tl.tensor, shift: tl.tensor, sparse: tl.constexpr,
    n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    symbol = tl.load(symbols + i, mask=i < n)
    each = step.to(tl.float32)
    q = (each * symbol.to(tl.float32) - shift.to(tl.float32)) - each * _uniform(i, x, k1, k2, k3)
    if sparse:
        q = tl.where(symbol.to(tl.int32) == 2 * shift + 1, 0.0, q)
    tl.store(out + i, _clamp(q * _scale(scales, i, first, size, i < n), -_LARGEST, _LARGEST), mask=i < n)


@_kernel
def _round_stochastic(
    out: tl.tensor, flat: tl.tensor, norm: tl.tensor, first: tl.tensor, size: tl.tensor, x: tl.uint32, k1: tl.uint32,
    k2: tl.uint32, k3: tl.uint32, levels: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    ratio = tl.div_rn(tl.load(flat + i, mask=i < n), _scale(norm, i, first, size, i < n))
    t = (_clamp(ratio, -1.0, 1.0) * (levels << 24).to(tl.float32)).to(tl.int32)
    u = _mix(i.to(tl.uint32) + x.to(tl.uint32), k1, k2, k3).to(tl.int32, bitcast=True) >> 8
    k = (t + u + (1 << 23)) >> 24
    tl.store(out + i, (k + levels).to(tl.uint8), mask=i < n)


@_kernel
def _round_nearest(
    out: tl.tensor, flat: tl.tensor, norm: tl.tensor, first: tl.tensor, size: tl.tensor, levels: tl.tensor,
    n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    ratio = tl.div_rn(tl.load(flat + i, mask=i < n), _scale(norm, i, first, size, i < n))
    k = _round(_clamp(ratio, -1.0, 1.0) * levels.to(tl.float32)).to(tl.int32)
    tl.store(out + i, (k + levels).to(tl.uint8), mask=i < n)


@_kernel
def _rescale(
    out: tl.tensor, symbols: tl.tensor, scales: tl.tensor, first: tl.tensor, size: tl.tensor, levels: tl.tensor,
    parts: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    k = (tl.load(symbols + i, mask=i < n).to(tl.int32) - levels).to(tl.float32)
    value = tl.div_rn(k, parts.to(tl.float32)) * _scale(scales, i, first, size, i < n)
    tl.store(out + i, value, mask=i < n)


@_kernel
def _nest(
    out: tl.tensor, flat: tl.tensor, divisor: tl.tensor, first: tl.tensor, size: tl.tensor, x: tl.uint32,
    k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, levels: tl.tensor, ratio: tl.tensor, inverse: tl.tensor,
    n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    most = levels.to(tl.float32)
    t = tl.div_rn(tl.load(flat + i, mask=i < n), _scale(divisor, i, first, size, i < n)) + _uniform(i, x, k1, k2, k3)
    m = _round(_clamp(t, -most, most))
    q = m - _round(m * inverse) * ratio.to(tl.float32) + (ratio // 2).to(tl.float32)
    tl.store(out + i, q.to(tl.int32).to(tl.uint8), mask=i < n)


@_kernel
def _unnest(
    out: tl.tensor, symbols: tl.tensor, scales: tl.tensor, divisor: tl.tensor, first: tl.tensor, size: tl.tensor,
    x: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32, levels: tl.tensor, ratio: tl.tensor, n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = _indices(BLOCK)
    turn, reach = ratio.to(tl.float32), (levels - ratio // 2).to(tl.float32)
    remainder = (tl.load(symbols + i, mask=i < n).to(tl.int32) - ratio // 2).to(tl.float32)
    u = _uniform(i, x, k1, k2, k3)
    target = tl.div_rn(tl.load(out + i, mask=i < n), _scale(divisor, i, first, size, i < n)) + u
    lowest, highest = -_round(tl.div_rn(remainder + reach, turn)), _round(tl.div_rn(reach - remainder, turn))
    turns = _clamp(_round(tl.div_rn(target - remainder, turn)), lowest, highest)
    value = (turns * turn + remainder - u) * _scale(scales, i, first, size, i < n)
    tl.store(out + i, _clamp(value, -_LARGEST, _LARGEST), mask=i < n)


def words(state: _State, out: Tensor) -> None:
    """Random words: uint32 ``[n]``."""
    _launch(_words, len(out), out, *state)


def uniforms(state: _State, out: Tensor) -> None:
    """Random numbers in (-1/2, 1/2)."""
    _launch(_uniforms, len(out), out, *state)


def flip_signs(state: _State, bits: Tensor) -> None:
    """Flip the sign bit of each float32 ``[n]``, seen as uint32, whose bit of the words is 0."""
    _launch(_flip_signs, len(bits), bits, *state)


def dither(
    flat: Tensor, divisor: Tensor, size: int, start: int, stop: int, state: _State,
    levels: int, sparse: bool, out: Tensor,
) -> None:  # fmt: skip
    """Symbols of the codec ``dithered``, subtractive or half."""
    elements, buckets, first, size = _span(size, start, stop)
    given = flat[elements], divisor[buckets], first, size, *state
    _launch(_dither, stop - start, out[elements], *given, levels, sparse)


def dither_signs(flat: Tensor, divisor: Tensor, size: int, start: int, stop: int, state: _State, out: Tensor) -> None:
    """Symbols of the codec ``dithered``, one_bit."""
    elements, buckets, first, size = _span(size, start, stop)
    _launch(_dither_signs, stop - start, out[elements], flat[elements], divisor[buckets], first, size, *state)


def undither(
    symbols: Tensor, scales: Tensor, size: int, start: int, stop: int, state: _State,
    step: int, shift: int, sparse: bool, out: Tensor,
) -> None:  # fmt: skip
    """Decoded values of the symbols of :func:`dither` (step 1, shift L) and :func:`dither_signs` (2, 1)."""
    elements, buckets, first, size = _span(size, start, stop)
    given = symbols[elements], scales[buckets], first, size, *state
    _launch(_undither, stop - start, out[elements], *given, step, shift, sparse)


def round_stochastic(
    flat: Tensor, norm: Tensor, size: int, start: int, stop: int, state: _State, levels: int, out: Tensor
) -> None:
    """Symbols of :func:`isgq.codecs.grid.round_stochastic`."""
    elements, buckets, first, size = _span(size, start, stop)
    given = flat[elements], norm[buckets], first, size, *state
    _launch(_round_stochastic, stop - start, out[elements], *given, levels)


def round_nearest(flat: Tensor, norm: Tensor, size: int, start: int, stop: int, levels: int, out: Tensor) -> None:
    """Symbols of :func:`isgq.codecs.grid.round_nearest`."""
    elements, buckets, first, size = _span(size, start, stop)
    _launch(_round_nearest, stop - start, out[elements], flat[elements], norm[buckets], first, size, levels)


def rescale(
    symbols: Tensor, scales: Tensor, size: int, start: int, stop: int, levels: int, divisor: int, out: Tensor
) -> None:
    """``(symbol - levels) / divisor`` times the bucket's scale."""
    elements, buckets, first, size = _span(size, start, stop)
    given = symbols[elements], scales[buckets], first, size
    _launch(_rescale, stop - start, out[elements], *given, levels, divisor)


def nest(
    flat: Tensor, divisor: Tensor, size: int, start: int, stop: int, state: _State,
    levels: int, ratio: int, out: Tensor,
) -> None:  # fmt: skip
    """Symbols of the codec ``nested_dithered``."""
    elements, buckets, first, size = _span(size, start, stop)
    given = flat[elements], divisor[buckets], first, size, *state
    _launch(_nest, stop - start, out[elements], *given, levels, ratio, 1 / ratio)


def unnest(
    symbols: Tensor, scales: Tensor, divisor: Tensor, size: int, start: int, stop: int, state: _State,
    levels: int, ratio: int, out: Tensor,
) -> None:  # fmt: skip
    """Decoded values of the codec ``nested_dithered``, in the place of the receiver's guess."""
    elements, buckets, first, size = _span(size, start, stop)
    given = symbols[elements], scales[buckets], divisor[buckets], first, size, *state
    _launch(_unnest, stop - start, out[elements], *given, levels, ratio)
