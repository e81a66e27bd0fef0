"""The largest magnitudes of a tensor, and whether it is finite at all."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isgq.core.errors import NonFiniteError
from isgq.core.kernels import compiled
from isgq.core.parallel import map_parts

_Part = tuple[slice, NDArray[np.uint32]]


def absmax(flat: Tensor, size: int) -> Tensor:
    """Largest absolute value of each run of ``size`` elements, the last of which may be shorter; NaN where one is.

    Args:
        flat: ``[n]``, contiguous, detached.
        size: at least 1.

    Returns:
        ``[ceil(n / size)]``, in the dtype of ``flat``.
    """
    kernels = compiled("search", flat.device) if flat.dtype is torch.float32 else None
    if kernels is None or not flat.numel():
        whole = flat.numel() // size * size
        parts = (flat[:whole].view(-1, size), flat[whole:].view(1, -1))
        # Two passes without a copy are several times faster than abs() or an infinity norm; abs() is for minus zero.
        peaks = [torch.maximum(part.amax(1), part.amin(1).neg()).abs_() for part in parts if part.numel()]
        return torch.cat(peaks or [flat])
    bits = flat.numpy().view(np.uint32)
    largest = np.zeros(-(-len(bits) // size), dtype=np.uint32)

    def work(start: int, stop: int) -> _Part:
        runs = slice(start // size, -(-stop // size))
        part = np.empty(runs.stop - runs.start, dtype=np.uint32)
        kernels.largest_bits(bits, size, start, stop, part)
        return runs, part

    for runs, part in map_parts(work, len(bits)):
        np.maximum(largest[runs], part, out=largest[runs])
    return torch.from_numpy(largest.view(np.float32))


def is_finite(x: Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor Inf."""
    x = x.detach()
    if not x.numel() or math.isfinite(float(x.sum())):  # a sum of finite numbers may overflow, but not the other way
        return True
    if x.dtype is torch.float32 and x.is_contiguous():
        return are_finite(absmax(x.view(-1), x.numel()))
    # One pass without a mask or a copy: both extremes are finite exactly if all elements are (NaN propagates).
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def are_finite(peaks: Tensor) -> bool:
    """Whether numbers of which none is negative, as of :func:`absmax`, are neither NaN nor Inf."""
    return not peaks.numel() or math.isfinite(float(peaks.max()))


def check_finite(x: Tensor, what: str) -> None:
    """Refuse NaN and Inf.

    Args:
        x: any tensor; integers pass.
        what: how to call it in the message.

    Raises:
        NonFiniteError: some element is NaN or Inf.
    """
    if x.is_floating_point() and not is_finite(x):
        count = int((~torch.isfinite(x)).sum())
        raise NonFiniteError(
            f"{what} holds {count} NaN or Inf among {x.numel()} elements; "
            "look for a diverging loss, a bad sample or an overflow in reduced precision"
        )
