"""Autograd leaves out weight gradients that a session replaces; nobody can tell but by the time it takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import isgq
from isgq.core.errors import IsgqError
from isgq.windows import Window
from tests.session_cases import CASES, Case, Net, Turn, loss, mlp


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the weights whose gradients were left out."""
    names: list[str] = []
    owe = Window.owe

    def counting(window: Window, gradient: Callable[[], Tensor]) -> None:
        names.append(window.name)
        owe(window, gradient)

    with patch.object(Window, "owe", counting):
        yield names


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def trained(case: Case, **options: Any) -> list[list[Tensor | None]]:
    """Gradients after each of some steps; without options, of the model alone."""
    torch.manual_seed(0)
    model, found = case.build().double(), []
    if case.tolerance > 1e-6:
        model = model.float()
    options = case.options | options if options else {}
    with isgq.instrument(model, "exact", routes="factors", **options) if options else nullcontext() as session:
        for step in range(4):
            case.zero(model)
            case.step(model, Turn(0, step, session.no_sync if session else nullcontext, model))
            if case.options.get("sync") == "manual" and session:
                session.synchronize()
            found.append(gradients(model))
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_model_alone(name: str) -> None:
    case = CASES[name]
    expected = trained(case)
    for skips in (True, False):
        got = trained(case, skip_weight_grad=skips, log=lambda _: None)
        for ours, theirs in zip(got, expected, strict=True):
            for mine, its in zip(ours, theirs, strict=True):
                assert (mine is None) == (its is None)
                if mine is not None:
                    torch.testing.assert_close(mine, its, rtol=max(case.tolerance, 1e-6), atol=case.tolerance)


@pytest.mark.parametrize("name", ["linear 2-d", "linear 3-d", "linear without bias", "conv2d", "twice", "fc", "lenet"])
def test_it_happens_from_the_second_step_on(name: str) -> None:
    case = CASES[name]
    with counted() as names:
        trained(case, skip_weight_grad=False)
        assert not names
        trained(case, skip_weight_grad=True)
    weights = [n for n, p in case.build().named_parameters() if p.dim() > 1]
    calls = 2 if name == "twice" else 1
    assert sorted(names) == sorted(3 * calls * weights)


def session_of(model: nn.Module, **options: Any) -> Any:
    session = isgq.instrument(model, "exact", routes="factors", **options)
    loss(model(torch.randn(5, 6, dtype=torch.float64))).backward()  # the first step has everything
    model.zero_grad()
    return session


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double()


X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(5, 6)


def test_who_asks_autograd_gets_everything(model: nn.Module) -> None:
    weights = [model[0].weight, model[2].weight]  # type: ignore[index]
    expected = torch.autograd.grad(loss(model(X)), weights)
    with session_of(model), counted() as names:
        torch.testing.assert_close(torch.autograd.grad(loss(model(X)), weights), expected)
        torch.testing.assert_close(torch.autograd.grad(loss(model(X)), weights[:1]), expected[:1])
        assert not names


def test_a_graph_of_gradients_has_everything(model: nn.Module) -> None:
    def penalty() -> Tensor:
        x = X.clone().requires_grad_()
        [slope] = torch.autograd.grad(loss(model(x)), x, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(), [model[0].weight, model[2].weight])  # type: ignore[index]
    with session_of(model, log=lambda _: None):
        penalty().backward()
    torch.testing.assert_close([model[0].weight.grad, model[2].weight.grad], list(expected))  # type: ignore[index]


def test_a_graph_that_outlives_the_session_has_everything(model: nn.Module) -> None:
    expected = torch.autograd.grad(loss(model(X)), list(model.parameters()))
    session = session_of(model)
    value = loss(model(X))
    session.close()
    value.backward()
    torch.testing.assert_close(gradients(model), list(expected))


def test_a_refused_step_leaves_the_gradient_of_this_rank(model: nn.Module) -> None:
    expected = torch.autograd.grad(loss(model(X)), list(model.parameters()))
    with session_of(model) as session, counted() as names:
        with patch.object(session._aggregate, "agree", side_effect=IsgqError("refused")), pytest.raises(IsgqError):
            loss(model(X)).backward()
        assert len(names) == 2
        torch.testing.assert_close(gradients(model), list(expected))


@pytest.mark.parametrize("late", ["hook", "post hook", "hook on the output"])
def test_late_hooks_see_everything(model: nn.Module, late: str) -> None:
    seen: list[Tensor] = []
    layer = model[0]  # type: ignore[index]
    with session_of(model, log=lambda _: None):
        if late == "hook":
            layer.weight.register_hook(lambda g: seen.append(g.clone()))
        elif late == "post hook":
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        else:
            layer.register_forward_hook(lambda module, args, output: output * 2, prepend=True)
        loss(model(X)).backward()
    got = gradients(model)
    expected = torch.autograd.grad(loss(model(X)), list(model.parameters()))
    torch.testing.assert_close(got, list(expected))
    assert all(torch.allclose(g, expected[0]) for g in seen)
    assert bool(seen) == (late != "hook on the output")


def test_a_beginning_gradient_is_kept(model: nn.Module) -> None:
    expected = torch.autograd.grad(loss(model(X)), list(model.parameters()))
    with session_of(model), counted() as names:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        held = [p.grad for p in model.parameters()]
        loss(model(X)).backward()
        assert names
    for p, grad, mine in zip(model.parameters(), held, expected, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(grad, mine + 1)


def test_a_method_in_the_place_of_forward_is_left_alone(model: nn.Module) -> None:
    net = Net(lambda self, x: self.a(x), a=nn.Linear(6, 4)).double()
    with session_of(net, log=lambda _: None), counted() as names:
        net.a.forward = lambda x: nn.functional.linear(2 * x, net.a.weight, net.a.bias)  # type: ignore[method-assign, operator]
        loss(net(X)).backward()
        assert not names
        got = gradients(net)
    torch.testing.assert_close(got, list(torch.autograd.grad(loss(net(X)), list(net.parameters()))))


def test_a_mean_is_written_where_a_dropped_gradient_was_unless_somebody_holds_it(model: nn.Module) -> None:
    weight = model[0].weight  # type: ignore[index]
    with session_of(model):
        addresses, held, kept = [], [], []
        for step in range(6):
            model.zero_grad()
            loss(model(X)).backward()
            addresses.append(weight.grad.data_ptr())
            if step == 3:
                held, kept = [weight.grad], [weight.grad.clone()]
    assert len(set(addresses[:4])) == 1
    assert addresses[4] == addresses[5] != addresses[3]
    torch.testing.assert_close(held, kept, rtol=0, atol=0)
