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
import threading
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from isgq.core.errors import OptionError, WireError
from isgq.core.payload import Symbols, symbol_dtype
from isgq.wire.ans import ans_decode, ans_encode
from isgq.wire.bits import pack_symbols, packed_size, tight_digits, unpack_symbols, whole_digits
from isgq.wire.histogram import count_bytes, count_packed, count_symbols
from isgq.wire.models import COARSE, FINE, Model, best_model, frequencies_of

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
        return COARSE if self is Coder.ANS_COARSE else FINE


_BY_WEIGHTS = {COARSE: Coder.ANS_COARSE, FINE: Coder.ANS_FINE}

WEIGHTED = frozenset(_BY_WEIGHTS.values())
"""The coders of symbols by ANS."""

Coded = tuple[Coder, bytes | memoryview]
"""A coder and a body."""


def minimum_size(count: int, alphabet: int) -> int:
    """Bytes that the body of ``count`` symbols has at least."""
    return count * symbol_dtype(alphabet).itemsize // EXPANSION


def encode_stream(symbols: Symbols, coder: CoderName = "auto") -> Coded:
    """Code a stream.

    Args:
        symbols: on any device: packing takes place there.
        coder: ``"auto"`` picks by size, see :func:`choose`; a named coder is used wherever it applies: where there is
            something to code and, for ANS, the alphabet is at most 4096.

    Returns:
        The coder used and the body, not yet filled up to :func:`minimum_size`.

    Raises:
        CodecError: a symbol is outside the alphabet.
        OptionError: unknown coder.
    """
    if coder not in _CODERS:
        raise OptionError(f"unknown coder {coder!r}; choose from {', '.join(_CODERS)}")
    if coder == "packed" or symbols.alphabet == 1 or not symbols.values.numel():
        return Coder.PACKED, _packed(symbols)
    if coder == "zstd":
        return Coder.ZSTD, _zstd(_whole(symbols))
    if coder == "ans" and symbols.alphabet > ANS_ALPHABET_MAX:
        return Coder.PACKED, _packed(symbols)
    large = symbols.values.numel() >= LARGE
    if large and symbols.alphabet <= _BYTES_ALPHABET_MAX:
        return _encode_bytes(symbols, coder)
    best = best_model(count_symbols(symbols)) if symbols.alphabet <= ANS_ALPHABET_MAX else None
    choice = choose(symbols, coder, best, _whole(symbols) if large else None)
    return settle(symbols, coder, choice, _ans(symbols.values, choice)) if isinstance(choice, Model) else choice


def _encode_bytes(symbols: Symbols, coder: CoderName) -> Coded:
    """A large stream of several symbols to a byte: bytes are counted, and coded, in a fraction of the time."""
    whole = _whole(symbols)
    counts, in_bytes = count_packed(whole, symbols)
    choice = choose(symbols, coder, best_model(counts), whole)
    if not isinstance(choice, Model):
        return choice
    model, _ = best_model(count_bytes(whole) if in_bytes is None else in_bytes, [FINE])
    return Coder.ANS_BYTES, _ans(whole, model)


def choose(
    symbols: Symbols, coder: CoderName, best: tuple[Model, int] | None, whole: Tensor | None = None
) -> Coded | Model:
    """The smallest coder, unless a faster one is nearly as small.

    ANS is estimated from the histogram. Packed symbols stay where it saves less than 3 %; Zstandard serves where it
    comes within 2 % of ANS, or 8 % in a large stream. Alphabets too large for a table choose between these two alone.

    Args:
        symbols: a stream that holds some information.
        coder: ``"auto"``, or ``"ans"`` for the model in any case.
        best: the model for ANS and the bytes it will take; None where the alphabet is too large for one.
        whole: of a large stream, the whole symbols in bytes.

    Returns:
        The coded stream, or the model for ANS.
    """
    size = packed_size(symbols.values.numel(), symbols.alphabet)
    model, estimate = best or (None, _WORTHWHILE * size / _FAST)
    if model is not None:
        if coder == "ans":
            return model
        if estimate > _WORTHWHILE * size:
            return Coder.PACKED, _packed(symbols, whole)
    body = _small_zstd(symbols, size, estimate) if whole is None else _large_zstd(whole, estimate)
    if body is not None:
        return Coder.ZSTD, body
    return model or (Coder.PACKED, _packed(symbols, whole))


def settle(symbols: Symbols, coder: CoderName, model: Model, body: bytes) -> Coded:
    """The stream coded by ANS, or packed after all: the last bytes of a short one may belie the estimate."""
    if coder == "ans" or len(body) < packed_size(symbols.values.numel(), symbols.alphabet):
        return _BY_WEIGHTS[model.weight_bits], body
    return Coder.PACKED, _packed(symbols)


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


def _packed(symbols: Symbols, whole: Tensor | None = None) -> memoryview:
    """Packed symbols; the whole ones in bytes, if there are any, may be the same."""
    if whole is None or whole_digits(symbols.alphabet) != tight_digits(symbols.alphabet):
        whole = pack_symbols(symbols.values, symbols.alphabet).cpu()
    return whole.numpy().data


def _whole(symbols: Symbols) -> Tensor:
    """Whole symbols in bytes, on the CPU."""
    return pack_symbols(symbols.values, symbols.alphabet, whole_digits).cpu()


class _Contexts(threading.local):
    """What Zstandard works with; each thread keeps its own, which take as long to make as to code a few kilobytes."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def _zstd(whole: Tensor) -> memoryview:
    threads, compressor = torch.get_num_threads(), _contexts.compressor
    if threads > 1 and whole.numel() > 2 * _ZSTD_JOB:
        compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                1, source_size=whole.numel(), threads=threads, job_size=_ZSTD_JOB
            )
        )
    return memoryview(compressor.compress(whole.numpy().data))[len(_ZSTD_MAGIC) :]


def _small_zstd(symbols: Symbols, size: int, estimate: float) -> memoryview | None:
    """A stream by Zstandard, if it is worth its time and small enough."""
    if size < _ZSTD_MIN:
        return None
    body = _zstd(_whole(symbols))
    return body if len(body) <= _FAST * estimate else None


def _large_zstd(whole: Tensor, estimate: float) -> memoryview | None:
    """The same of a large stream, if samples of it promise as much."""
    limit = _FAST_LARGE * estimate
    starts = range(0, whole.numel() - _SAMPLE + 1, max(whole.numel() // _SAMPLES, 1))
    sample = torch.cat([whole[start : start + _SAMPLE] for start in starts] or [whole])
    if len(_zstd(sample)) * whole.numel() > 1.02 * limit * sample.numel():
        return None
    body = _zstd(whole)
    return body if len(body) <= limit else None


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
        whole = _contexts.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"Zstandard stream of {body.numel()} bytes is damaged: {error}") from error
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def _ans(values: Tensor, model: Model) -> bytes:
    return model.table + ans_encode(values.cpu().numpy(), model.frequencies)


def _unans(body: Tensor, count: int, alphabet: int, weight_bits: int) -> Tensor:
    """Symbols coded by ANS, on the CPU; WireError if the body is no such stream."""  # noqa: DOC501
    size, data = packed_size(alphabet, 1 << weight_bits), body.numpy()
    if len(data) < size:
        raise WireError(f"table of {alphabet} weights takes {size} bytes, the stream has only {len(data)}")
    values = ans_decode(data[size:].tobytes(), count, frequencies_of(data[:size].tobytes(), alphabet, weight_bits))
    return torch.from_numpy(values).to(symbol_dtype(alphabet))
