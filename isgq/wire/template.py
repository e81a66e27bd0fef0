"""What sender and receiver both know of a message beforehand, and need not say again.

The messages of one training step look like those of the step before: the same codecs, names, alphabets and shapes, only
the contents differ. Of a message of a few hundred bytes, all that would be a sixth. A :class:`Template` is made from
records that both sides hold, for instance those that some rank sent to all in an earlier step. The checksum of a frame
begins with that of the template, so that reading with another one is an error and never a wrong result.
"""

import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from isgq.core.payload import Payload
from isgq.wire.layout import Layout, Record, layout_of, parts_of, write_layout
from isgq.wire.reader import text, varint
from isgq.wire.record import Sizes, sizes_of, write_sizes

Form = tuple[Layout, Sizes]
"""All of a record but its digests and contents."""


@dataclass(frozen=True, slots=True)
class Template:
    """Names, layouts and forms known to both sides; the empty template, for a message that stands alone.

    Attributes:
        names: first entries of the table of names.
        layouts: first entries of the table of layouts.
        forms: what the records of a message are expected to be, in their order; None where nothing is known.
        checksum: CRC-32 of the bytes that would say all this; 0 for the empty template.
    """

    names: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    forms: tuple[Form | None, ...] = ()
    checksum: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        """The template of messages whose records are like these; contents and digests are not kept.

        Raises:
            CodecError: a record that could not be sent.
        """
        return cls.of_forms(map(form_of, records))

    @classmethod
    def of_forms(cls, forms: Iterable[Form | None]) -> Self:
        """The same from the records' forms; None for a record of which nothing is known."""
        names: dict[str, int] = {}
        layouts: dict[Layout, int] = {}
        said = []
        forms = tuple(forms)
        for layout, sizes in filter(None, forms):
            if layout not in layouts:
                layouts[layout] = len(layouts)
                said.append(write_layout(layout, names))
            said.append(varint(layouts[layout]) + write_sizes(sizes, layout))
        checksum = zlib.crc32(b"".join([*map(text, names), *said]))
        return cls(tuple(names), tuple(layouts), forms, checksum)

    def form(self, index: int) -> Form | None:
        """What the record of this number is expected to be, if anything."""
        return self.forms[index] if index < len(self.forms) else None


_forms: dict[Hashable, Form] = {}  # by all that a form follows from; a training step asks again and again
_MOST_FORMS = 4096


def form_of(record: Record) -> Form:
    """The form of a record; asked again for a record like it, the same object.

    Raises:
        CodecError: it could not be sent.
    """
    parts = parts_of(record)
    facts = (record.codec, len(parts), parts[0].digest == parts[-1].digest, *map(_facts, parts))
    form = _forms.get(facts)
    if form is None:
        form = layout_of(record), sizes_of(record)
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        _forms[facts] = form
    return form


def _facts(part: Payload) -> Hashable:
    tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items()]
    streams = [(name, symbols.alphabet, symbols.values.numel()) for name, symbols in part.symbols.items()]
    return part.codec, tuple(part.shape), part.dtype, part.digest == 0, tuple(tensors), tuple(streams)
