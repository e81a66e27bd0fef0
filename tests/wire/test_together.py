"""The streams of a message side by side: as one after another."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from isgq.core.errors import WireError
from isgq.core.kernels import SWITCH, compiled, disabled
from isgq.core.payload import Symbols
from isgq.wire import entropy, together
from isgq.wire.ans import ans_encode
from isgq.wire.bits import packed_size
from isgq.wire.entropy import Coder, CoderName, encode_stream
from isgq.wire.together import Stream, decode_together, encode_together

CPU = torch.device("cpu")
with_kernels = pytest.mark.skipif(os.environ.get(SWITCH) == "0", reason="kernels are turned off")


def _some_symbols(rng: np.random.Generator) -> Symbols:
    alphabet = int(rng.choice([1, 2, 3, 4, 4, 4, 5, 16, 17, 255, 256, 257, 5000]))
    count = int(rng.choice([0, 1, 2, 3, 40, int(rng.integers(1, 3000)), int(rng.integers(3000, 30_000))]))
    values = np.minimum(rng.geometric(rng.uniform(0.01, 0.99), count) - 1, alphabet - 1)
    return Symbols(torch.from_numpy(values), alphabet)


@pytest.mark.parametrize("coder", ["auto", "packed", "zstd", "ans"])
@pytest.mark.parametrize("seed", range(12))
def test_streams_are_coded_side_by_side_as_one_after_another_or_not_at_all(seed: int, coder: CoderName) -> None:
    rng = np.random.default_rng(seed)
    streams = [_some_symbols(rng) for _ in range(rng.integers(1, 20))]
    many = sum(1 < s.alphabet <= 256 and s.values.numel() > 0 for s in streams) > 1
    kernels = compiled("coding", CPU) is not None
    for stream, coded in zip(streams, encode_together(streams, coder), strict=True):
        fits = many and kernels and coder in {"auto", "ans"}
        assert (coded is not None) == (fits and 1 < stream.alphabet <= 256 and stream.values.numel() > 0)
        if coded is not None:
            expected = encode_stream(stream, coder)
            assert coded[0] is expected[0]
            assert bytes(coded[1]) == bytes(expected[1])
    with disabled():
        assert encode_together(streams, coder) == [None] * len(streams)


@with_kernels
def test_large_streams_and_those_outside_their_alphabet_are_left_to_the_plain_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compiled("coding", CPU) is not None
    for module in (entropy, together):
        monkeypatch.setattr(module, "LARGE", 1000)
    good = Symbols(torch.tensor([0, 1, 0, 0] * 20, dtype=torch.uint8), 3)
    bad = Symbols(torch.tensor([0, 3, 0, 0], dtype=torch.uint8), 3)
    large = Symbols(torch.zeros(1000, dtype=torch.uint8), 3)
    assert [coded is None for coded in encode_together([bad, good, large, good], "auto")] == [True, False, True, False]


@with_kernels
@pytest.mark.parametrize("alphabet", [2, 3, 17, 256])
def test_any_frequencies_code_alike_side_by_side(alphabet: int) -> None:
    """Reciprocals are exact for every frequency, powers of two, their neighbours and the extremes among them."""
    kernels = compiled("coding", CPU)
    assert kernels is not None
    rng = np.random.default_rng(alphabet)
    room = (1 << 24) - alphabet
    for first in (0, 1, 2, *((1 << bits) - edge for bits in (7, 16, 22, 23) for edge in (0, 1, 2)), room):
        table = np.ones(alphabet, dtype=np.int64)
        table[0] += min(first, room)
        table[-1] += room - min(first, room)
        streams = [rng.integers(0, alphabet, int(count)).astype(np.uint8) for count in (900, 1, 40, 700)]
        ends = np.cumsum([len(stream) for stream in streams])
        fields = np.array([
            (end - len(stream), end, end - len(stream) + 2 * at, 0, alphabet)
            for at, (stream, end) in enumerate(zip(streams, ends, strict=True))
        ])
        words, sizes = np.empty(ends[-1] + 9, dtype=np.uint32), np.empty(4, dtype=np.int64)
        kernels.ans_encode_together(np.concatenate(streams), fields, table, words, sizes)
        for stream, start, size in zip(streams, fields[:, 2], sizes, strict=True):
            assert words[start : start + size].astype("<u4").tobytes().rstrip(b"\0") == ans_encode(stream, table)


def _side_by_side(seed: int) -> tuple[bytearray, list[Stream]]:
    """Streams of many sizes and alphabets, one after another."""
    rng, data, streams = np.random.default_rng(seed), bytearray(b"head"), []
    for _ in range(rng.integers(2, 20)):
        alphabet, count = int(rng.integers(2, 300)) if rng.integers(2) else 4, int(rng.integers(1, 3000))
        values = np.minimum(rng.geometric(0.4, count) - 1, alphabet - 1)
        symbols = Symbols(torch.from_numpy(values), alphabet)
        coder, body = encode_stream(symbols, "ans" if rng.integers(8) else "packed")
        streams.append(Stream(coder, slice(len(data), len(data) + len(body)), count, alphabet))
        data += bytes(body)
    return data, streams


def _alone(stream: Stream, data: Tensor) -> Tensor | None:
    try:
        return stream.decode(data, CPU)
    except WireError:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_streams_side_by_side_are_decoded_as_one_after_another_or_not_at_all(seed: int) -> None:
    data, streams = _side_by_side(seed)
    rng = np.random.default_rng(seed)
    for damaged in range(30):
        bytes_ = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        if damaged:
            bytes_[int(rng.integers(4, len(bytes_)))] = int(rng.integers(256)) * int(rng.integers(2))
        together = decode_together(streams, bytes_)
        for stream, values in zip(streams, together, strict=True):
            alone = _alone(stream, bytes_)
            if values is not None:
                assert alone is not None
                assert torch.equal(values, alone)
            by_ans = stream.coder in {Coder.ANS_COARSE, Coder.ANS_FINE} and stream.alphabet <= 256
            by_ans = by_ans and compiled("coding", CPU) is not None
            assert (values is None) == (alone is None or not by_ans)


def test_a_single_stream_or_one_without_a_table_is_left_to_the_plain_way() -> None:
    data, streams = _side_by_side(3)
    bytes_ = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    first, second = [stream for stream in streams if stream.coder is Coder.ANS_COARSE][:2]
    assert decode_together([first], bytes_) == [None]
    start = first.body.start
    size = packed_size(first.alphabet, 16)
    for short in (first._replace(body=slice(start, start + cut)) for cut in range(size)):
        assert decode_together([short, second], bytes_)[0] is None
