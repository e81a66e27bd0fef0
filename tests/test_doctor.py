"""doctor(): every parameter's route and reason, the right bytes, and the model as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import isgq
from isgq.cli import main
from isgq.core.errors import InstrumentError, NonFiniteError, OptionError
from isgq.wire.header import header_size
from tests.session_cases import Adapted, Net, attention, frozen, masked, mlp, shared_with_functional, tied


def two_layers() -> tuple[nn.Module, Tensor]:
    """A target for the command."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Dropout(), nn.BatchNorm1d(30), nn.Linear(30, 20)), torch.randn(4, 40)


def with_attention() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    return attention(), torch.randn(2, 3, 6), lambda out: out.sum()


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)  # type: ignore[no-any-return]


X, LONG = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3, dtype=torch.int64)
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str]]] = {
    "tied": (tied, LONG, {"table.weight": "tied: used by 2 modules"}),
    "frozen": (lambda: frozen(mlp(), "0.weight"), X, {"0.weight": "frozen", "0.bias": "frozen or travels densely"}),
    "parametrised": (
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 5))),
        X,
        {"0.bias": "parametrised", "0.parametrizations.weight.original1": "parametrised"},
    ),
    "LoRA of layers": (lambda: Adapted(called=True), X, {"lora_A.default.weight": "asked for"}),
    "LoRA of parameters": (lambda: Adapted(called=False), X, {"lora_A": "Adapted has no adapter"}),
    "attention": (
        attention,
        torch.ones(2, 3, 6),
        {"a.in_proj_weight": "Multi", "a.out_proj.weight": "without calling"},
    ),
    "keyword": (lambda: Net(lambda self, x: self.a(input=x), a=nn.Linear(6, 4)), X, {"a.weight": "asked for"}),
    "never called": (Skipping, X, {"b.weight": "never called", "b.bias": "never called"}),
    "functional": (shared_with_functional, X, {"a.weight": "do not make up"}),
    "bypassed": (
        lambda: Net(lambda self, x: F.linear(x, self.a.weight), a=nn.Linear(6, 4, bias=False)),
        X,
        {"a.weight": "without captured factors"},
    ),
    "hook on the weight": (masked, X, {"0.weight": "has a hook"}),
    "subclass": (
        lambda: type("Mine", (nn.Linear,), {})(6, 2),
        X,
        {"weight": "Mine has no adapter, and may compute something else than Linear"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_its_reason(name: str) -> None:
    build, batch, reasons = CASES[name]
    model = build().float()
    diagnosis = isgq.doctor(model, batch, "exact", routes="factors")
    found = {finding.name: finding for finding in diagnosis.findings}
    assert list(found) == [n for n, _ in model.named_parameters()]
    for parameter, reason in reasons.items():
        assert reason in found[parameter].reason
    fine = ("asked for", "rides with", "frozen")
    for finding in diagnosis.findings:
        assert (finding.error is not None and finding.error < 1e-5) or not finding.reason.startswith("asked for")
        assert finding.expected or not finding.reason.startswith(fine)
    unexpected = [f.name for f in diagnosis.problems]
    if not unexpected:
        isgq.doctor(model, batch, "exact", routes="factors", strict=True)
        return
    with pytest.raises(InstrumentError, match=unexpected[0]):
        isgq.doctor(model, batch, "exact", routes="factors", strict=True)
    if "never" not in name:
        isgq.doctor(model, batch, "exact", routes="factors", strict=True, skip=unexpected)


@pytest.mark.parametrize("spec", ["isgq", "exact", "top_k:k=0.1", "error_feedback(one_bit)", "rotated", "dense"])
def test_predicted_bytes_are_the_first_steps(spec: str) -> None:
    model, x = two_layers()
    diagnosis = isgq.doctor(model, x, spec, seed=3)
    with torch.random.fork_rng(), isgq.instrument(model, spec, seed=3) as session:
        model(x).double().square().mean().backward()
    traffic = session.traffic
    planning = header_size(6) + 8 * 2 if spec in {"isgq", "exact", "rotated"} else 0
    assert traffic.sent - traffic.setup == diagnosis.sent + planning
    assert dict(traffic.by_parameter) == {f.name: f.sent for f in diagnosis.findings if f.sent}


def test_the_model_is_as_it_was() -> None:
    model, x = two_layers()
    model(x).sum().backward()
    twin, generator = copy.deepcopy(model), torch.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    isgq.doctor(model, x)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    for (name, now), before in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(now, before), name
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), copies, strict=True))  # type: ignore[arg-type]
    assert torch.equal(generator, torch.get_rng_state())
    assert all(not module._forward_hooks for module in model.modules())
    isgq.instrument(model).close()


def test_batches_and_losses_of_all_kinds() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"loss": scale * self.inner(x).sum()}

    for batch in (X, (X,), [X, 2.0], {"x": X, "scale": 0.5}):
        assert not isgq.doctor(WithLoss(), batch, routes="factors").problems
    y = torch.zeros(5, dtype=torch.int64)
    assert not isgq.doctor(mlp(), X, routes="factors", loss=lambda out: F.cross_entropy(out, y)).problems


def test_bad_input_is_named() -> None:
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        isgq.doctor(mlp(), torch.full((2, 6), float("nan")))
    with pytest.raises(InstrumentError, match="no trainable parameter"):
        isgq.doctor(mlp(), X, loss=lambda out: torch.zeros(()))
    with pytest.raises(OptionError, match="routes='both'"):
        isgq.doctor(mlp(), X, routes="both")  # type: ignore[arg-type]
    model = mlp()
    with isgq.instrument(model), pytest.raises(InstrumentError, match="instrumented already"):
        isgq.doctor(model, X)


def test_the_command_prints_a_table_and_tells_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tests.test_doctor:two_layers", "--strict"]) == 0
    printed = capsys.readouterr().out
    assert "0.weight" in printed
    assert "bytes a step" in printed
    assert main(["doctor", "tests.test_doctor:with_attention"]) == 0
    assert main(["doctor", "tests.test_doctor:with_attention", "--strict"]) == 1
    assert "problem: a.out_proj.weight" in capsys.readouterr().out
    assert main(["doctor", "nowhere:nothing"]) == 2
    assert "isgq doctor: 'nowhere:nothing' is no package.module:function" in capsys.readouterr().err
