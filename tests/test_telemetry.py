"""Telemetry: its numbers are those of the definitions, it changes no bit of the training, and the terminal shows it."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isgq
from isgq import cli, watch
from isgq.core.errors import OptionError
from isgq.launch import launch

TOP_K = "error_feedback(top_k:k=0.25)"
LEARNED = "rotated:nmse=1.0,bases=learned"


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 9))


def train(session: isgq.Session, model: nn.Module, steps: int, rank: int = 0) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 16, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
        model.zero_grad()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Board:
    """Takes curves."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))


def test_numbers_are_those_of_the_definitions(tmp_path: Path) -> None:
    """Top-k keeps the largest entries, so everything about it can be said from the gradient alone."""
    model = make()
    with isgq.instrument(model, TOP_K) as session:
        isgq.Telemetry(session, every=1, path=tmp_path / "t.jsonl")
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
        with session.no_sync():
            model(x).square().sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        session.synchronize()
        [line] = lines(tmp_path / "t.jsonl")
        assert (line["step"], line["rank"], line["staleness"]) == (0, 0, 0)
        assert list(line["parameters"]) == list(grads)
        for name, said in line["parameters"].items():
            g = grads[name].double().flatten()
            kept = g.square().sort(descending=True).values[: round(0.25 * len(g)) or 1].sum()
            total = g.square().sum()
            assert said["bytes"] == session.traffic.by_parameter[name]
            assert said["gradient"] == pytest.approx(float(total.sqrt()))
            assert said["nmse"] == pytest.approx(float(1 - kept / total), rel=1e-5)
            assert said["cosine"] == pytest.approx(float((kept / total).sqrt()), rel=1e-5)
            assert said["memory"] == pytest.approx(float((total - kept).sqrt()), rel=1e-5)


def test_what_travels_as_it_is_has_no_error_and_a_zero_gradient_has_none_to_speak_of(tmp_path: Path) -> None:
    model, board = make(), Board()
    with isgq.instrument(model, "dense") as session:
        isgq.Telemetry(session, every=1, path=tmp_path / "t.jsonl", board=board)
        (model(torch.ones(2, 16)) * 0).sum().backward()
        train(session, model, 1)
    zero, first = (line["parameters"]["0.weight"] for line in lines(tmp_path / "t.jsonl"))
    assert (zero["bytes"], zero["gradient"], zero["nmse"], zero["cosine"]) == (768, 0, None, None)
    assert (first["bytes"], first["nmse"], first["memory"]) == (768, 0, 0)
    assert first["cosine"] == pytest.approx(1)
    assert ("isgq/bytes/0.weight", 768, 1) in board.points
    assert ("isgq/nmse/0.weight", 0.0, 1) in board.points
    assert not [tag for tag, _, step in board.points if step == 0 and "nmse" in tag]


def test_the_schedule_is_kept_and_nothing_is_written_between(tmp_path: Path) -> None:
    model = make()
    with isgq.instrument(model, TOP_K) as session:
        isgq.Telemetry(session, every=3, path=tmp_path / "new" / "t.jsonl")
        train(session, model, 8)
    assert [line["step"] for line in lines(tmp_path / "new" / "t.jsonl")] == [0, 3, 6]


def test_a_full_disk_ends_telemetry_and_not_the_training() -> None:
    model = make()
    with isgq.instrument(model, TOP_K) as session:
        isgq.Telemetry(session, every=1, path="/dev/full")
        with pytest.warns(UserWarning, match="telemetry ends at step 0"):
            train(session, model, 1)
        train(session, model, 2)
        assert session.step == 3


def test_mistakes_are_named(tmp_path: Path) -> None:
    with isgq.instrument(make(), TOP_K) as session:
        with pytest.raises(OptionError, match="every=0 of Telemetry must be 1 step or more"):
            isgq.Telemetry(session, every=0)
        with pytest.raises(OptionError, match="alarm=nan of Telemetry must be a positive NMSE"):
            isgq.Telemetry(session, alarm=float("nan"))
        with pytest.raises(OptionError, match="choose another path"):
            isgq.Telemetry(session, path=tmp_path)
    with isgq.instrument(make(), "subspace:rank=2") as session, pytest.raises(OptionError, match="codec subspace"):
        isgq.Telemetry(session, path=None)


WAYS: dict[str, dict[str, Any]] = {
    "factors": {"codec": "dithered:levels=4", "routes": "factors"},
    "learned": {"codec": LEARNED, "routes": "factors"},
    "memory": {"codec": TOP_K},
    "two_pass": {"codec": "top_k:k=0.25", "aggregate": "two_pass", "down": "one_bit"},
}


ALARMED: dict[str, tuple[dict[str, Any], str]] = {
    "factors": ({"codec": "dithered:levels=1", "routes": "factors"}, "NMSE"),
    "direct": ({"codec": "qsgd:levels=1"}, "NMSE"),
    "memory": ({"codec": TOP_K}, "memory"),
    "momentum": ({"codec": "momentum_correction(top_k:k=0.25)"}, "memory"),
    "of the model": ({"codec": TOP_K, "scope": "model"}, "memory"),
    "two_pass": ({"codec": "top_k:k=0.25", "aggregate": "two_pass", "down": "one_bit"}, "memory"),
}


def alarmed(path: str) -> dict[str, tuple[torch.Tensor, list[str], list[str]]]:
    """Weights after steps in which rank 1 finds that too much is left out of its gradients."""
    found = {}
    for name, (options, _) in ALARMED.items():
        said: list[str] = []
        model, rank = make(), dist.get_rank()
        with isgq.instrument(model, log=said.append, **options) as session:
            if rank == 1:
                isgq.Telemetry(session, every=1, path=f"{path}/{name}.jsonl", alarm=1e-3)
            train(session, model, 9, rank)
            whole = sorted(name for carrier in session._carriers if carrier.distrusted for name in carrier.names)
            state = session.state_dict()
        found[name] = torch.cat([p.detach().flatten() for p in model.parameters()]), said, whole
        model = make()
        with isgq.instrument(model, log=said.append, **options) as session:
            session.load_state_dict(state)
            train(session, model, 1, rank)
            assert whole == sorted(
                name for carrier in session._carriers if carrier.distrusted for name in carrier.names
            )
    return found


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alarm")
    return folder, launch(alarmed, 2, args=(str(folder),), timeout=30)


@pytest.mark.parametrize("name", ALARMED)
def test_what_drifts_on_one_rank_travels_whole_from_all_and_all_hold_the_same_bits(
    drifted: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, results = drifted
    (weights, heard, whole), (same, said, also) = (result[name] for result in results)
    assert whole == also
    assert torch.equal(weights, same)
    written = [line["parameters"] for line in lines(folder / f"{name}.jsonl")]
    first = {key for key, each in written[0].items() if (each["memory"] or each["nmse"]) > 1e-3}
    assert len(first) >= (1 if name == "of the model" else 2)
    what = ALARMED[name][1]
    for key in first:
        reason = f"travels whole from now on: its {what} has been above 0.001 up to step 2"
        assert sum(reason in words and words.startswith(f"isgq: {key}") for words in said) >= 1
        assert all(step[key]["memory"] == 0 for step in written[3:])  # nothing is owed any more
        assert written[4][key]["nmse"] == 0 or name == "momentum"
    for key in first:
        if name != "of the model":
            assert f"isgq: {key} travels whole from now on: rank 1 does not trust its compression any more" in heard


def observed(path: str) -> dict[str, Any]:
    """Final weights, observed on the last rank only and not at all."""
    rank, found = dist.get_rank(), {}
    for name, options in WAYS.items():
        for watched in (False, True):
            model = make()
            with isgq.instrument(model, **options) as session:
                if watched and rank == 1:
                    isgq.Telemetry(session, every=2, path=f"{path}/{name}.jsonl")
                train(session, model, 6, rank)
            found[name, watched] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("telemetry")
    return folder, launch(observed, 2, args=(str(folder),), timeout=30)


@pytest.mark.parametrize("name", WAYS)
def test_observing_one_rank_changes_no_bit_on_any(runs: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    folder, results = runs
    for result in results:
        assert torch.equal(result[name, True], results[0][name, False])
    written = lines(folder / f"{name}.jsonl")
    assert [(line["step"], line["rank"]) for line in written] == [(0, 1), (2, 1), (4, 1)]
    for line in written:
        assert {"0.weight", "2.weight"} <= set(line["parameters"])
        for each in line["parameters"].values():
            assert each["bytes"] >= 0  # in two passes, this rank's share of the gradient stays here
            assert each["nmse"] >= 0
            assert -1 <= each["cosine"] <= 1 + 1e-9
    assert any(each["memory"] > 0 for each in written[-1]["parameters"].values()) == (name in {"memory", "two_pass"})


def asynchronous(path: str) -> Counter[int] | None:
    """What a server has seen of staleness; its workers observe every step."""
    model, rank = make(), dist.get_rank()
    with isgq.instrument(model, "top_k:k=0.25", aggregate="async") as session:
        if session.serves:
            return session.serve(torch.optim.SGD(model.parameters(), lr=0.01)).staleness
        isgq.Telemetry(session, every=1, path=path)
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 16, generator=generator)).square().sum().backward()
    return None


def test_staleness_is_what_the_server_counts(tmp_path: Path) -> None:
    seen, *_ = launch(asynchronous, 3, args=(str(tmp_path / "t.jsonl"),), timeout=30)
    assert seen is not None
    written = lines(tmp_path / "t.jsonl")
    assert sorted((line["rank"], line["step"]) for line in written) == [(r, s) for r in (1, 2) for s in range(8)]
    told = Counter(line["staleness"] for line in written if line["step"])  # of the gradient before
    assert all(line["staleness"] == 0 for line in written if not line["step"])
    assert told <= seen
    assert told.total() == seen.total() - 2  # nobody tells of each worker's last


def entry(step: int, rank: int, size: int, nmse: float | None) -> str:
    each = {"bytes": size, "gradient": 1.0, "nmse": nmse, "cosine": 0.5, "memory": 0.25}
    return json.dumps({"step": step, "rank": rank, "staleness": 2 * rank, "parameters": {"0.weight": each}}) + "\n"


def test_the_terminal_shows_the_last_step_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.telemetry.jsonl"
    torn = "{torn\n[1]\n" + '{"parameters": 3}\n' + '{"step": 9'
    path.write_text(entry(3, 0, 7, 9.0) + entry(6, 0, 1000, 0.25) + entry(6, 1, 500, 0.75) + torn)
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    first, _, row = capsys.readouterr().out.splitlines()
    assert first == "a.telemetry.jsonl: step 6, 2 rank(s), 1,500 bytes sent, staleness 2"
    assert row.split() == ["0.weight", "1,500", "0.5", "0.500", "1", "0.25"]


def test_the_terminal_follows_what_grows_and_ends_with_control_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, looks = tmp_path / "telemetry.jsonl", iter([entry(1, 0, 10, None), None])
    path.touch()

    def sleep(seconds: float) -> None:
        more = next(looks)
        if more is None:
            raise KeyboardInterrupt
        path.write_text(more)

    watch.run(argparse.Namespace(source=path, refresh=1.0, once=False), sleep)
    output = capsys.readouterr().out
    assert "nothing observed yet" in output
    assert "step 1" in output
    assert "nan" in output


def test_a_run_without_telemetry_is_told_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (watch.main, lambda arguments: cli.main(["watch", *arguments])):
        assert main([str(tmp_path)]) == 2
        assert "--telemetry" in capsys.readouterr().err
