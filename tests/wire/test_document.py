"""What docs/wire-format.md says is so."""

import re
from pathlib import Path

import pytest

from isgq.wire import Template, pack, pack_message
from isgq.wire.entropy import ANS_ALPHABET_MAX, EXPANSION, Coder
from isgq.wire.layout import DTYPES
from tests.wire.coders import SIZES, size_row
from tests.wire.records import ternary

TEXT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()


def test_the_example_is_the_frame() -> None:
    block = TEXT.split("## Example")[1].split("```")[1]
    lines = [re.match(r"((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", line) for line in block.strip().splitlines()]
    written = bytes.fromhex(" ".join(line[1] for line in lines if line))
    assert all(lines)
    assert written == bytes(pack(ternary()).numpy())


def test_the_example_in_a_message() -> None:
    data, sizes = pack_message([ternary()], digests=[ternary().digest], template=Template.of([ternary()]))
    assert sizes == [8]
    assert bytes(data[-8:].numpy()) == bytes.fromhex("00 0000003f 00 0f13")


def test_codes_and_limits_are_the_documented_ones() -> None:
    for code, dtype in enumerate(DTYPES):
        assert re.search(rf"\b{code} {str(dtype).removeprefix('torch.')}\b", TEXT)
    for coder in Coder:
        assert re.search(rf"\| {coder.value} \| {coder.name.lower().replace('_', ' ')} \|", TEXT, re.IGNORECASE)
    assert str(EXPANSION) in TEXT
    assert f"Alphabets go up to {ANS_ALPHABET_MAX}" in TEXT


@pytest.mark.parametrize("case", SIZES)
def test_the_table_of_sizes_is_what_the_command_prints(case: tuple[int, int, int]) -> None:
    """Zstandard's column, and so a choice that hangs on it, may differ a little between its versions."""
    cells = size_row(*case).split(" | ")
    row = next(line for line in TEXT.splitlines() if line.startswith(" | ".join(cells[:4])))
    written = row.split(" | ")
    assert written[4] == cells[4]
    assert written[6] == cells[6]
    assert abs(float(written[5]) - float(cells[5])) < 0.05 * float(cells[5])
