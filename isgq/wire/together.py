"""The streams of a message side by side: many short ones take less time than one after another.

Only what kernels do with symbols of a byte on the CPU is done here; :mod:`isgq.wire.entropy` does all else, and tells
what is wrong.
"""

from collections.abc import Sequence
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
    alphabets = np.array([streams[i].alphabet for i in small])
    counts, good = np.empty((len(small), 256), dtype=np.int64), np.empty(len(small), dtype=np.bool_)
    kernels.count_together(values, ends, alphabets, counts, good)
    chosen: list[tuple[int, Model]] = []
    fields, place, shares = [], 0, 0
    for i, end, fine, best in zip(
        small, ends.tolist(), good.tolist(), best_models(kernels, counts, alphabets), strict=True
    ):
        if not fine:
            continue
        stream = streams[i]
        choice = choose(stream, coder, best)
        if not isinstance(choice, Model):
            coded[i] = choice
            continue
        size = stream.values.numel()
        chosen.append((i, choice))
        fields.append((end - size, end, place, shares, shares + stream.alphabet))
        place, shares = place + size + 2, shares + stream.alphabet
    if not chosen:
        return coded
    words, sizes = np.empty(place + 1, dtype=np.uint32), np.empty(len(chosen), dtype=np.int64)
    tables = np.concatenate([model.frequencies for _, model in chosen])
    kernels.ans_encode_together(values, np.array(fields), tables, words, sizes)
    data = little_endian(words)
    for (i, model), (_, _, start, _, _), size in zip(chosen, fields, sizes.tolist(), strict=True):
        body = data[4 * start : 4 * (start + size)].tobytes().rstrip(b"\0")
        coded[i] = settle(streams[i], coder, model, model.table + body)
    return coded


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
