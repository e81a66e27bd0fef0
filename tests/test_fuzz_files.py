"""Short runs of the fuzzers of files and strings; ``make fuzz`` has the long ones."""

from pathlib import Path

import pytest

from tests.fuzz_files import run


@pytest.mark.parametrize(
    ("target", "mutations"), [("checkpoint", 300), ("idx", 1000), ("codec", 2000), ("config", 300)]
)
def test_whatever_comes_in_is_refused_or_valid(tmp_path: Path, target: str, mutations: int) -> None:
    outcomes = run(target, tmp_path, mutations, seed=1)
    refused = sum(number for outcome, number in outcomes.items() if "refused" in outcome)
    assert mutations // 5 < refused < mutations  # so both have been tried


def test_the_same_seed_gives_the_same_mutants(tmp_path: Path) -> None:
    assert run("codec", tmp_path, 50, seed=3) == run("codec", tmp_path, 50, seed=3)
