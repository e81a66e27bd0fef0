"""Texts as numbers: what every loader of a text returns, and how words become ids.

The vocabulary comes from the training part alone, most frequent words first and equally frequent ones by spelling, so
that it is the same everywhere. A word outside it is ``<unk>``; a sentence or line ends with ``<eos>``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.dataset import DataError

UNKNOWN, END = "<unk>", "<eos>"
PARTS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Text:
    """Running text, split into three parts.

    Attributes:
        train: [n] int64 in [0, classes).
        valid: the same, [m]: what is looked at while models and rates are chosen.
        test: the same, [k].
        vocabulary: the words, by id.
        name: the name under which ``data.load_text`` knows it, e.g. ``"sotu"``.
        title: what a figure or a table calls it.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    name: str
    title: str

    @property
    def classes(self) -> int:
        """Size of the vocabulary."""
        return len(self.vocabulary)

    def __repr__(self) -> str:
        sizes = " + ".join(f"{len(part):,}" for part in (self.train, self.valid, self.test))
        return f"Text({self.name}: {sizes} tokens, vocabulary {self.classes:,})"


def from_words(words: Mapping[str, Sequence[str]], *, limit: int | None, name: str, title: str) -> Text:
    """Turn words into ids.

    Args:
        words: of each of :data:`PARTS`, with ``<eos>`` where it belongs.
        limit: size of the vocabulary, ``<unk>`` included; None for all words of the training part.
        name: see :class:`Text`.
        title: see :class:`Text`.

    Raises:
        DataError: a part has no words.
    """
    for part in PARTS:
        if not words[part]:
            raise DataError(f"{name}: the part {part!r} has no words")
    counts = Counter(words["train"])
    counts[UNKNOWN] += 0  # it has an id even where the text has none
    order = _by_frequency(counts)
    if limit is not None and len(order) > limit:
        for word in [word for word in order if word != UNKNOWN][limit - 1 :]:
            counts[UNKNOWN] += counts.pop(word)
        order = _by_frequency(counts)
    ids = {word: i for i, word in enumerate(order)}
    unknown = ids[UNKNOWN]
    train, valid, test = (
        torch.from_numpy(np.fromiter((ids.get(word, unknown) for word in words[part]), np.int64, len(words[part])))
        for part in PARTS
    )
    return Text(train, valid, test, tuple(order), name, title)


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))
