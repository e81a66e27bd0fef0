"""Real images and texts by name: ``data.load("mnist5k")``, ``data.load_text("sotu")``.

Nothing is ever downloaded: a loader finds its file, checks it, and otherwise raises :class:`DataError` with the command
that installs it or with what is wrong with the file. A new data set is one module with a ``load`` and one line below.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from data import cifar10, fashion, idx, mnist5k, patches, ptb, sotu
from data.dataset import DataError, Dataset
from data.text import Text

__all__ = ["DEFAULT", "DataError", "Dataset", "Text", "is_text", "load", "load_text", "names", "text_names"]

DEFAULT = "mnist5k"
_T = TypeVar("_T")
_PACKAGED: dict[str, Callable[[int], Dataset]] = {
    "mnist5k": mnist5k.load,
    "fashion": fashion.load,
    "patches": patches.load,
}
_OF_THE_USER: dict[str, Callable[[Path, int], Dataset]] = {
    "idx": idx.load,
    "cifar10": cifar10.load,
}
_PACKAGED_TEXTS: dict[str, Callable[[int], Text]] = {"sotu": sotu.load}
_TEXTS_OF_THE_USER: dict[str, Callable[[Path, int], Text]] = {"ptb": ptb.load}


def names() -> list[str]:
    """What :func:`load` understands; DIR stands for a folder of the user."""
    return [*_PACKAGED, *(f"{name}:DIR" for name in _OF_THE_USER)]


def text_names() -> list[str]:
    """What :func:`load_text` understands."""
    return [*_PACKAGED_TEXTS, *(f"{name}:DIR" for name in _TEXTS_OF_THE_USER)]


def is_text(name: str) -> bool:
    """Whether a name is one for :func:`load_text`."""
    return name.partition(":")[0] in {*_PACKAGED_TEXTS, *_TEXTS_OF_THE_USER}


def load(name: str = DEFAULT, *, seed: int = 0) -> Dataset:
    """Load images.

    Args:
        name: one of :func:`names`, e.g. ``"fashion"`` or ``"cifar10:~/cifar"``.
        seed: non-negative; decides the split of ``mnist5k`` and the places of ``patches``. The other data sets come in
            the order and split of their files.

    Raises:
        DataError: unknown name, data not installed, or a file that is not what it should be.
    """
    return _load(name, seed, _PACKAGED, _OF_THE_USER)


def load_text(name: str, *, seed: int = 0) -> Text:
    """Load a text.

    Args:
        name: one of :func:`text_names`, e.g. ``"sotu"`` or ``"ptb:~/simple-examples"``.
        seed: non-negative; not used by any text now.

    Raises:
        DataError: unknown name, data not installed, or a file that is not what it should be.
    """
    return _load(name, seed, _PACKAGED_TEXTS, _TEXTS_OF_THE_USER)


def _load(
    name: str,
    seed: int,
    packaged: Mapping[str, Callable[[int], _T]],
    of_the_user: Mapping[str, Callable[[Path, int], _T]],
) -> _T:
    """Split the name and call the loader."""  # noqa: DOC501
    if seed < 0:
        raise DataError(f"seed {seed} is negative; expected 0 or more")
    kind, colon, folder = name.partition(":")
    if kind in packaged and not colon:
        return packaged[kind](seed)
    if kind in of_the_user and folder:
        return of_the_user[kind](Path(folder).expanduser(), seed)
    raise DataError(
        f"unknown data set {name!r}; choose one of: {', '.join(names())} (images), {', '.join(text_names())} (texts)"
    )
