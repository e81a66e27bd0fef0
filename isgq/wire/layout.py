"""What many records of a message have in common, written once: codec, dtypes, names and alphabets.

Bytes of a layout, where *name* is a reference into the frame's table of names::

    layout := head  name of the codec  part [part]
    head   := bit 0: a pair; bits 1-2 and 3-4: the digest of each part: 0 none, 1 the record's first, 2 its second
    part   := [name of its codec, in a pair]  dtype  ndim  varint #tensors  tensor*  varint #streams  stream*
    tensor := name  dtype  ndim
    stream := name  varint 2 (alphabet - 1) + dense

A *dense* stream has a symbol for each element of the tensor, so that its length need not be written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isgq.core.errors import CodecError, WireError
from isgq.core.payload import PairPayload, Payload
from isgq.wire.reader import Reader, References, varint

Record = Payload | PairPayload

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""The dtypes that can be sent; a dtype's position is its code."""

_DIGESTS = {False: ((0,), (1,)), True: ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))}
"""Which digests the parts of a single payload, or of a pair, may have."""

NDIM_MAX = 64
NUMEL_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A raw tensor without its sizes."""

    name: str
    dtype: torch.dtype
    ndim: int


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """A stream of symbols without its length."""

    name: str
    alphabet: int
    dense: bool


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A payload without sizes, digest and contents."""

    codec: str
    dtype: torch.dtype
    ndim: int
    tensors: tuple[TensorLayout, ...]
    streams: tuple[StreamLayout, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A record without sizes, digests and contents.

    Attributes:
        codec: of the record.
        pair: whether it has two parts; a single payload has one, with the codec of the record.
        digests: for each part, which of the record's digests it has, counted from 1; 0 is none.
        parts: one or two.
    """

    codec: str
    pair: bool
    digests: tuple[int, ...]
    parts: tuple[PartLayout, ...]


def parts_of(record: Record) -> tuple[Payload, ...]:
    """The payloads of a record: one, or a pair's x and d."""
    return (record.x, record.d) if isinstance(record, PairPayload) else (record,)


def layout_of(record: Record) -> Layout:
    """The layout of a record that is to be sent.

    Raises:
        CodecError: a dtype, shape or digest that cannot be sent.
    """
    parts = parts_of(record)
    different = digests_of(record)
    return Layout(
        codec=record.codec,
        pair=isinstance(record, PairPayload),
        digests=tuple(different.index(part.digest) + 1 if part.digest else 0 for part in parts),
        parts=tuple(_part_of(part) for part in parts),
    )


def digests_of(record: Record) -> list[int]:
    """The different digests of a record that are not 0, in the order of its parts.

    Raises:
        CodecError: one has more than 64 bits.
    """
    digests = [part.digest for part in parts_of(record) if part.digest]
    for digest in digests:
        if not 0 <= digest < 1 << 64:
            raise CodecError(f"digest {digest} of a {record.codec!r} payload must be in 0 .. 2**64 - 1")
    return list(dict.fromkeys(digests))


def _part_of(payload: Payload) -> PartLayout:
    for what, shape, dtype in (
        ("its tensor", payload.shape, payload.dtype),
        *((f"tensor {name!r}", tensor.shape, tensor.dtype) for name, tensor in payload.tensors.items()),
    ):
        if dtype not in DTYPES:
            raise CodecError(f"{what} of a {payload.codec!r} payload is {dtype}; can be sent: {_names(DTYPES)}")
        if problem := shape_problem(shape):
            raise CodecError(f"{what} of a {payload.codec!r} payload cannot be sent: {problem}")
    return PartLayout(
        codec=payload.codec,
        dtype=payload.dtype,
        ndim=len(payload.shape),
        tensors=tuple(TensorLayout(name, t.dtype, t.dim()) for name, t in payload.tensors.items()),
        streams=tuple(
            StreamLayout(name, s.alphabet, s.values.numel() == payload.numel) for name, s in payload.symbols.items()
        ),
    )


def shape_problem(shape: Sequence[int]) -> str | None:
    """What is wrong with a shape, if anything; both sides keep to it."""
    if len(shape) > NDIM_MAX:
        return f"{len(shape)} dimensions, allowed are {NDIM_MAX}"
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) > NUMEL_MAX:
        return f"shape {tuple(shape)}, whose sizes must be at least 0 and multiply to at most 2**62"
    return None


def write_layout(layout: Layout, names: dict[str, int]) -> bytes:
    """Write a layout; names not yet in the table are added to it."""

    def name(value: str) -> bytes:
        return varint(names.setdefault(value, len(names)))

    head = layout.pair | sum(digest << 2 * at + 1 for at, digest in enumerate(layout.digests))
    out = [bytes([head]), name(layout.codec)]
    for part in layout.parts:
        if layout.pair:
            out.append(name(part.codec))
        out += [bytes([DTYPES.index(part.dtype), part.ndim]), varint(len(part.tensors))]
        out += [name(t.name) + bytes([DTYPES.index(t.dtype), t.ndim]) for t in part.tensors]
        out.append(varint(len(part.streams)))
        out += [name(s.name) + varint(2 * (s.alphabet - 1) + s.dense) for s in part.streams]
    return b"".join(out)


def read_layout(reader: Reader, names: Sequence[str], references: References) -> Layout:
    """Read a layout.

    Args:
        reader: stands at its first byte.
        names: the table of names.
        references: reads references into that table.

    Raises:
        WireError: malformed.
    """
    head = reader.byte("head of a layout")
    pair = bool(head & 1)
    digests = (head >> 1 & 3, head >> 3) if pair else (head >> 1,)
    if digests not in _DIGESTS[pair]:
        allowed = " ".join(map(str, _DIGESTS[pair]))
        raise WireError(
            f"head of a layout at byte {reader.at - 1} gives its parts digests {digests}, allowed: {allowed}"
        )
    codec = names[references.read(reader)]
    parts = []
    for _ in range(2 if pair else 1):
        part_codec = names[references.read(reader)] if pair else codec
        dtype, ndim = _read_type(reader, "tensor")
        tensors = tuple(
            TensorLayout(names[references.read(reader)], *_read_type(reader, "side tensor"))
            for _ in range(reader.varint("number of side tensors"))
        )
        streams = tuple(_read_stream(reader, names, references) for _ in range(reader.varint("number of streams")))
        for kind, used in (("tensors", [t.name for t in tensors]), ("streams", [s.name for s in streams])):
            if len(set(used)) < len(used):
                raise WireError(f"two {kind} of a {part_codec!r} payload have the same name: {', '.join(used)}")
        parts.append(PartLayout(part_codec, dtype, ndim, tensors, streams))
    return Layout(codec, pair, digests, tuple(parts))


def _read_type(reader: Reader, what: str) -> tuple[torch.dtype, int]:
    """Read dtype and number of dimensions; WireError if there is none such."""  # noqa: DOC501
    code, ndim = reader.byte(f"dtype of a {what}"), reader.byte(f"number of dimensions of a {what}")
    if code >= len(DTYPES):
        raise WireError(f"dtype {code} of a {what} at byte {reader.at - 2} is unknown; known: {_names(DTYPES)}")
    if ndim > NDIM_MAX:
        raise WireError(f"{what} at byte {reader.at - 1} has {ndim} dimensions, allowed are {NDIM_MAX}")
    return DTYPES[code], ndim


def _read_stream(reader: Reader, names: Sequence[str], references: References) -> StreamLayout:
    name = names[references.read(reader)]
    half, dense = divmod(reader.varint("alphabet of a stream"), 2)
    return StreamLayout(name, half + 1, bool(dense))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(f"{code} {str(dtype).removeprefix('torch.')}" for code, dtype in enumerate(dtypes))
