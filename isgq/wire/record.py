"""One record: what its layout does not say, namely digests, sizes and contents.

::

    record := digests (8 bytes each, little-endian)  part [part]
    part   := dims  tensor*  stream*
    tensor := dims  values (raw, little-endian)
    stream := [varint count, unless dense]  varint 8 length + coder  body  zeros

Dims are varints, as many as the layout says. The length of a packed stream follows from count and alphabet and stands
as 0. Zeros fill a body up to :func:`isgq.wire.entropy.minimum_size`. Tensors come before the streams, so that a
receiver has the scales when it decodes the symbols.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isgq.core.errors import CodecError, WireError
from isgq.core.payload import PairPayload, Payload, Symbols
from isgq.wire.bits import packed_size
from isgq.wire.entropy import Coder, CoderName, decode_stream, encode_stream, minimum_size
from isgq.wire.layout import Digests, Layout, PartLayout, Record, TensorLayout, parts_of, shape_problem
from isgq.wire.reader import Reader, varint

Pieces = list[bytes | memoryview]
_CODER_BITS = 3


def write_record(record: Record, layout: Layout, coder: CoderName, implied_digest: bool) -> Pieces:
    """Write a record.

    Args:
        record: what to write.
        layout: its layout.
        coder: for its streams.
        implied_digest: leave out a digest that the record has only one of.

    Raises:
        CodecError: symbols outside their alphabet.
        OptionError: unknown coder.
    """
    parts = parts_of(record)
    written = 0 if implied_digest and layout.digests is Digests.ONE else int(layout.digests)
    out: Pieces = [part.digest.to_bytes(8, "little") for part in parts[:written]]
    for part, part_layout in zip(parts, layout.parts, strict=True):
        out += [varint(size) for size in part.shape]
        for tensor in part.tensors.values():
            out += [*(varint(size) for size in tensor.shape), _raw(tensor)]
        for (name, symbols), stream in zip(part.symbols.items(), part_layout.streams, strict=True):
            _check_symbols(symbols, f"stream {name!r} of a {part.codec!r} payload")
            used, body = encode_stream(symbols, coder)
            count = symbols.values.numel()
            if not stream.dense:
                out.append(varint(count))
            length = 0 if used is Coder.PACKED else len(body)
            out += [varint(length << _CODER_BITS | used), body]
            out.append(bytes(max(0, minimum_size(count, symbols.alphabet) - len(body))))
    return out


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return _little_endian(flat, tensor.dtype.itemsize).numpy().data


def _little_endian(flat: Tensor, itemsize: int) -> Tensor:
    """Bytes ``[n itemsize]`` from the host's order to little-endian, or back."""
    return flat if sys.byteorder == "little" else flat.view(-1, itemsize).flip(1).reshape(-1)


def _check_symbols(symbols: Symbols, what: str) -> None:
    if not symbols.values.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(symbols.values))
    if low < 0 or high >= symbols.alphabet:
        raise CodecError(f"{what} has symbols {low} .. {high}, allowed are 0 .. {symbols.alphabet - 1}")


@dataclass(frozen=True, slots=True)
class RawField:
    """Where a raw tensor lies in a frame."""

    layout: TensorLayout
    shape: tuple[int, ...]
    body: slice

    def build(self, data: Tensor, device: torch.device) -> Tensor:
        """Copy it out of the frame ``data``; WireError if a bool is neither 0 nor 1."""  # noqa: DOC501
        flat = data[self.body].clone()
        if self.layout.dtype is torch.bool and flat.numel() and int(flat.max()) > 1:
            raise WireError(f"tensor {self.layout.name!r}: a bool is {int(flat.max())}, allowed are 0 and 1")
        flat = _little_endian(flat, self.layout.dtype.itemsize)
        return flat.view(self.layout.dtype).reshape(self.shape).to(device)


@dataclass(frozen=True, slots=True)
class StreamField:
    """Where a stream of symbols lies in a frame."""

    name: str
    alphabet: int
    count: int
    coder: Coder
    body: slice

    def build(self, data: Tensor, device: torch.device) -> Symbols:
        """Decode it from the frame ``data``; WireError if it is malformed."""  # noqa: DOC501
        try:
            values = decode_stream(self.coder, data[self.body], self.count, self.alphabet, device)
        except WireError as error:
            raise WireError(f"stream {self.name!r} at byte {self.body.start}: {error}") from error
        return Symbols(values, self.alphabet)


@dataclass(frozen=True, slots=True)
class PartFields:
    """Where the contents of a payload lie in a frame."""

    layout: PartLayout
    shape: tuple[int, ...]
    digest: int
    tensors: tuple[RawField, ...]
    streams: tuple[StreamField, ...]

    def build(self, data: Tensor, device: torch.device) -> Payload:
        """Decode the payload from the frame ``data``; WireError if it is malformed."""
        return Payload(
            codec=self.layout.codec,
            shape=self.shape,
            dtype=self.layout.dtype,
            tensors={field.layout.name: field.build(data, device) for field in self.tensors},
            symbols={field.name: field.build(data, device) for field in self.streams},
            digest=self.digest,
        )


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Where the contents of a record lie in a frame."""

    layout: Layout
    parts: tuple[PartFields, ...]

    def build(self, data: Tensor, device: torch.device) -> Record:
        """Decode the record.

        Args:
            data: uint8, the frame, on the CPU.
            device: where the tensors shall be.

        Raises:
            WireError: some stream or tensor is malformed.
        """
        parts = [part.build(data, device) for part in self.parts]
        return PairPayload(self.layout.codec, *parts) if self.layout.pair else parts[0]


def read_record(reader: Reader, layout: Layout, implied_digest: int | None) -> RecordFields:
    """Read the structure of a record, comparing every length with the bytes there are, but no contents.

    Args:
        reader: stands after the reference to the layout.
        layout: the layout of the record.
        implied_digest: the digest if the frame leaves it out, otherwise None.

    Raises:
        WireError: malformed.
    """
    digests = _read_digests(reader, layout, implied_digest)
    parts = (_read_part(reader, part, digest) for part, digest in zip(layout.parts, digests, strict=True))
    return RecordFields(layout, tuple(parts))


def _read_digests(reader: Reader, layout: Layout, implied: int | None) -> Sequence[int]:
    """One digest for each part; WireError where the layout would have been another."""  # noqa: DOC501
    if layout.digests is Digests.ONE and implied is not None:
        return [implied] * len(layout.parts)
    fields = [reader.skip(8, "digest") for _ in range(layout.digests)]
    digests = [int.from_bytes(reader.data[field], "little") for field in fields]
    if digests == [0] or (len(digests) == 2 and digests[0] == digests[1]):
        raise WireError(f"digests {digests} before byte {reader.at}: a layout with fewer digests says the same")
    return digests if layout.digests is Digests.TWO else (digests or [0]) * len(layout.parts)


def _read_part(reader: Reader, layout: PartLayout, digest: int) -> PartFields:
    shape = _read_shape(reader, layout.ndim, "tensor")
    tensors = tuple(_read_raw(reader, tensor) for tensor in layout.tensors)
    streams = tuple(
        _read_stream(reader, stream.name, stream.alphabet, stream.dense, math.prod(shape)) for stream in layout.streams
    )
    return PartFields(layout, shape, digest, tensors, streams)


def _read_shape(reader: Reader, ndim: int, what: str) -> tuple[int, ...]:
    shape = tuple(reader.varint(f"size of a {what}") for _ in range(ndim))
    if problem := shape_problem(shape):
        raise WireError(f"{what} before byte {reader.at}: {problem}")
    return shape


def _read_raw(reader: Reader, layout: TensorLayout) -> RawField:
    shape = _read_shape(reader, layout.ndim, f"tensor {layout.name!r}")
    return RawField(layout, shape, reader.skip(math.prod(shape) * layout.dtype.itemsize, f"tensor {layout.name!r}"))


def _read_stream(reader: Reader, name: str, alphabet: int, dense: bool, numel: int) -> StreamField:
    what = f"stream {name!r}"
    count = numel if dense else reader.varint(f"length of {what}")
    if count == numel and not dense:
        raise WireError(f"{what} before byte {reader.at} has {count} symbols, one an element, but is not called dense")
    length, code = divmod(reader.varint(f"coder of {what}"), 1 << _CODER_BITS)
    if code not in list(Coder):
        known = ", ".join(f"{c.value} {c.name.lower()}" for c in Coder)
        raise WireError(f"{what} before byte {reader.at} has coder {code}; known: {known}")
    coder = Coder(code)
    if coder is Coder.PACKED:
        if length:
            raise WireError(f"{what} before byte {reader.at} is packed, its length must be written as 0, not {length}")
        length = packed_size(count, alphabet)
    body = reader.skip(max(length, minimum_size(count, alphabet)), f"{what} of {count} symbols")
    if any(bytes(reader.data[body.start + length : body.stop])):
        raise WireError(f"{what} at byte {body.start}: what fills it up must be zero")
    return StreamField(name, alphabet, count, coder, slice(body.start, body.start + length))
