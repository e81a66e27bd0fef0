"""Whether captured pairs make up the gradient that autograd has made.

They do not where something else has come to it: a penalty on the weight, a second use of it. How far a product may be
from autograd's is relative to the gradient's norm in half precision and where float32 may be TensorFloat-32, and else
in roundings of its terms: those that cancel are rounded all the same, and a small penalty on the weight is too much.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isgq.core.keys import Key, uniform
from isgq.core.payload import Factors
from isgq.layers.capture import Unit

_HALF, _TENSOR_FLOAT, _ROUNDINGS = 5e-2, 1e-3, 64
_TINY = 1e-30


def make_up(unit: Unit, factors: Factors, given: Sequence[Tensor], dtype: torch.dtype, key: Key) -> bool:
    """Whether they do, as far as a random mix of outputs tells; see :meth:`isgq.layers.capture.Unit.mixed`.

    Args:
        unit: whose gradient.
        factors: one pair, unscaled.
        given: what autograd has made: the weight's gradient, and that of a bias that rides along.
        dtype: in which autograd has multiplied.
        key: of the weight.
    """
    weight, random = given[0], key.child("check")
    mix = uniform(random.digest, "mix", (weight.shape[unit.adapter.outputs],), weight.device) * math.sqrt(12)
    made, mixed = unit.mixed(factors, weight, mix)
    slack = _slack(factors, _length(factors.d), _norm(given), dtype)
    return _length(made - mixed) <= slack and _bias_gap(unit, factors, given[1:]) <= slack


def surely_make_up(unit: Unit, factors: Factors, biases: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """The same where autograd has left the weight's gradient out, so that nothing else can have come to it.

    Also whether it is sure to be finite.

    Args:
        unit: see :func:`make_up`.
        factors: see :func:`make_up`.
        biases: the gradient of the bias, if it rides along.
        dtype: see :func:`make_up`.
    """
    size = _length(factors.d)
    return _bias_gap(unit, factors, biases) <= _slack(factors, size, size, dtype) < math.inf


def fit(unit: Unit, factors: Factors, given: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """The same as :func:`make_up`, by the whole product."""
    apart, size = gap(unit, factors, given)
    return not apart > _slack(factors, _length(factors.d), size, dtype)  # what is not finite, the codec will say


def gap(unit: Unit, factors: Factors, given: Sequence[Tensor]) -> tuple[float, float]:
    """How far the factors' product is from autograd's gradient, and the gradient's norm; one contraction."""
    apart = []
    for made, mine in zip(unit.gradients(factors), given, strict=True):
        fits = made.dtype == mine.dtype  # then the difference needs no memory of its own
        apart.append(made.view(mine.shape).sub_(mine) if fits else made.view(mine.shape) - mine)
    return _norm(apart), _norm(given)


def _bias_gap(unit: Unit, factors: Factors, biases: Sequence[Tensor]) -> float:
    """How far the bias's gradient is from what the factors make it; 0 without a bias."""
    return _norm([unit.adapter.bias_grad(unit.module, factors.d) - bias for bias in biases])


def _slack(factors: Factors, d: float, size: float, dtype: torch.dtype) -> float:
    """How far a gradient of norm ``size`` may be from the factors' product, d being the norm of the factor d."""
    if dtype in {torch.float16, torch.bfloat16}:
        return _HALF * size
    terms = d * (_length(factors.x) if factors.x.is_floating_point() else math.sqrt(factors.x.numel()))
    if terms > torch.finfo(dtype).max:
        return math.inf
    slack = terms * (_ROUNDINGS * torch.finfo(dtype).eps) + _TINY
    coarse = dtype == torch.float32 and factors.d.device.type != "cpu"
    return slack + _TENSOR_FLOAT * size if coarse else slack


def _length(tensor: Tensor) -> float:
    """Euclidean norm of a tensor as one vector."""
    return float(torch.linalg.vector_norm(tensor))


def _norm(tensors: Sequence[Tensor]) -> float:
    """The same of several."""
    return math.hypot(*map(_length, tensors))
