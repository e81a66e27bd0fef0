"""Frames: payloads as one checked piece of bytes. ``docs/wire-format.md`` has the layout byte by byte, with an example.

::

    frame  := "IQ"  version 1  kind  crc32 (4 bytes, little-endian, of all other bytes)  body
    body   := varint #names  text*  varint #layouts  layout*  varint #records  (reference to a layout  record)*

Names (:mod:`isgq.wire.reader`), layouts (:mod:`isgq.wire.layout`) and records (:mod:`isgq.wire.record`) are three
levels: what several records have in common stands once.

Reading goes twice over the bytes: first the structure, completely, with every length compared with the bytes there are,
then the contents. Nothing is allocated for a length that the bytes do not bear out: what a frame decodes into is at
most 4096 bytes for each of its own, scratch at most five times as much, besides some hundred kilobytes of fixed work
space for the entropy coders.
"""

import enum
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from isgq.core.errors import WireError
from isgq.wire.entropy import CoderName
from isgq.wire.layout import Layout, Record, layout_of, read_layout, write_layout
from isgq.wire.reader import Reader, References, text, varint
from isgq.wire.record import Pieces, RecordFields, read_record, write_record

MAGIC = b"IQ"
VERSION = 1

_HEADER = struct.Struct("<2sBBI")
_CHECKSUM_AT = 4


class Kind(enum.IntEnum):
    """What a frame holds."""

    PAYLOAD = 1  # one record
    MESSAGE = 2  # any number of records
    IMPLIED = 3  # the same, but the receiver knows the digests


def pack(payload: Record, *, coder: CoderName = "auto") -> Tensor:
    """Write one payload.

    Args:
        payload: on any device; symbols are packed there.
        coder: for its streams: ``"auto"`` chooses for each by size; a name serves wherever that coder applies.

    Returns:
        uint8 ``[bytes]`` on the CPU.

    Raises:
        CodecError: symbols outside their alphabet, or a name, dtype, shape or digest that cannot be sent.
        OptionError: unknown coder.
    """
    return _write(Kind.PAYLOAD, [payload], coder)[0]


def pack_message(
    records: Sequence[Record], *, coder: CoderName = "auto", implied_digest: bool = False
) -> tuple[Tensor, list[int]]:
    """Write many payloads with one header and one checksum, saying once what they have in common.

    Args:
        records: in an order that the receiver knows.
        coder: as for :func:`pack`.
        implied_digest: leave out digests, because the receiver can make them from its own keys. Zero digests stay zero,
            and a pair whose parts have different digests still carries them.

    Returns:
        uint8 ``[bytes]`` on the CPU, and the bytes of each record; the rest is shared by all.

    Raises:
        CodecError: as for :func:`pack`.
        OptionError: as for :func:`pack`.
    """
    return _write(Kind.IMPLIED if implied_digest else Kind.MESSAGE, records, coder)


def unpack(data: Tensor, *, device: torch.device | str = "cpu") -> Record:
    """Read what :func:`pack` wrote: the same payload, bit for bit.

    Args:
        data: uint8 ``[bytes]``, on any device; not kept.
        device: where the payload's tensors shall be.

    Raises:
        WireError: the bytes are not exactly one such frame.
    """
    host = _on_host(data)
    kind, records = _read(host, None)
    if kind is not Kind.PAYLOAD:
        raise WireError(f"frame is a message of {len(records)} records, not one payload: use unpack_message")
    return records[0].build(host, torch.device(device))


def unpack_message(
    data: Tensor, *, digests: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> list[Record]:
    """Read what :func:`pack_message` wrote: the same payloads, bit for bit.

    Args:
        data: uint8 ``[bytes]``, on any device; not kept.
        digests: of every record, if and only if the message was written with ``implied_digest``.
        device: where the payloads' tensors shall be.

    Raises:
        WireError: the bytes are not exactly one such frame, or the digests do not fit it.
    """
    host = _on_host(data)
    kind, records = _read(host, digests)
    if kind is Kind.PAYLOAD:
        raise WireError("frame is a single payload, not a message: use unpack")
    return [record.build(host, torch.device(device)) for record in records]


def checksum(frame: memoryview) -> int:
    """CRC-32 (as in zlib) of a frame without the checksum itself."""
    return zlib.crc32(frame[_HEADER.size :], zlib.crc32(frame[:_CHECKSUM_AT]))


def _write(kind: Kind, records: Sequence[Record], coder: CoderName) -> tuple[Tensor, list[int]]:
    names: dict[str, int] = {}
    layouts: dict[Layout, int] = {}
    written: Pieces = []
    bodies: list[Pieces] = []
    for record in records:
        layout = layout_of(record)
        if layout not in layouts:
            layouts[layout] = len(layouts)
            written.append(write_layout(layout, names))
        bodies.append([varint(layouts[layout]), *write_record(record, layout, coder, kind is Kind.IMPLIED)])
    head: Pieces = [_HEADER.pack(MAGIC, VERSION, kind, 0)]
    head += [varint(len(names)), *map(text, names), varint(len(layouts)), *written, varint(len(bodies))]
    frame = bytearray().join(head + [piece for body in bodies for piece in body])
    struct.pack_into("<I", frame, _CHECKSUM_AT, checksum(memoryview(frame)))
    return torch.frombuffer(frame, dtype=torch.uint8), [sum(map(len, body)) for body in bodies]


def _on_host(data: Tensor) -> Tensor:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"a frame is a 1-d uint8 tensor, got {data.dtype} of shape {tuple(data.shape)}")
    return data.cpu().contiguous()


def _read(data: Tensor, digests: Sequence[int] | None) -> tuple[Kind, list[RecordFields]]:
    """Check the whole structure of a frame and say where its contents lie; WireError if it is malformed."""  # noqa: DOC501
    frame = data.numpy().data
    kind = _read_header(frame)
    if (kind is Kind.IMPLIED) != (digests is not None):
        raise WireError(
            "message leaves out its digests: pass digests=, one for each record"
            if digests is None
            else f"frame ({kind.name.lower()}) carries its own digests: none may be passed"
        )
    reader = Reader(frame, _HEADER.size)
    names = [reader.text("name") for _ in range(reader.varint("number of names"))]
    name_use = References(len(names), "name")
    layouts = [read_layout(reader, names, name_use) for _ in range(reader.varint("number of layouts"))]
    name_use.finish()
    for what, table in (("names", names), ("layouts", layouts)):
        if len(set(table)) < len(table):
            raise WireError(f"table of {len(table)} {what} holds one of them twice")
    count = reader.varint("number of records")
    if digests is not None and len(digests) != count:
        raise WireError(f"message has {count} records, {len(digests)} digests were passed")
    if kind is Kind.PAYLOAD and count != 1:
        raise WireError(f"frame of one payload says that it holds {count}")
    layout_use = References(len(layouts), "layout")
    records = []
    for index in range(count):
        layout = layouts[layout_use.read(reader)]
        records.append(read_record(reader, layout, None if digests is None else digests[index]))
    layout_use.finish()
    if reader.at != len(frame):
        raise WireError(f"frame ends at byte {reader.at}, {len(frame) - reader.at} more follow")
    return kind, records


def _read_header(frame: memoryview) -> Kind:
    """The kind of a frame; WireError on anything but a frame of this version, whole and undamaged."""  # noqa: DOC501
    if len(frame) < _HEADER.size:
        raise WireError(f"{len(frame)} bytes are no frame: its header alone has {_HEADER.size}")
    magic, version, kind, crc = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"bytes begin with {magic!r}, a frame with {MAGIC!r}: not written by isgq")
    if version != VERSION:
        raise WireError(f"frame of version {version}, this is version {VERSION}: use the same isgq on every rank")
    if kind not in list(Kind):
        raise WireError(f"frame of kind {kind}; known: {', '.join(f'{k.value} {k.name.lower()}' for k in Kind)}")
    if (actual := checksum(frame)) != crc:
        raise WireError(f"checksum is {actual:#010x}, the frame says {crc:#010x}: bytes were damaged or cut off")
    return Kind(kind)
