"""``idx:DIR``: the user's own files in the IDX format of MNIST, Fashion-MNIST and EMNIST (LeCun and Cortes).

Layout of a file, plain or gzip-compressed, all integers big-endian::

    byte 0-1   zero
    byte 2     type, 0x08 = uint8
    byte 3     number of dimensions d: 3 for images (n, h, w), 1 for labels (n)
    4 d bytes  one uint32 per dimension
    the rest   the values, row by row, and nothing after them

Accepted names are ``{train,t10k}-{images-idx3,labels-idx1}-ubyte``, the same with ``.idx3``, and EMNIST's
``emnist-SPLIT-{train,test}-...``; in DIR itself or in torchvision's ``MNIST/raw`` and ``FashionMNIST/raw``.
EMNIST's images stay as stored (transposed); its letters, labelled 1..26, become 0..25.
"""

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from data.dataset import Bytes, DataError, Dataset, Split, check_labels, from_splits

MAX_BYTES = 1 << 30  # a file that promises more is refused unread; the largest known one (EMNIST) has 0.55e9
_DEFLATE_RATIO = 1032  # deflate cannot expand further, so no honest compressed file promises more than this
_UINT8 = 0x08
_FOLDERS = ("", "MNIST/raw", "FashionMNIST/raw", "EMNIST/raw")


@dataclass(frozen=True, slots=True)
class _Naming:
    """How a family of files is called, and what its labels are."""

    train: str
    test: str
    classes: int
    first_label: int = 0


_NAMINGS = (
    _Naming("train", "t10k", 10),
    *(
        _Naming(f"emnist-{split}-train", f"emnist-{split}-test", classes, first)
        for split, classes, first in (
            ("mnist", 10, 0),
            ("digits", 10, 0),
            ("letters", 26, 1),
            ("balanced", 47, 0),
            ("bymerge", 47, 0),
            ("byclass", 62, 0),
        )
    ),
)


def load(folder: Path, seed: int) -> Dataset:
    """The four files of a folder, in their own order and split.

    Args:
        folder: where the files lie.
        seed: not used; the files fix order and split.

    Raises:
        DataError: a file is missing, damaged, too long, too short, or the four do not fit together.
    """
    del seed
    if not folder.is_dir():
        raise DataError(f"idx: {folder} is not a folder; write idx:DIR with the folder that holds the IDX files")
    found = [(place, naming) for place in _FOLDERS for naming in _NAMINGS if _find(folder / place, naming.train, 3)]
    if not found:
        raise DataError(
            f"idx: no train-images-idx3-ubyte (or .gz) in {folder}; "
            "expected {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz"
        )
    if len(found) > 1:
        several = ", ".join(f"{place or '.'}/{naming.train}-*" for place, naming in found)
        raise DataError(f"idx: {folder} holds several data sets ({several}); give a folder that holds one")
    place, naming = found[0]
    train, test = (read_split(folder / place, part, naming) for part in (naming.train, naming.test))
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = " and ".join("x".join(map(str, split.images.shape[2:])) for split in (train, test))
        raise DataError(f"idx: {folder}: images of {sizes} in train and test; expected one size")
    return from_splits(train, test, classes=naming.classes, name="idx", title=f"IDX files of {folder.name or folder}")


def read_split(folder: Path, part: str, naming: _Naming = _NAMINGS[0]) -> Split:
    """Images and labels of one part (``"train"``, ``"t10k"``, ...) of a folder.

    Raises:
        DataError: a file is missing or damaged, the counts differ, or a label is out of range.
    """
    paths = {}
    for d in (3, 1):
        path = _find(folder, part, d)
        if path is None:
            raise DataError(f"idx: {folder / _names(part, d)[0]} (or .gz) is missing")
        paths[d] = path
    images, labels = read_idx(paths[3], 3), read_idx(paths[1], 1)
    if len(images) != len(labels):
        raise DataError(
            f"{paths[1]}: {len(labels)} labels for {len(images)} images in {paths[3].name}; expected as many"
        )
    if naming.first_label and labels.min() < naming.first_label:
        raise DataError(f"{paths[1]}: label {labels.min()} is below {naming.first_label}, the first of {part}")
    labels = labels - np.uint8(naming.first_label)
    check_labels(labels, naming.classes, paths[1])
    return Split(images[:, None], labels)


def read_idx(path: Path, dimensions: Literal[1, 3], *, md5: str | None = None) -> Bytes:
    """Values of one IDX file, plain or gzip-compressed (decided by its first bytes, not by its name).

    Reads at most one byte more than the header promises, and nothing when it promises too much.

    Args:
        path: the file.
        dimensions: 3 for images [n, h, w], 1 for labels [n].
        md5: expected MD5 of the uncompressed file, if known.

    Returns:
        Array of uint8, read-only, of the shape that the header promises.

    Raises:
        DataError: the file is not exactly what its header says, or not the expected one.
    """
    header_size = 4 + 4 * dimensions
    try:
        with path.open("rb") as file:
            stored = path.stat().st_size
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream: BinaryIO = gzip.GzipFile(fileobj=file) if zipped else file  # type: ignore[assignment]
            header = stream.read(header_size)
            shape = _shape(path, header, dimensions)
            size = math.prod(shape)
            holds = stored * _DEFLATE_RATIO if zipped else stored - header_size
            if size > min(holds, MAX_BYTES):
                limit = f"a file of {stored} bytes" if size > holds else f"the limit of {MAX_BYTES} bytes"
                raise DataError(
                    f"{path}: too short: the header promises {shape} = {size} values, more than {limit} holds"
                )
            values = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); copy or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(values) != size:
        said = "ends early" if len(values) < size else "goes on after the last value"
        raise DataError(f"{path}: {said}; the header promises {shape} = {size} values after {header_size} bytes")
    if md5 is not None:
        digest = hashlib.md5(header, usedforsecurity=False)
        digest.update(values)
        if digest.hexdigest() != md5:
            raise DataError(f"{path}: uncompressed MD5 is {digest.hexdigest()}, expected {md5}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _shape(path: Path, header: bytes, dimensions: int) -> tuple[int, ...]:
    kind = "images" if dimensions == 3 else "labels"
    magic = struct.pack(">HBB", 0, _UINT8, dimensions)
    if header[:4] != magic:
        raise DataError(f"{path}: starts with 0x{header[:4].hex()}, expected 0x{magic.hex()} (IDX, uint8, {kind})")
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path}: ends inside the header ({len(header)} bytes)")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if 0 in shape:
        raise DataError(f"{path}: the header promises {shape}, which is empty; expected at least one value")
    return shape


def _names(part: str, dimensions: int) -> tuple[str, str]:
    kind = {3: "images", 1: "labels"}[dimensions]
    return f"{part}-{kind}-idx{dimensions}-ubyte", f"{part}-{kind}.idx{dimensions}-ubyte"


def _find(folder: Path, part: str, dimensions: int) -> Path | None:
    paths = [folder / (name + ending) for name in _names(part, dimensions) for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)
