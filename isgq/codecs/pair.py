"""Codecs that see both factors of a gradient.

Layout: a :class:`PairPayload` holds a payload for each factor, made by a direct codec (``exact`` for integer x); its
key is ``key.child("x")`` or ``key.child("d")``, so that the two draw independent numbers.

Deterministic indirect quantization (Abdi and Fekri, "Indirect Stochastic Gradient Quantization", AAAI 2020):

1. Quantize both factors with Lloyd-Max points: this is *naive*.
2. The contract is linear in d, so with x^ fixed the rebuilt gradient is ``sum_i c_i P_i``, where c_i are the points
   of d and ``P_i = contract(x^, [codes of d == i])``. Least squares against the true gradient G gives the points of
   *minimum variance* (MV): ``M c = e`` with ``M_ij = <P_i, P_j>`` and ``e_i = <P_i, G>``. *Minimum variance unbiased*
   (MVU) adds the constraint ``sum(G^) = sum(G)``.
3. The same for the points of x with d^ fixed; the problem is biconvex, and 2 and 3 alternate.

Only the points move, the codes stay: the payloads, and how they are decoded, are those of ``lloyd_max``. As only the
contract is used, all this holds for every layer that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.exact import Exact
from isgq.codecs.flat import require_codec
from isgq.codecs.lloyd_max import LloydMax, Model, look_up, make_codebook
from isgq.core.codec import Codec
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors, PairPayload, Payload
from isgq.core.registry import register_codec

_BLOCK = 1 << 20  # entries of the gradient that are in float64 at a time
_RANK = 1e-10  # relative: eigenvalues of M below are noise of float32 gradients
_REACH = 1e-12  # relative: a sum that the parts can hardly change is not constrained
_MAX_ITERATIONS = 100
_EXACT = Exact()


def _encode(parts: tuple[Codec, Codec], name: str, factors: Factors, key: Key) -> PairPayload:
    """Compress each factor with its codec; integer x (indices) without loss."""
    x_codec = parts[0] if factors.x.is_floating_point() else _EXACT
    x, d = x_codec.encode(factors.x, key.child("x")), parts[1].encode(factors.d, key.child("d"))
    return PairPayload(name, x, d)


def _decode(parts: tuple[Codec, Codec], name: str, payload: PairPayload) -> Factors:
    """The inverse; CodecError if the payload is of another codec."""
    require_codec(payload, name)
    x_codec = parts[0] if payload.x.dtype.is_floating_point else _EXACT
    return Factors(x_codec.decode(payload.x), parts[1].decode(payload.d))


@register_codec("separate")
@dataclass(frozen=True)
class Separate:
    """Lifts two direct codecs to a pair codec: each factor is compressed on its own.

    ``separate(dithered)`` takes the same codec for both, ``separate(dithered:levels=4;dithered)`` one for each.
    If both are unbiased, so is the gradient: it is linear in either factor, and their random numbers are independent.

    Attributes:
        x: codec of the input; integer x (indices) is sent without loss instead.
        d: codec of the output gradient.
    """

    x: Codec
    d: Codec
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for part in (self.x, self.d):
            if not isinstance(part, Codec):
                raise OptionError(f"separate takes codecs of one tensor, got {part!r}, which is none")

    @property
    def unbiased(self) -> bool:
        """Whether both codecs are."""
        return self.x.unbiased and self.d.unbiased

    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Compress both factors; the contract is not needed."""
        return _encode((self.x, self.d), self.name, factors, key)

    def decode_pair(self, payload: PairPayload) -> Factors:
        """Rebuild both factors."""
        return _decode((self.x, self.d), self.name, payload)


@register_codec("naive")
@dataclass(frozen=True)
class Naive:
    """Lloyd-Max quantization of both factors: step 1 of the module's algorithm.

    Attributes:
        levels: points of each factor's codebook, besides the zero if sparse; more is finer.
        x_model: model of x, as in ``lloyd_max``; ``"auto"`` is half-normal where x is not negative (after a ReLU).
        d_model: model of d.
        sparse: whether exact zeros have a symbol of their own.
    """

    levels: int = 2
    x_model: Model = "auto"
    d_model: Model = "normal"
    sparse: bool = True
    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._parts()  # checks the options

    def _parts(self) -> tuple[LloydMax, LloydMax]:
        return LloydMax(self.levels, self.x_model, self.sparse), LloydMax(self.levels, self.d_model, self.sparse)

    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Quantize both factors; the contract is not needed."""
        return _encode(self._parts(), self.name, factors, key)

    def decode_pair(self, payload: PairPayload) -> Factors:
        """Look the codes of both factors up."""
        return _decode(self._parts(), self.name, payload)


@dataclass(frozen=True)
class _Fitted(Naive):
    """Steps 1 to 3 of the module's algorithm.

    Attributes:
        iterations: how often both codebooks are fitted, 1 .. 100. More is finer, but hardly.
    """

    iterations: int = 1
    _keeps_sum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.iterations <= _MAX_ITERATIONS:
            raise OptionError(f"iterations is {self.iterations}, must be in 1 .. {_MAX_ITERATIONS}")

    @torch.no_grad()
    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Quantize both factors and fit their points to the gradient; of integer x, only those of d."""
        payload = _encode(self._parts(), self.name, factors, key)
        x, d = payload.x, payload.d
        if not factors.x.is_floating_point():
            gradient = contract(factors.x, factors.d.float())
            return replace(payload, d=self._fit(d, partial(contract, factors.x), gradient))
        gradient = contract(factors.x.float(), factors.d.float())
        for _ in range(self.iterations):
            d = self._fit(d, partial(contract, look_up(x).float()), gradient)
            x = self._fit(x, partial(_swapped, contract, look_up(d).float()), gradient)
        return replace(payload, x=x, d=d)

    def _fit(self, payload: Payload, contract: Callable[[Tensor], Tensor], gradient: Tensor) -> Payload:
        """Replace the points of a factor by those that bring ``contract(factor)`` closest to the gradient."""
        codes = payload.symbols["codes"].values.view(payload.shape)
        zero = int(self.sparse)
        parts = torch.empty(self.levels, gradient.numel(), device=gradient.device)
        for i, part in enumerate(parts):
            part.copy_(contract((codes == zero + i).float()).reshape(-1))
        points = fit_points(parts, gradient.reshape(-1), payload.tensors["codebook"][zero:], keeps_sum=self._keeps_sum)
        return replace(payload, tensors={"codebook": make_codebook(points, payload.dtype, self.sparse)})


def _swapped(contract: Contract, d: Tensor, x: Tensor) -> Tensor:
    return contract(x, d)


def fit_points(parts: Tensor, gradient: Tensor, points: Tensor, *, keeps_sum: bool) -> Tensor:
    """Least-squares points c of ``sum_i c_i parts_i = gradient``: float64 ``[L]``.

    With ``keeps_sum``, subject to ``sum(sum_i c_i parts_i) = sum(gradient)``. The Lagrange conditions
    ``M c + lambda f = e, f.c = t``, with ``f_i = sum(parts_i)`` and ``t = sum(gradient)``, have the solution
    ``c = M^-1 e + M^-1 f (t - f.M^-1 e) / f.M^-1 f``.

    Args:
        parts: float32 ``[L, N]``; linearly dependent rows are allowed.
        gradient: float32 ``[N]``.
        points: ``[L]``, kept where the part is 0 (its code does not occur, or is nowhere of influence).
        keeps_sum: whether the sum of the gradient is a constraint; dropped where the parts cannot change the sum.
    """
    rows = torch.zeros(parts.shape[0] + 1, parts.shape[0] + 2, dtype=torch.float64, device=parts.device)
    for first in range(0, gradient.numel(), _BLOCK):  # [parts; gradient] times [parts; gradient; ones]
        both = torch.cat([parts[:, first : first + _BLOCK], gradient[None, first : first + _BLOCK]]).double()
        rows += both @ torch.cat([both, torch.ones_like(both[:1])]).T
    gram, e, f, total = rows[:-1, :-2], rows[:-1, -2], rows[:-1, -1], rows[-1, -1]
    inverse = torch.linalg.pinv(gram, rtol=_RANK, hermitian=True)
    best = inverse @ e
    if keeps_sum:
        direction = inverse @ f
        reach = f @ direction  # squared length of the projection of the all-ones gradient on the span of the parts
        step = (total - f @ best) / reach
        best = torch.where(reach > _REACH * gradient.numel(), best + step * direction, best)
    return torch.where(gram.diagonal() > 0, best, points.double())


@register_codec("minimum_variance")
@dataclass(frozen=True)
class MinimumVariance(_Fitted):
    """MV: the points of least squared error of the gradient for the given codes."""


@register_codec("minimum_variance_unbiased")
@dataclass(frozen=True)
class MinimumVarianceUnbiased(_Fitted):
    """MVU: as MV, but the error of the gradient sums to zero ("empirically unbiased").

    It is unbiased in this sense alone: nothing is random, so ``unbiased`` is False.
    """

    iterations: int = 2
    _keeps_sum: ClassVar[bool] = True
