"""With the exact codec a session gives the gradients of DistributedDataParallel."""

import copy
import hashlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isgq
from isgq.launch import launch
from tests.session_cases import CASES, Case, Turn

STEPS = 3


def build(case: Case) -> nn.Module:
    torch.manual_seed(1)
    model = case.build()
    return model if case.tolerance > 1e-6 else model.double()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def advance(model: nn.Module, case: Case) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    case.zero(model)


def by_ddp(case: Case) -> list[dict[str, Tensor | None]]:
    model = build(case)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    taken = []
    for step in range(STEPS):
        case.step(wrapped, Turn(dist.get_rank(), step, wrapped.no_sync, model))
        taken.append(gradients(model))
        advance(model, case)
    return taken


def by_average(case: Case) -> list[dict[str, Tensor | None]]:
    model = build(case)
    taken = []
    for step in range(STEPS):
        case.step(model, Turn(dist.get_rank(), step, nullcontext, model))
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        taken.append(gradients(model))
        advance(model, case)
    return taken


def by_session(case: Case) -> tuple[list[dict[str, Tensor | None]], list[str]]:
    model = build(case)
    taken = []
    with isgq.instrument(model, "exact", routes="factors", **case.options) as session:
        for step in range(STEPS):
            case.step(model, Turn(dist.get_rank(), step, session.no_sync, model))
            if case.options.get("sync") == "manual":
                session.synchronize()
            taken.append(gradients(model))
            advance(model, case)
        dense = [line.name for line in session.plan.lines if line.route == "dense"]
    return taken, dense


def compare(names: list[str]) -> dict[str, Any]:
    """Per case: the worst relative difference, the dense parameters, and a hash of all gradients."""
    report: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        try:
            expected = by_ddp(case) if case.oracle == "ddp" else by_average(case)
            got, dense = by_session(case)
        except isgq.IsgqError as error:
            report[name] = f"{type(error).__name__}: {error}"
            continue
        worst, digest = 0.0, hashlib.sha256()
        for ours, theirs in zip(got, expected, strict=True):
            for parameter, grad in ours.items():
                reference = theirs[parameter]
                if grad is None or reference is None:
                    worst = worst if grad is reference is None else float("inf")
                    continue
                worst = max(worst, float((grad - reference).norm() / (reference.norm() + 1e-30)))
                digest.update(grad.numpy().tobytes())
        report[name] = (worst, dense, digest.hexdigest())
    return report


ON_THREE = ["linear 2-d", "conv2d", "embedding", "twice", "no_sync", "unused on a rank", "tied", "attention"]
RUNS = [(2, name) for name in CASES] + [(3, name) for name in ON_THREE]


@pytest.fixture(scope="module")
def reports() -> dict[int, list[dict[str, Any]]]:
    """By number of ranks."""
    return {2: launch(compare, 2, args=(list(CASES),)), 3: launch(compare, 3, args=(ON_THREE,))}


@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_an_exact_session_equals_data_parallel(reports: dict[int, list[dict[str, Any]]], ranks: int, name: str) -> None:
    case = CASES[name]
    assert len(reports[ranks]) == ranks
    for report in reports[ranks]:
        assert not isinstance(report[name], str), report[name]
        worst, dense, _ = report[name]
        assert worst <= case.tolerance
        assert dense == list(case.dense)
    assert len({report[name][2] for report in reports[ranks]}) == 1


def test_a_deep_copy_of_the_model_is_free_of_the_session() -> None:
    model = nn.Linear(3, 2)
    with isgq.instrument(model, "exact") as session:
        twin = copy.deepcopy(model)
        twin(torch.randn(4, 3)).sum().backward()
        assert session.step == 0
        (model(torch.ones(4, 3)) + twin(torch.ones(4, 3))).sum().backward()
        assert session.step == 1
        assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0))
