"""Vectors as symbols and as bytes, with a dither or with a dead zone.

*Dithered*: ``q = round(x / s + u)``, decoded ``s (q - u)``. Both sides know the dither u, so the symbol carries only
what u leaves open (entropy-coded dithered quantization: Zamir and Feder, "On universal quantization by randomized
uniform/lattice quantizers", 1992).

*Dead zone*: u = 0, and what is below ``(1/2 + z) s`` becomes 0, likewise all further thresholds are z higher; decoded
as the mean of what the model says lies between them.

The model of an entry is a Laplace distribution of root mean square 1; with ``e = step / scale``, scale 1/sqrt(2), and
z = 0 where there is a dither,

    P(q < 0) = exp(-(1/2 + z + u) e) / 2        P(q > 0) = exp(-(1/2 + z - u) e) / 2

and beyond that the distribution has no memory: given the sign, ``g = |q| - 1`` is geometric with ratio
``exp(-e)``, and the binary digits of a geometric number are independent: digit i is 1 with the odds ``exp(-e 2^i)``.
So a sign in {-, 0, +} for each entry, then digit by digit for those that are not 0; however fine the steps, no alphabet
grows. Coder: asymmetric numeral systems (``constriction``), with integer frequencies that sum to 2**24.

Frequencies must be the same on every machine: they come from the steps' table and the integers of the dither by
single IEEE operations on float64 (:func:`_decay`), never from a library's ``exp``.
"""

import math

import constriction
import numpy as np
import numpy.typing as npt
import torch

from isgq.codecs.rotation_sides import Ints, Reals
from isgq.core.errors import CodecError
from isgq.core.kernels import compiled

_TOTAL = 1 << 24
_INVERSE_SCALE = float(np.sqrt(2.0))
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_TAYLOR = [1 / math.factorial(i) for i in range(11, -1, -1)]
_MOST_DIGITS = 40

DEAD_ZONE = 0.15
"""How much higher than half-way between two symbols their threshold is, where there is no dither."""
_HOST = torch.device("cpu")
_FAMILY = constriction.stream.model.Categorical(perfect=False)


def quantize(x: Reals, dither: Reals | None) -> Ints:
    """Symbols of entries in steps ``[n]``; without a dither, with the dead zone."""
    y, zone = (x, DEAD_ZONE) if dither is None else (x + dither, 0.0)
    symbols: Ints = (np.sign(y) * np.floor(np.abs(y) + (0.5 - zone))).astype(np.int64)
    return symbols


def dequantize(symbols: Ints, dither: Reals | None, group: Ints, steps: Reals) -> Reals:
    """Entries ``[n]``, in units of their root mean square; see :func:`encode_symbols` for the arguments."""
    if dither is not None:
        if kernels := compiled("laplace", _HOST):
            entries = np.empty(len(symbols))
            kernels.dequantize_dithered(symbols, dither, group, steps, entries)
            return entries
        return (symbols - dither) * steps[group]
    e = steps * _INVERSE_SCALE
    r = _decay(e)
    # the mean of an exponential distribution of scale 1/e that is cut at 1; 1/2 - e/12 + ... where e is small
    mean = np.where(e < 1e-3, 0.5 - e / 12, 1 / e - r / np.where(e < 1e-3, 1.0, 1 - r))
    inner = np.abs(symbols) + (DEAD_ZONE - 0.5) + mean[group]
    return np.where(symbols == 0, 0.0, np.sign(symbols) * inner * steps[group])


def _decay(x: Reals) -> Reals:
    """``exp(-x)`` for x >= 0, to 1e-10, from products and sums alone: ``2**-k`` times a Taylor sum."""
    y = x * _LOG2_E
    whole = np.floor(y)
    f = (y - whole) * -_LN_2
    total = np.full_like(f, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        total *= f
        total += coefficient
    return np.ldexp(total, -np.minimum(whole, 1000.0).astype(np.int32))


def _signs(exponents: Reals, group: Ints, dither: Reals | None) -> Reals:
    """Frequencies less 1 (the coder adds 1 to each) of the signs -, 0, +: ``[n, 3]``."""
    frequencies = np.empty((len(group), 3))
    below, zero, above = frequencies.T
    if dither is None:
        tail, width = _decay(exponents * (0.5 + DEAD_ZONE))[group], 1 + 2 * DEAD_ZONE
    else:
        tail, width = _decay((dither + 0.5) * exponents[group]), 1.0
    np.floor(tail * (_TOTAL / 2), out=below)
    np.floor(
        _decay(exponents * width)[group] / tail * (_TOTAL / 2), out=above
    )  # exp(-(1/2 - u) e) = exp(-e) / exp(-(1/2 + u) e)
    for side in (below, above):
        np.clip(side, 1, _TOTAL / 2 - 1, out=side)
    np.subtract(_TOTAL - below, above, out=zero)
    frequencies -= 1
    return frequencies


def _digits(exponents: Reals, digits: int) -> Reals:
    """Frequencies less 1 of the digits 0 and 1 of each place and group: ``[digits, g, 2]``."""
    odds = _decay(exponents * np.ldexp(1.0, np.arange(digits))[:, None])
    one = np.clip(np.floor(odds / (1 + odds) * _TOTAL), 1, _TOTAL / 2)
    return np.stack([_TOTAL - one, one], 2) - 1


def encode_symbols(symbols: Ints, dither: Reals | None, group: Ints, steps: Reals, digits: int) -> bytes:
    """Write symbols.

    Args:
        symbols: ``[n]``, each at most ``2**digits`` in magnitude.
        dither: ``[n]`` in (-1/2, 1/2), or None for the dead zone.
        group: ``[n]``: which of the steps a symbol has.
        steps: ``[g]``, in units of the entries' root mean square.
        digits: of the largest magnitude less 1; both sides know it.

    Returns:
        Little-endian 32-bit words without the zero bytes at their end.

    Raises:
        CodecError: a symbol is too large.
    """
    exponents = steps * _INVERSE_SCALE
    if dither is not None and (kernels := compiled("laplace", _HOST)):
        words = np.empty((digits + 1) * len(symbols) + 2, dtype=np.uint32)
        size = kernels.encode_dithered(symbols, dither, group, exponents, digits, words)
        if size >= 0:
            return _trimmed(words[:size])
        largest = -size
    else:
        largest = int(np.abs(symbols).max(initial=1))
    if (largest - 1) >> digits:
        raise CodecError(f"symbol of magnitude {largest} has more than {digits} digits")
    nonzero = symbols != 0
    magnitudes = np.abs(symbols[nonzero]) - 1
    coder, tables, large = constriction.stream.stack.AnsCoder(), _digits(exponents, digits), group[nonzero]
    for place in reversed(range(digits)):
        coder.encode_reverse((magnitudes >> place & 1).astype(np.int32), _FAMILY, tables[place][large])
    coder.encode_reverse(np.sign(symbols).astype(np.int32) + 1, _FAMILY, _signs(exponents, group, dither))
    return _trimmed(coder.get_compressed())


def _trimmed(words: npt.NDArray[np.uint32]) -> bytes:
    return words.astype("<u4").tobytes().rstrip(b"\0")


def decode_symbols(data: bytes, dither: Reals | None, group: Ints, steps: Reals, digits: int) -> Ints:
    """Inverse of :func:`encode_symbols`: symbols ``[n]``.

    Raises:
        CodecError: the bytes end in a zero byte, or hold more than these symbols.
    """
    if data.endswith(b"\0"):
        raise CodecError("a code of symbols ends in a zero byte, which an encoder would have left off")
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.uint32)
    exponents = steps * _INVERSE_SCALE
    if dither is not None and (kernels := compiled("laplace", _HOST)):
        found: Ints = np.empty(len(group), dtype=np.int64)
        if not kernels.decode_dithered(words, dither, group, exponents, digits, found):
            raise CodecError(f"a code of symbols holds more than its {len(group)} symbols")
        return found
    coder = constriction.stream.stack.AnsCoder(words)
    symbols: Ints = coder.decode(_FAMILY, _signs(exponents, group, dither)).astype(np.int64) - 1
    nonzero = symbols != 0
    magnitudes, tables, large = np.ones(int(nonzero.sum()), dtype=np.int64), _digits(exponents, digits), group[nonzero]
    for place in range(digits):
        magnitudes += coder.decode(_FAMILY, tables[place][large]).astype(np.int64) << place
    if not coder.is_empty():
        raise CodecError(f"a code of symbols holds more than its {len(group)} symbols")
    symbols[nonzero] *= magnitudes
    return symbols


def digits_for(largest: float) -> int:
    """Digits of magnitudes up to ``largest`` steps.

    Raises:
        CodecError: more than 40.
    """
    digits = int(np.ceil(largest) + 1).bit_length()
    if digits > _MOST_DIGITS:
        raise CodecError(f"symbols have {digits} digits, allowed are {_MOST_DIGITS}")
    return digits
