"""A session that chooses for itself: all ranks alike, fast links not at all, and anew when batches change."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isgq
from isgq.core.errors import OptionError
from isgq.exchange import Loopback
from isgq.forecast import Forecast
from isgq.launch import launch

SLOW, FAST = "auto:link=20kbit/s,timed=false", "auto:link=999999Gbit/s"
LENGTHS = [24, 24, 24, 24, 3000, 3000, 3000, 3000]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(120, 160), nn.ReLU(), nn.LayerNorm(160), nn.Linear(160, 10))


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 120, generator=generator), torch.randint(10, (rows,), generator=generator)


def step(net: nn.Module, rows: int, seed: int) -> None:
    x, y = batch(rows, seed)
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()


def run() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    report: dict[str, Any] = {}
    for name, spec in (("slow", SLOW), ("fast", FAST)):
        net = network()
        with isgq.instrument(net, spec) as session:
            marks = []
            for t in range(6):
                step(net, 16, 10 * t + rank)
                marks.append((session.traffic.sent, session.traffic.received))
            moved = [(b - a) / 5 for a, b in zip(marks[0], marks[-1], strict=True)]
            report[name] = (session.plan, moved, [p.grad.clone() for p in net.parameters()])
    net, plans, said = network(), [], []
    with isgq.instrument(net, "auto(isgq):link=1Mbit/s,timed=false,error=10", log=said.append) as session:
        for t, rows in enumerate(LENGTHS):
            step(net, rows if rank else 16, t)  # one rank's batches alone change
            plans.append([line.route for line in session.plan.lines])
        state = session.state_dict()
    report["changing"] = (plans, session.plan, state["plan"])
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(run, 2, timeout=120)


def test_all_ranks_choose_alike_and_get_the_same_bits(reports: list[dict[str, Any]]) -> None:
    for name in ("slow", "fast"):
        (plan, _, ours), (other, _, theirs) = (report[name] for report in reports)
        assert plan == other
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert reports[0]["changing"][0] == reports[1]["changing"][0]


def test_a_slow_link_compresses_and_a_fast_one_does_not(reports: list[dict[str, Any]]) -> None:
    slow, fast = (reports[0][name][0] for name in ("slow", "fast"))
    assert slow.route("0.weight") == "factors"
    assert {line.route for line in fast.lines} == {"dense"}
    assert "ms" in fast.lines[0].reason
    assert all(line.codec and line.codec in str(slow) for line in slow.lines if line.route != "dense")


def test_the_forecast_agrees_with_the_ledger(reports: list[dict[str, Any]]) -> None:
    for name, spec in (("slow", "20kbit/s"), ("fast", "999999Gbit/s")):
        forecast = isgq.plan(network(), batch(16, 0), workers=2, link=spec)
        plan, moved, _ = reports[0][name]
        if name == "fast":
            assert [each.way for each in forecast.decision.chosen] == [line.route for line in plan.lines]
        assert forecast.moved.sent == pytest.approx(moved[0], rel=0.1), name
        assert forecast.moved.received == pytest.approx(moved[1], rel=0.1), name


def test_other_batches_make_another_plan_on_all_ranks(reports: list[dict[str, Any]]) -> None:
    routes, plan, saved = reports[1]["changing"]
    assert routes[0][0] == routes[5][0] == "factors"  # asked for after two steps, made in the third
    assert routes[6][0] == routes[7][0] == "dense"
    assert saved == [vars(line) for line in plan.lines]


def test_a_saved_plan_is_followed_without_measuring() -> None:
    states = []
    for _ in range(2):
        net = network()
        with isgq.instrument(net, "auto(isgq;qsgd):link=1Mbit/s,timed=false", exchange=Loopback()) as session:
            if states:
                edited = {
                    **states[0],
                    "plan": [{**line, "route": "direct", "codec": "qsgd"} for line in states[0]["plan"]],
                }
                session.load_state_dict(edited)
            step(net, 8, 0)
            states.append(session.state_dict())
    assert {line["route"] for line in states[0]["plan"]} == {"dense"}  # a lone worker has nobody to send to
    assert {line["codec"] for line in states[1]["plan"]} == {"qsgd"}
    assert session.traffic.by_parameter["0.weight"] < 120 * 160


def test_factors_everywhere_is_not_automatic() -> None:
    with pytest.raises(OptionError, match="routes='factors'"):
        isgq.instrument(network(), SLOW, routes="factors", exchange=Loopback())


def forecast(workers: int, link: str, **options: Any) -> Forecast:
    return isgq.plan(network(), batch(16, 0), workers=workers, link=link, **options)


def test_a_forecast_is_complete_and_leaves_the_model_alone() -> None:
    net = network()
    before = {name: p.clone() for name, p in net.state_dict().items()}
    found = isgq.plan(net, batch(16, 0), workers=8, link="1Mbit/s+1ms", error=0.3)
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], p) for name, p in net.state_dict().items())
    assert found.error <= 0.3
    assert found.compress
    assert found.codec in found.verdict
    assert found.seconds >= found.forward + found.backward + sum(found.codec_and_link)
    text = str(found)
    for item in found.decision.items:
        assert item.name in text
    json = found.as_dict()
    assert json["bytes"]["dense"] == 4 * sum(p.numel() for p in net.parameters())
    assert {way["way"] for way in json["parameters"][0]["ways"]} >= {
        "dense",
        "isgq",
        "rotated:share=layer,nmse=2",
        "fp16",
    }
    assert json["seconds"]["ddp"] == found.ddp


def test_do_not_compress_is_an_answer() -> None:
    assert not forecast(4, "999999Gbit/s").compress
    assert "do not compress" in str(forecast(4, "999999Gbit/s"))
    assert not forecast(1, "1kbit/s").compress  # nobody to send to


def test_closed_forms_of_errors_agree_with_what_was_decoded() -> None:
    from isgq import probe

    specs = "isgq;dithered:levels=4;rotated:share=layer;rotated;qsgd:levels=4;exact"
    exact = forecast(2, "1Mbit/s", ways=specs)
    original = probe._closed_forms
    try:
        probe._closed_forms = lambda way, carriers, *_: iter([float("nan")] * len(carriers))  # type: ignore[assignment]
        measured = forecast(2, "1Mbit/s", ways=specs)
    finally:
        probe._closed_forms = original
    for ours, theirs in zip(exact.decision.options, measured.decision.options, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.way == b.way
            assert a.error == pytest.approx(b.error, rel=0.5, abs=1e-9), a.way
            assert a.size == b.size


@pytest.mark.parametrize("options", [{"workers": 0}, {"link": "quick"}, {"ways": "sign2"}, {"error": -1.0}])
def test_a_forecast_refuses_what_makes_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        isgq.plan(network(), batch(4, 0), **{"workers": 2, "link": "1Mbit/s", **options})


@pytest.mark.parametrize("spec", ["auto:link=1000Gbit/s", "auto:link=1kbit/s,error=1e-12", "exact"])
def test_what_is_measured_leaves_the_gradients_alone(spec: str) -> None:
    """Planning decodes and averages, and so does telemetry, but not into what the step is about to send."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    x, y = torch.randn(8, 40), torch.zeros(8, dtype=torch.int64)
    alone = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    with isgq.instrument(model, spec, log=lambda _: None) as session:
        isgq.Telemetry(session, every=1, path=None)
        for _ in range(2):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], list(alone))
