"""What sender and receiver both know of a payload's symbols, and symbols of vectors by it.

Symbols are those of all left vectors, then those of all right ones. The step of an entry follows from the head and from
what is known of the layer; its dither, from the digest.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isgq.codecs.bases import Known
from isgq.codecs.rotation_code import decode_symbols, dequantize, digits_for, encode_symbols, quantize
from isgq.codecs.rotation_sides import COARSEST, FINEST_CODE, Ints, Reals, Side
from isgq.core.kernels import compiled
from isgq.core.keys import stream_state, uniform

_OVERSHOOT = 1.01  # how far rounding a weight to bfloat16 may stretch a vector of length 1
_STREAM = 1 << 31  # random numbers that the state of a stream is good for
_LARGEST = torch.finfo(torch.float32).max
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ladder:
    """Steps of all left vectors, then of all right ones, from the coarsest to the finest.

    Attributes:
        steps: ``[g]``, in units in which a vector of length 1 has mean square 1.
        relative: the same in units of their entries' root mean square.
        widths: ``[2]``: entries of class i on side s with step code c have step ``widths[s] c + offsets[s] + i``.
        offsets: ``[2]``.
        digits: of the largest magnitude less 1.
    """

    steps: Reals
    relative: Reals
    widths: Ints
    offsets: Ints
    digits: int


@functools.lru_cache(maxsize=256)
def _ladder(left: Side, right: Side, left_low: int, right_low: int, left_high: int, right_high: int) -> Ladder:
    """For step codes ``left_low .. left_high - 1`` and ``right_low .. right_high - 1``."""
    sides = left.ladder(left_low, left_high), right.ladder(right_low, right_high)
    steps, relative = (np.concatenate([side[i].reshape(-1) for side in sides]) for i in range(2))
    widths = [side[0].shape[1] for side in sides]
    offsets = [-left_low * widths[0], sides[0][0].size - right_low * widths[1]]
    longest = _OVERSHOOT * math.sqrt(max(left.size, right.size))
    digits = digits_for(longest / steps.min(initial=COARSEST))
    return Ladder(steps, relative, np.array(widths), np.array(offsets), digits)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the symbols of vectors lie.

    Attributes:
        sizes: o and p.
        ladder: steps.
        group: ``[k o + k p]``: which step a symbol has.
        dither: of each symbol; None for a dead zone.
    """

    sizes: tuple[int, int]
    ladder: Ladder
    group: Ints
    dither: Reals | None

    @classmethod
    def of(cls, codes: Ints, known: Known, digest: int | None) -> "Grid":
        """For vectors with these step codes.

        Args:
            codes: ``[k, 2]``, of left and right.
            known: of the layer.
            digest: names the dithers; None for a dead zone.
        """
        low, high = codes.min(0, initial=FINEST_CODE).tolist(), (codes.max(0, initial=-1) + 1).tolist()
        ladder = _ladder(known.left, known.right, *low, *high)
        group, dither = _lay_out(codes * ladder.widths + ladder.offsets, known, digest)
        return cls((known.left.size, known.right.size), ladder, group, dither)

    def symbols(self, left: Reals, right: Reals) -> Ints:
        """Of vectors ``[k, o]`` and ``[k, p]`` of length 1, or about."""
        steps = self.ladder.steps
        if self.dither is None or (kernels := compiled("laplace", _HOST)) is None:
            entries = np.concatenate([(v * math.sqrt(v.shape[1])).reshape(-1) for v in (left, right)])
            return quantize(entries / steps[self.group], self.dither)
        symbols, sides = np.empty(len(self.group), dtype=np.int64), map(np.ascontiguousarray, (left, right))
        kernels.quantize_dithered(*sides, self.dither, self.group, steps, symbols)
        return symbols

    def vectors(self, symbols: Ints) -> tuple[Reals, Reals]:
        """Vectors ``[k, o]`` and ``[k, p]`` of symbols, in units in which one of length 1 has mean square 1."""
        entries = dequantize(symbols, self.dither, self.group, self.ladder.steps)
        outputs, columns = self.sizes
        count = len(entries) // max(outputs + columns, 1)
        split = count * outputs
        return entries[:split].reshape(count, outputs), entries[split:].reshape(count, columns)

    def write(self, symbols: Ints) -> bytes:
        """Their code."""
        return encode_symbols(symbols, self.dither, self.group, self.ladder.relative, self.ladder.digits)

    def read(self, code: bytes) -> Ints:
        """Inverse of :meth:`write`; CodecError as of :func:`decode_symbols`."""
        return decode_symbols(code, self.dither, self.group, self.ladder.relative, self.ladder.digits)


def _lay_out(place: Ints, known: Known, digest: int | None) -> tuple[Ints, Reals | None]:
    """Which step each symbol has, and its dither.

    Args:
        place: ``[k, 2]``: step of the first class of each vector, left and right.
        known: of the layer.
        digest: names the dithers.
    """
    classes, roles = (known.left.classes, known.right.classes), ("rotated.left", "rotated.right")
    sizes = [len(place) * len(each) for each in classes]
    if digest is None or max(sizes) > _STREAM or (kernels := compiled("laplace", _HOST)) is None:
        group = np.concatenate([(place[:, i, None] + each).reshape(-1) for i, each in enumerate(classes)])
        if digest is None:
            return group, None
        parts = [uniform(digest, role, (size,)) for role, size in zip(roles, sizes, strict=True)]
        return group, torch.cat(parts).double().numpy()
    group, dither = np.empty(sum(sizes), dtype=np.int64), np.empty(sum(sizes))
    kernels.lay_out(place, *classes, *(stream_state(digest, role, 0) for role in roles), group, dither)
    return group, dither


def scale(left: Reals, right: Reals, weights: Reals) -> tuple[Tensor, Tensor]:
    """Factors of the sum of outer products of vectors of mean square 1, each times its weight, as float32.

    What is decoded reaches beyond the vector by half a step, which may be beyond float32.

    Args:
        left: ``[k, o]``.
        right: ``[k, p]``.
        weights: ``[k]``.
    """
    if kernels := compiled("laplace", _HOST):
        factors = torch.empty(left.shape, dtype=torch.float32), torch.empty(right.shape, dtype=torch.float32)
        sides = map(np.ascontiguousarray, (left, right))
        kernels.scale(*sides, weights, *(factor.numpy() for factor in factors))
        return factors
    left = left * (weights / math.sqrt(max(left.shape[1], 1)))[:, None]
    right = right / math.sqrt(max(right.shape[1], 1))
    one, other = (torch.from_numpy(side).clamp_(-_LARGEST, _LARGEST).float() for side in (left, right))
    return one, other
