"""``cifar10:DIR``: the user's CIFAR-10 (Krizhevsky 2009), python or binary version, unpacked.

Python version, ``cifar-10-batches-py/{data_batch_1..5,test_batch}``: each a pickled dict with ``data``
(uint8 [10000, 3072]) and ``labels`` (10,000 ints 0..9).

Binary version, ``cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin``: each 10,000 records of 3073 bytes, the label
and then 3072 pixels.

In both the pixels are 1024 red, 1024 green and 1024 blue ones, each plane 32 x 32 row by row. DIR is that folder or the
one above it.
"""

import hashlib
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import unpickle
from data.dataset import DataError, Dataset, Split, check_labels, from_splits

ROWS = 10_000
_PIXELS = 3 * 32 * 32
_MAX_BYTES = 1 << 27  # a genuine batch has 3.1e7 bytes; stored as text it would have twice as many
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load(folder: Path, seed: int, *, rows: int = ROWS) -> Dataset:
    """50,000 training and 10,000 test images in the order of the files.

    Args:
        folder: the unpacked archive, or the folder above it.
        seed: not used; the files fix order and split.
        rows: images per file; 10,000 in the genuine archive.

    Raises:
        DataError: a file is missing, damaged, or not what CIFAR-10 should hold.
    """
    del seed
    for version in _VERSIONS:
        for place in (folder, folder / version.folder):
            paths = [place / (name + version.ending) for name in _BATCHES]
            missing = [path.name for path in paths if not path.is_file()]
            if len(missing) == len(paths):
                continue
            if missing:
                raise DataError(f"cifar10: {place} lacks {', '.join(missing)}; unpack the archive again")
            *batches, test = [version.read(path, rows) for path in paths]
            train = Split(np.concatenate([b.images for b in batches]), np.concatenate([b.labels for b in batches]))
            return from_splits(train, test, classes=10, name="cifar10", title="CIFAR-10")
    raise DataError(
        f"cifar10: no CIFAR-10 in {folder}; expected the unpacked cifar-10-python.tar.gz or cifar-10-binary.tar.gz "
        f"(folder {' or '.join(version.folder for version in _VERSIONS)} with {', '.join(_BATCHES)})"
    )


def read_binary(path: Path, rows: int = ROWS) -> Split:
    """One batch of the binary version.

    Raises:
        DataError: the size is not that of ``rows`` records, or a label is out of range.
    """
    record = 1 + _PIXELS
    contents = _read(path)
    if len(contents) != rows * record:
        hint = "; this is CIFAR-100, expected CIFAR-10" if len(contents) % (record + 1) == 0 else ""
        raise DataError(f"{path}: {len(contents)} bytes, expected {rows} records of {record} = {rows * record}{hint}")
    records = np.frombuffer(contents, np.uint8).reshape(rows, record)
    check_labels(records[:, 0], 10, path)
    return Split(records[:, 1:].reshape(rows, 3, 32, 32), records[:, 0])


def read_pickled(path: Path, rows: int = ROWS) -> Split:
    """One batch of the python version, read without running it; warns where the MD5 is not the published one.

    Raises:
        DataError: no such pickle, or its arrays are not ``rows`` images with labels 0..9.
    """
    contents = _read(path)
    try:
        batch = unpickle.load(contents)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: refused: {error}; expected a batch of CIFAR-10's python version") from error
    if not (isinstance(batch, dict) and {"data", "labels"} <= batch.keys()):
        held = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise DataError(f"{path}: holds {held}, expected a dict with 'data' and 'labels'")
    data, labels = batch["data"], batch["labels"]
    if not isinstance(data, np.ndarray) or data.shape != (rows, _PIXELS):
        held = data.shape if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(f"{path}: 'data' is {held}, expected a uint8 array {(rows, _PIXELS)}")
    if not isinstance(labels, list) or len(labels) != rows:
        held = f"a list of {len(labels)}" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: 'labels' is {held}, expected a list of {rows}")
    wrong = next((i for i, label in enumerate(labels) if type(label) is not int or not 0 <= label <= 9), None)
    if wrong is not None:
        raise DataError(f"{path}: label {labels[wrong]!r} of image {wrong} is not an integer in 0..9")
    if hashlib.md5(contents, usedforsecurity=False).hexdigest() != _MD5.get(path.name):
        warnings.warn(f"{path} is well formed, but its MD5 is not that of the published CIFAR-10", stacklevel=2)
    return Split(data.reshape(rows, 3, 32, 32), np.array(labels, np.uint8))


def _read(path: Path) -> bytes:
    """Contents of a file of plausible size."""  # noqa: DOC501
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise DataError(f"{path}: {size} bytes, more than any batch of CIFAR-10 ({_MAX_BYTES})")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class _Version:
    folder: str
    ending: str
    read: Callable[[Path, int], Split]


_VERSIONS = (
    _Version("cifar-10-batches-py", "", read_pickled),
    _Version("cifar-10-batches-bin", ".bin", read_binary),
)
