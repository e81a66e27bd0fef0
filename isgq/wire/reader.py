"""The smallest pieces of the format: bytes, variable-length integers, names and references into tables.

A *varint* is an unsigned integer below 2**63 in LEB128: seven bits a byte, least significant first, the top bit set on
all bytes but the last, no zero byte at the end (so every number has one spelling). A *text* is a length byte and 1 to
63 printable ASCII characters. A *reference* is a varint that counts a table's entries from 0 in the order of their
first use.
"""

from isgq.core.errors import CodecError, WireError

TEXT_MAX = 63


def varint(value: int) -> bytes:
    """Write an integer in ``0 .. 2**63 - 1``."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(value: str) -> bytes:
    """Write a name.

    Raises:
        CodecError: not 1 to 63 printable ASCII characters.
    """
    if not (1 <= len(value) <= TEXT_MAX and all("!" <= letter <= "~" for letter in value)):
        raise CodecError(f"name {value!r} cannot be sent: it must be 1 to {TEXT_MAX} printable ASCII characters")
    return bytes([len(value)]) + value.encode()


class Reader:
    """Takes fields off a buffer, first to last; whatever is not there or malformed is a WireError that says where.

    Args:
        data: the bytes.
        at: where to begin.
    """

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    def skip(self, size: int, what: str) -> slice:
        """Pass over ``size`` bytes and return where they lie.

        Raises:
            WireError: fewer bytes are left.
        """
        left = len(self.data) - self.at
        if size > left:
            raise WireError(f"{what} takes {size} bytes at byte {self.at}, only {left} are left: message truncated")
        self.at += size
        return slice(self.at - size, self.at)

    def byte(self, what: str) -> int:
        """Read one byte; WireError at the end of the data."""
        at = self.at
        if at == len(self.data):
            self.skip(1, what)
        self.at = at + 1
        return self.data[at]

    def varint(self, what: str) -> int:
        """Read an integer.

        Raises:
            WireError: the data end within it, it is 2**63 or more, or it has needless zero bytes.
        """
        value = 0
        for position in range(9):
            byte = self.byte(what)
            value |= (byte & 0x7F) << (7 * position)
            if byte < 0x80:
                if byte == 0 and position:
                    raise WireError(f"{what} at byte {self.at - 1}: integer {value} is longer than need be")
                return value
        raise WireError(f"{what} at byte {self.at - 1}: integer of more than 63 bits")

    def text(self, what: str) -> str:
        """Read a name.

        Raises:
            WireError: wrong length or characters.
        """
        size = self.byte(what)
        if not 1 <= size <= TEXT_MAX:
            raise WireError(f"{what} at byte {self.at - 1} has length {size}, allowed are 1 .. {TEXT_MAX}")
        letters = bytes(self.data[self.skip(size, what)])
        if not all(0x21 <= letter <= 0x7E for letter in letters):
            raise WireError(f"{what} at byte {self.at - size} is {letters!r}, allowed is printable ASCII")
        return letters.decode()


class References:
    """Reads references into a table, whose entries must all be used, first in the order of the table.

    Args:
        size: number of entries.
        what: what the entries are.
        known: how many of them, at the beginning, need not be used.
    """

    def __init__(self, size: int, what: str, known: int = 0) -> None:
        self.size = size
        self.what = what
        self.used = known

    def read(self, reader: Reader) -> int:
        """Read one reference; WireError as for :meth:`check`."""
        return self.check(reader.varint(f"reference to a {self.what}"), reader)

    def check(self, index: int, reader: Reader) -> int:
        """Use an entry that the reader has just come upon.

        Raises:
            WireError: beyond the table, or past an entry not yet used.
        """
        if index >= self.size or index > self.used:
            raise WireError(
                f"reference to {self.what} {index} at byte {reader.at - 1}: the table has {self.size}, "
                f"of which the first {self.used} are in use"
            )
        self.used = max(self.used, index + 1)
        return index

    def finish(self) -> None:
        """Check that every entry was used.

        Raises:
            WireError: some was not.
        """
        if self.used != self.size:
            raise WireError(f"{self.what} {self.used} of {self.size} is never used")
