"""Sets of positions as symbols: Golomb's split of the gaps, with the unary half left to the entropy coder.

Layout of k sorted positions below d, with gaps ``g_j = i_j - i_{j-1} - 1`` (``i_{-1} = -1``):

    low     the b low bits of each gap; k symbols of alphabet 2**b
    high    the rest of each gap in unary: ``g_j >> b`` zeros, then a one; alphabet 2

For a uniformly random set the gaps are close to geometric, so the unary bits are independent coin flips and a binary
entropy coder stores them at their entropy, while the low bits are close to uniform (Golomb 1966; Gallager and Van
Voorhis 1975). b follows from k and d, so it is not sent: ``2**b`` is a quarter to a half of the mean gap, which costs
at most 0.02 bits a position more than ``log2 C(d, k)`` and makes at most five unary symbols a position. At b = 0
``high`` is the bitmap of the set.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.payload import Symbols

LOW, HIGH = "low", "high"


def low_bits(count: int, size: int) -> int:
    """How many bits of each gap are stored as they are, for ``count`` positions below ``size``."""
    return max(0, (size // max(count, 1)).bit_length() - 2)


def encode_indices(indices: Tensor, size: int) -> dict[str, Symbols]:
    """Store a set of positions.

    Args:
        indices: int64 ``[k]``, strictly increasing, in ``0 .. size - 1``.
        size: number of positions there are.

    Returns:
        The two streams described above; together with ``size`` they give the set back.
    """
    count = indices.numel()
    bits = low_bits(count, size)
    gaps = indices.diff(prepend=indices.new_full((1,), -1)) - 1
    ones = (gaps >> bits).cumsum(0) + torch.arange(count, device=indices.device)
    unary = torch.zeros(int(ones[-1]) + 1 if count else 0, dtype=torch.uint8, device=indices.device)
    unary[ones] = 1
    return {LOW: Symbols(gaps & ((1 << bits) - 1), 1 << bits), HIGH: Symbols(unary, 2)}


def decode_indices(symbols: Mapping[str, Symbols], size: int) -> Tensor:
    """Rebuild the set of positions: int64 ``[k]``, strictly increasing, in ``0 .. size - 1``.

    Args:
        symbols: a payload's symbols, of which two streams are read.
        size: as given to :func:`encode_indices`.

    Raises:
        CodecError: the streams are missing, disagree with one another, or name a position that there is not.
    """
    if LOW not in symbols or HIGH not in symbols:
        raise CodecError(f"a set of positions needs the symbols {LOW!r} and {HIGH!r}, got {sorted(symbols)}")
    low, high = symbols[LOW], symbols[HIGH]
    count = low.values.numel()
    bits = low_bits(count, size)
    if low.alphabet != 1 << bits or high.alphabet != 2:
        raise CodecError(
            f"{count} positions below {size} have alphabets {1 << bits} and 2, got {low.alphabet} and {high.alphabet}"
        )
    ones = high.values.nonzero().squeeze(1)
    # Canonical streams only: as many ones as positions, and the last symbol a one.
    if ones.numel() != count or high.values.numel() != (int(ones[-1]) + 1 if count else 0):
        raise CodecError(f"{HIGH!r} holds {ones.numel()} positions in {high.values.numel()} symbols, {LOW!r} {count}")
    if not count:
        return ones
    if int(high.values.max()) > 1 or int(low.values.min()) < 0 or int(low.values.max()) >= low.alphabet:
        raise CodecError(f"a symbol of {LOW!r} or {HIGH!r} lies outside its alphabet")
    step = torch.arange(count, device=ones.device)
    # Gaps are not negative, so the positions increase; only the last one can be too large.
    indices = ((ones - step) << bits) + low.values.to(torch.int64).cumsum(0) + step
    if int(indices[-1]) >= size:
        raise CodecError(f"position {int(indices[-1])} lies outside a tensor of {size} elements")
    return indices
