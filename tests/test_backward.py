"""The watch knows an empty batch, whether or not any layer's factors are captured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isgq.backward import BackwardWatch
from isgq.windows import Window


class WithLoss(nn.Module):
    """Returns its loss, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, *, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x) * scale).square().sum(), "scale": scale}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def vectors(rows: int) -> Tensor:
    return torch.linspace(-1, 1, 3 * rows).reshape(rows, 3)


def classify(model: nn.Module, rows: int) -> Tensor:
    return F.cross_entropy(model(vectors(rows)), torch.zeros(rows, dtype=torch.int64))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, int], Tensor]]] = {
    "sum": (lambda: nn.Linear(3, 2), lambda model, rows: model(vectors(rows)).sum()),
    "mean, which is NaN": (lambda: nn.Linear(3, 2), classify),
    "keyword": (lambda: nn.Linear(3, 2), lambda model, rows: model(input=vectors(rows)).sum()),
    "loss inside": (WithLoss, lambda model, rows: model(x=vectors(rows), scale=torch.tensor(2.0))["loss"]),
    "images": (lambda: nn.Conv2d(1, 2, 3), lambda model, rows: model(torch.ones(rows, 1, 5, 5)).sum()),
    "tokens": (
        lambda: nn.Embedding(5, 2),
        lambda model, rows: model(torch.zeros(rows, 7, dtype=torch.int64)).sum(),
    ),
    "twice": (
        lambda: nn.Linear(3, 2),
        lambda model, rows: model(vectors(rows)).sum() + model(vectors(rows)).square().sum(),
    ),
}


def watched(model: nn.Module) -> tuple[list[Window], list[bool]]:
    """Windows of a watched model, and for each pass whether it was filled."""
    windows, passes = [Window(name, p) for name, p in model.named_parameters()], list[bool]()

    def ended() -> None:
        passes.append(any(window.filled for window in windows))
        for window in windows:
            window.reset()

    BackwardWatch(model, windows, ended)
    return windows, passes


@pytest.mark.parametrize("name", CASES)
def test_a_pass_without_samples_is_empty(name: str) -> None:
    build, loss = CASES[name]
    model = build()
    _, passes = watched(model)
    for rows in (0, 2, 0, 1):
        loss(model, rows).backward()
    assert passes == [False, True, False, True]


def test_an_empty_pass_beside_one_with_samples_is_not() -> None:
    model = nn.Linear(3, 2)
    _, passes = watched(model)
    (model(vectors(0)).sum() + model(vectors(2)).sum()).backward()
    assert passes == [True]


def test_passes_that_accumulate_are_filled_by_one_of_them() -> None:
    model = nn.Linear(3, 2)
    windows = [Window(name, p) for name, p in model.named_parameters()]
    BackwardWatch(model, windows, lambda: None)
    seen = []
    for rows in (0, 3, 0):
        model(vectors(rows)).sum().backward()
        seen.append(windows[0].filled)
    assert seen == [False, True, True]
    windows[0].reset()
    assert not windows[0].filled


def test_what_says_nothing_of_samples_is_not_called_empty() -> None:
    model = mlp()
    _, passes = watched(model)
    model[2](torch.ones(0, 4)).sum().backward()  # a part of the model, called by itself
    model(vectors(4)).sum().backward()
    assert passes == [True, True]


def test_gradients_that_go_elsewhere_leave_nothing_behind() -> None:
    model = nn.Linear(3, 2)
    _, passes = watched(model)
    x = vectors(2).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(vectors(0)).sum().backward()
    hidden = model(vectors(3))

    def burst(grad: Tensor) -> None:
        raise LookupError

    model.weight.register_hook(burst)
    with pytest.raises(LookupError):
        hidden.sum().backward()
    model.weight._backward_hooks.popitem()  # type: ignore[union-attr]
    model(vectors(0)).sum().backward()
    assert passes == [False, False]
