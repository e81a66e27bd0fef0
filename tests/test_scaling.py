"""A GradScaler: the scale changes nothing but what float16 can hold, and one rank's overflow skips the step on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
from isgq.core.errors import OptionError, PeerNonFiniteError
from isgq.launch import launch

SPECS = ["error_feedback(top_k:k=0.2)", "isgq", "top_k:k=0.2, two_pass"]
HALF = SPECS[1:]
OVERFLOW = 7  # the step in which rank 1's loss overflows
STEPS = 40


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))


def batch(step: int, rank: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    teacher = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    return x, (x @ teacher).argmax(1)


def options_of(spec: str) -> tuple[str, dict[str, Any]]:
    codec, _, aggregate = spec.partition(", ")
    return codec, {"aggregate": aggregate, "down": codec} if aggregate else {}


def bits(tensors: Any) -> bytes:
    return b"".join(t.detach().numpy().tobytes() for t in tensors)


def flat(memory: dict[str, dict[str, Tensor]]) -> dict[str, bytes]:
    return {f"{where}/{name}": bits([tensor]) for where, held in memory.items() for name, tensor in held.items()}


def train(spec: str, scaler: torch.amp.GradScaler, half: bool = False) -> dict[str, Any]:
    """Train, with an overflow on rank 1 if the loss is scaled, or else without the batch in which it would be."""
    model, rank = make(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    codec, options = options_of(spec)
    seen: dict[str, Any] = {"trace": [], "scales": []}
    with isgq.instrument(model, codec, routes="factors", scaler=scaler, **options) as session:
        for step in range(STEPS):
            if step == OVERFLOW and not scaler.is_enabled():
                seen["trace"].append(seen["trace"][-1])
                continue
            x, y = batch(step, rank)
            before = (bits(model.parameters()), flat(session.state_dict()["memory"]), session.step)
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if step == OVERFLOW and rank == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == OVERFLOW:
                after = (bits(model.parameters()), flat(session.state_dict()["memory"]), session.step)
                seen["untouched"] = before == after
            seen["trace"].append(bits(model.parameters()))
            seen["scales"].append(scaler.get_scale())
    x, y = batch(-1, 0, 2000)
    seen["accuracy"] = float((model(x).argmax(1) == y).float().mean())
    return seen


def every() -> dict[str, Any]:
    def scaler(scale: float, grow: int = 1000) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=grow)

    report: dict[str, Any] = {}
    for spec in SPECS:
        runs = {
            "none": train(spec, torch.amp.GradScaler("cpu", enabled=False)),
            "scaled": train(spec, scaler(2.0**10, grow=3)),
        }
        if spec in HALF:
            runs["half"] = train(spec, scaler(2.0**22), half=True)
        report[spec] = runs
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(every, 2)


@pytest.mark.parametrize("spec", SPECS)
def test_scales_and_an_overflow_on_one_rank_change_no_bit_but_leave_out_its_batch_on_all(
    reports: list[dict[str, Any]], spec: str
) -> None:
    for report in reports:
        run, scales = report[spec]["scaled"], report[spec]["scaled"]["scales"]
        assert run["untouched"]  # parameters, memories and the number of steps
        assert scales[OVERFLOW] == scales[OVERFLOW - 1] / 2
        assert len(set(scales)) > 10
        assert run["trace"] == report[spec]["none"]["trace"] == reports[0][spec]["none"]["trace"]
        assert run["accuracy"] > 0.85


@pytest.mark.parametrize("spec", HALF)
def test_half_precision_finds_its_scale_and_trains(reports: list[dict[str, Any]], spec: str) -> None:
    for report in reports:
        run = report[spec]["half"]
        assert run["scales"][0] == 2.0**21  # the first step, with its plan, is refused
        assert 2.0**5 < run["scales"][-1] < 2.0**20
        assert run["trace"] == reports[0][spec]["half"]["trace"]
        assert run["accuracy"] == pytest.approx(report[spec]["none"]["accuracy"], abs=0.05)


@pytest.mark.parametrize("sync", ["backward", "manual"])
def test_accumulated_gradients_are_scaled_like_those_of_one_pass(sync: Any) -> None:
    model = make()
    optimizer, grads = torch.optim.SGD(model.parameters(), lr=0.1), []
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=enabled)
        optimizer.zero_grad()
        with isgq.instrument(model, "exact", routes="factors", sync=sync, scaler=scaler) as session:
            for start in range(2):  # what the first synchronised step leaves stays in p.grad for the second
                with session.no_sync():
                    scaler.scale(F.cross_entropy(model(batch(start, 0)[0]), batch(start, 0)[1])).backward()
                scaler.scale(F.cross_entropy(model(batch(start, 1)[0]), batch(start, 1)[1])).backward()
                if sync == "manual":
                    session.synchronize()
        scaler.unscale_(optimizer)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_nan_that_no_scale_cures_is_an_error_in_the_end() -> None:
    model, scaler = make(), torch.amp.GradScaler("cpu", init_scale=2.0**-23)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isgq.instrument(model, "isgq", scaler=scaler):
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 8), float("nan"))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        with pytest.raises(PeerNonFiniteError):
            scaler.scale(model(torch.full((2, 8), float("nan"))).sum()).backward()


def test_an_asynchronous_session_takes_no_scaler() -> None:
    with pytest.raises(OptionError, match="scaler="):
        isgq.instrument(make(), "sign", aggregate="async", scaler=torch.amp.GradScaler("cpu"))
