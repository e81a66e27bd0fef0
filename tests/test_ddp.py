"""Codecs as DistributedDataParallel hooks, and federated rounds, on real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isgq
from isgq.core.errors import OptionError
from isgq.launch import launch

SPECS = ["exact", "qsgd:levels=4", "error_feedback(top_k:k=0.25->0.05@20)", "error_feedback(one_bit)"]


def sample(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
    teacher = torch.randn(20, 2, generator=torch.Generator().manual_seed(5))
    return x, (x @ teacher).argmax(1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2))


def identical(model: nn.Module) -> bool:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [p.detach().numpy().tobytes() for p in model.parameters()])
    return all(each == every[0] for each in every)


def hooks(specs: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for spec in specs:
        model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.02)
        hook = isgq.ddp.comm_hook(spec, model)
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(60):
            x, y = sample(dist.get_rank(), step)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = hook.state  # type: ignore[attr-defined]
        report[spec] = (losses[0], sum(losses[-5:]) / 5, identical(model), state.exchange.sent / 60, state.state_dict())
    rounds_model = network()
    rounds = isgq.Federated(rounds_model, "error_feedback(top_k:k=0.1)")
    optimizer = torch.optim.SGD(rounds_model.parameters(), lr=0.1)
    for step in range(60):
        x, y = sample(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(rounds_model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            rounds.average()
    report["federated"] = (loss.item(), identical(rounds_model), rounds.round)
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(hooks, 2, args=(SPECS,), timeout=30)


@pytest.mark.parametrize("spec", SPECS)
def test_a_hook_converges_over_several_buckets_with_identical_replicas(
    reports: list[dict[str, Any]], spec: str
) -> None:
    for report in reports:
        first, last, same, sent, state = report[spec]
        assert same
        assert last < 0.7 * first
        dense = 4 * sum(p.numel() for p in network().parameters())
        assert sent < (1.05 if spec == "exact" else 0.5) * dense
        names = {name for name, _ in network().named_parameters()}
        assert set(state["memory"].get("up", {})) == (names if spec.startswith("error_feedback") else set())


def test_federated_rounds_keep_replicas_identical(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        loss, same, rounds = report["federated"]
        assert same
        assert rounds == 12
        assert loss < 0.6


def test_pair_codecs_are_refused() -> None:
    with pytest.raises(OptionError, match="gradients only"):
        isgq.ddp.comm_hook("naive")
    with pytest.raises(OptionError, match="no factors"):
        isgq.Federated(network(), "naive")
