"""Kernel of :mod:`isgq.core.outer`. For the CPU alone."""

import numpy as np
from numpy.typing import NDArray

from isgq.core.kernels.compiler import kernel

_Floats = NDArray[np.float32]


@kernel
def outer_sum(left: _Floats, right: _Floats, start: int, stop: int, out: _Floats) -> None:
    """Rows ``start .. stop - 1`` of the sum of four outer products."""
    r0, r1, r2, r3 = right[0], right[1], right[2], right[3]
    for i in range(start, stop):
        row, a0, a1, a2, a3 = out[i], left[0, i], left[1, i], left[2, i], left[3, i]
        for c in range(len(row)):
            row[c] = ((a0 * r0[c] + a1 * r1[c]) + a2 * r2[c]) + a3 * r3[c]
