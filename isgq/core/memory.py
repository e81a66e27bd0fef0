"""Memory that is used again, or comes in huge pages: 64 MB of fresh ones take a CPU longer than to write a gradient.

A gradient that a user has dropped (``zero_grad``) is the place for the next one, but only where nobody holds it, or a
view of it, any more; which the counts of references tell.
"""

import functools
import sys

import numpy as np
import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which on numpy asks for huge pages


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What :func:`torch.empty` makes: ``[numel]``; on the CPU in huge pages, where it is large and the system has them.

    Args:
        numel: number of elements.
        dtype: of them.
        device: where.
    """
    if device.type != "cpu" or numel * dtype.itemsize < _LARGE:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(numel * dtype.itemsize, dtype=np.uint8)).view(dtype)


class Place:
    """Remembers one tensor, to write to it again.

    Attributes:
        tensor: the tensor, or None.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor

    def free(self) -> Tensor | None:
        """The tensor, if nobody else holds it."""
        return self.tensor if self.tensor is not None and _holders(self) == _alone() else None


def _holders(place: Place) -> tuple[int, int, int]:
    """How often the tensor, the object of its storage and the storage itself are held, this function included."""
    assert place.tensor is not None
    storage = place.tensor.untyped_storage()
    return sys.getrefcount(place.tensor), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def _alone() -> tuple[int, int, int]:
    return _holders(Place(torch.empty(1)))
