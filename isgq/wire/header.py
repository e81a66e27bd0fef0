"""The fixed header that every rank sends before the payloads of a step, so that all ranks agree or fail alike.

Layout, little-endian, 16 bytes and a bitmap:

    u8  protocol version        u8  status (0 ok, else why this rank cannot take part)
    u16 parameter the status is about, with status 0 one whose compression this rank does not trust any more
        (0xFFFF: none; 0xFFFE: none, and this rank asks for a new plan)
    u32 step                    u32 digest of plan and codec          u32 length of the message that follows
    ceil(parameters / 8) bytes: bit p set where parameter p got a gradient on this rank

Where a rank sends a different message to each server, that length is 0 and each server gets its own as u32.

Ranks that go on within a step, of which all have heard the rest, say 7 bytes: status, parameter and length.
"""

import enum
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from isgq.core.errors import WireError

PROTOCOL = 1
NO_PARAMETER = 0xFFFF
NEW_PLAN = 0xFFFE
LENGTH_BYTES = 4
_FIELDS = struct.Struct("<BBHIII")
_NEWS = struct.Struct("<BHI")
NEWS_BYTES = _NEWS.size


def header_size(parameters: int) -> int:
    """Bytes of a header."""
    return _FIELDS.size + (parameters + 7) // 8


def pack_length(length: int) -> Tensor:
    """A message's length: uint8 ``[4]``."""
    return _bytes(length.to_bytes(LENGTH_BYTES, "little"))


def unpack_length(data: Tensor) -> int:
    """Inverse of :func:`pack_length`."""
    return int.from_bytes(data.cpu().numpy().tobytes(), "little")


class Status(enum.IntEnum):
    """Whether a rank takes part in a step, and if not, why; DONE: it has no more batches, or needs no server."""

    OK = 0
    NON_FINITE = 1
    EMPTY_BATCH = 2
    FAILED = 3
    DONE = 4


@dataclass(frozen=True)
class Header:
    """One rank's header.

    Attributes:
        status: whether the rank takes part.
        parameter: index of the parameter the status is about, or NO_PARAMETER, or NEW_PLAN.
        step: number of the step, modulo 2**32.
        digest: 32-bit digest of plan and codec.
        length: bytes of the message that follows.
        used: per parameter, whether it got a gradient on this rank.
        version: protocol version.
    """

    status: Status
    parameter: int
    step: int
    digest: int
    length: int
    used: Sequence[bool]
    version: int = PROTOCOL

    def pack(self) -> Tensor:
        """uint8 ``[16 + ceil(parameters / 8)]``."""
        head = _FIELDS.pack(self.version, self.status, self.parameter, self.step % (1 << 32), self.digest, self.length)
        return _bytes(head + _bitmap(tuple(self.used)))

    def news(self) -> Tensor:
        """Status, parameter and length alone: uint8 ``[7]``."""
        return _bytes(_NEWS.pack(self.status, self.parameter, self.length))

    def followed_by(self, data: Tensor) -> "Header":
        """This header with the :meth:`news` of the same rank.

        Raises:
            WireError: wrong length or status.
        """
        raw = data.cpu().numpy().tobytes()
        if len(raw) != NEWS_BYTES:
            raise WireError(f"news within a step have {len(raw)} bytes, must have {NEWS_BYTES}")
        status, parameter, length = _NEWS.unpack(raw)
        return replace(self, status=_status(status), parameter=parameter, length=length)

    @staticmethod
    def unpack(data: Tensor, parameters: int) -> "Header":
        """Read a header for a model of so many parameters.

        Raises:
            WireError: wrong length, version or status.
        """
        raw = data.cpu().numpy().tobytes()
        expected = header_size(parameters)
        if len(raw) != expected:
            raise WireError(f"step header has {len(raw)} bytes, must have {expected} for {parameters} parameters")
        version, status, parameter, step, digest, length = _FIELDS.unpack_from(raw)
        if version != PROTOCOL:
            raise WireError(f"step header of protocol {version}, this is protocol {PROTOCOL}")
        known = _status(status)
        return Header(known, parameter, step, digest, length, _used(raw[_FIELDS.size :], parameters), version)


# Nearly all headers have the same.
@functools.lru_cache(maxsize=64)
def _bitmap(used: tuple[bool, ...]) -> bytes:
    return np.packbits(np.asarray(used, dtype=bool), bitorder="little").tobytes()


@functools.lru_cache(maxsize=64)
def _used(bitmap: bytes, parameters: int) -> tuple[bool, ...]:
    bits = np.frombuffer(bitmap, dtype=np.uint8)
    return tuple(np.unpackbits(bits, count=parameters, bitorder="little").astype(bool).tolist())


def _status(code: int) -> Status:
    try:
        return Status(code)
    except ValueError:
        raise WireError(f"step header has status {code}, known are {[s.value for s in Status]}") from None


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
