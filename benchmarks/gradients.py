"""Real gradients to measure on: a network is trained for some steps, then one backward pass is captured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Dataset
from isgq.core.payload import Contract, Factors
from isgq.layers.capture import Capture, Unit, find_units
from models import build

_RATE, _MOMENTUM = 0.05, 0.9


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The weight gradient of one layer, and what it is made of.

    Attributes:
        name: the weight's parameter name.
        gradient: float32, in the weight's shape.
        factors: the pair that it is the contraction of.
        contract: the layer's contract.
    """

    name: str
    gradient: Tensor
    factors: Factors
    contract: Contract


def capture_gradients(model: str, dataset: Dataset, *, steps: int, batch: int, last_batch: int) -> list[LayerGradient]:
    """Weight gradients of every layer that has factors, after some steps of SGD with momentum.

    Args:
        model: spec for ``models.build``.
        dataset: where the images come from.
        steps: training steps before the captured one.
        batch: images of a training step, drawn with replacement.
        last_batch: images of the captured step.
    """
    network = build(model, classes=dataset.classes, in_shape=dataset.in_shape)
    optimizer = torch.optim.SGD(network.parameters(), lr=_RATE, momentum=_MOMENTUM)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        _backward(network, dataset, batch, generator)
        optimizer.step()
        optimizer.zero_grad()
    units, _ = find_units(network, skip=lambda name: False)
    caught: dict[str, Factors] = {}

    def sink(unit: Unit, factors: Factors) -> None:
        caught[unit.name] = factors

    capture = Capture(units, sink, lambda: None)
    try:
        _backward(network, dataset, last_batch, generator)
    finally:
        capture.close()
    return [LayerGradient(u.name, _gradient(u), caught[u.name], u.contract) for u in units]


def _gradient(unit: Unit) -> Tensor:
    assert unit.weight.grad is not None
    return unit.weight.grad.detach().clone()


def _backward(network: nn.Module, dataset: Dataset, batch: int, generator: torch.Generator) -> None:
    chosen = torch.randint(len(dataset.train_y), (batch,), generator=generator)
    loss = F.cross_entropy(network(dataset.train_x[chosen]), dataset.train_y[chosen])
    loss.backward()  # type: ignore[no-untyped-call]


def weight_numel(layers: Sequence[LayerGradient]) -> int:
    """Number of weights of all layers."""
    return sum(layer.gradient.numel() for layer in layers)
