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
from isgq.codecs.buckets import nonzero
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.codecs.grid import nearest_integer
from isgq.core.errors import OptionError
from isgq.core.kernels import compiled
from isgq.core.keys import Key, random_int32, stream_state, uniform
from isgq.core.memory import empty
from isgq.core.parallel import map_pieces, piece_size
from isgq.core.payload import Payload, Symbols
from isgq.core.registry import register_codec

_WORD = 32  # random signs
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

    @property
    def period(self) -> int:
        """The first k rows of H repeat after so many elements."""
        return hadamard.smallest_period(self.n, self.k)

    def pieces(self, device: torch.device) -> list[slice]:
        """Ranges of blocks whose projections, ``period`` numbers each, fit the cache."""
        return list(self._cut(slice(0, self.blocks), self.period, device))

    def parts(self, blocks: slice, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Ranges of these blocks that fit the cache themselves: blocks counted from the first of these; elements."""
        for part in self._cut(blocks, self.n, device):
            yield (
                slice(part.start - blocks.start, part.stop - blocks.start),
                slice(part.start * self.n, part.stop * self.n),
            )

    def _cut(self, blocks: slice, numbers: int, device: torch.device) -> Iterator[slice]:
        unit = _WORD // math.gcd(self.n, _WORD)  # so that they begin where a word of random signs does
        step = max(piece_size(self.blocks * numbers, device) // numbers // unit, 1) * unit
        return (slice(at, min(at + step, blocks.stop)) for at in range(blocks.start, blocks.stop, step))


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
        flat, _, largest = flatten_with_peaks(x, key, "tensor")  # [1] largest, or [0] of an empty tensor
        layout, digest = self._layout(x.numel()), key.digest
        n, k, period = layout.n, layout.k, layout.period
        symbols = torch.empty(layout.blocks, k, dtype=torch.uint8, device=flat.device)
        scale = torch.empty(layout.blocks, dtype=torch.float32, device=flat.device)

        def work(blocks: slice) -> None:
            y = torch.empty(blocks.stop - blocks.start, period, dtype=torch.float32, device=flat.device)
            for part, elements in layout.parts(blocks, flat.device):
                v = flat[elements] / nonzero(largest)  # sums of quotients cannot overflow
                if missing := elements.stop - elements.start - v.numel():
                    v = torch.nn.functional.pad(v, (0, missing))
                _flip_signs(v, digest, elements.start)
                torch.sum(v.view(-1, n // period, period), 1, out=y[part])
            z = hadamard.multiply(y.T)[:k].T.contiguous().div_(math.sqrt(k))
            step = torch.maximum(z.amax(1), z.amin(1).neg()).div_(self.levels)
            dither = uniform(digest, "dither", z.shape, z.device, start=blocks.start * k)
            q = torch.add(z / nonzero(step).unsqueeze(1), dither, out=dither).clamp_(-self.levels, self.levels)
            symbols[blocks].copy_(nearest_integer(q).add_(self.levels))
            torch.mul(step, largest, out=scale[blocks]).clamp_(max=_LARGEST)

        map_pieces(work, layout.pieces(flat.device))
        streams = {"q": Symbols(symbols, 2 * self.levels + 1)}
        return Payload(self.name, tuple(x.shape), x.dtype, streams, {"scale": scale}, digest)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild ``alpha T^T s (q - u)``."""
        require_codec(payload, self.name)
        layout, digest = self._layout(payload.numel), payload.digest
        n, k, period = layout.n, layout.k, layout.period
        symbols = payload.require_symbols("q", layout.blocks * k, 2 * self.levels + 1).values.view(-1, k)
        scale = payload.require_tensor("scale", layout.blocks, torch.float32)
        factor = self._alpha(layout) / math.sqrt(k)
        flat = empty(layout.blocks * n, torch.float32, symbols.device)

        def work(blocks: slice) -> None:
            q = symbols[blocks].to(torch.float32).sub_(self.levels)
            q.sub_(uniform(digest, "dither", q.shape, q.device, start=blocks.start * k))
            padded = torch.nn.functional.pad(q.T, (0, 0, 0, period - k)).contiguous()
            v = hadamard.multiply(padded, transposed=True).T.mul(factor).unsqueeze(1)
            for part, elements in layout.parts(blocks, flat.device):
                out = flat[elements]
                out.view(-1, n // period, period).copy_(v[part])
                _flip_signs(out, digest, elements.start)
                # The step comes last: at the end of float32's range nothing but the result can overflow.
                out.view(-1, n).mul_(scale[blocks][part].unsqueeze(1)).clamp_(-_LARGEST, _LARGEST)

        map_pieces(work, layout.pieces(flat.device))
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


def _flip_signs(v: Tensor, digest: int, start: int) -> None:
    """Multiply float32 ``v`` in place by random signs, a bit each of a random word: 1 is plus, 0 minus.

    Args:
        v: ``[elements]``, which begin at element ``start`` of the stream, where a word begins.
        digest: as in :func:`isgq.core.keys.random_int32`.
        start: a multiple of 32.
    """
    if kernels := compiled("quantize", v.device):
        kernels.flip_signs(stream_state(digest, "sign", start // _WORD), *kernels.arrays(v.view(torch.uint32)))
        return
    words = random_int32(digest, "sign", -(-v.numel() // _WORD), v.device, start=start // _WORD).bitwise_not_()
    # A bit becomes the sign of a float.
    shifts = torch.arange(_WORD - 1, -1, -1, dtype=torch.int32, device=v.device)
    flips = words.unsqueeze(1).bitwise_left_shift(shifts).bitwise_and_(-(1 << 31))
    v.view(torch.int32).bitwise_xor_(flips.view(-1)[: v.numel()])
