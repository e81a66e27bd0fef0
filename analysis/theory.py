"""Expected squared error of a codec on a given gradient: closed forms beside which measurements are put.

A pair codec that quantizes each factor on its own, with independent errors of mean 0 and entry variances vx and vd, has

    Var(G^) = contract(x^2 + vx, vd) + contract(vx, d^2)

entry by entry: every term of an entry of the gradient multiplies another entry of x with another one of d, whatever
the layer (but for convolutions that pad with copies), so that the terms are uncorrelated and their coefficients are 0
or 1. :mod:`isgq.codecs.variance` has the same for linear layers. Indices travel without loss, so vx is 0 there.

Keeping k of the r largest of w, times a factor c, leaves ``|w|^2 - |top_r|^2 + |top_r|^2 ((k/r) (1 - c)^2 + 1 - k/r)``;
without factor that is ``|w|^2 - (k/r) |top_r|^2`` (:mod:`isgq.codecs.sparse`). Scaled signs, 1-bit SGD and codecs that
state a variance have their own. With memory, the forms hold in the first step, while the memory is empty.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from analysis.gradients import LayerGradient
from isgq.codecs import AnyCodec
from isgq.codecs.eus import EUS
from isgq.codecs.exact import Exact
from isgq.codecs.feedback import ErrorFeedback, MomentumCorrection
from isgq.codecs.one_bit import OneBit
from isgq.codecs.pair import Separate
from isgq.codecs.rotated import Rotated
from isgq.codecs.sign import Sign
from isgq.codecs.sparse import RandomK, RTopK, TopK, largest, to_count


@dataclass(frozen=True)
class Prediction:
    """What is known of the expected squared error.

    Attributes:
        error: the value.
        exact: whether it is the expectation itself; otherwise it is a bound.
    """

    error: float
    exact: bool = True


def predict(coder: AnyCodec, layer: LayerGradient) -> Prediction | None:
    """Expected squared error of the rebuilt gradient; None where there is no closed form, nor a bound.

    Args:
        coder: the codec.
        layer: its gradient and factors.
    """
    if isinstance(coder, Separate):
        return _of_pair(coder, layer)
    if isinstance(coder, Rotated):
        stated = coder.unbiased and layer.factors.x.is_floating_point()
        return Prediction(coder.variance(layer.factors, layer.contract)) if stated else None
    return _of_tensor(coder, layer.gradient)


def _of_pair(coder: Separate, layer: LayerGradient) -> Prediction | None:
    x, d = layer.factors.x, layer.factors.d
    vd = _variance(coder.d, d)
    if vd is not None and not x.is_floating_point():
        return Prediction(float(layer.contract(x, vd).sum()))
    vx = _variance(coder.x, x)
    if vx is None or vd is None:
        return None
    x2, d2 = x.double().square(), d.double().square()
    return Prediction(float(layer.contract(x2 + vx, vd).sum() + layer.contract(vx, d2).sum()))


def _variance(coder: Any, x: Tensor) -> Tensor | None:
    """Variance of each decoded entry of an unbiased codec: float64 of the shape of x; None where it is not stated."""
    if isinstance(coder, Exact):
        return x.new_zeros(x.shape).double()
    if coder.unbiased and hasattr(coder, "variance"):
        variance: Tensor = coder.variance(x)
        return variance.double()
    return None


def _of_tensor(coder: Any, gradient: Tensor) -> Prediction | None:
    if isinstance(coder, ErrorFeedback | MomentumCorrection):
        return _of_tensor(coder.codec, gradient)
    flat = gradient.reshape(-1)
    norm = float(flat.double().square().sum())
    if isinstance(coder, TopK):
        return Prediction(norm - _kept(flat, to_count(coder.k, flat.numel())))
    if isinstance(coder, RTopK | RandomK):
        k = to_count(coder.k, flat.numel())
        r = max(to_count(coder.r, flat.numel()), k) if isinstance(coder, RTopK) else flat.numel()
        scaled = coder.debias if isinstance(coder, RTopK) else coder.scale
        factor = r / k if scaled else 1.0
        return Prediction(norm - _kept(flat, r) * (k / r) * (1 - (1 - factor) ** 2))
    if isinstance(coder, EUS):
        magnitudes = flat.abs()
        return Prediction(float(coder.plan(magnitudes).variance(magnitudes)))
    variance = _variance(coder, gradient)
    if variance is not None:
        return Prediction(float(variance.sum()))
    if hasattr(coder, "contraction"):
        return Prediction((1 - coder.contraction(gradient)) * norm, exact=isinstance(coder, Sign | OneBit))
    return None


def _kept(flat: Tensor, r: int) -> float:
    return float(flat[largest(flat.abs(), r)].double().square().sum())
