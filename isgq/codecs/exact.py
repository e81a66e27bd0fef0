"""The identity of the codecs: sends the tensor itself. Everything else is tested against it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.flat import require_codec
from isgq.core.extremes import check_finite
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec

_MAX_ALPHABET = 1 << 31  # above, a raw integer is no longer than a symbol


@register_codec("exact")
@dataclass(frozen=True)
class Exact:
    """Sends a tensor of any dtype without loss.

    Layout: floating point, bool and negative integers as the raw tensor ``values``; integers ``>= 0`` (tables of
    indices) as symbols ``values`` of alphabet max + 1, so that they take the bits they need instead of 64 each.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = True

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Copy the tensor, of any shape and dtype.

        Raises:
            NonFiniteError: x holds NaN or Inf.
        """
        check_finite(x, key.name)
        flat = x.detach().reshape(-1)
        shape = tuple(x.shape)
        if not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            low, high = (int(flat.min()), int(flat.max())) if flat.numel() else (0, 0)
            if low >= 0 and high < _MAX_ALPHABET:
                return Payload(self.name, shape, x.dtype, symbols={"values": Symbols(flat.clone(), high + 1)})
        return Payload(self.name, shape, x.dtype, tensors={"values": flat.clone()})

    def decode(self, payload: Payload) -> Tensor:
        """The tensor, equal bit for bit.

        Raises:
            CodecError: the payload is of another codec, or its values do not fit its shape.
        """
        require_codec(payload, self.name)
        if "values" in payload.symbols:
            values = payload.require_symbols("values", payload.numel).values.to(payload.dtype, copy=True)
        else:
            values = payload.require_tensor("values", payload.numel, payload.dtype).clone()
        return values.reshape(payload.shape)
