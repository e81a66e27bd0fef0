"""Kernels that look for something: the largest of a bucket, the cell of a number, the entry of a code.

For the CPU alone: elsewhere torch's own reductions and searches serve.
"""

import numpy as np
from numpy.typing import NDArray

from isgq.core.kernels.compiler import kernel

_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint32]


@kernel
def largest_bits(bits: _Words, size: int, start: int, stop: int, out: _Words) -> None:
    """Largest absolute value of each bucket that these elements lie in, all as bits of float32.

    As integers, bits without the sign are ordered as the numbers are, with infinity and NaN above all others.
    """
    begin = start // size
    for bucket in range(begin, (stop - 1) // size + 1):
        most = np.uint32(0)
        for word in bits[max(start, bucket * size) : min(stop, (bucket + 1) * size)]:
            most = max(most, np.uint32(word & np.uint32(0x7FFFFFFF)))
        out[bucket - begin] = most


@kernel
def look_up(codes: _Bytes, table: _Floats, start: int, stop: int, out: _Floats) -> None:
    """Entry of each code in a table of 256 entries."""
    given, values = codes[start:stop], out[start:stop]
    for i in range(len(given)):
        values[i] = table[given[i]]


@kernel
def count_above(flat: _Floats, edges: _Floats, start: int, stop: int, sparse: bool, out: _Bytes) -> None:
    """How many of the edges each value is above; if sparse, 1 more, and 0 for zeros."""
    for first in range(start, stop, 4096):
        last = min(first + 4096, stop)
        values, symbols = flat[first:last], out[first:last]
        symbols[:] = np.uint8(sparse)
        for edge in edges:
            for i in range(last - first):
                symbols[i] = np.uint8(symbols[i] + np.uint8(values[i] > edge))
        if sparse:
            for i in range(last - first):
                symbols[i] = np.uint8(symbols[i] * np.uint8(values[i] != 0))
