"""Symbols as bytes without any model: mixed-radix digits, several to a byte.

Layout. A stream holds n symbols in ``[0, alphabet)``.

1. It is cut into segments of 655,360 symbols, the last one shorter; each is packed by itself, one after another.
2. Every symbol becomes *digits*. :func:`tight_digits` takes the cheapest ``2**i * 3**t >= alphabet``, t at most 4, a
   bit costing 1 and a trit 1.6, the fewest trits among equals: first the low i bits, as many whole bytes as they fill,
   then in pieces of 4, 2 and 1 bits; then t trits; always the least significant first. So the symbols of an alphabet
   of 6 are a bit and a trit.
3. Every digit position of a segment is packed by itself, k digits a byte (base 2: 8, 3: 5, 4: 4, 16: 2, 256: 1), in
   *planes*: of ``m = ceil(n / k)`` bytes, byte j is ``sum_c digit[j + c m] * base**c``, digits from n on being 0. So
   every operation works on contiguous rows, which is what makes packing fast in plain tensor operations.
4. The digit positions follow one another.

On the CPU numpy does what torch does elsewhere: it takes as long, and asks no other thread for help in operations that
take microseconds, since waiting for one takes milliseconds where cores are busy.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isgq.core.errors import CodecError, WireError
from isgq.core.kernels import compiled
from isgq.core.memory import empty
from isgq.core.parallel import PIECE
from isgq.core.payload import symbol_dtype

SEGMENT = 40 << 14
"""Symbols that are packed together: bounds the scratch. 40 digits of any base fill whole bytes."""

DIGITS_PER_BYTE = {2: 8, 3: 5, 4: 4, 16: 2, 256: 1}
"""How many digits of a base share a byte."""

# v // 3**c is (v * multiply + add) >> shift for c = 1 .. 4 and v < 243, within 16 bits. Tensor libraries vectorise
# these operations, but no integer division.
_DIVIDE = ((85, 57, 19, 101), (85, 0, 0, 101), (8, 9, 9, 13))

_TRITS_MAX = 4  # more never beat the bits: five take 8 bits


class Digits(NamedTuple):
    """Digit positions of one base: position t is ``(symbol >> shift) // base**t % base``."""

    base: int
    shift: int
    positions: int = 1


Plan = tuple[Digits, ...]
Planner = Callable[[int], Plan]
"""Maps an alphabet to the digits that write its symbols, least significant first."""


def _bits(width: int) -> Iterator[Digits]:
    if width >= 8:
        yield Digits(256, 0, width // 8)
    for size in (4, 2, 1):
        if width & size:
            yield Digits(1 << size, width & ~(2 * size - 1))


@functools.lru_cache(maxsize=4096)
def tight_digits(alphabet: int) -> Plan:
    """The digits that take least room: bits, then trits."""

    def bits_besides(trits: int) -> int:
        return (-(-alphabet // int(3**trits)) - 1).bit_length()

    trits = min(range(_TRITS_MAX + 1), key=lambda t: (10 * bits_besides(t) + 16 * t, t))
    bits = bits_besides(trits)
    return (*_bits(bits), *([Digits(3, bits, trits)] if trits else []))


@functools.lru_cache(maxsize=4096)
def whole_digits(alphabet: int) -> Plan:
    """The digits that never cut a symbol at a byte's edge, for a coder of bytes: one digit, or whole bytes."""
    if alphabet == 1:
        return ()
    if alphabet <= 256:
        return (Digits(min(base for base in DIGITS_PER_BYTE if base >= alphabet), 0),)
    return (Digits(256, 0, -(-(alphabet - 1).bit_length() // 8)),)


@functools.lru_cache(maxsize=4096)
def packed_size(count: int, alphabet: int, planner: Planner = tight_digits) -> int:
    """Bytes that ``count`` symbols take."""
    return sum(d.positions * _position_size(count, d.base) for d in planner(alphabet))


def check_range(values: Tensor, alphabet: int) -> None:
    """Check symbols.

    Raises:
        CodecError: one is outside the alphabet.
    """
    if not values.numel():
        return
    if values.dtype is torch.uint8 and values.device.type == "cpu":  # where numpy is faster, and half will do
        low, high = 0, int(values.numpy().max())
    else:
        low, high = (int(bound) for bound in torch.aminmax(values))
    if low < 0 or high >= alphabet:
        raise CodecError(f"symbols {low} .. {high}, allowed are 0 .. {alphabet - 1}")


def pack_symbols(values: Tensor, alphabet: int, planner: Planner = tight_digits) -> Tensor:
    """Pack symbols on their own device.

    Args:
        values: ``[n]`` of dtype ``symbol_dtype(alphabet)``.
        alphabet: number of different symbols.
        planner: which digits write a symbol.

    Returns:
        uint8 ``[packed_size(n, alphabet, planner)]``.

    Raises:
        CodecError: a symbol is outside the alphabet.
    """
    plan, largest = planner(alphabet), 0
    told = _is_digit(plan) and plan[0].base < 256 and compiled("coding", values.device)  # kernels tell by the way
    if not told:
        check_range(values, alphabet)
    out = empty(packed_size(values.numel(), alphabet, planner), torch.uint8, values.device)
    start = 0
    for segment in _segments(values):
        for base, digits in _digits_of(segment, plan):
            end = start + _position_size(digits.numel(), base)
            largest = max(largest, _pack_digits(digits, base, out[start:end]))
            start = end
    if told and largest >= alphabet:
        check_range(values, alphabet)
    return out


def unpack_symbols(data: Tensor, count: int, alphabet: int, planner: Planner = tight_digits) -> Tensor:
    """Inverse of :func:`pack_symbols`, on the device of the data.

    Args:
        data: uint8 ``[packed_size(count, alphabet, planner)]``.
        count: number of symbols.
        alphabet: number of different symbols.
        planner: which digits write a symbol.

    Returns:
        ``[count]`` of dtype ``symbol_dtype(alphabet)``.

    Raises:
        WireError: wrong size, a byte that no digits give, padding that is not zero, or a symbol outside the alphabet.
    """
    size = packed_size(count, alphabet, planner)
    if data.numel() != size:
        raise WireError(f"{count} symbols of an alphabet of {alphabet} pack into {size} bytes, got {data.numel()}")
    plan = planner(alphabet)
    # The least digit is copied, so nothing has to be zeroed first, except where there is no digit at all.
    values = empty(count, symbol_dtype(alphabet), data.device)
    if not plan:
        values.zero_()
    start = 0
    for segment in _segments(values):
        for base, shift, positions in plan:
            for power in range(positions):
                end = start + _position_size(segment.numel(), base)
                digits = _unpack_digits(data[start:end], base, segment.numel())
                weight = base**power << shift
                _copy(digits, segment) if weight == 1 else segment.add_(digits.to(segment.dtype), alpha=weight)
                start = end
    capacity = math.prod(base**positions for base, _, positions in plan)
    if count and capacity > alphabet and (largest := _largest(values)) >= alphabet:
        raise WireError(f"symbol {largest} in a stream whose alphabet is {alphabet}: allowed are 0 .. {alphabet - 1}")
    return values


def _segments(values: Tensor) -> Sequence[Tensor]:
    return [values] if values.numel() <= SEGMENT else torch.split(values, SEGMENT)


def _position_size(count: int, base: int) -> int:
    return -(-count // DIGITS_PER_BYTE[base])


@functools.cache
def _column(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device).unsqueeze(1)


def _is_digit(plan: Plan) -> bool:
    """Whether a symbol is its digit."""
    return len(plan) == 1 and plan[0].positions == 1


def _digits_of(values: Tensor, plan: Plan) -> Iterator[tuple[int, Tensor]]:
    """Base and digits of each position of symbols ``[n]``: uint8 ``[n]``."""
    if _is_digit(plan):
        yield plan[0].base, values
        return
    for base, shift, positions in plan:
        if base == 3:
            trits = _trits_of(values.bitwise_right_shift(shift).to(torch.uint8), positions)
            yield from ((base, digits) for digits in trits)
        else:
            for at in range(shift, shift + positions * (base.bit_length() - 1), base.bit_length() - 1):
                yield base, values.bitwise_right_shift(at).bitwise_and_(base - 1).to(torch.uint8)


def _trits_of(values: Tensor, positions: int) -> Tensor:
    """Base-3 digits of bytes ``[n]`` below ``3 ** positions``, at most 243: uint8 ``[positions, n]``."""
    if positions == 1:
        return values.unsqueeze(0)
    if values.device.type == "cpu":
        return torch.from_numpy(_trits_of_numpy(values.numpy(), positions))
    multiply, add, shift = (_column(column[: positions - 1], torch.int16, values.device) for column in _DIVIDE)
    quotients = (values.to(torch.int16) * multiply).add_(add).bitwise_right_shift_(shift).to(torch.uint8)
    digits = torch.cat([values.unsqueeze(0), quotients])
    digits[:-1].sub_(quotients, alpha=3)
    return digits


def _trits_of_numpy(values: NDArray[np.uint8], positions: int) -> NDArray[np.uint8]:
    digits = np.empty((positions, len(values)), dtype=np.uint8)
    for first in range(0, len(values), PIECE):
        part = digits[:, first : first + PIECE]
        part[0] = values[first : first + PIECE]
        wide, scratch = part[0].astype(np.int16), np.empty(part.shape[1], dtype=np.int16)
        for quotient, multiply, add, shift in zip(part[1:], *_DIVIDE, strict=False):
            np.add(np.multiply(wide, np.int16(multiply), out=scratch), np.int16(add), out=scratch)
            np.copyto(quotient, np.right_shift(scratch, np.int16(shift), out=scratch), casting="unsafe")
        for digit, quotient in itertools.pairwise(part):
            digit -= quotient * np.uint8(3)
    return digits


def _copy(source: Tensor, target: Tensor) -> None:
    if target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _largest(data: Tensor) -> int:
    return int(data.numpy().max() if data.device.type == "cpu" else data.max())


def _pack_digits(digits: Tensor, base: int, out: Tensor) -> int:
    """Pack uint8 digits ``[n]`` into bytes ``[ceil(n / k)]``; the largest digit, where a kernel tells, else 0."""
    per_byte, size = DIGITS_PER_BYTE[base], out.numel()
    if per_byte == 1:
        _copy(digits, out)
        return 0
    if size and (kernels := compiled("coding", digits.device)):
        return int(kernels.pack_digits(digits.numpy(), base, out.numpy()))
    if digits.numel() < per_byte * size:
        digits = torch.cat([digits, digits.new_zeros(per_byte * size - digits.numel())])
    planes = digits.view(per_byte, size)
    if digits.device.type == "cpu":
        # Horner's rule
        rows, total = planes.numpy(), out.numpy()
        np.copyto(total, rows[-1])
        for row in rows[-2::-1]:
            np.add(np.multiply(total, np.uint8(base), out=total), row, out=total)
        return 0
    powers = _column(tuple(base**c for c in range(per_byte)), torch.uint8, digits.device)
    torch.sum(planes * powers, dim=0, dtype=torch.uint8, out=out)
    return 0


def _unpack_digits(data: Tensor, base: int, count: int) -> Tensor:
    """Inverse of :func:`_pack_digits`: uint8 ``[count]``; WireError if digits from ``count`` on are not zero."""  # noqa: DOC501
    per_byte, size = DIGITS_PER_BYTE[base], data.numel()
    for present in range(1, per_byte + 1):
        first = max(0, count - present * size)  # bytes from here on hold at most `present` digits
        limit = base**present
        if first < size and limit < 256 and (largest := _largest(data[first:])) >= limit:
            raise WireError(
                f"byte {largest} in a packed stream of {count} digits of base {base}: must be below {limit}, "
                "the padding being zero"
            )
    if per_byte == 1:
        return data
    if kernels := compiled("coding", data.device):
        digits = empty(count, torch.uint8, data.device)
        kernels.unpack_digits(data.numpy(), base, digits.numpy())
        return digits
    if base == 3:
        digits = _trits_of(data, per_byte)
    else:
        widths = tuple(c * (base.bit_length() - 1) for c in range(per_byte))
        if data.device.type == "cpu":
            shifted = np.right_shift(data.numpy(), np.array(widths, dtype=np.uint8)[:, None])
            digits = torch.from_numpy(np.bitwise_and(shifted, np.uint8(base - 1), out=shifted))
        else:
            shifts = _column(widths, torch.uint8, data.device)
            digits = data.bitwise_right_shift(shifts).bitwise_and_(base - 1)
    return digits.view(-1)[:count]
