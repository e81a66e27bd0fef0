"""Comparisons of float32 tensors as bytes, 1 where true: uint8 of the shape of the values.

On the CPU numpy makes them: torch writes bools one after another there, at a tenth of the speed.
"""

import numpy as np
import torch
from torch import Tensor


def above(values: Tensor, edge: Tensor) -> Tensor:
    """``values > edge``: float32 values, and an edge of one element."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.greater(values.numpy(), edge.numpy()).view(np.uint8))
    return torch.gt(values, edge).view(torch.uint8)


def not_negative(values: Tensor) -> Tensor:
    """``values >= 0``."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.greater_equal(values.numpy(), np.float32(0)).view(np.uint8))
    return torch.ge(values, 0).view(torch.uint8)


def not_zero(values: Tensor) -> Tensor:
    """``values != 0``."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.not_equal(values.numpy(), np.float32(0)).view(np.uint8))
    return torch.ne(values, 0).view(torch.uint8)
