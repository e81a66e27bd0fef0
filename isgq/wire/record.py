"""One record: what its layout does not say, namely sizes, digests and contents.

::

    sizes    := for each part:  dims  dims of each tensor  varint count of each stream that is not dense
    digests  := 8 bytes each, little-endian
    contents := for each part:  values of each tensor (raw, little-endian)  stream*
    stream   := varint 8 length + coder  body  zeros

Dims are varints, as many as the layout says. The length of a packed stream follows from count and alphabet and stands
as 0. Zeros fill a body up to :func:`isgq.wire.entropy.minimum_size`. Tensors come before the streams, so that a
receiver has the scales when it decodes the symbols.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isgq.core.errors import CodecError, WireError
from isgq.core.payload import PairPayload, Payload, Symbols
from isgq.wire.bits import packed_size
from isgq.wire.entropy import Coded, Coder, CoderName, encode_stream, minimum_size
from isgq.wire.layout import Layout, PartLayout, Record, TensorLayout, digests_of, parts_of, shape_problem
from isgq.wire.reader import Reader, varint
from isgq.wire.together import Stream, decode_together, encode_together

Pieces = list[bytes | memoryview]
Digests = Sequence[int | Sequence[int]]
"""For every record one digest that all its parts share, or a pair of them for x and d."""
_CODER_BITS = 3


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The sizes of a payload; counts of all streams, dense ones too."""

    shape: tuple[int, ...]
    tensors: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]


Sizes = tuple[PartSizes, ...]


def sizes_of(record: Record) -> Sizes:
    """The sizes of a record that is to be sent."""
    return tuple(
        PartSizes(
            shape=tuple(part.shape),
            tensors=tuple(tuple(tensor.shape) for tensor in part.tensors.values()),
            counts=tuple(symbols.values.numel() for symbols in part.symbols.values()),
        )
        for part in parts_of(record)
    )


def write_sizes(sizes: Sizes, layout: Layout) -> bytes:
    """Write the sizes of a record."""
    out = []
    for part, part_layout in zip(sizes, layout.parts, strict=True):
        out += [*part.shape, *(size for shape in part.tensors for size in shape)]
        out += [c for c, stream in zip(part.counts, part_layout.streams, strict=True) if not stream.dense]
    return b"".join(map(varint, out))


def read_sizes(reader: Reader, layout: Layout) -> Sizes:
    """Read the sizes of a record.

    Raises:
        WireError: a shape too large, or a dense stream that is not called so.
    """
    return tuple(_read_part_sizes(reader, part) for part in layout.parts)


def _read_part_sizes(reader: Reader, layout: PartLayout) -> PartSizes:
    shape = _read_shape(reader, layout.ndim, "tensor")
    numel = math.prod(shape)
    tensors = tuple(_read_shape(reader, tensor.ndim, f"tensor {tensor.name!r}") for tensor in layout.tensors)
    counts = []
    for stream in layout.streams:
        count = numel if stream.dense else reader.varint(f"length of stream {stream.name!r}")
        if count == numel and not stream.dense:
            raise WireError(
                f"stream {stream.name!r} before byte {reader.at} has {count} symbols, one for each element, "
                "but its layout does not call it dense"
            )
        counts.append(count)
    return PartSizes(shape, tensors, tuple(counts))


def _read_shape(reader: Reader, ndim: int, what: str) -> tuple[int, ...]:
    shape = tuple(reader.varint(f"size of a {what}") for _ in range(ndim))
    if problem := shape_problem(shape):
        raise WireError(f"{what} before byte {reader.at}: {problem}")
    return shape


def write_records(records: Sequence[Record], coder: CoderName, implied_digest: bool) -> list[Pieces]:
    """Write digests and contents of records.

    Args:
        records: what to write.
        coder: for their streams.
        implied_digest: leave the digests out.

    Raises:
        CodecError: symbols outside their alphabet.
        OptionError: unknown coder.
    """
    streams = [stream for record in records for part in parts_of(record) for stream in part.symbols.values()]
    known = iter(encode_together(streams, coder))
    return [_write_record(record, coder, implied_digest, known) for record in records]


def _write_record(record: Record, coder: CoderName, implied_digest: bool, known: Iterator[Coded | None]) -> Pieces:
    digests = [] if implied_digest else digests_of(record)
    out: Pieces = [digest.to_bytes(8, "little") for digest in digests]
    for part in parts_of(record):
        out += map(_raw, part.tensors.values())
        for name, symbols in part.symbols.items():
            try:
                used, body = next(known) or encode_stream(symbols, coder)
            except CodecError as error:
                raise CodecError(f"stream {name!r} of a {part.codec!r} payload has {error}") from error
            length = 0 if used is Coder.PACKED else len(body)
            missing = minimum_size(symbols.values.numel(), symbols.alphabet) - len(body)
            out += [varint(length << _CODER_BITS | used), body, bytes(max(0, missing))]
    return out


def _raw(tensor: Tensor) -> memoryview:
    """The values in row-major order, little-endian."""
    if tensor.dtype is torch.bfloat16:  # which numpy does not know
        tensor = tensor.view(torch.int16)
    flat = np.ascontiguousarray(tensor.numpy(force=True)).reshape(-1).view(np.uint8)
    return _little_endian(flat, tensor.itemsize).data


def _little_endian(flat: NDArray[np.uint8], itemsize: int) -> NDArray[np.uint8]:
    """Bytes ``[n itemsize]`` from the host's order to little-endian, or back."""
    return flat if sys.byteorder == "little" else flat.reshape(-1, itemsize)[:, ::-1].reshape(-1)


class RawField(NamedTuple):
    """Where a raw tensor lies in a frame."""

    layout: TensorLayout
    shape: tuple[int, ...]
    body: slice

    def build(self, frame: memoryview, device: torch.device) -> Tensor:
        """Copy it out of the frame; WireError if a bool is neither 0 nor 1."""  # noqa: DOC501
        dtype = self.layout.dtype
        if self.body.start == self.body.stop:
            return torch.empty(self.shape, dtype=dtype, device=device)
        raw = bytearray(frame[self.body])
        if sys.byteorder == "big":
            raw = bytearray(_little_endian(np.frombuffer(raw, dtype=np.uint8), dtype.itemsize))
        flat = torch.frombuffer(raw, dtype=dtype)
        if dtype is torch.bool and (largest := int(flat.view(torch.uint8).max())) > 1:
            raise WireError(f"tensor {self.layout.name!r}: a bool is {largest}, allowed are 0 and 1")
        return (flat if len(self.shape) == 1 else flat.view(self.shape)).to(device)


class StreamField(NamedTuple):
    """Where a stream of symbols lies in a frame."""

    name: str
    stream: Stream

    def build(self, data: Tensor, device: torch.device, values: Tensor | None) -> Symbols:
        """Decode it from the frame ``data``, unless its values are known; WireError if it is malformed."""  # noqa: DOC501
        try:
            values = self.stream.decode(data, device) if values is None else values.to(device)
        except WireError as error:
            raise WireError(f"stream {self.name!r} at byte {self.stream.body.start}: {error}") from error
        return Symbols(values, self.stream.alphabet)


class PartFields(NamedTuple):
    """Where the contents of a payload lie in a frame."""

    layout: PartLayout
    shape: tuple[int, ...]
    digest: int
    tensors: Sequence[RawField]
    streams: Sequence[StreamField]

    def build(self, data: Tensor, device: torch.device, known: Iterator[Tensor | None]) -> Payload:
        """Decode the payload from the frame ``data``; WireError if it is malformed."""
        frame = data.numpy().data
        return Payload(
            codec=self.layout.codec,
            shape=self.shape,
            dtype=self.layout.dtype,
            tensors={field.layout.name: field.build(frame, device) for field in self.tensors},
            symbols={field.name: field.build(data, device, next(known)) for field in self.streams},
            digest=self.digest,
        )


class RecordFields(NamedTuple):
    """Where the contents of a record lie in a frame."""

    layout: Layout
    parts: Sequence[PartFields]

    def build(self, data: Tensor, device: torch.device, known: Iterator[Tensor | None]) -> Record:
        """Decode the record; arguments and errors as of :func:`build_records`."""
        parts = [part.build(data, device, known) for part in self.parts]
        return PairPayload(self.layout.codec, *parts) if self.layout.pair else parts[0]


def build_records(records: Sequence[RecordFields], data: Tensor, device: torch.device) -> list[Record]:
    """Decode the contents of a frame.

    Args:
        records: where they lie.
        data: uint8, the frame, on the CPU.
        device: where the tensors shall be.

    Raises:
        WireError: some stream or tensor is malformed.
    """
    streams = [field.stream for record in records for part in record.parts for field in part.streams]
    known = iter(decode_together(streams, data))
    return [record.build(data, device, known) for record in records]


def digests_follow(record: Record, expected: int | Sequence[int]) -> bool:
    """Whether a record's digests are those expected, or zero."""
    given = (expected, expected) if isinstance(expected, int) else expected
    return all(part.digest in {0, digest} for part, digest in zip(parts_of(record), given, strict=False))


def read_record(reader: Reader, layout: Layout, sizes: Sizes, implied: "int | Sequence[int] | None") -> RecordFields:
    """Read the structure of a record, comparing every length with the bytes there are, but no contents.

    Args:
        reader: stands after the sizes.
        layout: the layout of the record.
        sizes: its sizes.
        implied: if the frame leaves digests out, the digest of all its parts, or one for each part.

    Raises:
        WireError: malformed.
    """
    digests = _read_digests(reader, layout) if implied is None else _use_digests(layout, implied)
    parts = zip(layout.parts, sizes, digests, strict=True)
    return RecordFields(layout, [_read_part(reader, *part) for part in parts])


def _read_digests(reader: Reader, layout: Layout) -> list[int]:
    """One digest for each part; WireError where the layout would have been another."""  # noqa: DOC501
    fields = [reader.skip(8, "digest") for _ in range(max(layout.digests))]
    digests = [0, *(int.from_bytes(reader.data[field], "little") for field in fields)]
    if len(set(digests)) < len(digests):
        raise WireError(f"digests {digests[1:]} before byte {reader.at} are zero or equal: the layout could say so")
    return [digests[which] for which in layout.digests]


def _use_digests(layout: Layout, implied: "int | Sequence[int]") -> list[int]:
    """The receiver's digests for each part that has one; WireError if it has too few."""  # noqa: DOC501
    given = [implied] * len(layout.parts) if isinstance(implied, int) else list(implied)[: len(layout.parts)]
    if len(given) < len(layout.parts):
        raise WireError(f"record of codec {layout.codec!r} has {len(layout.parts)} parts, {len(given)} digests passed")
    return [digest if which else 0 for digest, which in zip(given, layout.digests, strict=True)]


def _read_part(reader: Reader, layout: PartLayout, sizes: PartSizes, digest: int) -> PartFields:
    tensors = []
    for tensor, shape in zip(layout.tensors, sizes.tensors, strict=True):
        body = reader.skip(math.prod(shape) * tensor.dtype.itemsize, f"tensor {tensor.name!r}")
        tensors.append(RawField(tensor, shape, body))
    streams = [
        _read_stream(reader, stream.name, stream.alphabet, count)
        for stream, count in zip(layout.streams, sizes.counts, strict=True)
    ]
    return PartFields(layout, sizes.shape, digest, tensors, streams)


def _read_stream(reader: Reader, name: str, alphabet: int, count: int) -> StreamField:
    what = f"stream {name!r}"
    length, code = divmod(reader.varint(f"coder of {what}"), 1 << _CODER_BITS)
    try:
        coder = Coder(code)
    except ValueError:
        known = ", ".join(f"{c.value} {c.name.lower()}" for c in Coder)
        raise WireError(f"{what} before byte {reader.at} has coder {code}; known: {known}") from None
    if coder is Coder.PACKED:
        if length:
            raise WireError(f"{what} before byte {reader.at} is packed, its length must be written as 0, not {length}")
        length = packed_size(count, alphabet)
    body = reader.skip(max(length, minimum_size(count, alphabet)), f"{what} of {count} symbols")
    end = body.start + length
    if end < body.stop and any(bytes(reader.data[end : body.stop])):
        raise WireError(f"{what} at byte {body.start}: what fills it up must be zero")
    return StreamField(name, Stream(coder, slice(body.start, end), count, alphabet))
