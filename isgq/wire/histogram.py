"""How often each symbol of a stream occurs."""

from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.kernels import compiled
from isgq.core.parallel import map_parts, map_pieces, piece_size
from isgq.core.payload import Symbols
from isgq.wire.bits import DIGITS_PER_BYTE, check_range, whole_digits

_Ints = npt.NDArray[np.int64]


def count_symbols(symbols: Symbols) -> _Ints:
    """How often each symbol occurs: ``[alphabet]``.

    Raises:
        CodecError: a symbol is outside the alphabet.
    """
    values, alphabet = symbols.values, symbols.alphabet
    if values.dtype is torch.uint8:
        counts = count_bytes(values)
        if outside := counts[alphabet:].nonzero()[0].tolist():
            raise CodecError(f"symbols 0 .. {alphabet + outside[-1]}, allowed are 0 .. {alphabet - 1}")
        return counts[:alphabet]
    check_range(values, alphabet)
    return _count(values, alphabet)


def count_bytes(values: Tensor) -> _Ints:
    """How often each byte occurs: ``[256]``."""
    kernels = compiled("coding", values.device)
    return _count_compiled(kernels, values.numpy()) if kernels else _count(values, 256)


def count_packed(whole: Tensor, symbols: Symbols) -> tuple[_Ints, _Ints | None]:
    """The same from whole symbols in bytes, several to a byte; and how often each byte occurs, if that had to be known.

    Args:
        whole: the symbols as :func:`isgq.wire.bits.whole_digits` writes them.
        symbols: the stream.
    """
    ((base, *_),) = whole_digits(symbols.alphabet)
    if base in {2, 4} and (kernels := compiled("coding", whole.device)):
        digits, in_bytes = _count_pairs(kernels, whole.numpy(), base), None
    else:
        per_byte, in_bytes = DIGITS_PER_BYTE[base], count_bytes(whole)
        by_digit = in_bytes[: base**per_byte].reshape([base] * per_byte)
        digits = sum(by_digit.sum(tuple(b for b in range(per_byte) if b != axis)) for axis in range(per_byte))
    digits[0] += symbols.values.numel() - digits.sum()  # without what fills up the last bytes
    return digits[: symbols.alphabet], in_bytes


def _count_pairs(kernels: ModuleType, whole: npt.NDArray[np.uint8], base: int) -> _Ints:
    """Counts of digits of one bit or two; but those of zeros, which are left at 0."""
    words = whole[: len(whole) // 8 * 8]
    last = np.zeros(8, dtype=np.uint8)
    last[: len(whole) - len(words)] = whole[len(words) :]
    low, high, both = np.sum([kernels.count_pairs(part.view(np.uint64)) for part in (words, last)], axis=0)
    return np.array([0, low + high] if base == 2 else [0, low - both, high - both, both])


def _count(values: Tensor, alphabet: int) -> _Ints:
    parts = torch.split(values, piece_size(values.numel(), values.device))
    counted = map_pieces(lambda part: torch.bincount(part, minlength=alphabet), parts)
    total: _Ints = torch.stack(counted).sum(0).cpu().numpy()
    return total


def _count_compiled(kernels: ModuleType, values: npt.NDArray[np.uint8]) -> _Ints:
    def work(start: int, stop: int) -> _Ints:
        counts = np.zeros(256, dtype=np.int64)
        kernels.count_bytes(values[start:stop], counts)
        return counts

    return sum(map_parts(work, len(values)), np.zeros(256, dtype=np.int64))
