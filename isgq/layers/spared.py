"""Layers whose weight gradient autograd need not make, because a session makes the mean of it from the factors.

After a module's forward, a function takes the place of the one that has made its output: the same values, the same
gradients of input and bias; but the gradient of the weight only where somebody other than the session wants it.

Where a graph's tensors are saved by hooks, all is as autograd makes it: a checkpointed forward that runs once more must
save as many tensors, though by then the plan may be another. So it is under ``torch.func`` and forward-mode gradients.

Whatever else uses the weight still sends its gradient there, so a gradient that arrives at a weight which was spared
one is always one that the pairs do not make up. A graph of gradients (``create_graph``) has everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from isgq.core.payload import Factors
from isgq.layers.capture import Unit, canonical_pair, is_batch_of_gradients

Caught = Callable[[Unit, Factors, bool], bool]
"""Takes the pair of a call during backward, and whether the weight's gradient would only be added to ``weight.grad``;
returns whether it may be left out."""


def spare(unit: Unit, x: Tensor, output: Tensor, caught: Caught) -> Tensor | None:
    """The output with another history; None where that might miss something.

    Args:
        unit: whose module was called.
        x: its input.
        output: its output.
        caught: called in every backward pass.
    """
    module, adapter, weight = unit.module, unit.sparing, unit.module._parameters.get("weight")
    plain = (
        adapter is not None
        and "forward" not in module.__dict__
        and isinstance(weight, nn.Parameter)
        and type(x) is type(output) is Tensor
        and x.dtype == weight.dtype == output.dtype  # else it is autocast
        and not _transformed()
        and adapter.made(module, x, output)
    )
    if not plain:
        return None
    # .data is no view, which would forbid an in-place activation behind.
    result: Tensor = _Spared.apply(x, weight, module.bias, _Call(unit, output.data, caught))  # type: ignore[no-untyped-call]
    return result


def _transformed() -> bool:
    """Whether something else than autograd by itself makes or keeps the graph."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


@dataclass(frozen=True, slots=True)
class _Call:
    unit: Unit
    output: Tensor
    caught: Caught


class _Spared(torch.autograd.Function):
    """A layer that has been computed already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        """The values of the output."""
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)  # else it may change before backward
        ctx.unit, ctx.caught = call.unit, call.caught
        return call.output

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        x, weight = ctx.saved_tensors
        unit, graph = ctx.unit, torch.is_grad_enabled()
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        wanted, adds = _wants(ctx.next_functions[1][0]) if needs_weight else (False, False)
        pair = None if is_batch_of_gradients(d) else canonical_pair(unit, x, d)
        left_out = pair is not None and ctx.caught(unit, pair, adds and not graph)
        factors = pair if pair and not graph else Factors(*unit.adapter.canonical(unit.module, x, d))
        return (
            unit.adapter.input_grad(unit.module, weight, x, d) if needs_x else None,
            unit.contract(factors.x, factors.d) if wanted and not left_out else None,
            unit.adapter.bias_grad(unit.module, factors.d) if needs_bias else None,
            None,
        )


def _wants(accumulator: Any) -> tuple[bool, bool]:
    """Whether the running pass wants a leaf's gradient at all, and whether to add it to ``.grad``."""
    try:
        adds = bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # so it says that torch.autograd.grad asks for this leaf
        return True, False
    return adds, adds
