"""Real images by name: ``data.load("mnist5k")``.

Nothing is ever downloaded: a loader finds its file, checks it, and otherwise raises :class:`DataError` with the command
that installs it or with what is wrong with the file. A new data set is one module with a ``load`` and one line below.
"""

from collections.abc import Callable
from pathlib import Path

from data import cifar10, fashion, idx, mnist5k, patches
from data.dataset import DataError, Dataset

__all__ = ["DEFAULT", "DataError", "Dataset", "load", "names"]

DEFAULT = "mnist5k"
_PACKAGED: dict[str, Callable[[int], Dataset]] = {
    "mnist5k": mnist5k.load,
    "fashion": fashion.load,
    "patches": patches.load,
}
_OF_THE_USER: dict[str, Callable[[Path, int], Dataset]] = {
    "idx": idx.load,
    "cifar10": cifar10.load,
}


def names() -> list[str]:
    """What :func:`load` understands; DIR stands for a folder of the user."""
    return [*_PACKAGED, *(f"{name}:DIR" for name in _OF_THE_USER)]


def load(name: str = DEFAULT, *, seed: int = 0) -> Dataset:
    """Load a data set.

    Args:
        name: one of :func:`names`, e.g. ``"fashion"`` or ``"cifar10:~/cifar"``.
        seed: non-negative; decides the split of ``mnist5k`` and the places of ``patches``. The other data sets come in
            the order and split of their files.

    Raises:
        DataError: unknown name, data not installed, or a file that is not what it should be.
    """
    if seed < 0:
        raise DataError(f"seed {seed} is negative; expected 0 or more")
    kind, colon, folder = name.partition(":")
    if kind in _PACKAGED and not colon:
        return _PACKAGED[kind](seed)
    if kind in _OF_THE_USER and folder:
        return _OF_THE_USER[kind](Path(folder).expanduser(), seed)
    raise DataError(f"unknown data set {name!r}; choose one of: {', '.join(names())}")
