"""Hooks that catch a layer's input x and output gradient d during autograd, and nothing else.

A forward hook (with keyword arguments) puts a tensor hook on the module's *output*, whose closure holds x. Unlike
``register_full_backward_hook`` this works with in-place activations behind the layer, pairs x and d rightly when a
module is called several times, and fires once under both kinds of activation checkpointing. It comes before the
module's other forward hooks, so that output and d are those of the layer, whatever they do. A call with other tensors
in the place of the parameters (``torch.func.functional_call``) is none of the layer's.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils.hooks import RemovableHandle

from isgq.core.errors import CodecError
from isgq.core.payload import Factors, LowRank
from isgq.layers.adapters import Adapter, Spares, Writes, adapter_for, has_adapter

SKIPPED = "skipped by the caller"


@dataclass(frozen=True, eq=False)
class Unit:
    """One module whose weight gradient can travel as factors; its bias, if it has a trainable one, rides along.

    Attributes:
        name: the weight's parameter name.
        bias_name: the bias's parameter name, or None.
        module: the module.
        adapter: its adapter.
    """

    name: str
    bias_name: str | None
    module: nn.Module
    adapter: Adapter

    @property
    def weight(self) -> nn.Parameter:
        """The weight, as it is now."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    # Kept, because to ask costs as much as a small product.
    @functools.cached_property
    def writing(self) -> Writes | None:
        """The adapter, if it can write."""
        return self.adapter if isinstance(self.adapter, Writes) else None

    @functools.cached_property
    def sparing(self) -> Spares | None:
        """The adapter, if it can spare."""
        return self.adapter if isinstance(self.adapter, Spares) else None

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that rides along, or None."""
        bias = self.module.bias if self.bias_name is not None else None
        assert bias is None or isinstance(bias, nn.Parameter)
        return bias

    def contract(self, x: Tensor, d: Tensor) -> Tensor:
        """The weight's gradient; a :data:`isgq.core.payload.Contract`."""
        return self.adapter.contract(self.module, x, d)

    def mixed(self, factors: Factors, gradient: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        """The weight's gradient made of the factors, and the one given, both with their outputs mixed.

        Equal for a random mix if the gradients are, and hardly ever otherwise (Freivalds 1977), at the cost of reading
        factors and gradient once instead of a product.

        Args:
            factors: one pair.
            gradient: in the weight's shape.
            mix: ``[o]``, a random number for each output; a convolution's groups are mixed each by itself.
        """
        groups = getattr(self.module, "groups", 1)
        dtype = torch.promote_types(factors.d.dtype, torch.float32)
        matrix = torch.eye(groups, device=mix.device).repeat_interleave(mix.numel() // groups, 1) * mix
        matrix, dimension = matrix.to(factors.d.device, dtype), self.adapter.outputs
        x = factors.x.to(dtype) if factors.x.is_floating_point() else factors.x
        d = _mix(factors.d.to(dtype), matrix, 1)
        return self.contract(x, d), _mix(gradient.to(dtype), matrix, dimension)

    def gradients(self, factors: Factors | LowRank, out: Tensor | None = None) -> list[Tensor]:
        """Weight gradient, in the weight's shape or as a matrix, and bias gradient if there is one.

        Args:
            factors: what they are made of.
            out: where the weight's gradient may be written, if that is possible: of its shape and dtype, contiguous.
        """
        has_bias = self.bias_name is not None
        if isinstance(factors, LowRank):
            return [factors.weight(out), *([factors.bias()] if has_bias else [])]
        if out is not None and self.writing is not None:
            weight = self.writing.contract_into(self.module, factors.x, factors.d, out)
        else:
            weight = self.contract(factors.x, factors.d)
        return [weight, *([self.adapter.bias_grad(self.module, factors.d)] if has_bias else [])]

    def flat_gradient(self, factors: Factors | LowRank) -> Tensor:
        """The same as one flat vector."""
        return torch.cat([gradient.reshape(-1) for gradient in self.gradients(factors)])


def find_units(model: nn.Module, skip: Callable[[str], bool]) -> tuple[list[Unit], dict[str, str]]:
    """Which trainable parameters can travel as factors, and for the rest, why not.

    Args:
        model: the model.
        skip: tells by parameter name what the user wants dense.

    Returns:
        The units in the order of the model's parameters, and name -> reason for each trainable parameter in none.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, attribute))
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    units: list[Unit] = []
    reasons: dict[str, str] = {}
    for parameter, name in names.items():
        if skip(name):
            reasons[name] = SKIPPED
        elif len(owners[parameter]) > 1:
            reasons[name] = f"tied: used by {len(owners[parameter])} modules"
        else:
            module, attribute = owners[parameter][0]
            adapter, reason = adapter_for(module), _obstacle(module, attribute)
            if adapter is not None and reason is None:
                bias = module._parameters.get("bias")
                rides = bias is not None and bias in names and len(owners[bias]) == 1 and not skip(names[bias])
                units.append(Unit(name, names[bias] if bias is not None and rides else None, module, adapter))
            else:
                reasons[name] = reason or ""
    for unit in units:
        reasons.pop(unit.bias_name or "", None)
    return units, reasons


def _obstacle(module: nn.Module, attribute: str) -> str | None:
    """Why a module's parameter has no factors; None where it has."""
    adapter, kind = adapter_for(module), type(module).__name__
    computed = adapter is not None and "weight" not in module._parameters
    if computed or isinstance(module, ParametrizationList) or is_parametrized(module):
        return "parametrised: its module's weight is computed (weight_norm, spectral_norm and the like)"
    if isinstance(module, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear)):
        return "MultiheadAttention uses its projections without calling them"
    if adapter is None:
        bases = [base.__name__ for base in type(module).__mro__ if has_adapter(base)]
        return f"{kind} has no adapter" + (f", and may compute something else than {bases[0]}" if bases else "")
    if attribute != "weight":
        return "no factors: the weight beside it is frozen or travels densely"
    return adapter.refusal(module)


def _mix(x: Tensor, matrix: Tensor, dimension: int) -> Tensor:
    """The matrix ``[m, n]`` applied to a dimension of size n, which becomes m."""
    if x.dim() == dimension + 1:
        return x @ matrix.t()
    mixed = matrix @ x.flatten(dimension + 1)
    return mixed.reshape(*mixed.shape[:-1], *x.shape[dimension + 1 :])


class Capture:
    """Forward hooks on the modules of some units; hands each caught pair to ``sink``.

    Args:
        units: what to watch.
        sink: called during backward with the unit and the pair of one call.
        on_forward: called with no argument at each watched forward pass that builds a graph.
        replace: given unit, input and output of a call, may return another output that catches the pair by itself.
    """

    def __init__(
        self,
        units: Collection[Unit],
        sink: Callable[[Unit, Factors], None],
        on_forward: Callable[[], None],
        replace: Callable[[Unit, Tensor, Tensor], Tensor | None] = lambda *_: None,
    ) -> None:
        self._sink: Callable[[Unit, Factors], None] | None = sink
        self._on_forward, self._replace = on_forward, replace
        self._handles: list[RemovableHandle] = [
            unit.module.register_forward_hook(self._forward_hook(unit), prepend=True, with_kwargs=True)
            for unit in units
        ]

    def close(self) -> None:
        """Remove the hooks; tensor hooks already in a graph do nothing from now on."""
        self._sink = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward_hook(self, unit: Unit) -> Callable[..., Tensor | None]:
        weight = unit.weight

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
            if module is not unit.module or module._parameters.get("weight") is not weight:
                return None  # a deep copy of the model has copies of the hooks
            if not (isinstance(output, Tensor) and output.requires_grad and weight.requires_grad):
                return None  # no graph, or autograd will make no weight gradient
            self._on_forward()
            x = args[0] if args else kwargs.get("input")
            if not isinstance(x, Tensor):
                return None  # the gradient will be found without a pair, and goes the dense way
            # What has seen the output already, with a hook of its own perhaps, would miss another history's gradient.
            first = next(iter(module._forward_hooks.values())) is hook and not nn_module._global_forward_hooks
            replaced = self._replace(unit, x, output) if first else None
            if replaced is not None:
                return replaced
            x = x.detach()

            def catch(d: Tensor) -> None:
                if self._sink is not None and not is_batch_of_gradients(d):
                    self._sink(unit, canonical_pair(unit, x, d))

            output.register_hook(catch)  # type: ignore[no-untyped-call]
            return None

        return hook


def is_batch_of_gradients(d: Tensor) -> bool:
    """Whether it is that of ``autograd.grad(is_grads_batched=True)``, which adds to no ``.grad``."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(d)


def canonical_pair(unit: Unit, x: Tensor, d: Tensor) -> Factors:
    """The pair of one call in its adapter's layout, contiguous (``loss.sum()`` makes d of stride 0), x in d's dtype.

    Autograd under autocast multiplies in the dtype of d, so casting x reproduces its result.
    """
    d = d.detach()
    if x.is_floating_point() and x.dtype != d.dtype:
        x = x.to(d.dtype)
    x, d = unit.adapter.canonical(unit.module, x, d)
    return Factors(x.contiguous(), d.contiguous())


def merge(pairs: Sequence[Factors]) -> Factors:
    """One pair whose contraction is the sum of the contractions of several: samples side by side.

    Args:
        pairs: at least one pair of the same unit.

    Raises:
        CodecError: the calls differ in more than their number of samples (a convolution at two image sizes).
    """
    if len(pairs) == 1:
        return pairs[0]
    if len({(p.x.shape[1:], p.d.shape[1:], p.x.dtype, p.d.dtype) for p in pairs}) > 1:
        raise CodecError("calls of different sizes cannot be joined into one pair of factors")
    return Factors(torch.cat([p.x for p in pairs]), torch.cat([p.d for p in pairs]))
