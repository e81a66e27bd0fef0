"""Sums of outer products as a matrix.

A product of matrices is not made for two to four rows: it takes twice the time that their sum takes to be written.
Such a sum is made element by element here, ``((a_0 b_0 + a_1 b_1) + a_2 b_2) + a_3 b_3``, each product and each sum
rounded, so that it is the same bits with compiled kernels and without.
"""

import torch
from torch import Tensor

from isgq.core.kernels import compiled
from isgq.core.parallel import PART, map_pieces

_FEW = 4


def outer_sum(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left^T right``.

    Args:
        left: ``[k, o]``.
        right: ``[k, p]``, of the same dtype, on the same device.
        out: ``[o, p]``, contiguous; where to write it, if given.
    """
    shape = left.shape[1], right.shape[1]
    fits = left.device.type == "cpu" and left.dtype is right.dtype is torch.float32 and 2 <= len(left) <= _FEW
    if not fits or 0 in shape:
        return torch.mm(left.T, right, out=out)
    result = left.new_empty(shape) if out is None else out
    a, b = (torch.nn.functional.pad(side, (0, 0, 0, _FEW - len(side))).contiguous() for side in (left, right))
    kernels = compiled("outer", left.device)
    rows = max(PART // shape[1], 1)

    def work(start: int) -> None:
        if kernels:
            kernels.outer_sum(a.numpy(), b.numpy(), start, min(start + rows, shape[0]), result.numpy())
            return
        block = result[start : start + rows]
        torch.mul(a[0, start : start + rows, None], b[0], out=block)
        for each, row in zip(a[1:, start : start + rows, None], b[1:], strict=True):
            block.add_(each * row)

    map_pieces(work, range(0, shape[0], rows))
    return result
