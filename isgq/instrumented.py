"""Which modules have a session now, so that none gets two."""

import weakref
from collections.abc import Callable, Collection

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


class Occupation:
    """Notes all modules of a model until it is released, and refuses to let their parameters be replaced.

    A state that is loaded with ``assign=True`` brings other parameters, which the session would not synchronise.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = weakref.WeakSet(model.modules())
        self._hooks = [
            module.register_load_state_dict_post_hook(_keeps(module))  # type: ignore[no-untyped-call]
            for module in self._modules
        ]
        _INSTRUMENTED.update(self._modules)

    def release(self) -> None:
        """The session is closed."""
        _INSTRUMENTED.difference_update(self._modules)
        for hook in self._hooks:
            hook.remove()


def _keeps(module: nn.Module) -> Callable[[nn.Module, object], None]:
    """What has to hold of a module after a state was loaded."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    owner = weakref.ref(module)  # a copy of the module has a copy of the hook

    def check(module: nn.Module, _: object) -> None:
        replaced = [name for name, p in own.items() if module._parameters.get(name, p) is not p]
        if replaced and module is owner():
            raise InstrumentError(
                f"load_state_dict(assign=True) has replaced {', '.join(replaced)} of {type(module).__name__} after "
                "instrument(), so their gradients would not be synchronised: load without assign=True, or before"
            )

    return check
