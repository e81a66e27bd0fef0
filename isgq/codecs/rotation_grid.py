"""What sender and receiver both know of a payload's symbols, and symbols of vectors by it.

Symbols are those of all left vectors, then those of all right ones. The step of an entry follows from the head and from
what is known of the layer; its dither, from the digest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isgq.codecs.bases import Known
from isgq.codecs.rotation_code import decode_symbols, dequantize, digits_for, encode_symbols, quantize
from isgq.codecs.rotation_sides import COARSEST, FINEST_CODE, Ints, Ladder, Reals
from isgq.core.kernels import compiled
from isgq.core.keys import stream_state, uniform

_OVERSHOOT = 1.01  # how far rounding a weight to bfloat16 may stretch a vector of length 1
_STREAM = 1 << 31  # random numbers that the state of a stream is good for
_LARGEST = torch.finfo(torch.float32).max
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the symbols of vectors lie.

    Attributes:
        sizes: o and p.
        steps: ``[g]``, in units in which a vector of length 1 has mean square 1.
        relative: the same in units of their entries' root mean square.
        group: ``[k o + k p]``: which step a symbol has.
        dither: of each symbol; None for a dead zone.
        digits: of the largest magnitude less 1.
    """

    sizes: tuple[int, int]
    steps: Reals
    relative: Reals
    group: Ints
    dither: Reals | None
    digits: int

    @classmethod
    def of(cls, codes: Ints, known: Known, digest: int | None) -> "Grid":
        """For vectors with these step codes.

        Args:
            codes: ``[k, 2]``, of left and right.
            known: of the layer.
            digest: names the dithers; None for a dead zone.
        """
        sizes = known.left.size, known.right.size
        low, high = codes.min(0, initial=FINEST_CODE).tolist(), (codes.max(0, initial=-1) + 1).tolist()
        ladders = [side.ladder(codes[:, i], low[i], high[i]) for i, side in enumerate((known.left, known.right))]
        steps = np.concatenate([ladder.steps for ladder in ladders])
        digits = digits_for(_OVERSHOOT * math.sqrt(max(sizes)) / steps.min(initial=COARSEST))
        group, dither = _lay_out(ladders, len(codes), digest)
        return cls(sizes, steps, np.concatenate([ladder.relative for ladder in ladders]), group, dither, digits)

    def encode(self, left: Reals, right: Reals) -> bytes:
        """Quantize and code vectors ``[k, o]`` and ``[k, p]`` of length 1, or about."""
        symbols = self._quantize(left, right)
        return encode_symbols(symbols, self.dither, self.group, self.relative, self.digits)

    def decode(self, code: bytes) -> tuple[Reals, Reals]:
        """Vectors ``[k, o]`` and ``[k, p]``, in units in which one of length 1 has mean square 1.

        Raises:
            CodecError: as of :func:`decode_symbols`.
        """
        symbols = decode_symbols(code, self.dither, self.group, self.relative, self.digits)
        entries = dequantize(symbols, self.dither, self.group, self.steps)
        outputs, columns = self.sizes
        split = len(entries) // max(outputs + columns, 1) * outputs
        return entries[:split].reshape(-1, outputs), entries[split:].reshape(-1, columns)

    def _quantize(self, left: Reals, right: Reals) -> Ints:
        if self.dither is None or (kernels := compiled("laplace", _HOST)) is None:
            entries = np.concatenate([(v * math.sqrt(v.shape[1])).reshape(-1) for v in (left, right)])
            return quantize(entries / self.steps[self.group], self.dither)
        symbols = np.empty(len(self.group), dtype=np.int64)
        for part, vectors in ((slice(left.size), left), (slice(left.size, None), right)):
            kernels.quantize_dithered(
                np.ascontiguousarray(vectors), self.dither[part], self.group[part], self.steps, symbols[part]
            )
        return symbols


def _lay_out(ladders: Sequence[Ladder], count: int, digest: int | None) -> tuple[Ints, Reals | None]:
    """Which step each symbol has, of the steps of all ladders one after the other, and its dither."""
    firsts, sizes = (0, len(ladders[0].steps)), [count * len(ladder.classes) for ladder in ladders]
    roles = ("rotated.left", "rotated.right")
    if digest is None or max(sizes) > _STREAM or (kernels := compiled("laplace", _HOST)) is None:
        group = np.concatenate([
            (first + ladder.place[:, None] + ladder.classes).reshape(-1)
            for first, ladder in zip(firsts, ladders, strict=True)
        ])
        if digest is None:
            return group, None
        parts = [uniform(digest, role, (size,)) for role, size in zip(roles, sizes, strict=True)]
        return group, torch.cat(parts).double().numpy()
    group, dither = np.empty(sum(sizes), dtype=np.int64), np.empty(sum(sizes))
    for first, ladder, role, part in zip(firsts, ladders, roles, (slice(sizes[0]), slice(sizes[0], None)), strict=True):
        state = stream_state(digest, role, 0)
        kernels.lay_out(first + ladder.place, ladder.classes, state, group[part], dither[part])
    return group, dither


def narrow(vectors: Reals, gains: Reals, divisor: float) -> Tensor:
    """Vectors ``[k, n]`` times gains ``[k]``, divided: float32, which what is decoded may go beyond by half a step."""
    if kernels := compiled("laplace", _HOST):
        out = torch.empty(vectors.shape, dtype=torch.float32)
        kernels.narrow(np.ascontiguousarray(vectors), gains, divisor, out.numpy())
        return out
    return torch.from_numpy(vectors * gains[:, None] / divisor).clamp_(-_LARGEST, _LARGEST).float()
