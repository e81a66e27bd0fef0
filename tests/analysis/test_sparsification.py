"""Baselines of sparsification: their means, their closed forms, how many entries they keep, and the table."""

import pytest
import torch

from analysis.sparsification import SPARSIFIERS, closed_form, main, measure, vectors
from isgq.core.keys import Key

N, M = 1000, 50
VECTORS = vectors(N, seed=0)


@pytest.mark.parametrize("name", VECTORS)
def test_usa_has_its_closed_form_within_one_percent(name: str) -> None:
    x = VECTORS[name]
    assert measure(SPARSIFIERS["USA"], x, M, 300).error == pytest.approx(closed_form("USA", x, M), rel=0.01)


@pytest.mark.parametrize("name", [name for name in SPARSIFIERS if name != "priority"])
def test_errors_are_those_of_the_closed_form(name: str) -> None:
    for x in VECTORS.values():
        found, expected = measure(SPARSIFIERS[name], x, M, 200), closed_form(name, x, M)
        assert expected is not None
        assert abs(found.error - expected) <= 4.5 * found.deviation


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_the_mean_is_the_vector(name: str) -> None:
    x, draws = vectors(12, seed=1)["Student t2"], 800
    q = torch.stack([SPARSIFIERS[name](x, 4, Key("mean", step=step).digest) for step in range(draws)])
    assert bool(((q.mean(0) - x).abs() <= 4.5 * q.std(0) / draws**0.5 + 1e-12).all())


def test_how_many_entries_are_kept() -> None:
    for x in VECTORS.values():
        found = {name: measure(sparsifier, x, M, 50) for name, sparsifier in SPARSIFIERS.items()}
        for name in ("USA", "priority", "random m"):
            assert (found[name].fewest, found[name].most) == (M, M)
        assert found["with replacement"].most <= M
        assert found["Poisson"].fewest < M < found["Poisson"].most


def test_priority_sampling_lies_between_usa_and_replacement() -> None:
    for x in VECTORS.values():
        found = measure(SPARSIFIERS["priority"], x, M, 400).error
        assert closed_form("USA", x, M) < found < closed_form("with replacement", x, M)  # type: ignore[operator]


def test_as_many_entries_as_there_are_change_nothing() -> None:
    x = vectors(9, seed=2)["Gaussian"]
    for name in ("USA", "Poisson", "priority", "random m"):
        torch.testing.assert_close(SPARSIFIERS[name](x, 9, 1), x, rtol=1e-12, atol=0)


def test_the_command_prints_a_line_for_each_vector(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--draws", "3", "--n", "100", "--m", "10"])
    title, _, header, rule, *lines = capsys.readouterr().out.splitlines()
    assert "n = 100, m = 10" in title
    assert [line.split("  ")[0] for line in lines] == list(VECTORS)
    assert all(name in header for name in SPARSIFIERS)
    assert all(len(line) == len(rule) for line in lines)


@pytest.mark.parametrize("options", [["--m", "0"], ["--n", "10", "--m", "11"], ["--draws", "1"]])
def test_sizes_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert "must be in 1" in capsys.readouterr().err
