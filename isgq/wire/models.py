"""Models that travel with their streams: tables of weights, and what follows from them.

Weights are codes of 4 bits (coarse) or 8 (fine), see :func:`isgq.wire.ans.weight_table`; both sides make integer
frequencies of them.
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from isgq.wire.ans import TOTAL_BITS, frequencies, midpoints, weight_codes, weight_table
from isgq.wire.bits import pack_symbols, unpack_symbols

COARSE, FINE = 4, 8
"""Bits of a weight."""

_FEW = 16  # symbols of an alphabet whose models recur from stream to stream and are kept
_KEPT = 4096

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Model:
    """A transmitted model.

    Attributes:
        weight_bits: of each weight.
        table: the weights, packed.
        frequencies: the frequencies that follow from them.
        bits: that each symbol takes.
    """

    weight_bits: int
    table: bytes
    frequencies: _Ints
    bits: npt.NDArray[np.float64]

    def size(self, counts: _Ints) -> int:
        """Bytes that a stream of this histogram takes, about, table included."""
        if len(counts) <= _FEW:  # where numpy takes longer
            bits: float = sum(map(operator.mul, counts.tolist(), self.bits.tolist()))
        else:
            bits = float(counts @ self.bits)
        return math.ceil(bits / 8) + len(self.table)


def _model(codes: bytes, weight_bits: int) -> Model:
    weights = np.frombuffer(bytearray(codes), dtype=np.uint8)
    shares = frequencies(weights, weight_bits)
    table = pack_symbols(torch.from_numpy(weights), 1 << weight_bits).numpy().tobytes()
    return Model(weight_bits, table, shares, TOTAL_BITS - np.log2(shares))


_kept_model = functools.lru_cache(_KEPT)(_model)


def best_model(counts: _Ints, weight_bits: Iterable[int] = (COARSE, FINE)) -> tuple[Model, int]:
    """The model that makes a stream of this histogram smallest, table included, and the bytes that it will take."""
    return _best(counts, [(weight_codes(counts, bits).tobytes(), bits) for bits in weight_bits])


def best_models(kernels: ModuleType, counts: _Ints, alphabets: _Ints) -> list[tuple[Model, int]]:
    """:func:`best_model` of several histograms.

    Args:
        kernels: the compiled ones.
        counts: ``[streams, 256]``.
        alphabets: ``[streams]``, at most 256.
    """
    codes = np.empty((len(counts), 2, 256), dtype=np.uint8)
    largest = np.array([weight_table(COARSE)[-1], weight_table(FINE)[-1]])
    kernels.weigh_together(counts, alphabets, midpoints(COARSE), midpoints(FINE), largest, codes)
    raw, width = codes.tobytes(), codes.shape[-1]
    found = []
    for own, size, coarse in zip(counts, alphabets.tolist(), range(0, len(raw), 2 * width), strict=True):
        fine = coarse + width
        coded = (raw[coarse : coarse + size], COARSE), (raw[fine : fine + size], FINE)
        found.append(_best(own[:size], coded))
    return found


def _best(counts: _Ints, coded: Iterable[tuple[bytes, int]]) -> tuple[Model, int]:
    model_of = _kept_model if len(counts) <= _FEW else _model
    models = [model_of(codes, bits) for codes, bits in coded]
    return min([(model, model.size(counts)) for model in models], key=operator.itemgetter(1))


def frequencies_of(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    """The frequencies that follow from a table; WireError if there is no such table."""
    return (_kept_shares if alphabet <= _FEW else _shares)(table, alphabet, weight_bits)


def _shares(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    packed = torch.frombuffer(bytearray(table), dtype=torch.uint8)
    return frequencies(unpack_symbols(packed, alphabet, 1 << weight_bits).numpy(), weight_bits)


_kept_shares = functools.lru_cache(_KEPT)(_shares)
