"""Which modules have a session now, so that none gets two."""

import weakref
from collections.abc import Collection

from torch import nn

from isgq.core.errors import InstrumentError
from isgq.layers.adapters import refuse_sparse_gradients

_INSTRUMENTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_free(model: nn.Module) -> None:
    """Refuse a model that cannot be instrumented now.

    Raises:
        InstrumentError: it is wrapped, sharded, compiled, instrumented already as a whole or in part, has nothing to
            train, or a layer that makes sparse gradients.
    """
    for module in model.modules():
        refuse_wrapper(module)
    if any(module in _INSTRUMENTED for module in model.modules()):
        raise InstrumentError("the model, its part or its whole is instrumented already: close() that session first")
    if not any(p.requires_grad for p in model.parameters()):
        raise InstrumentError("the model has no trainable parameter")
    refuse_sparse_gradients(model)


def refuse_wrapper(module: nn.Module) -> None:
    """Refuse what handles gradients by itself, or runs without the hooks that a session would place.

    Raises:
        InstrumentError: the module is such a thing; the message says what to use instead.
    """
    kind = type(module).__name__
    if isinstance(module, nn.DataParallel):
        raise InstrumentError(
            "DataParallel copies the model in every forward pass, past any hook: start one process per device "
            "(torchrun) and instrument the module it wraps (model.module) in each"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise InstrumentError(
            "DistributedDataParallel already averages gradients: instrument the module that it wraps (model.module) "
            "without the wrapper; or keep it, and give it a codec by isgq.ddp.comm_hook"
        )
    if any(base.__name__ in {"FSDPModule", "FullyShardedDataParallel"} for base in type(module).__mro__) or any(
        type(p.data).__name__ == "DTensor" for p in module.parameters(recurse=False)
    ):
        raise InstrumentError(
            f"{kind} is sharded (FSDP or DTensor), so no rank holds a whole gradient: instrument the plain model, "
            "without fully_shard, where it fits into a device's memory; otherwise leave its gradients to FSDP"
        )
    if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        raise InstrumentError(
            "the model is compiled already, and compiled code may ignore hooks that come later: instrument first "
            "(session = isgq.instrument(model)), then compile (model = torch.compile(model))"
        )


def check_frozen(frozen: Collection[nn.Parameter]) -> None:
    """What was frozen when the session began must be so still.

    Raises:
        InstrumentError: it is not.
    """
    thawed = sum(parameter.requires_grad for parameter in frozen)
    if thawed:
        raise InstrumentError(
            f"{thawed} frozen parameter(s) became trainable after instrument(), so their gradients would not be "
            "synchronised: close() the session and instrument the model again"
        )


def occupy(model: nn.Module) -> "weakref.WeakSet[nn.Module]":
    """Note all modules of a model, and return them for :func:`release`."""
    modules = weakref.WeakSet(model.modules())
    _INSTRUMENTED.update(modules)
    return modules


def release(modules: "weakref.WeakSet[nn.Module]") -> None:
    """The session is closed."""
    _INSTRUMENTED.difference_update(modules)
