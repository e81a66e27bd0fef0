"""QSGD (Alistarh et al. 2017): stochastic rounding to a uniform grid between minus and plus the bucket's norm.

Data: symbols ``q`` ``[numel]`` of 2 L + 1 values; tensor ``norm`` float32, one a bucket.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs import grid
from isgq.codecs.buckets import Bucket, Buckets, check_bucket
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec


@register_codec("qsgd")
@dataclass(frozen=True)
class QSGD:
    """Quantized SGD.

    Attributes:
        levels: steps between zero and the norm, 1 .. 127; fewer is more aggressive.
        bucket: what shares a norm: ``tensor``, ``row`` or a number of elements; larger is more aggressive.
        norm: ``max``, or ``l2`` as in the paper's theory: sparser symbols, more variance.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = True
    levels: int = 4
    bucket: Bucket = 512
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        grid.check_levels(self.levels)
        check_bucket(self.bucket)
        if self.norm not in {"max", "l2"}:
            raise OptionError(f"norm={self.norm!r} must be 'max' or 'l2'")

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress: ``k = floor(L x / norm + u)``, u uniform in [0, 1)."""
        flat, buckets, peaks = flatten_with_peaks(x, key, self.bucket)
        norm = self._norms(flat, buckets, peaks)
        q = grid.round_stochastic(flat, norm, self.levels, buckets, key.digest)
        symbols = {"q": Symbols(q, grid.alphabet(self.levels))}
        return Payload(self.name, tuple(x.shape), x.dtype, symbols, {"norm": norm})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild ``norm k / L``."""
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        q = payload.require_symbols("q", buckets.numel, grid.alphabet(self.levels))
        norm = payload.require_tensor("norm", buckets.count, torch.float32)
        return restore(grid.rebuild(q.values, norm, self.levels, buckets), payload)

    def variance(self, x: Tensor) -> Tensor:
        """Variance of each decoded element over keys, exact; float32 of x's shape."""
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        return grid.rounding_variance(flat, self._norms(flat, buckets, peaks), self.levels, buckets).reshape(x.shape)

    def _norms(self, flat: Tensor, buckets: Buckets, peaks: Tensor) -> Tensor:
        return peaks if self.norm == "max" else buckets.l2(flat, peaks)
