"""Blockwise 8-bit integers: each block is scaled by its largest element to -127 .. 127.

Data: symbols ``q`` ``[numel]`` of 255 values; tensor ``norm`` float32, one a block. The last block may be shorter;
nothing is padded. Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs import grid
from isgq.codecs.buckets import Buckets, check_bucket
from isgq.codecs.flat import flatten, flatten_with_peaks, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec


@register_codec("int8")
@dataclass(frozen=True)
class Int8:
    """Eight bits an element.

    Attributes:
        block: elements that share a scale, at least 1; larger is more aggressive.
        rounding: ``nearest``, deterministic and biased; or ``stochastic``, unbiased with twice the error.
    """

    name: ClassVar[str]
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        check_bucket(self.block)
        if self.rounding not in {"nearest", "stochastic"}:
            raise OptionError(f"rounding={self.rounding!r} must be 'nearest' or 'stochastic'")

    @property
    def unbiased(self) -> bool:
        """True with stochastic rounding."""
        return self.rounding == "stochastic"

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress: ``127 x / norm``, rounded."""
        flat, blocks, norm = flatten_with_peaks(x, key, self.block)
        if self.rounding == "stochastic":
            q = grid.round_stochastic(flat, norm, grid.MAX_LEVELS, blocks, key.digest)
        else:
            q = grid.round_nearest(flat, norm, grid.MAX_LEVELS, blocks)
        symbols = {"q": Symbols(q, grid.alphabet(grid.MAX_LEVELS))}
        return Payload(self.name, tuple(x.shape), x.dtype, symbols, {"norm": norm})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild ``norm k / 127``."""
        require_codec(payload, self.name)
        blocks = Buckets.of(payload.shape, self.block)
        q = payload.require_symbols("q", blocks.numel, grid.alphabet(grid.MAX_LEVELS))
        norm = payload.require_tensor("norm", blocks.count, torch.float32)
        return restore(grid.rebuild(q.values, norm, grid.MAX_LEVELS, blocks), payload)

    def variance(self, x: Tensor) -> Tensor:
        """Variance of each decoded element over keys, exact (0 with rounding to nearest); float32 of x's shape."""
        flat, blocks = flatten(x, Key("x")), Buckets.of(x.shape, self.block)
        if self.rounding == "nearest":
            return torch.zeros(x.shape, device=x.device)
        return grid.rounding_variance(flat, blocks.absmax(flat), grid.MAX_LEVELS, blocks).reshape(x.shape)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``E ||x - decode||**2 <= (1 - delta) ||x||**2``: no element is off by more than half a step.

        With stochastic rounding no variance exceeds a quarter of a squared step, which is the same bound.
        """
        flat, blocks = flatten(x, Key("x")), Buckets.of(x.shape, self.block)
        bound = blocks.sizes(flat.device) * (blocks.absmax(flat).double() / grid.MAX_LEVELS / 2).square()
        total = flat.double().square().sum()
        return float(1 - bound.sum() / total) if total else 1.0
