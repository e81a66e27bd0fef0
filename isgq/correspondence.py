"""Messages between ranks that know one another: what both sides know is not said again.

*Digests*: the receiver makes them from its own keys (rank, name, step). The checksum of a message covers them, so that
a message of another step, rank or seed is an error and no wrong gradient. A codec whose digests are others sends them.

*Forms*: codecs, names, shapes and sizes of a record are those of the last one of the same carrier and sender, unless
the record says otherwise. Both sides learn a step's forms when it is applied, and neither does where it is refused, so
they know the same as long as they are at the same step; if not, the checksum tells.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.keys import Key
from isgq.records import Carrier, Record
from isgq.wire import Template, pack_message, unpack_message
from isgq.wire.layout import parts_of
from isgq.wire.template import Form, form_of

_Address = tuple[int, int, str]


class Correspondence:
    """What this rank and those it hears from know of their messages."""

    def __init__(self) -> None:
        self._known: dict[_Address, Form] = {}
        self._learned: dict[_Address, Form] = {}
        self._templates: dict[tuple[str, ...], Template] = {}  # the latest for these carriers
        self._written: dict[tuple[_Address, ...], tuple[Tensor, Sequence[Record]]] = {}

    def write(
        self, carriers: Sequence[Carrier], records: Sequence[Record], keys: Sequence[Key]
    ) -> tuple[Tensor, list[int]]:
        """The message of these records, and the bytes of each.

        Args:
            carriers: of the records.
            records: at least one.
            keys: that the records were encoded with.
        """
        addresses, forms = _addresses(carriers, keys), list(map(form_of, records))
        self._learned.update(zip(addresses, forms, strict=True))
        digests, template = _digests(carriers, keys), self._template(addresses)
        message, sizes = pack_message(records, digests=digests, template=template, forms=forms)
        if all(map(_on_cpu, records)):  # elsewhere decoding may round otherwise than on the other ranks
            self._written[addresses] = message, records
        return message, sizes

    def read(self, message: Tensor, carriers: Sequence[Carrier], keys: Sequence[Key]) -> Sequence[Record]:
        """The records of a message; no bytes are none.

        Args:
            message: uint8 ``[bytes]``.
            carriers: of the records that are expected.
            keys: that their sender has encoded them with.

        Raises:
            WireError: the message is corrupt, or of another step or sender.
            CodecError: there are more records than expected, or fewer.
        """
        if not carriers and not message.numel():
            return []
        if not carriers or not message.numel():
            what = f"a message of {message.numel()} bytes" if message.numel() else "no message"
            raise CodecError(f"{what} came for {len(carriers)} gradients")
        addresses = _addresses(carriers, keys)
        mine, written = self._written.pop(addresses, (None, ()))
        if mine is not None and torch.equal(mine, message):
            return written
        records = unpack_message(message, digests=_digests(carriers, keys), template=self._template(addresses))
        self._learned.update(zip(addresses, map(form_of, records), strict=True))
        return records

    def commit(self) -> None:
        """The step was applied."""
        self._known.update(self._learned)
        self.rollback()

    def rollback(self) -> None:
        """The step was not applied."""
        self._learned.clear()
        self._written.clear()

    def forget(self) -> None:
        """Start anew, as all ranks do: the next messages describe themselves."""
        self._known.clear()
        self._templates.clear()
        self.rollback()

    def _template(self, addresses: Sequence[_Address]) -> Template:
        names, forms = tuple(name for _, _, name in addresses), tuple(map(self._known.get, addresses))
        template = self._templates.get(names)
        if template is None or template.forms != forms:  # they hardly ever change
            template = self._templates[names] = Template.of_forms(forms)
        return template


def _addresses(carriers: Sequence[Carrier], keys: Sequence[Key]) -> tuple[_Address, ...]:
    """Sender, server and name: another server, who may get the rows when shards change, has not heard of them."""
    return tuple((key.rank, carrier.server, carrier.name) for carrier, key in zip(carriers, keys, strict=True))


def _on_cpu(record: Record) -> bool:
    return all(
        all(tensor.is_cpu for tensor in part.tensors.values()) and all(s.values.is_cpu for s in part.symbols.values())
        for part in parts_of(record)
    )


def _digests(carriers: Sequence[Carrier], keys: Sequence[Key]) -> list[int | tuple[int, int]]:
    return [carrier.digests(key) for carrier, key in zip(carriers, keys, strict=True)]
