"""The head of a rotated payload: how many atoms, their weights and step codes."""

from dataclasses import dataclass

import numpy as np
import torch

from isgq.codecs.rotation_sides import FINEST_CODE, Ints, Reals
from isgq.core.errors import CodecError

ENTRY_BYTES, COUNT_BYTES = 4, 2
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
        weights = torch.from_numpy(self.weights[:entries]).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2")
        rows = np.concatenate([weights.view(np.uint8).reshape(-1, 2), self.codes[:entries].astype(np.uint8)], 1)
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
        rows = np.frombuffer(head[COUNT_BYTES:], dtype=np.uint8).reshape(entries, ENTRY_BYTES)
        raw = np.ascontiguousarray(rows[:, :2]).view("<i2").reshape(-1).astype(np.int16)
        weights = torch.from_numpy(raw).view(torch.bfloat16).double().numpy()
        codes = rows[:, 2:].astype(np.int64)
        if not (np.isfinite(weights) & (weights > 0)).all() or (codes > FINEST_CODE).any():
            raise CodecError(f"head of a rotated payload has weights {weights} and step codes {codes.tolist()}")
        repeats = np.ones(entries, dtype=np.int64)
        if light:
            repeats[-1] = light
        return Head(np.repeat(weights, repeats), np.repeat(codes, repeats, axis=0), light)


def light_of(head: bytes) -> int:
    """How many light atoms a packed head counts."""
    return int.from_bytes(head[:COUNT_BYTES], "little")
