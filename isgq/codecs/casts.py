"""Half precision: 16 bits an element, float16 or bfloat16.

Data: tensor ``half`` ``[numel]`` of the 16-bit dtype; fp16 also ``scale`` float32 ``[1]``, a power of two.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.buckets import Buckets
from isgq.codecs.flat import flatten, require_codec, restore
from isgq.core.keys import Key
from isgq.core.memory import empty
from isgq.core.payload import Payload
from isgq.core.registry import register_codec

_TOP = 15  # fp16 holds magnitudes below 2**16; scaled values stay below 2**15
_LARGEST_EXPONENT = 126  # powers of two up to this one, and their inverses, are normal float32 numbers


@register_codec("fp16")
@dataclass(frozen=True)
class FP16:
    """Rounds to float16 after scaling the tensor by a power of two.

    A plain cast overflows beyond 65504 and loses what is below 6e-8, which gradients often are. The scale brings the
    largest element to ``[2**14, 2**15)``; as a power of two it adds no rounding error.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; the key serves for messages only, nothing is random."""
        flat = flatten(x, key)
        largest = Buckets.of(x.shape, "tensor").absmax(flat)
        exponent = (_TOP - torch.frexp(largest).exponent).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        factor = torch.ldexp(torch.ones_like(largest), exponent)
        tensors = {"half": _chunked_cast(flat, torch.float16, factor), "scale": 1 / factor}
        return Payload(self.name, tuple(x.shape), x.dtype, tensors=tensors)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild: the 16-bit numbers times the scale."""
        require_codec(payload, self.name)
        half = payload.require_tensor("half", payload.numel, torch.float16)
        scale = payload.require_tensor("scale", min(payload.numel, 1), torch.float32)
        return restore(_chunked_cast(half, torch.float32, scale), payload)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``||x - decode||**2 <= (1 - delta) ||x||**2``: ``1 - 2**-21``.

        Normal numbers are off by at most ``2**-11`` of themselves, smaller ones by ``2**-25`` where the largest element
        is ``2**14``; half of the bound is room for the rounding of float64 input.
        """
        return 1 - 2.0**-21


@register_codec("bf16")
@dataclass(frozen=True)
class BF16:
    """Rounds to bfloat16: float32's range, 8 significant bits; what would round to infinity stays finite."""

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; the key serves for messages only, nothing is random."""
        half = _chunked_cast(flatten(x, key), torch.bfloat16, None)
        return Payload(self.name, tuple(x.shape), x.dtype, tensors={"half": half})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild: widen."""
        require_codec(payload, self.name)
        half = payload.require_tensor("half", payload.numel, torch.bfloat16)
        return restore(half.to(torch.float32), payload)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``||x - decode||**2 <= (1 - delta) ||x||**2``: ``1 - 2**-17``, for normal float32 numbers.

        A number is off by at most ``2**-9`` of itself; half of the bound is room for the rounding of float64 input.
        """
        return 1 - 2.0**-17


def _chunked_cast(flat: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """``flat * factor`` in another dtype, held within its range: ``[numel]``."""
    limit = torch.finfo(dtype).max
    result = empty(flat.numel(), dtype, flat.device)

    def work(block: Tensor, elements: slice, _: slice) -> None:
        part = block.view(-1).to(torch.float32)
        result[elements].copy_((part if factor is None else part * factor).clamp(-limit, limit))

    Buckets.of(flat.shape, "tensor").map(flat, work)
    return result
