"""Reads a pickle that holds plain containers and uint8 arrays, and calls nothing that the file names.

A pickle is a program: ``pickle.load`` runs whatever it says. Here its instructions are screened first, and the few
names that a numpy array needs stand for harmless objects of this module, so that not even numpy sees the file's numbers
before they are checked.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from data.dataset import Bytes

_INSTRUCTIONS = frozenset(
    """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    SHORT_BINSTRING BINSTRING SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
    """.split()  # noqa: SIM905
)
_MAX_TUPLES = 16  # an array takes 6 or 9; deeper or wider nests of tuples cost exponential time to hash


def load(contents: bytes) -> object:
    """Unpickle; strings of Python 2 are read as Latin-1, arrays come back as read-only ndarrays of uint8.

    Args:
        contents: the whole pickle, protocol 2 to 4.

    Raises:
        pickle.UnpicklingError: the file is damaged, or asks for anything but containers and uint8 arrays.
    """
    try:
        _screen(contents)
        value = _Unpickler(io.BytesIO(contents), encoding="latin1").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a malformed program can fail in any way, and each means the same here
        raise pickle.UnpicklingError(f"malformed pickle: {type(error).__name__}: {error}") from error
    if isinstance(value, dict):
        return {key: item.values if isinstance(item, _Array) else item for key, item in value.items()}
    return value


def _screen(contents: bytes) -> None:
    """Refuse instructions and counts that no honest file has, before anything is executed."""  # noqa: DOC501
    tuples = 0
    for count, (instruction, argument, position) in enumerate(pickletools.genops(contents)):
        if instruction.name not in _INSTRUCTIONS:
            raise pickle.UnpicklingError(f"instruction {instruction.name} at byte {position} is not allowed")
        # The unpickler's memo is an array as long as the largest index: a forged one would allocate gigabytes.
        if instruction.name == "LONG_BINPUT" and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"memo index {argument} at byte {position} is forged")
        tuples += "TUPLE" in instruction.name
        if tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError(f"more than {_MAX_TUPLES} tuples at byte {position}")


class _DType:
    """Stands for numpy.dtype: remembers its code."""

    def __init__(self, code: str, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like mean nothing for single bytes."""


class _Array:
    """Stands for numpy.ndarray: checks its state, then holds the array."""

    def __init__(self) -> None:
        self.values: Bytes = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _DType, bool, str | bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if dtype.code not in {"u1", "|u1", "B"}:
            raise pickle.UnpicklingError(f"array of type {dtype.code!r}, expected uint8")
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; fresh functions, since a pickle may set attributes on what it is given."""  # noqa: DOC501
        stand_ins: dict[tuple[str, str], Callable[..., object]] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _DType,
            ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
        }
        if (module, name) not in stand_ins:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed; only numpy arrays are")
        return stand_ins[module, name]
