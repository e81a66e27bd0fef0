"""What every loader returns, and the one error that every loader raises.

Index legend: ``n`` images, ``c`` channels, ``h`` rows, ``w`` columns. Pixels are float32 in [0, 1], labels int64.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class DataError(ValueError):
    """A data set that cannot be loaded: unknown, not installed, or in a file that is not what it should be."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dataset:
    """Labelled images, split into train and test.

    Attributes:
        train_x: [n, c, h, w] float32 in [0, 1].
        train_y: [n] int64 in [0, classes).
        test_x: [m, c, h, w] float32 in [0, 1].
        test_y: [m] int64 in [0, classes).
        classes: number of classes.
        name: the name under which ``data.load`` knows it, e.g. ``"mnist5k"``.
        title: what a figure or a table calls it, e.g. ``"Fashion-MNIST"``.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    name: str
    title: str

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """Shape (c, h, w) of one image."""
        c, h, w = self.train_x.shape[1:]
        return c, h, w

    def standardized(self) -> "Dataset":
        """The same images, shifted and scaled so that each channel of the training part has mean 0 and deviation 1.

        Pixels then lie outside [0, 1]. Networks learn faster so; a channel that is constant is only shifted.
        """
        mean = self.train_x.mean((0, 2, 3), keepdim=True)
        std = self.train_x.std((0, 2, 3), keepdim=True, correction=0)
        std = torch.where(std > 0, std, torch.ones_like(std))
        return replace(self, train_x=(self.train_x - mean) / std, test_x=(self.test_x - mean) / std)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.in_shape))
        return f"Dataset({self.name}: {len(self.train_y)} + {len(self.test_y)} images {shape}, {self.classes} classes)"


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """One part of a data set as its file holds it.

    Attributes:
        images: [n, c, h, w] uint8, 0..255.
        labels: [n] uint8.
    """

    images: Bytes
    labels: Bytes


def from_splits(train: Split, test: Split, *, classes: int, name: str, title: str) -> Dataset:
    """Turn bytes into tensors: pixels / 255 as float32, labels as int64."""
    return Dataset(
        train_x=_unit(train.images),
        train_y=torch.from_numpy(train.labels.astype(np.int64)),
        test_x=_unit(test.images),
        test_y=torch.from_numpy(test.labels.astype(np.int64)),
        classes=classes,
        name=name,
        title=title,
    )


def _unit(pixels: Bytes) -> Tensor:
    return torch.from_numpy(np.divide(pixels, np.float32(255), dtype=np.float32, order="C"))


def check_labels(labels: Bytes, classes: int, source: object) -> None:
    """Refuse labels outside [0, classes).

    Args:
        labels: [n] uint8.
        classes: number of classes.
        source: the file, for the message.

    Raises:
        DataError: some label is too large; the message says which one and where.
    """
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        at = int(wrong[0])
        raise DataError(f"{source}: label {labels[at]} of image {at} is outside 0..{classes - 1}")
