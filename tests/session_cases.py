"""Ways to use a model that must give the gradients of data-parallel training, as data.

A case builds a model and runs one step of it: forward passes, backward passes, and what a user may do in between.
Everything is float64, so that agreement is far below the rounding of float32; inputs differ by step and rank.
"""

import os
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import models

STEPS = int(os.environ.get("ISGQ_TEST_STEPS", "30"))
"""Of long sessions; 200 by hand, and before a release."""


@dataclass
class Turn:
    """One step on one rank."""

    rank: int
    step: int
    no_sync: Callable[[], AbstractContextManager[None]]
    model: nn.Module
    rows: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
        self.rows = self.rows or 3 + self.rank  # batches are unequal

    def x(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def batch(self, *shape: int) -> Tensor:
        return self.x(self.rows, *shape)

    def tokens(self, *shape: int, high: int = 7) -> Tensor:
        return torch.randint(high, (self.rows, *shape), generator=self.generator)


def loss(*outputs: Tensor) -> Tensor:
    """Something with a gradient that differs everywhere."""
    return sum((torch.sin(out.double() * 3) + out.double() ** 2).mean() for out in outputs)  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    """Attributes:
    build: the model.
    step: forward and backward passes of one step.
    dense: the parameters that have no factors; all other weights must have some.
    oracle: ``ddp``, or ``average`` (mean over ranks of a lone model's gradients) for what DDP cannot do.
    """

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module, Turn], None]
    dense: Collection[str] = ()
    oracle: str = "ddp"
    tolerance: float = 1e-6
    zero: Callable[[nn.Module], None] = lambda model: model.zero_grad()
    options: dict[str, Any] = field(default_factory=dict)


def fed(*shape: int) -> Callable[[nn.Module, Turn], None]:
    return lambda net, turn: loss(net(turn.batch(*shape))).backward()


def one(module: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """A layer alone."""
    return Case(module, fed(*shape), **options)


class Net(nn.Module):
    """A model from a forward function and its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward = forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self, *inputs)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def accumulate(between: Callable[[nn.Module], None] = lambda net: None) -> Callable[[nn.Module, Turn], None]:
    def step(net: nn.Module, turn: Turn) -> None:
        with turn.no_sync():
            loss(net(turn.batch(6))).backward()
        between(net)
        loss(net(turn.batch(6))).backward()

    return step


def scale_gradients(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.mul_(0.25)


def replace_gradients(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.25


def scale_data(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.mul_(0.25)


def drop_a_bias(net: nn.Module) -> None:
    next(p for name, p in net.named_parameters() if name.endswith("0.bias")).grad = None


def two_synced(net: nn.Module, turn: Turn) -> None:
    for _ in range(2):
        loss(net(turn.batch(6))).backward()


def on_even_ranks(net: nn.Module, turn: Turn) -> None:
    loss(net(turn.batch(6), turn.rank % 2 == 0)).backward()


def two_losses(net: nn.Module, turn: Turn) -> None:
    first, second = net(turn.batch(6)), net(turn.batch(6))
    loss(first).backward()
    loss(second).backward()


def grad_between(net: nn.Module, turn: Turn) -> None:
    x = turn.batch(6).requires_grad_()
    out = net(x)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    loss(out).backward()
    torch.autograd.grad(net(x).sum(), list(net.parameters()))


def look_first(net: nn.Module, turn: Turn) -> None:
    with torch.no_grad():
        net(turn.batch(6))
    loss(net(turn.batch(6))).backward()


def retained(net: nn.Module, turn: Turn) -> None:
    value = loss(net(turn.batch(6)))
    with turn.no_sync():
        value.backward(retain_graph=True)
    value.backward()


def checkpointed(reentrant: bool) -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = checkpoint(self.inner, self.first(x), use_reentrant=reentrant)
        return self.last(h)

    return Case(
        lambda: Net(forward, first=nn.Linear(6, 6), inner=nn.Sequential(nn.Linear(6, 6), nn.Tanh()), last=two()),
        fed(6),
        oracle="average" if reentrant else "ddp",  # DDP refuses it beside find_unused_parameters
    )


def autocast_to(dtype: torch.dtype) -> Callable[[nn.Module, Turn], None]:
    def step(net: nn.Module, turn: Turn) -> None:
        with torch.autocast("cpu", dtype):
            out = net(turn.batch(6).float())
        loss(out).backward()

    return step


def uncompiled() -> nn.Module:
    torch.compiler.reset()  # code compiled for the same model without hooks would serve this one, too
    return mlp()


def compiled(net: nn.Module, turn: Turn) -> None:
    loss(torch.compile(net, backend="eager")(turn.batch(6))).backward()


def clipped(net: nn.Module, turn: Turn) -> None:
    loss(net(turn.batch(6))).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def differentiable(net: nn.Module, turn: Turn) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the cycle between gradients and graph
        loss(net(turn.batch(6))).backward(create_graph=True)
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad.detach()


def residual() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        return self.b(torch.relu_(h))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2))


class Adapted(nn.Module):
    """A low-rank adapter (LoRA) beside a frozen layer: of layers that are called, or of bare parameters."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 5).requires_grad_(False)
        self.called = called
        if called:
            self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 5, bias=False)})
        else:
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(5, 2))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if self.called:
            change = self.lora_B["default"](self.lora_A["default"](x))
        else:
            change = F.linear(x, self.lora_B @ self.lora_A)  # type: ignore[operator]
        return self.base_layer(x) + 2.0 * change  # type: ignore[no-any-return]


def late(forward: Callable[[Any, Tensor], Tensor]) -> Case:
    """Another way to use the layer, from the second step on."""

    def step(net: nn.Module, turn: Turn) -> None:
        loss(net(turn.batch(6), forward if turn.step else None)).backward()

    return Case(lambda: Net(lambda self, x, other: other(self, x) if other else self.a(x), a=nn.Linear(6, 4)), step)


def halved_weight(self: Any, x: Tensor) -> Tensor:
    handle = self.a.weight.register_hook(lambda grad: handle.remove() or grad * 0.5)
    return self.a(x)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    net = Net(lambda self, t: self.head(torch.tanh(self.middle(self.table(t)))), table=nn.Embedding(7, 5))
    net.middle, net.head = nn.Linear(5, 5), nn.Linear(5, 7)
    net.head.weight = net.table.weight
    return net


def hooked() -> nn.Module:
    net = mlp()
    net[0].register_forward_hook(lambda module, args, output: output * 2)
    return net


def masked() -> nn.Module:
    net = mlp()
    net[0].weight.register_hook(lambda grad: grad * 0.5)
    return net


def shared_with_functional() -> nn.Module:
    return Net(lambda self, x: self.a(x) + F.linear(x * 2, self.a.weight), a=nn.Linear(6, 6))


def broken_then_whole(net: nn.Module, turn: Turn) -> None:
    def burst(grad: Tensor) -> Tensor:
        raise LookupError("broken")

    inner: Any = net.module if hasattr(net, "module") else net
    h = inner[0](turn.batch(6))
    out = inner[2](inner[1](h))
    h.register_hook(burst)
    try:
        loss(out).backward()
    except LookupError:
        net.zero_grad()
    else:
        raise AssertionError("the backward pass went through")
    loss(net(turn.batch(6))).backward()


def sizes(*shapes: tuple[int, ...]) -> Callable[[nn.Module, Turn], None]:
    return lambda net, turn: loss(*net(*[turn.batch(*shape) for shape in shapes])).backward()


def twice(part: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda self, *xs: [self.a(x) for x in xs], a=part())


def image_model(spec: str, *shape: int) -> Case:
    def step(net: nn.Module, turn: Turn) -> None:
        target = turn.tokens(high=10)
        F.cross_entropy(net(turn.batch(*shape)), target).backward()

    return Case(lambda: models.build(spec, classes=10, in_shape=shape, seed=3), step)  # type: ignore[arg-type]


def attention() -> nn.Module:
    return Net(
        lambda self, x: self.b(self.a(x, x, x)[0]),
        a=nn.MultiheadAttention(6, 2, batch_first=True),
        b=nn.Linear(6, 3),
    )


TO_NONE_OR_ZERO = {
    "zeroed in place": Case(mlp, fed(6), zero=lambda model: model.zero_grad(set_to_none=False)),
    "zeroed in place, accumulating": Case(mlp, accumulate(), zero=lambda model: model.zero_grad(set_to_none=False)),
    "never zeroed": Case(mlp, fed(6), zero=lambda model: None),
}

LAYERS = {
    "linear 1-d": Case(mlp, lambda net, turn: loss(net(turn.x(6))).backward()),
    "linear 2-d": Case(mlp, fed(6)),
    "linear 3-d": Case(mlp, fed(2, 6)),
    "linear without bias": one(lambda: nn.Linear(6, 4, bias=False), 6),
    "conv1d": one(lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), 2, 9),
    "conv2d": one(lambda: nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2)), 2, 7, 6),
    "conv2d without bias": one(lambda: nn.Conv2d(2, 4, 3, bias=False), 2, 6, 6),
    "conv3d": one(lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), 2, 4, 4, 3),
    "conv2d same": one(lambda: nn.Conv2d(2, 4, 3, padding="same"), 2, 6, 6),
    "conv2d same, even kernel": one(lambda: nn.Conv2d(2, 4, (4, 2), padding="same"), 2, 6, 6),
    "conv1d same, dilated, even kernel": one(lambda: nn.Conv1d(2, 4, 4, padding="same", dilation=3), 2, 12),
    "conv2d valid": one(lambda: nn.Conv2d(2, 4, 3, padding="valid"), 2, 6, 6),
    "conv2d reflect": one(lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"), 2, 6, 6),
    "conv2d circular": one(lambda: nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="circular"), 2, 6, 5),
    "conv1d replicate": one(lambda: nn.Conv1d(2, 4, 3, stride=2, padding=2, padding_mode="replicate"), 2, 9),
    "conv2d same, circular": one(lambda: nn.Conv2d(2, 4, 4, padding="same", padding_mode="circular"), 2, 6, 6),
    "conv2d groups, dilation": one(lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2), 4, 6, 6),
    "conv2d depthwise": one(lambda: nn.Conv2d(3, 6, 3, groups=3), 3, 5, 5),
    "conv2d leaves rows over": one(lambda: nn.Conv2d(2, 3, 3, stride=3), 2, 8, 7),
    "conv2d unbatched": Case(lambda: nn.Conv2d(2, 4, 3), lambda net, turn: loss(net(turn.x(2, 6, 6))).backward()),
    "conv2d channels_last": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda net, turn: loss(net(turn.batch(2, 8, 8).to(memory_format=torch.channels_last))).backward(),
    ),
    "embedding": Case(lambda: nn.Embedding(7, 4), lambda net, turn: loss(net(turn.tokens(5))).backward()),
    "embedding padding_idx": Case(
        lambda: nn.Embedding(7, 4, padding_idx=2), lambda net, turn: loss(net(turn.tokens(5))).backward()
    ),
    "embedding max_norm": Case(
        lambda: nn.Embedding(7, 4, max_norm=1.0), lambda net, turn: loss(net(turn.tokens(5))).backward()
    ),
    "embedding scale_grad_by_freq": Case(
        lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), lambda net, turn: loss(net(turn.tokens(5))).backward()
    ),
    "embedding int32": Case(lambda: nn.Embedding(7, 4), lambda net, turn: loss(net(turn.tokens(5).int())).backward()),
}

USES = {
    "fc": image_model("fc:hidden=20-10", 1, 8, 8),
    "lenet": image_model("lenet", 1, 28, 28),
    "cifarnet": image_model("cifarnet", 3, 24, 24),
    "twice": Case(twice(lambda: nn.Linear(6, 5)), sizes((6,), (6,))),
    "twice, other shape": Case(twice(lambda: nn.Linear(6, 5)), sizes((6,), (2, 6))),
    "conv twice": Case(twice(lambda: nn.Conv2d(2, 3, 3)), sizes((2, 6, 6), (2, 6, 6))),
    "embedding twice": Case(
        lambda: nn.Embedding(7, 4),
        lambda net, turn: (loss(net(turn.tokens(5))) + loss(net(turn.tokens(2)))).backward(),
    ),
    "conv at two sizes": Case(twice(lambda: nn.Conv2d(2, 3, 3)), sizes((2, 6, 6), (2, 5, 7)), dense=["a.weight"]),
    "conv at one size a rank": Case(
        lambda: nn.Conv2d(2, 3, 3), lambda net, turn: loss(net(turn.batch(2, 6 + turn.rank, 6))).backward()
    ),
    "no_sync": Case(mlp, accumulate()),
    "two synced backwards": Case(mlp, two_synced),
    "no_sync, scaled between": Case(mlp, accumulate(scale_gradients), dense=["0.weight", "2.weight"]),
    "no_sync, replaced between": Case(mlp, accumulate(replace_gradients), dense=["0.weight", "2.weight"]),
    "no_sync, scaled behind autograd": Case(mlp, accumulate(scale_data), dense=["0.weight", "2.weight"]),
    "no_sync, one dropped": Case(mlp, accumulate(drop_a_bias), dense=["0.weight"]),
    "no_sync, all dropped": Case(mlp, accumulate(lambda net: net.zero_grad())),
    "unused on a rank": Case(
        lambda: Net(lambda self, x, use: self.a(x) if use else self.b(x), a=two(), b=two(), c=two()),
        on_even_ranks,
        dense=["c.0.weight"],
    ),
    "frozen weight and bias": Case(lambda: frozen(mlp(), "0.weight", "0.bias"), fed(6)),
    "frozen weight": Case(lambda: frozen(mlp(), "0.weight"), fed(6), dense=["0.bias"]),
    "frozen bias": Case(lambda: frozen(mlp(), "0.bias"), fed(6)),
    "tied": Case(tied, lambda net, turn: loss(net(turn.tokens(3))).backward(), dense=["table.weight", "head.bias"]),
    "weight_norm": Case(
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2)),
        fed(6),
        dense=["0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"],
    ),
    "attention": Case(
        attention,
        fed(3, 6),
        dense=["a.in_proj_weight", "a.in_proj_bias", "a.out_proj.weight", "a.out_proj.bias"],
    ),
    "keyword": Case(lambda: Net(lambda self, x: self.a(input=x), a=nn.Linear(6, 4)), fed(6)),
    "in-place ReLU": Case(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), fed(6)),
    "batch norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        fed(6),
        dense=["1.weight", "1.bias"],
    ),
    "two losses": Case(mlp, two_losses, oracle="average"),
    "autograd.grad": Case(mlp, grad_between, oracle="average"),
    "no_grad forward": Case(mlp, look_first),
    "checkpoint": checkpointed(reentrant=False),
    "reentrant checkpoint": checkpointed(reentrant=True),
    "autocast": Case(lambda: mlp().float(), autocast_to(torch.bfloat16), tolerance=2e-2),
    "autocast float16": Case(lambda: mlp().float(), autocast_to(torch.float16), tolerance=3e-3),
    "compiled": Case(uncompiled, compiled, oracle="average"),
    "clipped": Case(mlp, clipped),
    "create_graph": Case(mlp, differentiable, oracle="average"),
    "in-place residual": Case(residual, fed(6)),
    "LoRA of layers": Case(lambda: Adapted(called=True), fed(6)),
    "LoRA of parameters": Case(lambda: Adapted(called=False), fed(6), dense=["lora_A", "lora_B"]),
    "late functional": late(lambda self, x: F.linear(x, self.a.weight, self.a.bias)),
    "late functional, too": late(lambda self, x: self.a(x) + F.linear(x * 2, self.a.weight)),
    "late penalty": late(lambda self, x: self.a(x) + 0.01 * self.a.weight.square().sum()),
    "late hook on the weight": late(halved_weight),
    "sum": Case(mlp, lambda net, turn: net(turn.batch(6)).sum().backward()),
    "retain_graph": Case(mlp, retained, oracle="average"),
    "hook on the output": Case(hooked, fed(6)),
    "hook on the weight": Case(masked, fed(6), dense=["0.weight"]),
    "functional": Case(shared_with_functional, fed(6), dense=["a.weight"]),
    "exception in backward": Case(mlp, broken_then_whole, oracle="average"),
    "manual": Case(mlp, fed(6), options={"sync": "manual"}),
    "manual, accumulating": Case(mlp, two_synced, options={"sync": "manual"}, oracle="average"),
}

CASES = LAYERS | USES | TO_NONE_OR_ZERO
