"""Quantized compressive sampling (Abdi and Fekri 2020): fewer numbers than elements, each of a few bits.

Index legend: n elements of a block, k rows of the transform. Data: symbols ``q`` ``[blocks * k]`` of 2 levels + 1
values; tensor ``scale`` float32, the step of each block; the digest, from which signs and dither are drawn again.

1. A block v (zeros fill the last one) is projected: ``z = T v`` with ``T = H R / sqrt(k)``, H the first k rows of a
   Hadamard matrix and R random signs, so that ``T T^T = (n / k) I`` and ``E T^T T = I``.
2. z is quantized with subtractive dither u in (-1/2, 1/2) and step ``s = max|z| / levels``: ``q = round(z / s + u)``.
3. The receiver rebuilds ``alpha T^T s (q - u)``.

alpha = 1 is unbiased, with ``E ||error||**2 <= gamma ||v||**2``; alpha = 1 / (1 + gamma) is a contraction,
``E ||error||**2 <= (1 - alpha) ||v||**2``; see :func:`gamma`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs import hadamard
from isgq.codecs.buckets import Buckets, nonzero
from isgq.codecs.flat import flatten, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.keys import Key, random_int32, uniform
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec

_PIECE = 1 << 17  # elements that are worked on together on the CPU
_LARGEST = torch.finfo(torch.float32).max


def gamma(n: int, k: int, levels: int) -> float:
    """Bound of the relative error of the unbiased mode: ``n/k - 1 + n log k / (4 levels**2 (k - 1))``.

    The first part is the projection's and exact; the second bounds the quantization's. A single row (k = 1) has its
    error in closed form, ``n - 1 + n / (12 levels**2)``.

    Args:
        n: elements of a block.
        k: rows of the transform, 1 .. n.
        levels: steps between zero and the largest projection.
    """
    quantization = 1 / 12 if k == 1 else math.log(k) / (4 * (k - 1))
    return n / k - 1 + n * quantization / levels**2


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor is cut.

    Attributes:
        n: elements of a block.
        k: rows of the transform.
        blocks: number of blocks.
    """

    n: int
    k: int
    blocks: int

    def pieces(self, device: torch.device) -> Iterator[slice]:
        """Ranges of blocks that fit the cache; they begin at multiples of 32, where a word of random signs does."""
        step = max(_PIECE // self.n // 32, 1) * 32 if device.type == "cpu" else max(self.blocks, 1)
        for first in range(0, self.blocks, step):
            yield slice(first, min(first + step, self.blocks))


@register_codec("qcs")
@dataclass(frozen=True)
class QCS:
    """Random projection, then dithered quantization; ``32 block / (rows log2(2 levels + 1))`` times fewer bits.

    Attributes:
        block: elements that are projected together: ``2**a`` times 1, 12, 20, 100 or 144; at most 65536. A tensor
            that is smaller takes the next power of two, and as many rows in proportion.
        rows: projections of a block, 1 .. block; fewer is more aggressive.
        levels: steps between zero and the largest projection, 1 .. 127; fewer is more aggressive.
        mode: ``unbiased``, or ``mmse``: shrunk for the least error, to be used with error feedback.
    """

    name: ClassVar[str]
    block: int = 512
    rows: int = 128
    levels: int = 1
    mode: Literal["unbiased", "mmse"] = "unbiased"

    def __post_init__(self) -> None:
        hadamard.factors(self.block)
        if self.block > 65536:
            raise OptionError(f"block={self.block} must be at most 65536")
        if not 1 <= self.rows <= self.block:
            raise OptionError(f"rows={self.rows} must be in 1 .. block = {self.block}")
        if not 1 <= self.levels <= 127:
            raise OptionError(f"levels={self.levels} must be in 1 .. 127")
        if self.mode not in {"unbiased", "mmse"}:
            raise OptionError(f"mode={self.mode!r} must be 'unbiased' or 'mmse'")

    @property
    def unbiased(self) -> bool:
        """True without shrinking."""
        return self.mode == "unbiased"

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; NonFiniteError on NaN or Inf."""
        flat, layout, digest = flatten(x, key), self._layout(x.numel()), key.digest
        n, k = layout.n, layout.k
        period = hadamard.smallest_period(n, k)
        largest = Buckets.of(x.shape, "tensor").absmax(flat)  # [1], or [0] of an empty tensor
        symbols = torch.empty(layout.blocks, k, dtype=torch.uint8, device=flat.device)
        scale = torch.empty(layout.blocks, dtype=torch.float32, device=flat.device)
        for blocks in layout.pieces(flat.device):
            v = flat[blocks.start * n : blocks.stop * n] / nonzero(largest)  # sums of quotients cannot overflow
            v = torch.nn.functional.pad(v, (0, (blocks.stop - blocks.start) * n - v.numel())).view(-1, n)
            signed = v.mul_(_signs(digest, blocks, n, v.device))
            z = hadamard.multiply(signed.view(-1, n // period, period).sum(1).T)[:k].T / math.sqrt(k)
            step = torch.maximum(z.amax(1), z.amin(1).neg()).div_(self.levels)
            dither = uniform(digest, "dither", z.shape, z.device, start=blocks.start * k)
            q = (z / nonzero(step).unsqueeze(1)).add_(dither).round_().clamp_(-self.levels, self.levels)
            symbols[blocks].copy_(q.add_(self.levels))
            torch.mul(step, largest, out=scale[blocks]).clamp_(max=_LARGEST)
        streams = {"q": Symbols(symbols, 2 * self.levels + 1)}
        return Payload(self.name, tuple(x.shape), x.dtype, streams, {"scale": scale}, digest)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild ``alpha T^T s (q - u)``."""
        require_codec(payload, self.name)
        layout, digest = self._layout(payload.numel), payload.digest
        n, k = layout.n, layout.k
        period = hadamard.smallest_period(n, k)
        symbols = payload.require_symbols("q", layout.blocks * k, 2 * self.levels + 1).values.view(-1, k)
        scale = payload.require_tensor("scale", layout.blocks, torch.float32)
        factor = self._alpha(layout) / math.sqrt(k)
        flat = torch.empty(layout.blocks * n, dtype=torch.float32, device=symbols.device)
        for blocks in layout.pieces(flat.device):
            q = symbols[blocks].to(torch.float32).sub_(self.levels)
            q.sub_(uniform(digest, "dither", q.shape, q.device, start=blocks.start * k))
            padded = torch.nn.functional.pad(q.T, (0, 0, 0, period - k)).contiguous()
            v = hadamard.multiply(padded, transposed=True).T.mul(factor).unsqueeze(1)
            signs = _signs(digest, blocks, n, flat.device).view(-1, n // period, period)
            # The step comes last: at the end of float32's range nothing but the result can overflow.
            v = signs.mul_(v).mul_(scale[blocks].view(-1, 1, 1)).clamp_(-_LARGEST, _LARGEST)
            flat[blocks.start * n : blocks.stop * n].copy_(v.view(-1))
        return restore(flat[: payload.numel], payload)

    def contraction(self, x: Tensor) -> float:
        """The delta of ``E ||x - decode||**2 <= (1 - delta) ||x||**2``: ``1 - gamma``, or alpha in the mode mmse."""
        layout = self._layout(x.numel())
        bound = gamma(layout.n, layout.k, self.levels)
        return 1 - bound if self.unbiased else 1 / (1 + bound)

    def _layout(self, numel: int) -> _Layout:
        n = min(self.block, 1 << max(numel - 1, 0).bit_length())
        return _Layout(n, max(round(self.rows * n / self.block), 1), -(-numel // n))

    def _alpha(self, layout: _Layout) -> float:
        return 1.0 if self.unbiased else 1 / (1 + gamma(layout.n, layout.k, self.levels))


def _signs(digest: int, blocks: slice, n: int, device: torch.device) -> Tensor:
    """Random signs of some blocks: float32 ``[blocks, n]`` of -1 and 1, a bit each of a random word."""
    count = (blocks.stop - blocks.start) * n
    words = random_int32(digest, "sign", -(-count // 32), device, start=blocks.start * n // 32)
    bits = words.unsqueeze(1).bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=device)).bitwise_and_(1)
    return bits.view(-1)[:count].to(torch.float32).mul_(2).sub_(1).view(-1, n)
