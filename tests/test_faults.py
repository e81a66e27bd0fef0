"""A fault on one rank is the same named error on every rank, or an ExchangeError in time; then training goes on."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isgq
from isgq.core.errors import RankError
from isgq.launch import launch

CODEC = "dithered:levels=4"
TIMEOUT = 8.0


def make(width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3))


def spoil(value: float) -> Callable[[nn.Module, int], None]:
    def step(model: nn.Module, rank: int) -> None:
        x = torch.ones(4, 6) + rank
        x[0, 2] = value if rank == 1 else 0.0
        model(x).sum().backward()

    return step


def spoil_dense(model: nn.Module, rank: int) -> None:
    handle = model[1].bias.register_hook(lambda grad: grad * float("nan")) if rank == 1 else None  # type: ignore[index]
    try:
        whole(model, rank)
    finally:
        if handle is not None:
            handle.remove()


def empty(model: nn.Module, rank: int) -> None:
    model(torch.ones(0 if rank == 1 else 4, 6)).sum().backward()


def whole(model: nn.Module, rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()


REFUSALS: dict[str, tuple[Callable[[nn.Module, int], None], str, str]] = {
    "NaN": (spoil(float("nan")), "PeerNonFiniteError", "rank 1, step {step}, parameter '"),
    "Inf": (spoil(float("inf")), "PeerNonFiniteError", "rank 1, step {step}, parameter '"),
    "NaN, dense": (spoil_dense, "PeerNonFiniteError", "rank 1, step {step}, parameter '1.bias'"),
    "empty": (empty, "EmptyBatchError", "rank 1, step {step}"),
}


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # the test looks at what it is
        return f"{type(error).__name__}: {error}"
    return "fine"


def refused_steps() -> dict[str, Any]:
    rank, report = dist.get_rank(), {}
    for name, (bad, _, _) in REFUSALS.items():
        for steps_before in (0, 2):
            for to_none in (True, False):
                model = make()
                with isgq.instrument(model, CODEC, routes="factors") as session:
                    for _ in range(steps_before):
                        whole(model, rank)
                        model.zero_grad(set_to_none=to_none)
                    said = outcome(partial(bad, model, rank))
                    model.zero_grad(set_to_none=to_none)
                    for _ in range(2):
                        whole(model, rank)
                    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    factored = sum(line.route == "factors" for line in session.plan.lines)
                    report[name, steps_before, to_none] = (said, session.step, factored, grads)
    return report


def disagreements() -> dict[str, str]:
    rank = dist.get_rank()
    last = rank == 1
    saved = isgq.instrument(model := make(), CODEC)
    whole(model, rank)
    early = saved.state_dict()
    whole(model, rank)
    late = saved.state_dict()
    saved.close()

    def resumed(state: dict[str, Any] | None) -> str:
        with isgq.instrument(other := make(), CODEC) as session:
            if state is not None:
                session.load_state_dict(state)
            return outcome(lambda: whole(other, rank))

    def frozen() -> nn.Module:
        model = make()
        model.append(nn.BatchNorm1d(4 if last else 3))
        model[3].requires_grad_(False)
        return model

    return {
        "codec": outcome(lambda: isgq.instrument(make(), CODEC if last else "exact")),
        "seed": outcome(lambda: isgq.instrument(make(), CODEC, seed=rank)),
        "model": outcome(lambda: isgq.instrument(make(6 if last else 5), CODEC)),
        "frozen part of the model": outcome(lambda: isgq.instrument(frozen(), CODEC)),
        "step": resumed(late if last else early),
        "resumed on one rank only": resumed(late if last else None),
    }


def leave_out() -> tuple[str, float]:
    model = make()
    isgq.instrument(model, CODEC)
    whole(model, dist.get_rank())
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT + 6)
        return "absent", 0.0
    return outcome(lambda: whole(model, 0)), time.monotonic() - start


def die(folder: str) -> None:
    model = make()
    isgq.instrument(model, CODEC)
    whole(model, rank := dist.get_rank())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = outcome(lambda: whole(model, rank))
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(said)


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Any]]:
    return launch(refused_steps, 2, timeout=TIMEOUT)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_step_is_one_error_and_training_goes_on(
    refusals: list[dict[str, Any]], name: str, steps_before: int, to_none: bool
) -> None:
    _, error, where = REFUSALS[name]
    results = [report[name, steps_before, to_none] for report in refusals]
    for said, step, factored, grads in results:
        assert said.startswith(f"{error}: {where.format(step=steps_before)}")
        assert (step, factored) == (steps_before + 2, 2)
        assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert len({said for said, *_ in results}) == 1
    assert all(torch.equal(a, b) for a, b in zip(results[0][3], results[1][3], strict=True))


def test_ranks_that_disagree_are_refused_alike() -> None:
    reports = launch(disagreements, 2, timeout=TIMEOUT)
    assert reports[0] == reports[1]
    for name, said in reports[0].items():
        assert said.startswith("MismatchError: rank 1"), (name, said)


def test_a_rank_that_skips_a_step_is_missed_in_time() -> None:
    said, waited = launch(leave_out, 2, timeout=TIMEOUT)[0]
    assert said.startswith("ExchangeError: rank 0 of 2")
    assert waited < TIMEOUT + 4


def test_a_killed_rank_is_missed_in_time(tmp_path: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: killed"):
        launch(die, 2, args=(str(tmp_path),), timeout=TIMEOUT)
    assert time.monotonic() - start < TIMEOUT + 30
    assert (tmp_path / "0").read_text().startswith("ExchangeError: rank 0 of 2")
