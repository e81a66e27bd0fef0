"""Scaled sign: one bit an element and one scale a bucket (signSGD with magnitude; the 1-bit codec of DoubleSqueeze).

Data: symbols ``q`` ``[numel]`` of 2 values, 1 where ``x >= 0``; tensor ``scale`` float32, one a bucket.
Zero counts as positive, so that a bit is enough; a bucket of zeros has scale 0 and decodes to zeros.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets, check_bucket
from isgq.codecs.compare import not_negative
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.memory import empty
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec


@register_codec("sign")
@dataclass(frozen=True)
class Sign:
    """``scale * sign(x)``; for use with error feedback.

    Attributes:
        scale: ``l1``, the mean of ``|x|``, which is the best scale and always a contraction (Karimireddy et al. 2019);
            or ``l2``, ``||x|| / sqrt(size)``, which keeps the norm (Tang et al. 2019) but may double the error.
        bucket: what shares a scale: ``tensor``, ``row`` or a number of elements.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False
    scale: Literal["l1", "l2"] = "l1"
    bucket: Bucket = "tensor"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if self.scale not in {"l1", "l2"}:
            raise OptionError(f"scale={self.scale!r} must be 'l1' or 'l2'")

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; the key serves for messages only, nothing is random."""
        flat, buckets, peaks = flatten_with_peaks(x, key, self.bucket)
        bits = empty(flat.numel(), torch.uint8, flat.device)
        buckets.map(flat, lambda block, elements, _: bits[elements].view(block.shape).copy_(not_negative(block)))
        scale = self._scales(flat, buckets, peaks).to(torch.float32)
        return Payload(self.name, tuple(x.shape), x.dtype, {"q": Symbols(bits, 2)}, {"scale": scale})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild plus or minus the scale."""
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        bits = payload.require_symbols("q", buckets.numel, 2).values
        scale = payload.require_tensor("scale", buckets.count, torch.float32).unsqueeze(1)
        flat = empty(buckets.numel, torch.float32, bits.device)

        def work(block: Tensor, elements: slice, rows: slice) -> None:
            block.copy_(bits[elements].view(block.shape)).mul_(2).sub_(1).mul_(scale[rows])

        buckets.map(flat, work)
        return restore(flat, payload)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``||x - decode||**2 = (1 - delta) ||x||**2``, exact; with ``l2`` down to -1.

        With scale s and mean m of ``|x|`` a bucket of n elements loses ``||x||**2 - n s (2 m - s)``.
        """
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        scale, mean = self._scales(flat, buckets, peaks), buckets.mean_abs(flat, peaks)
        total = flat.double().square().sum()
        return float((buckets.sizes(flat.device) * scale * (2 * mean - scale)).sum() / total) if total else 1.0

    def _scales(self, flat: Tensor, buckets: Buckets, peaks: Tensor) -> Tensor:
        if self.scale == "l1":
            return buckets.mean_abs(flat, peaks)
        return buckets.l2(flat, peaks).double() / buckets.sizes(flat.device).sqrt()
