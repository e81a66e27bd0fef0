"""The codec of efficient unbiased sparsification (Barnes, Cameron, Chow et al., ISIT 2024).

Plan (:mod:`isgq.codecs.eus_plan`) and sampler (:mod:`isgq.codecs.eus_sample`) decide which m entries are kept and at
what magnitude; the payload holds

    low, high   the positions kept (:mod:`isgq.codecs.indices`)
    kind        per position: 0 plus the common value, 1 minus the common value, 2 a value of its own; missing where
                every position has a value of its own
    values      the values of kind 2: heavy entries, or every entry where light ones differ
    level       the common value of the light entries, USA's tau

so a light entry costs a position and a sign: fewer bits than the m values of top-k.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs.eus_plan import ChiSquared, Plan, usa, uwsa
from isgq.codecs.eus_sample import SAMPLERS
from isgq.codecs.flat import flatten, require_codec
from isgq.codecs.indices import decode_indices, encode_indices
from isgq.codecs.sparse import check_amount, check_choice, scatter, to_count
from isgq.core.errors import CodecError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec

Divergences = Literal["squared", "kl", "chi_squared"]
Samplers = Literal["systematic", "pivotal", "conditional_poisson"]

_VALUED = 2


@register_codec("eus")
@dataclass(frozen=True)
class EUS:
    """Keep m entries so that the mean is exact and the expected divergence is as small as can be.

    The hard cap on m and, for ``squared`` and ``kl``, the l1 norm hold in every draw. The error of unbiased
    sparsification is large (often beyond the vector's own norm): it is for many workers, not for error feedback.

    Attributes:
        m: entries to keep: an int is a count, a float is a share in (0, 1] (so 1 is one entry and 1.0 is all of
            them). Smaller is more aggressive.
        divergence: what to minimise. ``squared`` and ``kl`` have the same optimal law (USA); ``chi_squared`` minimises
            the error relative to each entry and sends a value for every position.
        sampler: how positions are drawn; ``conditional_poisson`` is for small tensors.
    """

    m: int | float = 0.01
    divergence: Divergences = "squared"
    sampler: Samplers = "systematic"
    name: ClassVar[str]
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_amount("eus", "m", self.m)
        check_choice("eus", "divergence", self.divergence, Divergences)
        check_choice("eus", "sampler", self.sampler, Samplers)

    def plan(self, magnitudes: Tensor) -> Plan:
        """The plan for a vector of magnitudes ``[n]``."""
        m = max(1, to_count(self.m, magnitudes.numel()))
        return uwsa(magnitudes, m, ChiSquared()) if self.divergence == "chi_squared" else usa(magnitudes, m)

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a tensor; NonFiniteError on NaN or Inf."""
        flat = flatten(x, key)
        plan = self.plan(flat.abs())
        drawn = SAMPLERS[self.sampler](plan.light_scores, plan.light, key.digest)
        indices, source = torch.cat([plan.heavy, drawn]).sort()
        heavy = source < plan.heavy.numel()
        kept = flat[indices]
        symbols = encode_indices(indices, flat.numel())
        if self.divergence == "chi_squared" or plan.light == 0:
            values = torch.where(heavy, kept, kept * (plan.level / plan.scores[indices]))
            tensors = {"values": values}
        else:
            kind = (kept < 0).to(torch.uint8).masked_fill_(heavy, _VALUED)
            symbols["kind"] = Symbols(kind, 3 if heavy.any() else 2)
            level = min(plan.level, torch.finfo(torch.float32).max)
            tensors = {"values": kept[heavy], "level": kept.new_full((1,), level)}
        return Payload(self.name, tuple(x.shape), x.dtype, symbols, tensors)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor; CodecError on a malformed payload."""
        require_codec(payload, self.name)
        indices = decode_indices(payload.symbols, payload.numel)
        count = indices.numel()
        if "kind" in payload.symbols:
            values = _merge(payload, payload.require_symbols("kind", count))
        else:
            values = payload.require_tensor("values", count, torch.float32).reshape(-1)
        return scatter(payload, indices, values)


def _merge(payload: Payload, kinds: Symbols) -> Tensor:
    """One value a position, from the kinds, the values of kind 2 and the common value: float32 ``[k]``.

    Raises:
        CodecError: a kind is unknown, or the values do not fit the kinds.
    """
    kind = kinds.values
    if kinds.alphabet not in {2, 3} or bool((kind >= kinds.alphabet).any()):
        raise CodecError(f"symbols 'kind' must lie below an alphabet of 2 or 3, got an alphabet of {kinds.alphabet}")
    valued = kind == _VALUED
    values = payload.require_tensor("values", int(valued.sum()), torch.float32)
    level = payload.require_tensor("level", 1, torch.float32).reshape(-1)
    merged = torch.where(kind == 1, -level, level)
    merged[valued] = values.reshape(-1)
    return merged
