"""``fashion``: Fashion-MNIST (Xiao, Rasul and Vollgraf 2017) from Debian's package dataset-fashion-mnist.

60,000 + 10,000 images of 28 x 28. Debian compresses the files anew, so only the uncompressed contents are checked.
"""

from pathlib import Path

from data.dataset import DataError, Dataset, Split, check_labels, from_splits
from data.idx import read_idx

FOLDER = Path("/usr/share/datasets/fashion-mnist")
_INSTALL = "apt-get install dataset-fashion-mnist"
_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def load(seed: int, *, folder: Path = FOLDER) -> Dataset:
    """The official split in the official order.

    Args:
        seed: not used; the files fix order and split.
        folder: where the package puts its files.

    Raises:
        DataError: the package is not installed, or a file is damaged; the message says what to install.
    """
    del seed
    if not all((folder / f"{name}.gz").is_file() for name in _MD5):
        raise DataError(f"fashion: no Fashion-MNIST in {folder}; install it with: {_INSTALL}")
    try:
        train, test = (_split(folder, part) for part in ("train", "t10k"))
    except DataError as error:
        raise DataError(
            f"{error}; install it again with: {_INSTALL.replace('install', 'install --reinstall')}"
        ) from error
    return from_splits(train, test, classes=10, name="fashion", title="Fashion-MNIST")


def _split(folder: Path, part: str) -> Split:
    images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    x = read_idx(folder / f"{images}.gz", 3, md5=_MD5[images])
    y = read_idx(folder / f"{labels}.gz", 1, md5=_MD5[labels])
    check_labels(y, 10, labels)
    return Split(x[:, None], y)
