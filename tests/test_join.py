"""Ranks with different numbers of batches: the same training as with DistributedDataParallel's join."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isgq
from isgq.launch import launch

BATCHES = {"rank 0 more": [5, 3], "rank 1 more": [2, 4], "none on rank 0": [0, 2], "equal": [3, 3], "none": [0, 0]}
SPECS = ["exact", "isgq", "dense", "error_feedback(top_k:k=0.2), two_pass", "exact, server"]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, inner: nn.Module, batches: int, seed: int) -> None:
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for step in range(batches):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def by_ddp(counts: list[int]) -> list[Tensor]:
    model = make()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    for epoch in range(2):
        with wrapped.join() if max(counts) else nullcontext():
            train(wrapped, model, counts[dist.get_rank()], epoch)
    return [p.detach().clone() for p in model.parameters()]


def by_session(counts: list[int], spec: str) -> tuple[list[Tensor], int]:
    codec, _, aggregate = spec.partition(", ")
    model, options = make(), {"aggregate": aggregate} if aggregate else {}
    with isgq.instrument(model, codec, routes="factors", check_replicas=1, **options) as session:  # type: ignore[arg-type]
        for epoch in range(2):
            with session.join():
                train(model, model, counts[dist.get_rank()], epoch)
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]], session.step


def broken() -> str:
    """Rank 1 has NaN in its second batch, while rank 0 has none left."""
    model = make()
    with isgq.instrument(model, "isgq") as session:
        try:
            with session.join():
                train(model, model, 1, 0)
                if dist.get_rank() == 1:
                    model(torch.full((4, 6), float("nan"))).sum().backward()
        except isgq.IsgqError as error:
            return f"{type(error).__name__}: {error}"
    return "fine"


def straddling() -> list[str]:
    """By its own batch, rank 0 would send factors and rank 1 would not."""
    model = nn.Linear(30, 20)
    with isgq.instrument(model, "exact") as session:
        model(torch.randn(2 if dist.get_rank() == 0 else 200, 30)).sum().backward()
    return [line.route for line in session.plan.lines]


def every() -> dict[str, Any]:
    report: dict[str, Any] = {"broken": broken(), "straddling": straddling()}
    for name, counts in BATCHES.items():
        report[name] = {"ddp": by_ddp(counts)} | {spec: by_session(counts, spec) for spec in SPECS}
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(every, 2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", BATCHES)
def test_uneven_batches_train_as_with_join(reports: list[dict[str, Any]], name: str, spec: str) -> None:
    for report in reports:
        tensors, steps = report[name][spec]
        assert steps == 2 * max(BATCHES[name])
        if "equal" not in name:  # where a rank's buffers are the last word
            assert all(torch.equal(a, b) for a, b in zip(tensors, reports[0][name][spec][0], strict=True))
        if "exact" in spec or spec == "dense":
            for ours, theirs in zip(tensors, report[name]["ddp"], strict=False):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_who_has_no_batch_left_hears_of_a_fault_alike(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["broken"] == reports[1]["broken"]
    assert reports[0]["broken"].startswith("PeerNonFiniteError: rank 1, step 1, parameter '")


def test_routes_come_from_what_all_ranks_share(reports: list[dict[str, Any]]) -> None:
    assert [report["straddling"] for report in reports] == [["dense"], ["dense"]]
