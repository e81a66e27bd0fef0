"""The head of a rotated payload: how many atoms, their weights and step codes."""

from dataclasses import dataclass

import numpy as np

from isgq.codecs.rotation_sides import FINEST_CODE, Ints, Reals
from isgq.core.errors import CodecError

_ENTRY = np.dtype([("weight", "<u2"), ("codes", "u1", 2)])  # a bfloat16 is the upper half of a float32
ENTRY_BYTES, COUNT_BYTES = _ENTRY.itemsize, 2
MOST_ATOMS = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Head:
    """One row an atom, heavy ones first.

    Attributes:
        weights: ``[k]``, values that bfloat16 has.
        codes: ``[k, 2]`` step codes, left and right.
        light: how many of them are light: they share weight and codes.
    """

    weights: Reals
    codes: Ints
    light: int

    def pack(self) -> bytes:
        """As the module :mod:`isgq.codecs.rotated` lays it out."""
        entries = len(self.weights) - max(self.light - 1, 0)
        rows = np.empty(entries, dtype=_ENTRY)
        rows["weight"] = self.weights[:entries].astype(np.float32).view(np.uint32) >> 16
        rows["codes"] = self.codes[:entries]
        return self.light.to_bytes(COUNT_BYTES, "little") + rows.tobytes()

    @staticmethod
    def unpack(head: bytes) -> "Head":
        """Inverse of :meth:`pack`.

        Raises:
            CodecError: no head is like that.
        """
        entries, rest = divmod(len(head) - COUNT_BYTES, ENTRY_BYTES)
        if entries < 0 or rest:
            raise CodecError(
                f"head of a rotated payload has {len(head)} bytes, must be {COUNT_BYTES} and {ENTRY_BYTES} an entry"
            )
        light = light_of(head)
        if light and not entries:
            raise CodecError(f"head of a rotated payload has {light} light atoms and no entry for them")
        rows = np.frombuffer(head, dtype=_ENTRY, offset=COUNT_BYTES)
        weights = (rows["weight"].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        codes = rows["codes"].astype(np.int64)
        if not (np.isfinite(weights) & (weights > 0)).all() or (codes > FINEST_CODE).any():
            raise CodecError(f"head of a rotated payload has weights {weights} and step codes {codes.tolist()}")
        repeats = np.ones(entries, dtype=np.int64)
        if light:
            repeats[-1] = light
        return Head(np.repeat(weights, repeats), np.repeat(codes, repeats, axis=0), light)


def light_of(head: bytes) -> int:
    """How many light atoms a packed head counts."""
    return int.from_bytes(head[:COUNT_BYTES], "little")
