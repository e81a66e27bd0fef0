"""1-bit SGD (Seide et al. 2014): one bit an element, threshold 0, and the mean of either side as its value.

Data: symbols ``q`` ``[numel]`` of 2 values, 1 where ``x >= 0``; tensors ``high`` and ``low`` float32, one a bucket.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets, check_bucket, nonzero
from isgq.codecs.compare import not_negative
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.core.keys import Key
from isgq.core.memory import empty
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec


@register_codec("one_bit")
@dataclass(frozen=True)
class OneBit:
    """The two means are the best two values for this threshold; the error has mean zero over either side.

    Attributes:
        bucket: what shares the two values: ``row`` (the paper's columns), ``tensor`` or a number of elements.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False
    bucket: Bucket = "row"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; the key serves for messages only, nothing is random."""
        flat, buckets, peaks = flatten_with_peaks(x, key, self.bucket)
        bits, _, means = _split_at_zero(flat, buckets, peaks)
        high, low = means.to(torch.float32)
        return Payload(self.name, tuple(x.shape), x.dtype, {"q": Symbols(bits, 2)}, {"high": high, "low": low})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild: ``high`` for ones, ``low`` for zeros."""
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        bits = payload.require_symbols("q", buckets.numel, 2).values
        high, low = (payload.require_tensor(side, buckets.count, torch.float32)[:, None] for side in ("high", "low"))
        flat = empty(buckets.numel, torch.float32, bits.device)

        def work(block: Tensor, elements: slice, rows: slice) -> None:
            bit = bits[elements].view(block.shape).to(torch.float32)
            torch.mul(bit, high[rows], out=block)
            block.addcmul_(bit.neg_().add_(1), low[rows])  # one of the two products is zero, so the sum is exact

        buckets.map(flat, work)
        return restore(flat, payload)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``||x - decode||**2 = (1 - delta) ||x||**2``: what the two means keep of ``||x||**2``; exact."""
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        _, counts, means = _split_at_zero(flat, buckets, peaks)
        total = flat.double().square().sum()
        return float((counts * means.square()).sum() / total) if total else 1.0


def _split_at_zero(flat: Tensor, buckets: Buckets, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bits: uint8 ``[numel]``, 1 where >= 0; counts and means of both sides, ones first: float64 ``[2, count]``."""
    bits = empty(flat.numel(), torch.uint8, flat.device)
    divisor = nonzero(largest).unsqueeze(1)  # sums of quotients cannot overflow
    ones, high, low = torch.zeros(3, buckets.count, dtype=torch.float64, device=flat.device)

    def work(block: Tensor, elements: slice, rows: slice) -> tuple[slice, Tensor, Tensor, Tensor]:
        bit = not_negative(block)
        bits[elements].copy_(bit.view(-1))
        quotient = block / divisor[rows]
        below = quotient.clamp(max=0).sum(1)
        return rows, bit.sum(1, dtype=torch.int32), quotient.clamp_(min=0).sum(1), below

    for rows, *sums in buckets.map(flat, work):
        for total, part in zip((ones, high, low), sums, strict=True):
            total[rows] += part
    counts = torch.stack((ones, buckets.sizes(flat.device) - ones))
    means = torch.stack((high, low)) / counts.clamp(min=1) * largest
    return bits, counts, means
