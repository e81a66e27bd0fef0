"""What a session cannot factor it says once, by name; what it cannot handle it refuses with a way out."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import isgq
from isgq.core.errors import InstrumentError
from tests.session_cases import Net, attention, mlp, tied


def bypass(net: Any, x: Tensor) -> Tensor:
    return F.linear(x, net.a.weight, net.a.bias)


def besides(net: Any, x: Tensor) -> Tensor:
    return net.a(x) + F.linear(2 * x, net.a.weight)  # type: ignore[no-any-return]


def slightly_besides(net: Any, x: Tensor) -> Tensor:
    return net.a(x) + 0.05 * net.a.weight[0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("other", "reason"),
    [(bypass, "without captured factors"), (besides, "do not make up"), (slightly_besides, "do not make up")],
)
def test_a_gradient_that_its_pairs_do_not_make_up_is_right_and_reported_once(
    other: Callable[[Any, Tensor], Tensor], reason: str
) -> None:
    torch.manual_seed(0)
    net = Net(lambda self, x, use: use(self, x), a=nn.Linear(30, 20))
    x, said = torch.randn(6, 30), list[str]()
    with isgq.instrument(net, "exact", routes="factors", log=said.append) as session:
        for step in range(1, 9):  # far from any multiple of a large number
            use = other if step % 2 == 0 else (lambda self, x: self.a(x))
            net.zero_grad()
            net(x, use).square().sum().backward()
            got = net.a.weight.grad.clone()
            expected = torch.autograd.grad(use(net, x).square().sum(), net.a.weight)[0]
            torch.testing.assert_close(got, expected)
        assert session.plan.route("a.weight") == "factors"
    assert [line for line in said if reason in line] == said
    assert len(said) == 1
    assert said[0].startswith("isgq: a.weight travels whole")


@pytest.mark.parametrize(
    ("build", "batch", "names"),
    [
        (attention, torch.ones(2, 3, 6), ["a.in_proj_weight (Multi", "a.out_proj.weight (Multi"]),
        (tied, torch.ones(2, 3, dtype=torch.int64), ["table.weight (tied: used by 2 modules)"]),
    ],
)
def test_a_plan_warns_once_of_what_a_user_would_not_expect(
    build: Callable[[], nn.Module], batch: Tensor, names: list[str]
) -> None:
    model = build()
    with warnings.catch_warnings(record=True) as caught, isgq.instrument(model, "isgq"):
        for _ in range(3):
            model(batch).sum().backward()
    [words] = [str(each.message) for each in caught]
    assert all(name in words for name in names)


def test_a_plan_is_silent_of_what_a_user_expects() -> None:
    model = nn.Sequential(mlp(), nn.LayerNorm(4), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"skip": "0.0.weight"}):
            with isgq.instrument(model, "isgq", **options):  # type: ignore[arg-type]
                model(torch.ones(5, 6)).sum().backward()
        with isgq.instrument(attention(), "dense"):
            pass


class Sharded(nn.Linear, FSDPModule):  # type: ignore[misc]
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__new__(cls)


def compiled_in_place() -> nn.Module:
    model = mlp()
    model[0].compile(backend="eager")  # type: ignore[index, operator]
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.DataParallel(mlp()), r"one process per device \(torchrun\).*model\.module"),
        (lambda: nn.Sequential(Sharded(2, 2)), r"without fully_shard"),
        (lambda: torch.compile(mlp(), backend="eager"), r"instrument first .*then compile"),
        (compiled_in_place, r"instrument first .*then compile"),
    ],
    ids=["DataParallel", "FSDP2", "compiled", "compiled in place"],
)
def test_what_is_refused_says_what_to_use(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(InstrumentError, match=words):
        isgq.instrument(build())


def test_hooks_that_compiled_code_ignores_are_missed() -> None:
    model, x, said = mlp().float(), torch.ones(3, 6), list[str]()
    run = torch.compile(lambda x: model(x).square().sum(), backend="eager")
    run(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with isgq.instrument(model, "exact", routes="factors", log=said.append):
        run(x).backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert any("0.weight" in line and "compiled before instrument()" in line for line in said) or not said


@pytest.mark.parametrize("forward_only", ["no_grad", "no backward", "create_graph"])
def test_no_activation_outlives_its_graph(forward_only: str) -> None:
    model = mlp()
    with isgq.instrument(model, "exact"):
        x = torch.ones(3, 6)
        seen = weakref.ref(x)
        if forward_only == "no_grad":
            with torch.no_grad():
                model(x)
        elif forward_only == "no backward":
            model(x)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(x).square().sum().backward(create_graph=True)
            model.zero_grad()
        del x
        gc.collect()
        assert seen() is None


def test_no_step_touches_the_global_generator() -> None:
    model = mlp()
    x = torch.ones(3, 6)
    with isgq.instrument(model, "isgq", dense="qsgd"):
        before = torch.get_rng_state()
        model(x).sum().backward()
        assert torch.equal(before, torch.get_rng_state())


def test_frozen_parameters_cost_nothing() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    with isgq.instrument(model, "isgq") as session:
        assert not model[0]._forward_hooks  # type: ignore[index]
        model(torch.ones(3, 6)).sum().backward()
        assert list(session.traffic.by_parameter) == ["2.weight"]
