"""Models that travel with their streams: tables of weights, and what follows from them.

Weights are codes of 4 bits (coarse) or 8 (fine), see :func:`isgq.wire.ans.weight_table`; both sides make integer
frequencies of them.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isgq.wire.ans import TOTAL_BITS, frequencies, weight_codes
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
        return math.ceil(float(counts @ self.bits) / 8) + len(self.table)


def model_of(codes: npt.NDArray[np.uint8], weight_bits: int) -> Model:
    """The model of these weight codes ``[alphabet]``."""
    return (_kept_model if len(codes) <= _FEW else _model)(codes.tobytes(), weight_bits)


def _model(codes: bytes, weight_bits: int) -> Model:
    weights = np.frombuffer(bytearray(codes), dtype=np.uint8)
    shares = frequencies(weights, weight_bits)
    table = pack_symbols(torch.from_numpy(weights), 1 << weight_bits).numpy().tobytes()
    return Model(weight_bits, table, shares, TOTAL_BITS - np.log2(shares))


_kept_model = functools.lru_cache(_KEPT)(_model)


def best_model(counts: _Ints, weight_bits: Iterable[int] = (COARSE, FINE)) -> tuple[Model, int]:
    """The model that makes a stream of this histogram smallest, table included, and the bytes that it will take."""
    models = (model_of(weight_codes(counts, bits), bits) for bits in weight_bits)
    return min(((model, model.size(counts)) for model in models), key=lambda choice: choice[1])


def frequencies_of(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    """The frequencies that follow from a table; WireError if there is no such table."""
    return (_kept_shares if alphabet <= _FEW else _shares)(table, alphabet, weight_bits)


def _shares(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    packed = torch.frombuffer(bytearray(table), dtype=torch.uint8)
    return frequencies(unpack_symbols(packed, alphabet, 1 << weight_bits).numpy(), weight_bits)


_kept_shares = functools.lru_cache(_KEPT)(_shares)
