"""An asynchronous server: who comes first is served first, nothing gets too stale, the dead are left behind."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import isgq
from isgq.asynchronous import Service
from isgq.core.errors import ExchangeError, InstrumentError, OptionError, PeerError, RankError
from isgq.launch import launch

FAST, SLOW = 0.02, 0.08  # seconds that a worker's step takes at least
STEPS, SLOW_STEPS = 48, 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(16, 6, generator=generator)
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    return F.cross_entropy(model(x), (x @ teacher).argmax(1))


def train(model: nn.Module, steps: int, pause: float) -> tuple[float, float]:
    """Mean loss of the last ten steps, and steps a second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e9)  # must not step
    losses, begin = [], time.perf_counter()
    for step in range(steps):
        value = loss(model, step)
        time.sleep(pause)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return sum(losses[-10:]) / 10, steps / (time.perf_counter() - begin)


def run(spec: str, down: str | None, bound: int | None, half: bool) -> Any:
    model = network().bfloat16() if half else network()
    logs: list[str] = []
    options: dict[str, Any] = {"aggregate": "async", "down": down, "max_staleness": bound, "log": logs.append}
    with isgq.instrument(model, spec, **options) as session:
        if session.serves:
            seen: list[int] = []
            service = session.serve(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5), seen.append)
            assert seen == list(range(1, service.updates + 1))
            return service, logs
        slow = dist.get_rank() == 1
        if half:
            return [value.dtype for value in model.parameters()] + [train_half(model)]
        return train(model, SLOW_STEPS if slow else STEPS, SLOW if slow else FAST)


def train_half(model: nn.Module) -> float:
    for step in range(5):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        value = model(x).float().square().mean()
        value.backward()
    return value.item()


CASES: dict[str, tuple[str, str | None, int | None]] = {
    "dense": ("dense", None, None),
    "factors": ("isgq", "sign", 12),
    "sparse": ("top_k:k=0.1", "one_bit", 3),
}


def cases() -> dict[str, Any]:
    report = {name: run(*case, half=False) for name, case in CASES.items()}
    report["half"] = run("sign", "sign", None, half=True)
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(cases, 4, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_all_are_served_and_learn(reports: list[dict[str, Any]], name: str) -> None:
    service, logs = reports[0][name]
    assert isinstance(service, Service)
    assert logs == []
    assert service.by_worker == {1: SLOW_STEPS, 2: STEPS, 3: STEPS}
    assert service.lost == {}
    assert sum(service.staleness.values()) == service.updates == SLOW_STEPS + 2 * STEPS
    for report in reports[1:]:
        final, _ = report[name]
        assert final < 0.75  # 1.1 at the start


def test_staleness_is_bounded_as_set_and_fast_workers_need_not_wait(reports: list[dict[str, Any]]) -> None:
    strict, loose = reports[0]["sparse"][0], reports[0]["factors"][0]
    assert max(strict.staleness) <= 3
    assert 3 < max(loose.staleness) <= 12


def test_half_precision_models_have_masters(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["half"][0].updates == 15
    for report in reports[1:]:
        *dtypes, value = report["half"]
        assert set(dtypes) == {torch.bfloat16}
        assert value < 1


def broken(who: int, how: str) -> Any:
    model, logs = network(), []
    with isgq.instrument(model, "sign", aggregate="async", log=logs.append) as session:  # type: ignore[var-annotated]
        if session.serves:

            def on_update(updates: int) -> None:
                if who == 0 and updates == 20:
                    os.kill(os.getpid(), signal.SIGKILL)

            return session.serve(torch.optim.SGD(model.parameters(), lr=0.1), on_update), logs
        train(model, 10, FAST)
        if dist.get_rank() == who:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            value = loss(model, 0) * (float("nan") if how == "nan" else 1)
            if how == "raise":
                raise ValueError("no more samples")
            value.backward()  # type: ignore[no-untyped-call]
        train(model, 10, FAST)
        return "done"


@pytest.mark.parametrize(("how", "what"), [("kill", "gone"), ("nan", "could not"), ("raise", "could not")])
def test_a_lost_worker_is_named_and_the_others_go_on(how: str, what: str) -> None:
    (service, logs), first, lost, third = launch(broken, 4, args=(2, how), timeout=20, may_fail=[2])
    assert first == third == "done"
    assert isinstance(lost, RankError)
    assert list(service.lost) == [2]
    assert service.updates == 50
    [line] = logs
    assert "worker 2 is lost after 10 gradients, the others go on" in line
    assert re.search(what, line)


def test_a_lost_server_ends_all() -> None:
    with pytest.raises(RankError, match="rank 0 of 3: killed") as caught:
        launch(broken, 3, args=(0, "kill"), timeout=20)
    assert ExchangeError.__name__ in str(caught.value)


def hopeless() -> str:
    model = network()
    with isgq.instrument(model, "sign", aggregate="async", log=lambda line: None) as session:
        if not session.serves:
            with pytest.raises(InstrumentError, match="rank 0"):
                session.serve(torch.optim.SGD(model.parameters(), lr=0.1))
            raise ValueError
        with pytest.raises(InstrumentError, match="serve"):
            session.synchronize()
        try:
            session.serve(torch.optim.SGD(model.parameters(), lr=0.1))
        except PeerError as error:
            return str(error)
    return "served"


def test_a_server_without_workers_says_so() -> None:
    assert launch(hopeless, 2, timeout=20, may_fail=[1])[0].startswith("all workers are lost: rank 1")


def too_strict() -> None:
    isgq.instrument(network(), aggregate="async", max_staleness=0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ExchangeError, match="2 processes or more"):
        isgq.instrument(network(), aggregate="async")
    with pytest.raises(OptionError, match="needs no memory"):
        isgq.instrument(network(), aggregate="async", down="error_feedback(sign)")
    with pytest.raises(OptionError, match="async"):
        isgq.instrument(network(), max_staleness=4)
    with pytest.raises(OptionError, match="for sessions"):
        isgq.ddp.comm_hook("sign", aggregate="async")
    with pytest.raises(RankError, match="max_staleness=0 with 2 workers must be at least 1"):
        launch(too_strict, 3, timeout=20)
