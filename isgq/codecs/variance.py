"""How far a gradient rebuilt from noisy factors is from the gradient: closed forms.

Index legend: ``b`` row, ``i`` input, ``o`` output. With G = D^T X, X^ = X + E and D^ = D + F, where all entries of E
and F are independent, of mean 0 and of variances vx and vd,

    G^_oi - G_oi = sum_b D_bo E_bi + F_bo X_bi + F_bo E_bi

The three kinds of terms are uncorrelated, and so are the rows, hence

    Var(G^_oi) = sum_b D_bo^2 vx_bi + vd_bo X_bi^2 + vd_bo vx_bi

and, summed over o and i, with row sums Vx_b = sum_i vx_bi and Vd_b = sum_o vd_bo,

    E ||G^ - G||_F^2 = sum_b ||D_b||^2 Vx_b + ||X_b||^2 Vd_b + Vx_b Vd_b

For dithered factors the variances are ``Dithered.variance`` of each. The mean of the gradients of P workers with
independent noise has the mean of their errors divided by P.
"""

import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.payload import Factors


def _rows(factors: Factors, vx: Tensor, vd: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Squares of x, vx, squares of d, vd: float64 ``[b, features]``; CodecError where they do not fit."""  # noqa: DOC501
    rows: list[Tensor] = []
    for what, factor, variance in (("x", factors.x, vx), ("d", factors.d, vd)):
        if variance.shape != factor.shape:
            raise CodecError(
                f"v{what} has shape {tuple(variance.shape)}, must be that of {what}: {tuple(factor.shape)}"
            )
        rows += [t.double().reshape(-1, factor.shape[-1]) for t in (factor, variance)]
    x, vx, d, vd = rows
    return x.square(), vx, d.square(), vd


def entrywise_variance(factors: Factors, vx: Tensor, vd: Tensor) -> Tensor:
    """Variance of each entry of a linear layer's rebuilt weight gradient: float64 ``[o, i]``.

    Args:
        factors: x ``[..., i]`` and d ``[..., o]`` with the same leading dimensions, which are rows.
        vx: variance of each entry of the decoded x, of x's shape.
        vd: variance of each entry of the decoded d, of d's shape.

    Raises:
        CodecError: a variance has not the shape of its factor.
    """
    x2, vx, d2, vd = _rows(factors, vx, vd)
    return d2.T @ vx + vd.T @ (x2 + vx)


def product_variance(factors: Factors, vx: Tensor, vd: Tensor) -> Tensor:
    """Expected squared error ``E ||G^ - G||_F^2`` of a linear layer's rebuilt weight gradient: float64 scalar.

    The sum of :func:`entrywise_variance` at the cost of the factors instead of the gradient.

    Args:
        factors: x ``[..., i]`` and d ``[..., o]`` with the same leading dimensions, which are rows.
        vx: variance of each entry of the decoded x, of x's shape.
        vd: variance of each entry of the decoded d, of d's shape.

    Raises:
        CodecError: a variance has not the shape of its factor.
    """
    x2_b, vx_b, d2_b, vd_b = (t.sum(1) for t in _rows(factors, vx, vd))
    return torch.dot(d2_b, vx_b) + torch.dot(x2_b, vd_b) + torch.dot(vx_b, vd_b)


def global_scale_variance(factors: Factors, step_x: float, step_d: float) -> Tensor:
    """:func:`product_variance` for subtractive dither with one step a factor and no symbol for zeros: float64 scalar.

    ``(step_d^2/12) m ||X||^2 + (step_x^2/12) n ||D||^2 + step_x^2 step_d^2 B n m / 144``
    for B rows of n inputs and m outputs.

    Args:
        factors: x ``[..., i]`` and d ``[..., o]`` with the same leading dimensions, which are rows.
        step_x: quantization step of x, ``max|x| / L``.
        step_d: quantization step of d.
    """
    x, d = factors.x.double(), factors.d.double()
    n, m = x.shape[-1], d.shape[-1]
    rows = x.numel() // max(n, 1)
    vx, vd = step_x**2 / 12, step_d**2 / 12
    return vd * m * x.square().sum() + vx * n * d.square().sum() + vx * vd * rows * n * m
