"""Fully connected network: 784-300-100-10 by default; the large one of the papers has hidden=1000-300-100."""

import itertools
import math
from collections.abc import Sequence

from torch import nn

from models.shape import Shape


def fc(classes: int, in_shape: Shape, *, hidden: Sequence[int] = (300, 100)) -> nn.Sequential:
    """[b, c, h, w] -> [b, classes].

    Args:
        classes: number of classes.
        in_shape: (c, h, w); pixels are flattened.
        hidden: widths of the hidden layers, each followed by a ReLU; none gives softmax regression.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in itertools.pairwise([math.prod(in_shape), *hidden]):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else math.prod(in_shape), classes))
