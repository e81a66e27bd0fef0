"""What else than a backward pass users do with an instrumented model: all of it as without a session."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import isgq
from tests.session_cases import loss, mlp

X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(5, 6)
Way = Callable[[nn.Module], Any]
WAYS: dict[str, Way] = {}


def way(use: Way) -> Way:
    WAYS[use.__name__] = use
    return use


def backward(model: nn.Module, *values: Tensor) -> list[Tensor | None]:
    for value in values:
        value.backward()  # type: ignore[no-untyped-call]
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def others(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(2 * p.detach()) for name, p in model.named_parameters()}


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@way
def checkpointed_before_the_first_plan(model: nn.Module) -> Any:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()  # all saved tensors have one shape
    with isgq.instrument(model, "exact", routes="factors"):
        x = X[:, :5].clone().requires_grad_()
        got = backward(model, *[loss(checkpoint(model, x, use_reentrant=False)) for _ in range(2)])
    model.zero_grad()
    torch.testing.assert_close(got, backward(model, 2 * loss(model(x))))


@way
def other_parameters(model: nn.Module) -> Any:
    given = others(model)
    return backward(model, loss(functional_call(model, given, (X,)))), [p.grad for p in given.values()]


@way
def other_parameters_beside_its_own(model: nn.Module) -> Any:
    given = others(model)
    return backward(model, loss(functional_call(model, given, (X,)), model(X))), [p.grad for p in given.values()]


@way
def a_step_inside_the_graph(model: nn.Module) -> Any:
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss(model(X)), list(named.values()), create_graph=True)
    moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
    return backward(model, loss(functional_call(model, moved, (X,))))


@way
def gradients_of_samples(model: nn.Module) -> Any:
    grad = torch.func.grad(lambda params, x: loss(functional_call(model, params, (x,))))
    return torch.func.vmap(grad, (None, 0))(plain(model), X)


@way
def jacobians(model: nn.Module) -> Any:
    return [torch.func.jacrev(model)(X[0]), torch.func.jacfwd(model)(X[0]), torch.func.vmap(model)(X)]


@way
def vectorized_jacobian(model: nn.Module) -> Any:
    return torch.autograd.functional.jacobian(model, X, vectorize=True)  # type: ignore[no-untyped-call]


@way
def batch_of_gradients(model: nn.Module) -> Any:
    ones = torch.eye(20, dtype=torch.float64).reshape(20, 5, 4)
    found = torch.autograd.grad(model(X), list(model.parameters()), ones, is_grads_batched=True)
    return found, backward(model, loss(model(X)))


@way
def forward_mode(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))).tangent


@way
def first_weight_changed_before_backward(model: nn.Module) -> Any:
    value = loss(model(X))
    with torch.no_grad():
        model[0].weight.mul_(0.5)  # type: ignore[index]
    return backward(model, value)


@way
def parametrised_late(model: nn.Module) -> Any:
    nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[index, no-untyped-call]
    return backward(model, loss(model(X)))


@pytest.mark.parametrize("use", WAYS.values(), ids=list(WAYS))
def test_all_is_as_without_a_session(use: Way) -> None:
    def found(instrumented: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False)).double()
        if not instrumented:
            return use(model)
        with isgq.instrument(model, "exact", routes="factors", log=lambda _: None):
            loss(model(X)).backward()
            model.zero_grad()
            return use(model)

    torch.testing.assert_close(found(True), found(False))


HOOKS: dict[str, Callable[[list[Any]], Callable[..., Any]]] = {
    "hooks the output": lambda seen: lambda module, args, out: out.register_hook(lambda d: seen.append(d)) and None,
    "keeps the output": lambda seen: lambda module, args, out: seen.append(out),
    "changes the output": lambda seen: lambda module, args, out: out * 2,
    "computes another": lambda seen: lambda module, args, out: F.linear(2 * args[0], module.weight, module.bias),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_forward_hooks_of_users(name: str, late: bool) -> None:
    def found(instrumented: bool) -> Any:
        torch.manual_seed(0)
        model, seen = mlp().double(), list[Any]()

        def put() -> None:
            model[0].register_forward_hook(HOOKS[name](seen), prepend=late)

        if not late or not instrumented:
            put()
        session = isgq.instrument(model, "exact", routes="factors", log=lambda _: None) if instrumented else None
        if session:
            loss(model(X)).backward()
            model.zero_grad()
            seen.clear()
            if late:
                put()
        value = loss(model(X))
        if name == "keeps the output":
            return torch.autograd.grad(value, seen)
        got = backward(model, value)
        if session:
            session.close()
        return got, seen

    torch.testing.assert_close(found(True), found(False))


def test_a_gradient_in_shared_memory_is_not_written_again() -> None:
    model = mlp().double()
    weight = model[0].weight
    with isgq.instrument(model, "exact", routes="factors"):
        for _ in range(2):
            model.zero_grad()
            loss(model(X)).backward()
        assert weight.grad is not None
        address = weight.grad.share_memory_().data_ptr()  # as a queue of multiprocessing does
        model.zero_grad()
        loss(model(2 * X)).backward()
        assert weight.grad.data_ptr() != address


def test_parameters_that_are_replaced_by_loading_are_refused() -> None:
    """They would train without the session, and nobody would notice."""
    model, other = mlp(), mlp()
    with isgq.instrument(model, "exact"):
        model.load_state_dict(other.state_dict())
        copy.deepcopy(model).load_state_dict(other.state_dict())
        with pytest.raises(isgq.IsgqError, match=r"assign=True\) has replaced weight, bias of Linear"):
            model.load_state_dict(other.state_dict(), assign=True)
    model.load_state_dict(other.state_dict(), assign=True)
