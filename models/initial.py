"""The initial weights of the experiments by Abdi and Fekri (quantized compressive sampling, indirect quantization).

Weights are drawn from a normal distribution truncated at two standard deviations, biases are constant.
"""

from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from torch import Generator, Tensor, nn

Initializer = Callable[[nn.Module, Generator], None]


@torch.no_grad()
def truncated_normal(model: nn.Module, generator: Generator, *, std: Sequence[float], bias: Sequence[float]) -> None:
    """Fill every convolution and linear layer.

    Args:
        model: its layers are filled in the order of ``model.modules()``.
        generator: where the numbers come from.
        std: one standard deviation (before truncation) per layer, or one for all.
        bias: one constant per layer, or one for all.
    """
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    each_std, each_bias = (repeat(v[0], len(layers)) if len(v) == 1 else v for v in (std, bias))
    for layer, s, b in zip(layers, each_std, each_bias, strict=True):
        nn.init.trunc_normal_(layer.weight, std=s, a=-2 * s, b=2 * s, generator=generator)
        if isinstance(layer.bias, Tensor):
            layer.bias.fill_(b)


def common(model: nn.Module, generator: Generator) -> None:
    """FC, LeNet and AlexNet: standard deviation 0.1, bias 0.1."""
    truncated_normal(model, generator, std=[0.1], bias=[0.1])


def cifarnet(model: nn.Module, generator: Generator) -> None:
    """CifarNet: its two convolutions, then its three linear layers."""
    truncated_normal(model, generator, std=[0.05, 0.05, 0.04, 0.04, 1 / 192], bias=[0.0, 0.1, 0.1, 0.1, 0.0])
