"""The streams of a message side by side: many short ones take less time than one after another.

Only what kernels do with symbols of a byte on the CPU is done here; :mod:`isgq.wire.entropy` does all else, and tells
what is wrong.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isgq.core.errors import WireError
from isgq.core.kernels import compiled
from isgq.core.payload import Symbols
from isgq.wire.ans import little_endian
from isgq.wire.bits import packed_size
from isgq.wire.entropy import LARGE, WEIGHTED, Coded, Coder, CoderName, choose, decode_stream, settle
from isgq.wire.models import Model, best_models, frequencies_of

_HOST = torch.device("cpu")

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


def encode_together(streams: Sequence[Symbols], coder: CoderName) -> list[Coded | None]:
    """What :func:`isgq.wire.entropy.encode_stream` makes of those streams that are coded faster side by side.

    Args:
        streams: of a message.
        coder: for all of them.

    Returns:
        None for all others, and for those with symbols outside their alphabet.
    """
    coded: list[Coded | None] = [None] * len(streams)
    kernels = compiled("coding", _HOST)
    if coder not in {"auto", "ans"} or kernels is None:
        return coded
    small = [i for i, stream in enumerate(streams) if _is_small(stream)]
    if len(small) < 2:
        return coded
    small.sort(key=lambda i: -streams[i].values.numel())
    values = torch.cat([streams[i].values for i in small]).numpy()
    ends = np.cumsum([streams[i].values.numel() for i in small])
    best = _best_models(kernels, values, ends, np.array([streams[i].alphabet for i in small]))
    by_ans, chosen = [], []
    for i, end, model in zip(small, ends.tolist(), best, strict=True):
        choice = None if model is None else choose(streams[i], coder, model)
        if isinstance(choice, Model):
            by_ans.append(i)
            chosen.append((end - streams[i].values.numel(), end, choice))
        else:
            coded[i] = choice
    for i, (_, _, by), body in zip(by_ans, chosen, _ans(kernels, values, chosen), strict=True):
        coded[i] = settle(streams[i], coder, by, body)
    return coded


def _best_models(
    kernels: ModuleType, values: _Bytes, ends: _Ints, alphabets: _Ints
) -> Iterable[tuple[Model, int] | None]:
    """The best model of each stream up to each end; None for one with symbols outside its alphabet."""
    counts, good = np.empty((len(ends), 256), dtype=np.int64), np.empty(len(ends), dtype=np.bool_)
    kernels.count_together(values, ends, alphabets, counts, good)
    models = best_models(kernels, counts, alphabets)
    return (model if fine else None for model, fine in zip(models, good.tolist(), strict=True))


def _ans(kernels: ModuleType, values: _Bytes, streams: Sequence[tuple[int, int, Model]]) -> list[bytes]:
    """Streams that begin and end somewhere in the symbols, each coded by its model."""
    if not streams:
        return []
    fields, place, shares = [], 0, 0
    for start, end, model in streams:
        fields.append((start, end, place, shares, shares + len(model.frequencies)))
        place, shares = place + end - start + 2, shares + len(model.frequencies)
    words, sizes = np.empty(place + 1, dtype=np.uint32), np.empty(len(streams), dtype=np.int64)
    tables = np.concatenate([model.frequencies for _, _, model in streams])
    kernels.ans_encode_together(values, np.array(fields), tables, words, sizes)
    data = little_endian(words)
    return [
        model.table + data[4 * place : 4 * (place + size)].tobytes().rstrip(b"\0")
        for (_, _, model), (_, _, place, _, _), size in zip(streams, fields, sizes.tolist(), strict=True)
    ]


def _is_small(stream: Symbols) -> bool:
    values = stream.values
    return 1 < stream.alphabet <= 256 and 0 < values.numel() < LARGE and values.is_cpu


class Stream(NamedTuple):
    """Where a stream lies in some bytes: the arguments of :func:`decode_stream`."""

    coder: Coder
    body: slice
    numel: int
    alphabet: int

    def decode(self, data: Tensor, device: torch.device) -> Tensor:
        """The symbols; WireError as of :func:`decode_stream`."""
        return decode_stream(self.coder, data[self.body], self.numel, self.alphabet, device)


def decode_together(streams: Sequence[Stream], data: Tensor) -> list[Tensor | None]:
    """The symbols, on the CPU, of those streams that are decoded faster side by side; None for all others.

    Also for those that are malformed, of which :func:`decode_stream` tells what is wrong.

    Args:
        streams: checked as for :func:`decode_stream`.
        data: uint8, on the CPU, in which they lie.
    """
    found: list[Tensor | None] = [None] * len(streams)
    by_ans = [i for i, s in enumerate(streams) if s.coder in WEIGHTED and 1 < s.alphabet <= 256 and s.numel]
    kernels = compiled("coding", data.device)
    if kernels is None or len(by_ans) < 2:
        return found
    raw, chosen, fields, tables, place, shares = data.numpy(), [], [], [], 0, 0
    for i in sorted(by_ans, key=lambda i: -streams[i].numel):
        stream = streams[i]
        start = stream.body.start + packed_size(stream.alphabet, 1 << stream.coder.weight_bits)
        table = _table(raw[stream.body.start : start].tobytes(), stream) if start <= stream.body.stop else None
        if table is None or (start < stream.body.stop and not raw[stream.body.stop - 1]):
            continue
        chosen.append(i)
        fields.append((start, stream.body.stop, stream.numel, place, shares, shares + stream.alphabet))
        tables.append(table)
        place, shares = place + stream.numel, shares + stream.alphabet
    if not fields:
        return found
    symbols, good = np.empty(place, dtype=np.uint8), np.empty(len(fields), dtype=np.bool_)
    kernels.ans_decode_together(raw, np.array(fields), np.concatenate(tables), symbols, good)
    decoded = torch.split(torch.from_numpy(symbols), [streams[i].numel for i in chosen])
    for i, values, fine in zip(chosen, decoded, good, strict=True):
        found[i] = values if fine else None
    return found


def _table(packed: bytes, stream: Stream) -> _Ints | None:
    """The frequencies of a stream; None if it has no such table."""
    try:
        return frequencies_of(packed, stream.alphabet, stream.coder.weight_bits)
    except WireError:
        return None
