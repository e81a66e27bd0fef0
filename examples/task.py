"""What the examples train: a small network on made-up points, so that they need nothing but torch."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_CLASSES, _FEATURES = 10, 64


def points() -> tuple[TensorDataset, TensorDataset]:
    """2048 points to train on and 1000 to test: ten clouds in 64 dimensions, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(_CLASSES, _FEATURES, generator=generator)
    labels = torch.arange(3048) % _CLASSES
    clouds = centers[labels] + 2 * torch.randn(len(labels), _FEATURES, generator=generator)
    return TensorDataset(clouds[:2048], labels[:2048]), TensorDataset(clouds[2048:], labels[2048:])


def network() -> nn.Module:
    """[b, 64] -> [b, 10]."""
    hidden = [nn.Linear(_FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(256, _CLASSES))


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of points whose class the model finds."""
    x, y = test.tensors
    device = next(model.parameters()).device
    found: Tensor = model(x.to(device)).argmax(1).cpu() == y
    return found.double().mean().item()
