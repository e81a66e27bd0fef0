"""IDX files: honest ones load in every accepted dress, every damage is a DataError that names the file."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
import torch

import data
from data.idx import MAX_BYTES, read_idx
from tests.data.files import digits, idx, idx_folder


@pytest.mark.parametrize("place", ["", "MNIST/raw", "FashionMNIST/raw"])
@pytest.mark.parametrize(("pack", "ending"), [(bytes, ""), (gzip.compress, ".gz"), (gzip.compress, ""), (bytes, ".gz")])
def test_folder_loads(tmp_path, place, pack, ending):
    (train_x, train_y), (test_x, test_y) = idx_folder(tmp_path / place, pack=pack, ending=ending)
    loaded = data.load(f"idx:{tmp_path}")
    assert (loaded.in_shape, loaded.classes, loaded.name) == ((1, 5, 5), 10, "idx")
    torch.testing.assert_close(loaded.train_x[:, 0], torch.from_numpy(train_x).float() / 255, rtol=0, atol=0)
    torch.testing.assert_close(loaded.test_x[:, 0], torch.from_numpy(test_x).float() / 255, rtol=0, atol=0)
    assert loaded.train_y.tolist() == train_y.tolist()
    assert loaded.test_y.tolist() == test_y.tolist()
    loaded.train_x.add_(1)  # writable, unlike the bytes of the file


def test_names_with_dots(tmp_path):
    idx_folder(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(data.load(f"idx:{tmp_path}").train_y) == 20


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    idx_folder(tmp_path / "digits")
    assert len(data.load("idx:~/digits").test_y) == 10


@pytest.mark.parametrize(("split", "classes", "first"), [("letters", 26, 1), ("byclass", 62, 0), ("digits", 10, 0)])
def test_emnist(tmp_path, split, classes, first):
    names = (f"emnist-{split}-train", f"emnist-{split}-test")
    idx_folder(tmp_path, prefixes=names, counts=(classes, classes), classes=classes, first=first)
    loaded = data.load(f"idx:{tmp_path}")
    assert loaded.classes == classes
    assert loaded.train_y.tolist() == list(range(classes))


def test_several_sets_in_one_folder(tmp_path):
    idx_folder(tmp_path)
    idx_folder(tmp_path, prefixes=("emnist-digits-train", "emnist-digits-test"))
    with pytest.raises(data.DataError, match="several data sets"):
        data.load(f"idx:{tmp_path}")


IMAGES = idx(digits(6, 0)[0])
ZIPPED = gzip.compress(IMAGES)


def _header(*shape: int, magic: int = 0x803) -> bytes:
    return struct.pack(f">I{len(shape)}I", magic, *shape)


HOSTILE = {
    "empty file": (b"", "expected 0x00000803"),
    "half a magic": (IMAGES[:3], "expected 0x00000803"),
    "only the gzip mark": (b"\x1f\x8b", "damaged gzip"),
    "labels for images": (idx(digits(6, 0)[1]), "starts with 0x00000801"),
    "float type": (b"\x00\x00\x0d\x03" + IMAGES[4:], "starts with 0x00000d03"),
    "not zero": (b"\x01" + IMAGES[1:], "starts with 0x01000803"),
    "little endian": (b"\x03\x08\x00\x00" + IMAGES[4:], "starts with 0x03080000"),
    "a web page": (b"<!DOCTYPE html>" * 40, "starts with 0x3c21444f"),
    "ends in the header": (IMAGES[:13], "inside the header"),
    "one byte short": (IMAGES[:-1], "too short"),
    "one byte long": (IMAGES + b"\0", "goes on after"),
    "no images": (_header(0, 28, 28), "empty"),
    "no pixels": (_header(2**32 - 1, 0, 28), "empty"),
    "forged count": (_header(2**32 - 1, 2**32 - 1, 2**32 - 1) + b"abc", "too short"),
    "forged to the limit": (_header(1, 1, MAX_BYTES) + b"abc", "too short"),
    "zipped, forged count": (gzip.compress(_header(1, 1, MAX_BYTES) + b"abc"), "too short"),
    "zipped, one byte short": (gzip.compress(IMAGES[:-1]), "ends early"),
    "zipped, one byte long": (gzip.compress(IMAGES + b"\0"), "goes on after"),
    "zipped, cut": (ZIPPED[:-9], "damaged gzip"),
    "zipped, cut in the checksum": (ZIPPED[:-3], "damaged gzip"),
    "zipped, wrong checksum": (ZIPPED[:-8] + b"\0\0\0\0" + ZIPPED[-4:], "damaged gzip"),
    "zipped, bad block": (ZIPPED[:10] + b"\xff" * 40, "damaged gzip"),
    "zipped, rubbish behind": (ZIPPED + b"rubbish", "damaged gzip"),
    "zipped, a second member": (ZIPPED + gzip.compress(b"more"), "goes on after"),
}


@pytest.mark.parametrize(("contents", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_images(tmp_path, contents, message):
    idx_folder(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(contents)
    with pytest.raises(data.DataError, match=message) as caught:
        data.load(f"idx:{tmp_path}")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_every_truncation_is_refused(tmp_path, packed):
    whole = gzip.compress(IMAGES) if packed else IMAGES
    path = tmp_path / "file"
    path.write_bytes(whole)
    np.testing.assert_array_equal(read_idx(path, 3), digits(6, 0)[0])
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(data.DataError):
            read_idx(path, 3)


def test_gzip_bomb_fills_no_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(IMAGES + bytes(64 << 20)))  # 64 MiB behind the last image
    assert path.stat().st_size < 1 << 20
    _peak_while_refused(path, "goes on after")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_forged_count_allocates_nothing(tmp_path, pack):
    path = tmp_path / "forged"
    path.write_bytes(pack(_header(1024, 1024, 1024) + bytes(100)))
    _peak_while_refused(path, "too short")


def test_promise_above_the_limit_is_refused_though_the_file_is_that_long(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(_header(1, 1, MAX_BYTES + 1))
        file.truncate(16 + MAX_BYTES + 1)
    _peak_while_refused(path, "limit")


def _peak_while_refused(path, message):
    tracemalloc.start()
    try:
        with pytest.raises(data.DataError, match=message):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_label_out_of_range(tmp_path):
    idx_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 10, 3, 4, 5, 6, 7, 8, 9])))
    with pytest.raises(data.DataError, match=r"label 10 of image 2 is outside 0\.\.9"):
        data.load(f"idx:{tmp_path}")


def test_letter_zero_does_not_wrap_around(tmp_path):
    idx_folder(tmp_path, prefixes=("emnist-letters-train", "emnist-letters-test"), classes=26, first=0)
    with pytest.raises(data.DataError, match="label 0 is below 1"):
        data.load(f"idx:{tmp_path}")


def test_counts_differ(tmp_path):
    idx_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(digits(19, 0)[1]))
    with pytest.raises(data.DataError, match="19 labels for 20 images"):
        data.load(f"idx:{tmp_path}")


def test_sizes_differ(tmp_path):
    idx_folder(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(digits(10, 1, side=6)[0]))
    with pytest.raises(data.DataError, match="5x5 and 6x6"):
        data.load(f"idx:{tmp_path}")


def test_missing_file_is_named(tmp_path):
    idx_folder(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(data.DataError, match="t10k-labels-idx1-ubyte"):
        data.load(f"idx:{tmp_path}")


@pytest.mark.parametrize("what", ["absent", "empty folder", "a file", "folder in place of a file"])
def test_no_files(tmp_path, what):
    place = tmp_path / "place"
    if what == "a file":
        place.write_bytes(IMAGES)
    elif what != "absent":
        place.mkdir()
    if what == "folder in place of a file":
        (place / "train-images-idx3-ubyte").mkdir()
    with pytest.raises(data.DataError, match="idx"):
        data.load(f"idx:{place}")
