"""Codecs as DistributedDataParallel hooks, and federated rounds, on real processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isgq
from isgq.core.errors import OptionError
from isgq.launch import launch

SPECS = ["exact", "qsgd:levels=4", "error_feedback(top_k:k=0.25->0.05@20)", "error_feedback(one_bit)"]
SPECS += ["one_bit, two_pass", "top_k:k=0.1, server"]
"""Codec, and how to aggregate if not by gathering; in two passes the codec works both ways."""


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


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of every tensor that is handed to torch.distributed's gathering and reducing, one entry a call."""
    sizes: list[int] = []
    all_gather, all_reduce, all_to_all = dist.all_gather, dist.all_reduce, dist.all_to_all_single

    def gather(parts: list[torch.Tensor], message: torch.Tensor, **options: Any) -> Any:
        sizes.append(message.numel() * message.element_size())
        return all_gather(parts, message, **options)

    def reduce(tensor: torch.Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, **options)

    def deal(result: torch.Tensor, data: torch.Tensor, *counts: Any, **options: Any) -> Any:
        size = data.numel() * data.element_size()
        sizes.append(size if counts else size // dist.get_world_size())  # the same for all ranks is a message for all
        return all_to_all(result, data, *counts, **options)

    dist.all_gather, dist.all_reduce, dist.all_to_all_single = gather, reduce, deal
    try:
        yield sizes
    finally:
        dist.all_gather, dist.all_reduce, dist.all_to_all_single = all_gather, all_reduce, all_to_all


def descend(model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    """The losses of 60 steps; ``after`` is called behind each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(60):
        x, y = sample(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step)
    return losses


def hooks(specs: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for spec in specs:
        model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.02)
        codec, _, aggregate = spec.partition(", ")
        options: dict[str, Any] = {"aggregate": aggregate, "down": codec} if aggregate else {}
        hook = isgq.ddp.comm_hook(codec, model, **options)
        model.register_comm_hook(None, hook)
        state, buckets = hook.state, set[int]()  # type: ignore[attr-defined]

        def reduce(bucket: Any, state: Any = state, buckets: set[int] = buckets) -> Any:
            buckets.add(bucket.index())
            return type(state).reduce(state, bucket)

        state.reduce = reduce
        with counted() as sizes:
            losses = descend(model)
        report[spec] = {
            "losses": (losses[0], sum(losses[-5:]) / 5),
            "identical": identical(model),
            "buckets": len(buckets),
            "sent": (state.exchange.sent, sum(sizes)),
            "memory": {name.split("[")[0] for name in state.state_dict()["memory"].get("up", {})},
        }
    model = network()
    rounds = isgq.Federated(model, "error_feedback(top_k:k=0.1)")
    before = rounds.exchange.sent
    with counted() as sizes:
        losses = descend(model, lambda step: rounds.average() if step % 5 == 4 else None)
    report["federated"] = (losses[-1], identical(model), rounds.round, rounds.exchange.sent - before, sum(sizes))
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(hooks, 2, args=(SPECS,), timeout=30)


@pytest.mark.parametrize("spec", SPECS)
def test_a_hook_converges_over_several_buckets_with_identical_replicas(
    reports: list[dict[str, Any]], spec: str
) -> None:
    for report in reports:
        found = report[spec]
        assert found["identical"]
        assert found["buckets"] >= 2
        first, last = found["losses"]
        assert last < 0.7 * first
        sent, handed = found["sent"]
        assert sent == handed
        dense = 60 * 4 * sum(p.numel() for p in network().parameters())
        assert sent < (1.05 if spec == "exact" else 0.5) * dense
        names = {name for name, _ in network().named_parameters()}
        assert found["memory"] == (names if spec.startswith("error_feedback") or ", " in spec else set())


def test_federated_rounds_keep_replicas_identical(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        loss, same, rounds, sent, handed = report["federated"]
        assert same
        assert rounds == 12
        assert loss < 0.6
        assert sent == handed


def test_pair_codecs_are_refused() -> None:
    with pytest.raises(OptionError, match="gradients only"):
        isgq.ddp.comm_hook("naive")
    with pytest.raises(OptionError, match="no factors"):
        isgq.Federated(network(), "naive")
