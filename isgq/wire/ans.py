"""Asymmetric numeral systems and their models.

Source: J. Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
arithmetic coding", 2013.

A categorical model is a table of integer frequencies, at least 1 each, which sum to 2**24; both sides build it from
integers alone, so that it is the same everywhere. A coder whose model both sides know from elsewhere needs only another
table in the place of the transmitted one: :func:`ans_encode` and :func:`ans_decode` take the frequencies.
"""

import functools

import constriction
import numpy as np
import numpy.typing as npt
import torch

from isgq.core.errors import WireError
from isgq.core.kernels import compiled

TOTAL_BITS = 24
"""The frequencies of a model sum to ``2 ** TOTAL_BITS``."""

_HOST = torch.device("cpu")

_Ints = npt.NDArray[np.int64]


@functools.cache
def midpoints(bits: int) -> npt.NDArray[np.float64]:
    """What separates the weights of a table."""
    weights = weight_table(bits)
    return (weights[:-1] + weights[1:]) / 2


@functools.cache
def weight_table(bits: int) -> _Ints:
    """Weights of the codes of a table: zero, then small floating-point numbers.

    Code c > 0 stands for ``(2**m + (c - 1) % 2**m) << (c - 1) // 2**m`` with m = 1 bit of mantissa of 4, or 4 of 8: in
    steps of a factor 1.33 to 1.5 over a range of 128, or of 1.03 to 1.06 over a range of 61440.
    """
    mantissa = {4: 1, 8: 4}[bits]
    code = np.arange((1 << bits) - 1, dtype=np.int64)
    return np.concatenate([[0], ((1 << mantissa) + (code & (1 << mantissa) - 1)) << (code >> mantissa)])


def frequencies(codes: npt.NDArray[np.uint8], bits: int) -> _Ints:
    """The model of a table of weight codes ``[alphabet]``: integer frequencies ``[alphabet]``.

    With weights w, their sums C up to and with a symbol, alphabet a and ``F = 2**24 - a``, the frequencies up to and
    with symbol i sum to ``C_i F // C_(a-1) + i + 1``.

    Raises:
        WireError: all weights are zero.
    """
    if kernels := compiled("coding", _HOST):
        shares = np.empty(len(codes), dtype=np.int64)
        if kernels.share(codes, weight_table(bits), shares):
            return shares
    sums = np.cumsum(weight_table(bits)[codes])
    if sums[-1] == 0:
        raise WireError(f"all {len(codes)} weights of a stream's table are zero")
    scaled: _Ints = sums * ((1 << TOTAL_BITS) - len(codes)) // sums[-1]
    scaled[1:] -= scaled[:-1].copy()
    return scaled + 1


def weight_codes(counts: _Ints, bits: int) -> npt.NDArray[np.uint8]:
    """Codes of the weights nearest in proportion to the counts; 0 where a count is 0 alone."""
    between, largest = midpoints(bits), int(weight_table(bits)[-1])
    codes = np.empty(len(counts), dtype=np.uint8)
    if kernels := compiled("coding", _HOST):
        kernels.weight_codes(counts, between, largest, codes)
    else:
        codes[:] = between.searchsorted(counts * (largest / counts.max()))
        codes[(codes == 0) & (counts > 0)] = 1
    return codes


def _categorical(table: _Ints) -> constriction.stream.model.Categorical:
    # constriction gives every symbol 1 of the 2**24 and shares out the rest in proportion: exactly these frequencies.
    return constriction.stream.model.Categorical((table - 1).astype(np.float64), perfect=False)


def ans_encode(values: npt.NDArray[np.integer], table: _Ints) -> bytes:
    """Code symbols by asymmetric numeral systems: 32-bit words, 64-bit state that starts from 0.

    Args:
        values: ``[n]`` symbols.
        table: integer frequencies ``[alphabet]`` that sum to 2**24.

    Returns:
        The little-endian words without the zero bytes at their end.
    """
    if values.dtype == np.uint8 and (kernels := compiled("coding", _HOST)):
        out = np.empty(len(values) + 2, dtype=np.uint32)
        return _to_bytes(out[: kernels.ans_encode(values, table, out)])
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(values.astype(np.int32), _categorical(table))
    return _to_bytes(coder.get_compressed())


def _to_bytes(words: npt.NDArray[np.uint32]) -> bytes:
    return little_endian(words).tobytes().rstrip(b"\0")


def little_endian(words: npt.NDArray[np.uint32]) -> memoryview:
    """The bytes of words ``[n]``; zero bytes at the end of a stream are left off."""
    return words.astype("<u4", copy=False).view(np.uint8).data


def ans_decode(data: bytes, count: int, table: _Ints) -> npt.NDArray[np.uint8 | np.int32]:
    """Inverse of :func:`ans_encode`.

    Raises:
        WireError: the data end in a zero byte, or do not hold exactly this many symbols.
    """
    if data.endswith(b"\0"):
        raise WireError("ANS stream ends in a zero byte, which an encoder would have left off")
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.uint32)
    if len(table) <= 256 and (kernels := compiled("coding", _HOST)):
        symbols = np.empty(count, dtype=np.uint8)
        if not kernels.ans_decode(words, table, symbols):
            raise WireError(f"ANS stream holds more than its {count} symbols")
        return symbols
    coder = constriction.stream.stack.AnsCoder(words)
    values: npt.NDArray[np.int32] = coder.decode(_categorical(table), count)
    if not coder.is_empty():
        raise WireError(f"ANS stream holds more than its {count} symbols")
    return values
