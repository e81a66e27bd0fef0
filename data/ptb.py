"""``ptb:DIR``: the user's word-level text files in the layout of the Penn Treebank (Mikolov's) or of WikiText.

``ptb.{train,valid,test}.txt``, in DIR or in its ``simple-examples/data``, or ``wiki.{train,valid,test}.tokens``: UTF-8,
words separated by blanks, one sentence or paragraph a line. Every line gets an ``<eos>``; rare words are ``<unk>``
already. The genuine Penn Treebank has 929,589 + 73,760 + 82,430 tokens and a vocabulary of 10,000.
"""

import warnings
from pathlib import Path

from data.dataset import DataError
from data.text import END, PARTS, Text, from_words

_PLACES = ("", "simple-examples/data", "data")
_LAYOUTS = {"ptb": ("ptb.{}.txt", "Penn Treebank"), "wiki": ("wiki.{}.tokens", "WikiText")}
_GENUINE = 10_000  # words


def load(folder: Path, seed: int) -> Text:
    """The three files of a folder; a warning where files under the names of the Penn Treebank are not it.

    Args:
        folder: where the files lie.
        seed: not used; the files fix order and split.

    Raises:
        DataError: a file is missing, empty or not UTF-8.
    """
    del seed
    for place in _PLACES:
        for layout, (pattern, title) in _LAYOUTS.items():
            paths = {part: folder / place / pattern.format(part) for part in PARTS}
            missing = [path.name for path in paths.values() if not path.is_file()]
            if len(missing) == len(paths):
                continue
            if missing:
                raise DataError(f"ptb: {folder / place} lacks {', '.join(missing)}")
            words = {part: _words(path) for part, path in paths.items()}
            text = from_words(words, limit=None, name="ptb", title=title)
            if layout == "ptb" and text.classes != _GENUINE:
                warnings.warn(
                    f"{folder / place}: a vocabulary of {text.classes:,}; the genuine Penn Treebank has 10,000",
                    stacklevel=2,
                )
            return text
    raise DataError(
        f"ptb: no text in {folder}; expected ptb.train.txt, ptb.valid.txt and ptb.test.txt, or wiki.train.tokens, "
        "wiki.valid.tokens and wiki.test.tokens"
    )


def _words(path: Path) -> list[str]:
    """Words of a file, ``<eos>`` after every line."""  # noqa: DOC501
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; expected plain text") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not any(line.split() for line in lines):
        raise DataError(f"{path}: has no words")
    return [word for line in lines for word in (*line.split(), END)]
