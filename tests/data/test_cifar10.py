"""CIFAR-10 files: both versions agree, damage is refused, and nothing in a pickle is ever run."""

import contextlib
import os
import pickle
import struct
import tracemalloc
import warnings

import numpy as np
import pytest
import torch

import data
from data import cifar10, unpickle
from tests.data.files import cifar_batch, python2_pickle

ROWS = 12
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def _binary(pixels, labels) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))


def _python3(pixels, labels, protocol=2) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels}, protocol=protocol)


WRITERS = {
    "python 2": ("cifar-10-batches-py", "", python2_pickle),
    **{f"python 3, protocol {p}": ("cifar-10-batches-py", "", lambda x, y, p=p: _python3(x, y, p)) for p in (2, 3, 4)},
    "binary": ("cifar-10-batches-bin", ".bin", _binary),
}


@pytest.mark.parametrize("above", [True, False], ids=["folder above", "folder itself"])
@pytest.mark.parametrize(("folder", "ending", "write"), WRITERS.values(), ids=WRITERS)
@pytest.mark.filterwarnings("ignore:.*MD5")
def test_every_version_gives_the_same_images(tmp_path, folder, ending, write, above):
    place = tmp_path / folder if above else tmp_path
    place.mkdir(exist_ok=True)
    batches = [cifar_batch(ROWS, seed) for seed in range(6)]
    for name, batch in zip(NAMES, batches, strict=True):
        (place / f"{name}{ending}").write_bytes(write(*batch))
    loaded = cifar10.load(tmp_path, 0, rows=ROWS)
    assert (loaded.in_shape, loaded.classes, len(loaded.train_y)) == ((3, 32, 32), 10, 5 * ROWS)
    pixels = torch.from_numpy(np.concatenate([x for x, _ in batches])).float() / 255
    torch.testing.assert_close(torch.cat([loaded.train_x, loaded.test_x]).flatten(1), pixels, rtol=0, atol=0)
    assert torch.cat([loaded.train_y, loaded.test_y]).tolist() == [k for _, labels in batches for k in labels]
    # Byte 1024 g + 32 y + x of a record is channel g, row y, column x.
    assert loaded.train_x[0, 1, 2, 3] == pixels[0, 1024 + 2 * 32 + 3]


def test_column_major_array(tmp_path):
    pixels, labels = cifar_batch(ROWS, 0)
    path = tmp_path / "batch"
    path.write_bytes(_python3(np.asfortranarray(pixels), labels))
    with pytest.warns(UserWarning, match="MD5"):
        split = cifar10.read_pickled(path, ROWS)
    np.testing.assert_array_equal(split.images.reshape(ROWS, -1), pixels)


def test_full_size_is_the_default(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    with path.open("wb") as file:
        file.truncate(30_730_000)
    assert cifar10.read_binary(path).images.shape == (10_000, 3, 32, 32)


def test_unknown_md5_is_a_warning_and_binary_has_none(tmp_path):
    batch = cifar_batch(ROWS, 0)
    path = tmp_path / "data_batch_1"
    path.write_bytes(python2_pickle(*batch))
    with pytest.warns(UserWarning, match="data_batch_1 is well formed"):
        cifar10.read_pickled(path, ROWS)
    path.write_bytes(_binary(*batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cifar10.read_binary(path, ROWS)


PIXELS, LABELS = cifar_batch(ROWS, 0)
RECORDS = _binary(PIXELS, LABELS)
HOSTILE_BINARY = {
    "empty": (b"", "0 bytes, expected 12 records"),
    "short": (RECORDS[:-1], "expected 12 records of 3073"),
    "long": (RECORDS + b"\0", "expected 12 records of 3073"),
    "a record less": (RECORDS[:-3073], "expected 12 records of 3073"),
    "cifar-100": (bytes(ROWS * 3074), "CIFAR-100"),
    "label out of range": (RECORDS[:3073] + b"\x0a" + RECORDS[3074:], r"label 10 of image 1 is outside 0\.\.9"),
}


@pytest.mark.parametrize(("contents", "message"), HOSTILE_BINARY.values(), ids=HOSTILE_BINARY)
def test_hostile_binary(tmp_path, contents, message):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(contents)
    with pytest.raises(data.DataError, match=message) as caught:
        cifar10.read_binary(path, ROWS)
    assert str(path) in str(caught.value)


class _Runs:
    """Pickles as a call of ``function(*arguments)``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def _dict(**items) -> bytes:
    return pickle.dumps({"data": PIXELS, "labels": LABELS} | items, protocol=2)


GOOD = python2_pickle(PIXELS, LABELS)
HOSTILE_PICKLES = {
    "empty": (b"", "malformed"),
    "text": (b"hello world, this is no pickle", "refused"),
    "os.system": (pickle.dumps(_Runs(os.system, "exit 1"), 2), "system is not allowed"),
    "eval": (pickle.dumps(_Runs(eval, "1 + 1"), 2), "eval is not allowed"),
    "eval, protocol 4": (pickle.dumps(_Runs(eval, "1 + 1"), 4), "eval is not allowed"),
    "eval, protocol 0": (pickle.dumps(_Runs(eval, "1 + 1"), 0), "refused"),
    "getattr": (pickle.dumps(_Runs(getattr, "a", "upper"), 2), "getattr is not allowed"),
    "numpy.load": (pickle.dumps(_Runs(np.load, "x"), 2), "not allowed"),
    "dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.", "dtype.__init__ is not allowed"),
    "persistent id": (b"\x80\x02K\x01Q.", "BINPERSID"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "object array": (_dict(data=np.array([[{}] * 2], dtype=object)), "array of type 'O8', expected uint8"),
    "float array": (_dict(data=PIXELS.astype(np.float32)), "array of type 'f4', expected uint8"),
    "signed array": (_dict(data=PIXELS.astype(np.int8)), "array of type 'i1', expected uint8"),
    "forged shape": (python2_pickle(PIXELS, LABELS, shape=(2**31 - 1, 3072)), "malformed"),
    "negative shape": (python2_pickle(PIXELS, LABELS, shape=(-5, -3072)), "malformed"),
    "array never filled": (b"\x80\x02}(U\x04data"
                           b"cnumpy.core.multiarray\n_reconstruct\n)RU\x06labels]u.", r"'data' is \(0,\)"),
    "no array": (_dict(data=[1, 2]), "'data' is list"),
    "three dimensions": (_dict(data=PIXELS.reshape(ROWS, 3, 1024)), "'data' is"),
    "wrong columns": (_dict(data=PIXELS[:, :-1].copy()), "'data' is"),
    "a row less": (_dict(data=PIXELS[:-1]), r"'data' is \(11, 3072\)"),
    "a label less": (_dict(labels=LABELS[:-1]), "a list of 11, expected a list of 12"),
    "labels are an array": (_dict(labels=np.array(LABELS, np.uint8)), "'labels' is ndarray"),
    "label 10": (_dict(labels=[*LABELS[:-1], 10]), "label 10 of image 11"),
    "label -1": (_dict(labels=[-1, *LABELS[1:]]), "label -1 of image 0"),
    "label true": (_dict(labels=[True, *LABELS[1:]]), "label True of image 0"),
    "label text": (_dict(labels=["3", *LABELS[1:]]), "label '3' of image 0"),
    "no labels": (pickle.dumps({"data": PIXELS, "fine_labels": LABELS}, 2), "expected a dict with 'data' and 'labels'"),
    "a list": (pickle.dumps([1, 2], 2), "holds list"),
    "nothing on the stack": (b"\x80\x02.", "underflow"),
    "forged memo index": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "forged"),
    "forged string length": (b"\x80\x02T\xff\xff\xff\x7fabc.", "malformed"),
    "negative string length": (b"\x80\x02T\xff\xff\xff\xffabc.", "malformed"),
    "forged frame": (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"K\x01.", "truncated"),
    "nested tuples as key": (b"\x80\x02}K\x01" + b"\x85" * 500_000 + b"K\x01s.", "more than 16 tuples"),
    "doubling tuples as key": (b"\x80\x02}K\x01" + b"q\x01h\x01\x86" * 60 + b"K\x01s.", "more than 16 tuples"),
    "attribute of a stand-in": (b"\x80\x02cnumpy\ndtype\n}U\x04codeU\x02u1sb.", "malformed"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "message"), HOSTILE_PICKLES.values(), ids=HOSTILE_PICKLES)
def test_hostile_pickle(tmp_path, contents, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(contents)
    tracemalloc.start()
    try:
        with pytest.raises(data.DataError, match=message) as caught:
            cifar10.read_pickled(path, ROWS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_evil_pickle_is_not_run(tmp_path):
    """The same bytes do run under pickle.load: the test would notice."""
    mark = tmp_path / "mark"
    evil = _dict(labels=_Runs(os.mkdir, str(mark)))
    with pytest.raises(pickle.UnpicklingError, match="mkdir is not allowed"):
        unpickle.load(evil)
    assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists()


def test_every_truncation_of_a_pickle_is_refused():
    small = python2_pickle(PIXELS[:1, :40].copy(), LABELS[:1])
    assert isinstance(unpickle.load(small), dict)
    for length in range(len(small)):
        with pytest.raises(pickle.UnpicklingError):
            unpickle.load(small[:length])


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_random_damage_never_escapes():
    """Any outcome but a value or UnpicklingError fails; afterwards the loader works as before."""
    small = python2_pickle(PIXELS[:2, :20].copy(), LABELS[:2])
    rng = np.random.default_rng(0)
    for _ in range(3000):
        damaged = bytearray(small)
        for at in rng.integers(0, len(small), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        with contextlib.suppress(pickle.UnpicklingError):
            unpickle.load(bytes(damaged))
    np.testing.assert_array_equal(unpickle.load(small)["data"], PIXELS[:2, :20])


def test_oversized_file_is_refused_unread(tmp_path):
    path = tmp_path / "data_batch_1"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for read in (cifar10.read_pickled, cifar10.read_binary):
        with pytest.raises(data.DataError, match="more than any batch"):
            read(path)


def test_missing_batch_is_named(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_bytes(GOOD)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(data.DataError, match="lacks data_batch_4;"):
        data.load(f"cifar10:{tmp_path}")


def test_no_files(tmp_path):
    with pytest.raises(data.DataError, match="cifar-10-batches-py or cifar-10-batches-bin"):
        data.load(f"cifar10:{tmp_path}")
