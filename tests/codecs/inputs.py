"""Tensors that tests of single codecs share."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHAPES = {
    "zero": torch.zeros(5, 7),
    "constant": torch.full((5, 7), -2.5),
    "one element": torch.tensor([3.0]),
    "0-d": torch.tensor(-3.0),
    "empty": torch.zeros(0, 4),
    "odd": normal(3, 5, 7),
    "transposed": normal(6, 9).t(),
    "strided": normal(50)[::3],
    "expanded": torch.tensor(1.5).expand(4, 6),
    "channels last": normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "tiny": normal(40) * 1e-38,
    "huge": normal(40) * 1e37,
}
