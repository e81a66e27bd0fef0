"""Dithered factors with one step for all samples: balanced rows, steps by root mean square, rows drawn at random.

The gradient is a sum over rows, ``sum_b d_b x_b^T``, and stays the same if x_b is multiplied by some c_b and d_b
divided by it. Both get the length ``sqrt(|x_b| |d_b|)``: then one step for all rows makes errors in proportion to what
the row is worth, and rows that the model has learned already cost next to no bits. Nobody need know c_b. The bias's
gradient, ``sum_b d_b``, needs a column of ones in x, which is multiplied too.

The step is a multiple of the entries' root mean square, and not a part of their maximum: then there are many symbols,
nearly all of them small, which the entropy coder makes use of, and a single large entry does not make all others
coarse.

Of the rows, a fraction may be drawn by efficient unbiased sparsification of their worth ``|x_b| |d_b|``
(:mod:`isgq.codecs.eus_plan`): heavy rows always, light ones with probability in proportion, weighted up.

Layout of the payload: ``x`` and ``d`` are those of ``dithered:bucket=tensor`` whose levels follow from the alphabet;
rows that are not drawn, or zero, are left out. Floating-point x ``[b, i]`` has the column of ones, ``[b, i + 1]``; any
other (a convolution's, indices) is neither balanced nor drawn from.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.dithered import Dithered
from isgq.codecs.eus_plan import usa
from isgq.codecs.eus_sample import systematic
from isgq.codecs.exact import Exact
from isgq.codecs.flat import require_codec
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.extremes import check_finite
from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors, LowRank, PairPayload, Payload
from isgq.core.registry import register_codec

_EXACT = Exact()
_MOST_LEVELS = 4095
_LARGEST = torch.finfo(torch.float32).max


@register_codec("balanced")
@dataclass(frozen=True)
class Balanced:
    """Dithered factors whose rows have equal shares of the error; unbiased.

    Attributes:
        step: of the quantizer, in units of the entries' root mean square; larger is more aggressive.
        balance: whether rows of x and d get equal lengths.
        samples: fraction of the rows that is sent, at least one; smaller is more aggressive.
    """

    step: float = 2.0
    balance: bool = True
    samples: float = 1.0
    name: ClassVar[str]
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise OptionError(f"step={self.step} of balanced must be positive")
        if not 0 < self.samples <= 1:
            raise OptionError(f"samples={self.samples} of balanced must be in (0, 1]")

    @torch.no_grad()
    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Balance, draw, quantize; the contract is not needed.

        Raises:
            NonFiniteError: NaN or Inf in a factor, or factors that no float32 can hold once balanced.
        """
        x, d = factors.x.detach(), factors.d.detach()
        if x.dim() == 2 and x.is_floating_point():
            x, d = self._rows(x, d, key)
        floating = x.is_floating_point()
        sent = self._quantize(x, key.child("x")) if floating else _EXACT.encode(x, key.child("x"))
        return PairPayload(self.name, sent, self._quantize(d, key.child("d")))

    def _rows(self, x: Tensor, d: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """The rows that are sent, in their dtype; NonFiniteError where there are none."""  # noqa: DOC501
        check_finite(x, f"the input of {key.name!r}")
        check_finite(d, f"the output gradient of {key.name!r}")
        wide, deep = torch.cat([x, x.new_ones(len(x), 1)], 1).double(), d.double()
        lengths = [torch.linalg.vector_norm(side, dim=1) for side in (wide, deep)]
        worth = lengths[0] * lengths[1]
        index = worth.nonzero().squeeze(1)
        weights = worth[index]
        count = max(1, math.ceil(self.samples * len(x)))
        if count < len(index):
            plan = usa(weights, count)
            light = torch.ones_like(weights, dtype=torch.bool)
            light[plan.heavy] = False
            [tail] = light.nonzero(as_tuple=True)
            drawn = tail[systematic(weights[tail], count - len(plan.heavy), key.child("rows").digest)]
            weights[drawn] = plan.level
            kept = torch.cat([plan.heavy, drawn]).sort().values
            index, weights = index[kept], weights[kept]
        gains = (weights / worth[index]).sqrt()
        scale = (lengths[1][index] / lengths[0][index]).sqrt() if self.balance else torch.ones_like(gains)
        wide, deep = wide[index] * (gains * scale)[:, None], deep[index] * (gains / scale)[:, None]
        sides = wide.to(x.dtype), deep.to(d.dtype)
        if not all(bool(side.isfinite().all()) for side in sides):
            raise NonFiniteError(f"the balanced factors of {key.name!r} reach beyond {x.dtype}")
        return sides

    def _quantize(self, side: Tensor, key: Key) -> Payload:
        levels = 1
        if side.numel() and (peak := float(side.abs().amax())):
            rms = float(side.double().square().mean().sqrt())
            levels = min(max(1, math.ceil(peak / (self.step * rms))), _MOST_LEVELS)
        return Dithered(levels, "tensor").encode(side, key)

    @torch.no_grad()
    def decode_pair(self, payload: PairPayload) -> Factors | LowRank:
        """Rebuild the rows.

        Raises:
            CodecError: a malformed payload.
        """
        require_codec(payload, self.name)
        if not payload.x.dtype.is_floating_point:
            return Factors(_EXACT.decode(payload.x), _rebuild(payload.d))
        x, d = _rebuild(payload.x), _rebuild(payload.d)
        if x.dim() != 2:
            return Factors(x, d)
        if d.dim() != 2 or len(x) != len(d) or not x.shape[1]:
            raise CodecError(f"rows of a balanced payload are {tuple(x.shape)} and {tuple(d.shape)}")
        return LowRank(d.float(), x.float())


def _rebuild(payload: Payload) -> Tensor:
    stream = payload.symbols.get("levels")
    if stream is None or stream.alphabet % 2 or not 4 <= stream.alphabet <= 2 * _MOST_LEVELS + 2:
        raise CodecError(f"part of a balanced payload has no levels that there can be: {sorted(payload.symbols)}")
    return Dithered(stream.alphabet // 2 - 1, "tensor").decode(payload)
