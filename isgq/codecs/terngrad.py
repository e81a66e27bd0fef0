"""TernGrad (Wen et al. 2017): stochastic rounding to ``-s, 0, +s`` with s the largest element, optionally clipped.

Data: symbols ``q`` ``[numel]`` of 3 values; tensor ``norm`` float32, one a bucket.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs import grid
from isgq.codecs.buckets import Bucket, Buckets, check_bucket
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec


@register_codec("terngrad")
@dataclass(frozen=True)
class TernGrad:
    """Ternary gradients.

    Attributes:
        clip: elements beyond ``clip`` standard deviations are cut to that before rounding (2.5 in the paper); smaller
            is more aggressive. None, the default, cuts nothing. Clipping lowers the variance and makes the codec
            *biased*: averages converge to the clipped tensor, however many ranks there are. The deviation is taken
            about zero, so that a constant tensor is not clipped away.
        bucket: what shares a scale: ``tensor`` as in the paper, ``row`` or a number of elements.
    """

    name: ClassVar[str]
    clip: float | None = None
    bucket: Bucket = "tensor"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if self.clip is not None and not 1.0 <= self.clip < float("inf"):
            raise OptionError(f"clip={self.clip} must be none or a finite number >= 1 of standard deviations")

    @property
    def unbiased(self) -> bool:
        """True without clipping."""
        return self.clip is None

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress: ``k = sign(x)`` with probability ``min(|x|, s) / s``, else 0."""
        flat, buckets, peaks = flatten_with_peaks(x, key, self.bucket)
        scale = self._scales(flat, buckets, peaks)
        q = grid.round_stochastic(flat, scale, 1, buckets, key.digest)
        return Payload(self.name, tuple(x.shape), x.dtype, {"q": Symbols(q, grid.alphabet(1))}, {"norm": scale})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild ``s k``."""
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        q = payload.require_symbols("q", buckets.numel, grid.alphabet(1))
        scale = payload.require_tensor("norm", buckets.count, torch.float32)
        return restore(grid.rebuild(q.values, scale, 1, buckets), payload)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of the decoded tensor over keys: x, clipped if ``clip`` is set; float32 of x's shape."""
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        limit = buckets.spread(self._scales(flat, buckets, peaks))
        return torch.minimum(torch.maximum(flat, -limit), limit).reshape(x.shape)

    def variance(self, x: Tensor) -> Tensor:
        """Variance of each decoded element over keys, ``m (s - m)`` for an m of ``|mean|``; float32 of x's shape."""
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        return grid.rounding_variance(flat, self._scales(flat, buckets, peaks), 1, buckets).reshape(x.shape)

    def _scales(self, flat: Tensor, buckets: Buckets, peaks: Tensor) -> Tensor:
        if self.clip is None:
            return peaks
        deviation = buckets.l2(flat, peaks) / buckets.sizes(flat.device).sqrt()
        return torch.minimum(peaks, self.clip * deviation)
