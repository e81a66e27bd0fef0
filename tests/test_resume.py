"""Going on with another number of workers: memories are shared out so that nothing is lost, dropped, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isgq
from isgq.core.errors import MismatchError, OptionError
from isgq.launch import launch
from tests.test_aggregate import fingerprint, gather_objects, left_out, network, step_once

CASES: dict[str, dict[str, Any]] = {
    "two_pass": {"codec": "top_k:k=0.1", "down": "one_bit", "aggregate": "two_pass"},
    "whole model": {"codec": "one_bit", "down": "top_k:k=0.1", "aggregate": "two_pass", "scope": "model"},
    "server": {"codec": "one_bit", "down": "one_bit", "aggregate": "server"},
    "factors": {"codec": "isgq", "down": "top_k:k=0.1", "aggregate": "two_pass", "routes": "factors"},
    "gather": {"codec": "error_feedback(top_k:k=0.1)"},
    "subspace": {"codec": "subspace:rank=2"},
    "momentum": {"codec": "momentum_correction(top_k:k=0.1)", "down": "sign", "aggregate": "two_pass"},
}


def save(steps: int) -> dict[str, Any]:
    report = {}
    for name, options in CASES.items():
        model = network()
        with isgq.instrument(model, **options) as session:
            for step in range(steps):
                step_once(model, step)
            omega = left_out(model, session) if name != "momentum" else torch.zeros(1)
            report[name] = (session.state_dict(), model.state_dict(), omega)
    return report


def resume(path: Path, resize: str) -> dict[str, Any]:
    saved, report = torch.load(path), {}
    for name, options in CASES.items():
        model, logs = network(), []
        model.load_state_dict(saved[0][name][1])
        with isgq.instrument(model, **options, log=logs.append) as session:  # type: ignore[var-annotated]
            session.load_state_dict([states[name][0] for states in saved], resize=resize)  # type: ignore[arg-type]
            omega = left_out(model, session) if name != "momentum" else torch.zeros(1)
            norms = sum(float(t.norm()) for held in session.state_dict()["memory"].values() for t in held.values())
            step_once(model, session.step)
            report[name] = (omega, norms, logs, len(set(gather_objects(fingerprint(model)))), session.step)
    return report


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    return launch(save, 3, args=(5,), timeout=60)


@pytest.mark.parametrize("resize", ["sum", "reset"])
def test_another_number_of_workers_goes_on_by_the_declared_policy(
    saved: list[dict[str, Any]], resize: str, tmp_path: Path
) -> None:
    torch.save(saved, path := tmp_path / "saved.pt")
    for rank, report in enumerate(launch(resume, 2, args=(path, resize), timeout=60)):
        for name in CASES:
            omega, norms, logs, different, steps = report[name]
            before: Tensor = saved[0][name][2]
            assert different == 1
            assert steps == 6
            if resize == "sum":
                torch.testing.assert_close(omega, before, rtol=1e-6, atol=1e-8)
                assert norms > 0
            else:
                assert norms == 0
            if rank == 0:
                [line] = logs
                assert "resumed with 2 ranks what 3 had saved" in line
                assert ("shared out" if resize == "sum" else "dropped") in line


def refused(path: Path) -> list[str]:
    answers = []
    states = [each["two_pass"][0] for each in torch.load(path)]
    with isgq.instrument(network(), **CASES["two_pass"]) as session:
        for state, resize in (
            (states, "error"),
            (states[:1], "sum"),
            (states[::-1], "sum"),
            (states[0] | {"world_size": 2}, "error"),
            (states, "add"),
            ([], "error"),
        ):
            try:
                session.load_state_dict(state, resize=resize)  # type: ignore[arg-type]
                answers.append(f"fine on {dist.get_rank()}")
            except (MismatchError, OptionError) as error:
                answers.append(str(error))
    return answers


def test_what_would_lose_a_memory_is_refused(saved: list[dict[str, Any]], tmp_path: Path) -> None:
    torch.save([{"two_pass": each["two_pass"]} for each in saved], path := tmp_path / "saved.pt")
    for rank, answers in enumerate(launch(refused, 2, args=(path,), timeout=60)):
        other, few, order, rank_0, policy, nothing = answers
        assert "saved by 3 ranks, these are 2" in other
        assert "resize='sum'" in other
        assert "needs the states of all 3 ranks" in few
        assert "in rank order" in order
        assert ("fine" if rank == 0 else "every rank has memories of its own") in rank_0
        assert "error, sum, reset" in policy
        assert "no state" in nothing
