"""A fault on one rank is the same named error on every rank, or an ExchangeError in time; then training goes on."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isgq
from isgq import agreement
from isgq.codecs.dithered import Dithered
from isgq.core.errors import RankError
from isgq.exchange import TorchExchange
from isgq.launch import launch

CODEC = "dithered:levels=4"
TIMEOUT = 30.0  # of a job's ranks for one another, also while they start
PATIENCE = 3.0  # of a session that waits for a rank which will not come


def make(width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3))


Step = Callable[[nn.Module, int, bool], None]
"""A backward pass: of this model, on this rank, and whether this rank is the faulty one."""


def spoil(value: float) -> Step:
    def step(model: nn.Module, rank: int, faulty: bool) -> None:
        x = torch.ones(4, 6) + rank
        x[0, 2] = value if faulty else 0.0
        model(x).sum().backward()

    return step


def spoil_dense(model: nn.Module, rank: int, faulty: bool) -> None:
    handle = model[1].bias.register_hook(lambda grad: grad * float("nan")) if faulty else None  # type: ignore[index]
    try:
        whole(model, rank)
    finally:
        if handle is not None:
            handle.remove()


def overflow(model: nn.Module, rank: int, faulty: bool) -> None:
    """Every rank's gradient is finite, their sum is not."""
    handle = model[1].bias.register_hook(lambda grad: grad * 0 + 3e38)  # type: ignore[index]
    try:
        whole(model, rank)
    finally:
        handle.remove()


def overflow_later(model: nn.Module, rank: int, faulty: bool) -> None:
    """Projected on a direction of its inputs, this gradient is finite; on one of its outputs, not."""
    weight = model[0].weight  # type: ignore[index]
    handle = weight.register_hook(lambda grad: grad * 0 + 2e38) if faulty else None
    try:
        whole(model, rank)
    finally:
        if handle is not None:
            handle.remove()


def empty(model: nn.Module, rank: int, faulty: bool) -> None:
    model(torch.ones(0 if faulty else 4, 6)).sum().backward()


def break_codec(model: nn.Module, rank: int, faulty: bool) -> None:
    """Not an error that anybody thought of."""

    def burst(*arguments: Any) -> None:
        raise LookupError("broken")

    with pytest.MonkeyPatch.context() as patch:
        if faulty:
            patch.setattr(Dithered, "encode", burst)
        whole(model, rank)


def whole(model: nn.Module, rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()


class Refusal(NamedTuple):
    step: Step
    error: str
    parameter: str = ""
    faulty: int = 1  # -1 is the last rank
    codec: str = CODEC
    factored: int = 2
    options: dict[str, Any] = {}  # noqa: RUF012  # of the session


TWO_PASS: dict[str, Any] = {"aggregate": "two_pass", "down": "one_bit"}
SERVER: dict[str, Any] = {"aggregate": "server", "down": "top_k:k=0.5"}
AHEAD: dict[str, Any] = {"bucket_cap_mb": 1e-6}
TOP_K = "top_k:k=0.5"
SUBSPACE = "subspace:rank=1"
REFUSALS = {
    "NaN": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", -1),
    "Inf": Refusal(spoil(float("inf")), "PeerNonFiniteError", ", parameter '", -1),
    "NaN, dense": Refusal(spoil_dense, "PeerNonFiniteError", ", parameter '1.bias'"),
    "empty": Refusal(empty, "EmptyBatchError"),
    "empty, dense": Refusal(empty, "EmptyBatchError", codec="dense", factored=0),
    "empty, direct": Refusal(empty, "EmptyBatchError", codec="error_feedback(top_k:k=0.5)", factored=0),
    "NaN, direct": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", codec="qsgd", factored=0),
    "NaN, ahead": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", options=AHEAD),
    "empty, ahead": Refusal(empty, "EmptyBatchError", options=AHEAD),
    "broken codec, ahead": Refusal(break_codec, "PeerError", ", parameter '", options=AHEAD),
    "NaN, direct and ahead": Refusal(spoil(float("nan")), "PeerNonFiniteError", codec=TOP_K, factored=0, options=AHEAD),
    "NaN, two passes": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", options=TWO_PASS),
    "NaN, server": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", -1, TOP_K, 0, SERVER),
    "empty, two passes": Refusal(empty, "EmptyBatchError", codec=TOP_K, factored=0, options=TWO_PASS),
    "NaN, subspace": Refusal(spoil(float("nan")), "PeerNonFiniteError", ", parameter '", codec=SUBSPACE, factored=0),
    "empty, subspace": Refusal(empty, "EmptyBatchError", codec=SUBSPACE, factored=0),
    "the mean overflows, subspace": Refusal(
        overflow, "PeerNonFiniteError", faulty=0, codec=SUBSPACE, factored=0, options={"aggregate": "server"}
    ),
    "a later round overflows": Refusal(overflow_later, "PeerNonFiniteError", ", parameter '0.weight'", -1, SUBSPACE, 0),
    "an exception": Refusal(break_codec, "PeerError", ", parameter '0.weight'", -1),
    "the mean overflows": Refusal(overflow, "PeerNonFiniteError", faulty=0, codec=TOP_K, factored=0, options=SERVER),
}


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # the test looks at what it is
        return f"{type(error).__name__}: {error}"
    return "fine"


def refused_steps() -> dict[str, Any]:
    rank, report = dist.get_rank(), {}
    for name, case in REFUSALS.items():
        faulty = rank == case.faulty % dist.get_world_size()
        for steps_before in (0, 2):
            for to_none in (True, False):
                model = make()
                with isgq.instrument(model, case.codec, routes="factors", **case.options) as session:
                    for _ in range(steps_before):
                        whole(model, rank)
                        model.zero_grad(set_to_none=to_none)
                    said = outcome(partial(case.step, model, rank, faulty))
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

    def drifted(last_only: bool) -> str:
        with isgq.instrument(other := make(), CODEC, check_replicas=2):
            for _ in range(2):
                whole(other, rank)
            with torch.no_grad():
                other[2].bias += float(last and last_only)  # type: ignore[operator]
            return outcome(lambda: whole(other, rank))

    def of_another_version() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "PROTOCOL", agreement.PROTOCOL + int(last))
            return outcome(lambda: isgq.instrument(make(), CODEC))

    assert drifted(False) == "fine"
    return {
        "drift": drifted(True),
        "protocol": of_another_version(),
        "codec": outcome(lambda: isgq.instrument(make(), CODEC if last else "exact")),
        "seed": outcome(lambda: isgq.instrument(make(), CODEC, seed=rank)),
        "model": outcome(lambda: isgq.instrument(make(6 if last else 5), CODEC)),
        "frozen part of the model": outcome(lambda: isgq.instrument(frozen(), CODEC)),
        "step": resumed(late if last else early),
        "resumed on one rank only": resumed(late if last else None),
    }


def leave_out() -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    model, rank = make(), dist.get_rank()
    isgq.instrument(model, CODEC, exchange=TorchExchange(group))
    whole(model, rank)
    dist.barrier()
    start = time.monotonic()
    said = outcome(lambda: whole(model, rank)) if rank != 1 else "absent"
    waited = time.monotonic() - start
    dist.barrier()  # until here rank 1 lives, so that it is missed and not found dead
    return said, waited


def faults() -> dict[str, Any]:
    return {"refusals": refused_steps(), "disagreements": disagreements(), "absence": leave_out()}


def die(folder: str, options: dict[str, Any]) -> None:
    model = make()
    isgq.instrument(model, CODEC, **options)
    whole(model, rank := dist.get_rank())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = outcome(lambda: whole(model, rank))
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(said)


@pytest.fixture(scope="module", params=[3])
def reports(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(faults, request.param, timeout=TIMEOUT)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_step_is_one_error_and_training_goes_on(
    reports: list[dict[str, Any]], name: str, steps_before: int, to_none: bool
) -> None:
    case = REFUSALS[name]
    results = [report["refusals"][name, steps_before, to_none] for report in reports]
    for said, step, factored, grads in results:
        where = f"rank {case.faulty % len(reports)}, step {steps_before}{case.parameter}"
        assert said.startswith(f"{case.error}: {where}")
        assert (step, factored) == (steps_before + 2, case.factored)
        assert len(grads) == 6
        assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert len({said for said, *_ in results}) == 1
    for *_, grads in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][3], grads, strict=True))


def test_ranks_that_disagree_are_refused_alike(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["disagreements"] == reports[0]["disagreements"]
    for name, said in reports[0]["disagreements"].items():
        assert said.startswith("MismatchError: rank 1"), (name, said)


def test_drifted_replicas_are_told_by_rank_and_parameter(reports: list[dict[str, Any]]) -> None:
    said = reports[0]["disagreements"]["drift"]
    assert said.startswith("MismatchError: rank 1, step 2, parameter '2.bias': holds other bits than on rank 0")


def test_a_rank_that_skips_a_step_is_missed_in_time(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        said, waited = report["absence"]
        missed = f"ExchangeError: rank {rank} of {len(reports)}: a collective failed; rank 1 is dead, stuck or"
        assert said.startswith(missed if rank != 1 else "absent")
        assert waited < TIMEOUT / 2  # by its own timeout and not by that of the job


@pytest.mark.parametrize("options", [{}, TWO_PASS, SERVER], ids=["gather", "two_pass", "server"])
def test_a_killed_rank_is_missed_in_time(tmp_path: Any, options: dict[str, Any]) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: killed"):
        launch(die, 2, args=(str(tmp_path), options), timeout=TIMEOUT)
    assert time.monotonic() - start < TIMEOUT + 30
    assert (tmp_path / "0").read_text().startswith("ExchangeError: rank 0 of 2: a collective failed; rank 1 is dead")
