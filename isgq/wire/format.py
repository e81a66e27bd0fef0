"""Frames: payloads as one checked piece of bytes. ``docs/wire-format.md`` has the layout byte by byte, with an example.

::

    frame  := "IQ"  version 1  kind  crc32 (4 bytes, little-endian, of all other bytes)  tables  record*
            | 0xC0 + kind  crc32  record*, where a template says all the rest
    tables := varint #names  text*  varint #layouts  layout*  varint #records
    record := form  digests  contents
    form   := 0, as the template says | 1 + reference to a layout  sizes

Names (:mod:`isgq.wire.reader`), layouts (:mod:`isgq.wire.layout`) and records (:mod:`isgq.wire.record`) are three
levels: what several records have in common stands once, and what both sides know beforehand
(:mod:`isgq.wire.template`) not at all.

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
from isgq.wire.layout import Layout, Record, read_layout, write_layout
from isgq.wire.reader import Reader, References, text, varint
from isgq.wire.record import (
    Digests,
    Pieces,
    RecordFields,
    build_records,
    digests_follow,
    read_record,
    read_sizes,
    write_records,
    write_sizes,
)
from isgq.wire.template import Form, Template, form_of

MAGIC = b"IQ"
VERSION = 1

_STANDS_ALONE = Template()
_HEADER = struct.Struct("<2sBBI")
_SHORT, _SHORT_MARK = struct.Struct("<BI"), 0xC0
_CHECKSUM_BYTES = 4

FRAME_BYTES = _SHORT.size
"""What a message takes besides its records, if both sides know its names and layouts."""


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
    return _write(Kind.PAYLOAD, [payload], [form_of(payload)], coder, _STANDS_ALONE)[0]


def pack_message(
    records: Sequence[Record],
    *,
    coder: CoderName = "auto",
    digests: Digests | None = None,
    template: Template | None = None,
    forms: Sequence[Form] | None = None,
) -> tuple[Tensor, list[int]]:
    """Write many payloads with one header and one checksum, saying once what they have in common.

    Args:
        records: in an order that the receiver knows.
        coder: as for :func:`pack`.
        digests: what the receiver expects, as it makes it from its own keys: for every record one for all its parts, or
            a pair of them for x and d. They are left out if they are those of the records (zero digests stay zero), and
            written if not. In either case the message can be read with the same digests only.
        template: leave out what the receiver knows from the same template; a record may still differ from it.
        forms: what :func:`isgq.wire.template.form_of` says of the records, if it has been asked already.

    Returns:
        uint8 ``[bytes]`` on the CPU, and the bytes of each record; the rest is shared by all.

    Raises:
        CodecError: as for :func:`pack`.
        OptionError: as for :func:`pack`.
    """
    implied = digests is not None and all(map(digests_follow, records, digests))
    kind = Kind.IMPLIED if implied else Kind.MESSAGE
    return _write(kind, records, forms or list(map(form_of, records)), coder, template or _STANDS_ALONE, digests)


def unpack(data: Tensor, *, device: torch.device | str = "cpu") -> Record:
    """Read what :func:`pack` wrote: the same payload, bit for bit.

    Args:
        data: uint8 ``[bytes]``, on any device; not kept.
        device: where the payload's tensors shall be.

    Raises:
        WireError: the bytes are not exactly one such frame.
    """
    host = _on_host(data)
    kind, records = read_frame(host, None, _STANDS_ALONE)
    if kind is not Kind.PAYLOAD:
        raise WireError(f"frame is a message of {len(records)} records, not one payload: use unpack_message")
    return build_records(records, host, torch.device(device))[0]


def unpack_message(
    data: Tensor,
    *,
    digests: Digests | None = None,
    template: Template | None = None,
    device: torch.device | str = "cpu",
) -> list[Record]:
    """Read what :func:`pack_message` wrote: the same payloads, bit for bit.

    Args:
        data: uint8 ``[bytes]``, on any device; not kept.
        digests: those that the message was written with, if any. Of a pair of digests, a record of one part has the
            first.
        template: the one that the message was written with.
        device: where the payloads' tensors shall be.

    Raises:
        WireError: the bytes are not exactly one such frame, or digests or template do not fit it.
    """
    host = _on_host(data)
    kind, records = read_frame(host, digests, template or _STANDS_ALONE)
    if kind is Kind.PAYLOAD:
        raise WireError("frame is a single payload, not a message: use unpack")
    return build_records(records, host, torch.device(device))


def checksum(frame: memoryview, template: Template = _STANDS_ALONE, digests: Digests | None = None) -> int:
    """CRC-32 (as in zlib) of a frame without the checksum itself, begun with its template's and that of its digests."""
    known = template.checksum
    for given in digests or ():
        for digest in (given,) if isinstance(given, int) else given:
            known = zlib.crc32(digest.to_bytes(8, "little"), known)
    at = checksum_at(frame)
    return zlib.crc32(frame[at + _CHECKSUM_BYTES :], zlib.crc32(frame[:at], known))


def checksum_at(frame: memoryview | bytes | bytearray) -> int:
    """Where a frame of a byte or more has its checksum: its last field before the tables, or the records."""
    return (_SHORT.size if frame[0] >= _SHORT_MARK else _HEADER.size) - _CHECKSUM_BYTES


def _write(
    kind: Kind,
    records: Sequence[Record],
    forms: Sequence[Form],
    coder: CoderName,
    template: Template,
    digests: Digests | None = None,
) -> tuple[Tensor, list[int]]:
    names = {name: at for at, name in enumerate(template.names)}
    layouts = {layout: at for at, layout in enumerate(template.layouts)}
    new_layouts: Pieces = []
    bodies: list[Pieces] = []
    contents = write_records(records, coder, kind is Kind.IMPLIED)
    for index, (form, content) in enumerate(zip(forms, contents, strict=True)):
        layout, sizes = form
        if form == template.form(index):
            said = varint(0)
        else:
            if layout not in layouts:
                layouts[layout] = len(layouts)
                new_layouts.append(write_layout(layout, names))
            said = varint(1 + layouts[layout]) + write_sizes(sizes, layout)
        bodies.append([said, *content])
    new_names = list(names)[len(template.names) :]
    if _says_all(template, len(new_names), len(new_layouts), len(bodies)):
        head: Pieces = [_SHORT.pack(_SHORT_MARK | kind, 0)]
    else:
        head = [_HEADER.pack(MAGIC, VERSION, kind, 0), varint(len(new_names)), *map(text, new_names)]
        head += [varint(len(new_layouts)), *new_layouts, varint(len(bodies))]
    frame = bytearray().join([*head, *(piece for body in bodies for piece in body)])
    struct.pack_into("<I", frame, checksum_at(frame), checksum(memoryview(frame), template, digests))
    return torch.frombuffer(frame, dtype=torch.uint8), [sum(map(len, body)) for body in bodies]


def _says_all(template: Template, names: int, layouts: int, records: int) -> bool:
    """Whether a frame with so many new names and layouts, and so many records, is short."""
    return bool(template.forms) and not names and not layouts and records == len(template.forms)


def _on_host(data: Tensor) -> Tensor:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise WireError(f"a frame is a 1-d uint8 tensor, got {data.dtype} of shape {tuple(data.shape)}")
    return data.cpu().contiguous()


def read_frame(data: Tensor, digests: Digests | None, template: Template) -> tuple[Kind, list[RecordFields]]:
    """Check the whole structure of a frame and say where its contents lie; WireError if it is malformed."""  # noqa: DOC501
    frame = data.numpy().data
    kind = _read_header(frame, template, digests)
    if frame[0] >= _SHORT_MARK:
        reader, layouts, count = Reader(frame, _SHORT.size), list(template.layouts), len(template.forms)
    else:
        reader = Reader(frame, _HEADER.size)
        names, layouts = _read_layouts(reader, template)
        count = reader.varint("number of records")
        if _says_all(template, names, len(layouts) - len(template.layouts), count):
            raise WireError("frame writes out what its template says: it has to be a short one")
    if digests is not None and len(digests) != count:
        raise WireError(f"message has {count} records, digests for {len(digests)} were passed")
    if kind is Kind.PAYLOAD and count != 1:
        raise WireError(f"frame of one payload says that it holds {count}")
    use = References(len(layouts), "layout", known=len(template.layouts))
    records = []
    for index in range(count):
        layout, sizes = _read_form(reader, layouts, use, template.form(index))
        implied = digests[index] if kind is Kind.IMPLIED and digests is not None else None
        records.append(read_record(reader, layout, sizes, implied))
    use.finish()
    if reader.at != len(frame):
        raise WireError(f"frame ends at byte {reader.at}, {len(frame) - reader.at} more follow")
    return kind, records


def _read_layouts(reader: Reader, template: Template) -> tuple[int, list[Layout]]:
    """Number of names in the frame; layouts of the template, then of the frame.

    WireError if the frame's tables repeat or do not use an entry.
    """  # noqa: DOC501
    names = [*template.names, *(reader.text("name") for _ in range(reader.varint("number of names")))]
    use = References(len(names), "name", known=len(template.names))
    layouts = list(template.layouts)
    layouts += [read_layout(reader, names, use) for _ in range(reader.varint("number of layouts"))]
    use.finish()
    if len(set(names)) < len(names) or len(set(layouts)) < len(layouts):
        raise WireError(f"tables of {len(names)} names and {len(layouts)} layouts hold one of them twice")
    return len(names) - len(template.names), layouts


def _read_form(reader: Reader, layouts: Sequence[Layout], use: References, expected: Form | None) -> Form:
    """Layout and sizes of a record; WireError if they are those expected, but written out, or the other way round."""  # noqa: DOC501
    code = reader.varint("form of a record")
    if code == 0:
        if expected is None:
            raise WireError(f"record before byte {reader.at} has the form that the template says, which says none")
        return expected
    layout = layouts[use.check(code - 1, reader)]
    form = layout, read_sizes(reader, layout)
    if form == expected:
        raise WireError(f"record before byte {reader.at} writes out the form that the template says")
    return form


def _read_header(frame: memoryview, template: Template, digests: Digests | None) -> Kind:
    """The kind of a frame; WireError on anything but a frame of this version, whole and undamaged."""  # noqa: DOC501
    short = len(frame) > 0 and frame[0] >= _SHORT_MARK
    least = _SHORT.size if short else _HEADER.size
    if len(frame) < least:
        raise WireError(f"{len(frame)} bytes are no frame: its header alone has {least}")
    if short:
        mark, crc = _SHORT.unpack_from(frame)
        kind = mark - _SHORT_MARK
        if not template.forms:
            raise WireError("frame is a short one: pass template=, which says the rest")
    else:
        magic, version, kind, crc = _HEADER.unpack_from(frame)
        if magic != MAGIC:
            raise WireError(f"bytes begin with {magic!r}, a frame with {MAGIC!r}: not written by isgq")
        if version != VERSION:
            raise WireError(f"frame of version {version}, this is version {VERSION}: use the same isgq on every rank")
    if kind not in list(Kind):
        raise WireError(f"frame of kind {kind}; known: {', '.join(f'{k.value} {k.name.lower()}' for k in Kind)}")
    if kind == Kind.IMPLIED and digests is None:
        raise WireError("message leaves out its digests: pass digests=, one for each record")
    if (actual := checksum(frame, template, digests)) != crc:
        raise WireError(
            f"checksum is {actual:#010x}, the frame says {crc:#010x}: bytes were damaged or cut off, or the frame was "
            "written with another template or other digests (those of another step, rank or seed)"
        )
    return Kind(kind)
