"""Streams of symbols as bytes, by the coder that suits each stream.

Coders:

| id | coder      | body                                                                                      |
|----|------------|-------------------------------------------------------------------------------------------|
| 0  | packed     | bits and trits (:mod:`isgq.wire.bits`), no model                                          |
| 1  | zstd       | whole symbols in bytes, then one Zstandard frame without its four magic bytes             |
| 2  | ANS coarse | a table of 4-bit weights, one a symbol of the alphabet, then asymmetric numeral systems   |
| 3  | ANS fine   | the same with 8-bit weights                                                               |
| 4  | ANS bytes  | the bytes of coder 1 before compression as the symbols, alphabet 256, of coder 3          |

Whole symbols in bytes: two to eight to a byte for alphabets up to 16, so that coder 4 is as many times as fast.

A body has at least ``values // 4096`` bytes, *values* being the bytes that the symbols take in memory; a shorter one
is filled up with zeros. So what a receiver allocates is bounded by what it received, whatever the coder.
"""

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from isgq.core.errors import OptionError, WireError
from isgq.core.kernels import compiled
from isgq.core.parallel import map_parts, map_pieces, piece_size
from isgq.core.payload import Symbols, symbol_dtype
from isgq.wire.ans import TOTAL_BITS, ans_decode, ans_encode, frequencies, weight_codes
from isgq.wire.bits import DIGITS_PER_BYTE, pack_symbols, packed_size, unpack_symbols, whole_digits

CoderName = Literal["auto", "packed", "zstd", "ans"]

EXPANSION = 4096
"""Bytes of decoded symbols that one byte on the wire stands for, at most."""

ANS_ALPHABET_MAX = 4096
"""Largest alphabet for which a frequency table is sent."""

LARGE = 1 << 20
"""Symbols from which on a stream is large: speed counts for more."""

_WORTHWHILE = 0.97  # an entropy coder must take at most this part of the packed size
_FAST = 1.02  # Zstandard, several times as fast, may take this much more than ANS
_FAST_LARGE = 1.08  # the same for a large stream
_ZSTD_MIN = 1 << 12  # packed bytes below which speed does not count
_ZSTD_JOB = 1 << 19  # bytes that a thread compresses by itself
_SAMPLES, _SAMPLE = 8, 1 << 14  # how many samples of a large stream are tried, and the bytes of each
_BYTES_ALPHABET_MAX = 16  # largest alphabet of which several symbols share a byte
_ZSTD_MAGIC = zstandard.FRAME_HEADER

_FEW = 16  # symbols of an alphabet whose models recur from stream to stream and are kept
_KEPT = 4096

_CODERS = get_args(CoderName)

_Ints = npt.NDArray[np.int64]


class Coder(enum.IntEnum):
    """How the body of a stream is written; the number stands on the wire."""

    PACKED = 0
    ZSTD = 1
    ANS_COARSE = 2
    ANS_FINE = 3
    ANS_BYTES = 4

    @property
    def weight_bits(self) -> int:
        """Bits of one weight in the table of an ANS coder."""
        return 4 if self is Coder.ANS_COARSE else 8


_WEIGHTED = frozenset({Coder.ANS_COARSE, Coder.ANS_FINE})


def minimum_size(count: int, alphabet: int) -> int:
    """Bytes that the body of ``count`` symbols has at least."""
    return count * symbol_dtype(alphabet).itemsize // EXPANSION


def encode_stream(symbols: Symbols, coder: CoderName = "auto") -> tuple[Coder, bytes | memoryview]:
    """Code a stream.

    Args:
        symbols: values within the alphabet (not checked), on any device: packing takes place there.
        coder: ``"auto"`` picks by size, see :func:`_choose`; a named coder is used wherever it applies: where there is
            something to code and, for ANS, the alphabet is at most 4096.

    Returns:
        The coder used and the body, not yet filled up to :func:`minimum_size`.

    Raises:
        OptionError: unknown coder.
    """
    if coder not in _CODERS:
        raise OptionError(f"unknown coder {coder!r}; choose from {', '.join(_CODERS)}")
    if coder == "packed" or symbols.alphabet == 1 or not symbols.values.numel():
        return Coder.PACKED, _packed(symbols)
    if coder == "zstd":
        return Coder.ZSTD, _zstd(_whole(symbols))
    if coder == "ans" and symbols.alphabet <= ANS_ALPHABET_MAX:
        whole = _whole(symbols) if _is_large(symbols) else None
        counts, in_bytes = _histograms(symbols, whole)
        if whole is not None and in_bytes is not None:
            return Coder.ANS_BYTES, _ans(whole, _best_model(in_bytes, Coder.ANS_BYTES)[0])
        model, _ = _best_model(counts)
        return model.coder, _ans(symbols.values, model)
    return _choose(symbols) if coder == "auto" else (Coder.PACKED, _packed(symbols))


def decode_stream(coder: Coder, body: Tensor, count: int, alphabet: int, device: torch.device) -> Tensor:
    """Inverse of :func:`encode_stream`.

    Args:
        coder: how the body was written.
        body: uint8 ``[size]`` on the CPU, without what filled it up. The caller has checked that
            ``minimum_size(count, alphabet)`` bytes were received, so allocating the symbols is safe.
        count: number of symbols.
        alphabet: number of different symbols.
        device: where the symbols shall be.

    Returns:
        ``[count]`` of dtype ``symbol_dtype(alphabet)`` on the device.

    Raises:
        WireError: the body is no such stream.
    """
    if coder is Coder.PACKED:
        return unpack_symbols(body.to(device), count, alphabet)
    if alphabet == 1 or not count:
        raise WireError(f"stream of {count} symbols of an alphabet of {alphabet} is coded, but holds no information")
    if coder is Coder.ZSTD:
        return unpack_symbols(_unzstd(body, count, alphabet).to(device), count, alphabet, whole_digits)
    if alphabet > ANS_ALPHABET_MAX:
        raise WireError(
            f"stream with an alphabet of {alphabet} is coded by ANS, which takes {ANS_ALPHABET_MAX} at most"
        )
    if coder is not Coder.ANS_BYTES:
        return _unans(body, count, alphabet, coder.weight_bits).to(device)
    if alphabet > _BYTES_ALPHABET_MAX:
        raise WireError(
            f"stream with an alphabet of {alphabet} is coded by ANS of bytes, which takes {_BYTES_ALPHABET_MAX} at most"
        )
    size = packed_size(count, alphabet, whole_digits)
    return unpack_symbols(_unans(body, size, 256, coder.weight_bits).to(device), count, alphabet, whole_digits)


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a stream lies in some bytes: the arguments of :func:`decode_stream`."""

    coder: Coder
    body: slice
    count: int
    alphabet: int

    def decode(self, data: Tensor, device: torch.device) -> Tensor:
        """The symbols; WireError as of :func:`decode_stream`."""
        return decode_stream(self.coder, data[self.body], self.count, self.alphabet, device)


def decode_together(streams: Sequence[Stream], data: Tensor) -> list[Tensor | None]:
    """The symbols, on the CPU, of those streams that are decoded faster side by side; None for all others.

    Also for those that are malformed, of which :func:`decode_stream` tells what is wrong.

    Args:
        streams: checked as for :func:`decode_stream`.
        data: uint8, on the CPU, in which they lie.
    """
    found: list[Tensor | None] = [None] * len(streams)
    by_ans = [i for i, s in enumerate(streams) if s.coder in _WEIGHTED and 1 < s.alphabet <= 256 and s.count]
    kernels = compiled("coding", data.device)
    if kernels is None or len(by_ans) < 2:
        return found
    raw, chosen, fields, tables, place, shares = data.numpy(), [], [], [], 0, 0
    for i in sorted(by_ans, key=lambda i: -streams[i].count):
        stream = streams[i]
        start = stream.body.start + packed_size(stream.alphabet, 1 << stream.coder.weight_bits)
        table = _table(raw[stream.body.start : start].tobytes(), stream) if start <= stream.body.stop else None
        if table is None or (start < stream.body.stop and not raw[stream.body.stop - 1]):
            continue
        chosen.append(i)
        fields.append((start, stream.body.stop, stream.count, place, shares, shares + stream.alphabet))
        tables.append(table)
        place, shares = place + stream.count, shares + stream.alphabet
    if not fields:
        return found
    symbols, good = np.empty(place, dtype=np.uint8), np.empty(len(fields), dtype=np.bool_)
    kernels.ans_decode_together(raw, np.array(fields), np.concatenate(tables), symbols, good)
    decoded = torch.split(torch.from_numpy(symbols), [streams[i].count for i in chosen])
    for i, values, fine in zip(chosen, decoded, good, strict=True):
        found[i] = values if fine else None
    return found


def _table(packed: bytes, stream: Stream) -> _Ints | None:
    """The frequencies of a stream; None if it has no such table."""
    try:
        return _shares_of(packed, stream.alphabet, stream.coder.weight_bits)
    except WireError:
        return None


def _choose(symbols: Symbols) -> tuple[Coder, bytes | memoryview]:
    """The smallest coder, unless a faster one is nearly as small.

    ANS is estimated from the histogram. Packed symbols stay where it saves less than 3 %; Zstandard serves where it
    comes within 2 % of ANS, or 8 % in a large stream. Alphabets too large for a table choose between these two alone.
    """
    size = packed_size(symbols.values.numel(), symbols.alphabet)
    estimate = _WORTHWHILE * size / _FAST
    whole = _whole(symbols) if _is_large(symbols) else None
    if symbols.alphabet <= ANS_ALPHABET_MAX:
        counts, in_bytes = _histograms(symbols, whole)
        model, estimate = _best_model(counts)
        if estimate > _WORTHWHILE * size:
            return Coder.PACKED, _packed(symbols)
    if whole is None:
        if size >= _ZSTD_MIN and len(body := _zstd(_whole(symbols))) <= _FAST * estimate:
            return Coder.ZSTD, body
    elif _zstd_promises(whole, limit := _FAST_LARGE * estimate) and len(body := _zstd(whole)) <= limit:
        return Coder.ZSTD, body
    if symbols.alphabet > ANS_ALPHABET_MAX:
        return Coder.PACKED, _packed(symbols)
    if whole is not None and in_bytes is not None:
        return Coder.ANS_BYTES, _ans(whole, _best_model(in_bytes, Coder.ANS_BYTES)[0])
    # The last bytes of a short stream may belie the estimate.
    body = _ans(symbols.values, model)
    return (model.coder, body) if len(body) < size else (Coder.PACKED, _packed(symbols))


def _is_large(symbols: Symbols) -> bool:
    return symbols.values.numel() >= LARGE


def _packed(symbols: Symbols) -> memoryview:
    return pack_symbols(symbols.values, symbols.alphabet).cpu().numpy().data


def _whole(symbols: Symbols) -> Tensor:
    """Whole symbols in bytes, on the CPU."""
    return pack_symbols(symbols.values, symbols.alphabet, whole_digits).cpu()


def _zstd(whole: Tensor) -> bytes:
    threads = torch.get_num_threads()
    if threads == 1 or whole.numel() <= 2 * _ZSTD_JOB:
        compressor = zstandard.ZstdCompressor(level=1)
    else:
        compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1, source_size=whole.numel(), threads=threads, job_size=_ZSTD_JOB
            )
        )
    return compressor.compress(whole.numpy().data)[len(_ZSTD_MAGIC) :]


def _zstd_promises(whole: Tensor, limit: float) -> bool:
    """Whether Zstandard may stay below a size, by what it makes of samples of a large stream."""
    starts = range(0, whole.numel() - _SAMPLE + 1, max(whole.numel() // _SAMPLES, 1))
    sample = torch.cat([whole[start : start + _SAMPLE] for start in starts] or [whole])
    return len(_zstd(sample)) * whole.numel() <= 1.02 * limit * sample.numel()


def _unzstd(body: Tensor, count: int, alphabet: int) -> Tensor:
    """Whole symbols in bytes; the frame must announce their exact number, which bounds all that is allocated."""  # noqa: DOC501
    frame = _ZSTD_MAGIC + body.numpy().tobytes()
    size = packed_size(count, alphabet, whole_digits)
    try:
        header = zstandard.get_frame_parameters(frame)
        if header.content_size != size or header.window_size > max(size, 1 << 10) or header.dict_id:
            raise WireError(
                f"Zstandard frame announces {header.content_size} bytes, window {header.window_size}, dictionary "
                f"{header.dict_id}; {count} symbols of an alphabet of {alphabet} are {size} bytes without a dictionary"
            )
        whole = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"Zstandard stream of {body.numel()} bytes is damaged: {error}") from error
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Model:
    """A transmitted model: its table, the frequencies that follow from it, and the bits that each symbol takes."""

    coder: Coder
    table: bytes
    frequencies: _Ints
    bits: npt.NDArray[np.float64]

    @classmethod
    def of(cls, coder: Coder, codes: npt.NDArray[np.uint8]) -> "_Model":
        """The model of these weight codes ``[alphabet]``."""
        return (_kept_model if len(codes) <= _FEW else _model)(coder, codes.tobytes())


def _model(coder: Coder, codes: bytes) -> _Model:
    weights = np.frombuffer(bytearray(codes), dtype=np.uint8)
    shares = frequencies(weights, coder.weight_bits)
    table = pack_symbols(torch.from_numpy(weights), 1 << coder.weight_bits).numpy().tobytes()
    return _Model(coder, table, shares, TOTAL_BITS - np.log2(shares))


_kept_model = functools.lru_cache(_KEPT)(_model)


def _shares(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    """The frequencies that follow from a table; WireError if there is no such table."""
    packed = torch.frombuffer(bytearray(table), dtype=torch.uint8)
    return frequencies(unpack_symbols(packed, alphabet, 1 << weight_bits).numpy(), weight_bits)


_kept_shares = functools.lru_cache(_KEPT)(_shares)


def _shares_of(table: bytes, alphabet: int, weight_bits: int) -> _Ints:
    return (_kept_shares if alphabet <= _FEW else _shares)(table, alphabet, weight_bits)


def _histograms(symbols: Symbols, whole: Tensor | None) -> tuple[_Ints, _Ints | None]:
    """How often each symbol occurs, ``[alphabet]``, and each byte, ``[256]``, if bytes are given and are fewer."""
    if whole is None or symbols.alphabet > _BYTES_ALPHABET_MAX:
        return _count(symbols.values, symbols.alphabet), None
    ((base, *_),) = whole_digits(symbols.alphabet)
    per_byte = DIGITS_PER_BYTE[base]
    in_bytes = _count(whole, 256)
    by_digit = in_bytes[: base**per_byte].reshape([base] * per_byte)
    digits: _Ints = sum(by_digit.sum(tuple(b for b in range(per_byte) if b != axis)) for axis in range(per_byte))
    digits[0] -= per_byte * whole.numel() - symbols.values.numel()  # what fills up the last bytes
    return digits[: symbols.alphabet], in_bytes


def _count(values: Tensor, alphabet: int) -> _Ints:
    if alphabet <= 256 and (kernels := compiled("coding", values.device)):
        return _count_compiled(kernels, values.numpy())[:alphabet]
    parts = torch.split(values, piece_size(values.numel(), values.device))
    counted = map_pieces(lambda part: torch.bincount(part, minlength=alphabet), parts)
    total: _Ints = torch.stack(counted).sum(0).cpu().numpy()
    return total


def _count_compiled(kernels: ModuleType, values: npt.NDArray[np.uint8]) -> _Ints:
    """How often each byte occurs: ``[256]``."""

    def work(start: int, stop: int) -> _Ints:
        counts = np.zeros(256, dtype=np.int64)
        kernels.count_bytes(values[start:stop], counts)
        return counts

    return sum(map_parts(work, len(values)), np.zeros(256, dtype=np.int64))


def _best_model(counts: _Ints, *coders: Coder) -> tuple[_Model, float]:
    """The model that makes a stream of this histogram smallest, table included, and the bytes that it will take."""
    choices = []
    for coder in coders or (Coder.ANS_COARSE, Coder.ANS_FINE):
        model = _Model.of(coder, weight_codes(counts, coder.weight_bits))
        choices.append((model, math.ceil(float(counts @ model.bits) / 8) + len(model.table)))
    return min(choices, key=lambda choice: choice[1])


def _ans(values: Tensor, model: _Model) -> bytes:
    return model.table + ans_encode(values.cpu().numpy(), model.frequencies)


def _unans(body: Tensor, count: int, alphabet: int, weight_bits: int) -> Tensor:
    """Symbols coded by ANS, on the CPU; WireError if the body is no such stream."""  # noqa: DOC501
    size, data = packed_size(alphabet, 1 << weight_bits), body.numpy()
    if len(data) < size:
        raise WireError(f"table of {alphabet} weights takes {size} bytes, the stream has only {len(data)}")
    values = ans_decode(data[size:].tobytes(), count, _shares_of(data[:size].tobytes(), alphabet, weight_bits))
    return torch.from_numpy(values).to(symbol_dtype(alphabet))
