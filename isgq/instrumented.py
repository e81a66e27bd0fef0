"""Which modules have a session now, so that none gets two."""

import weakref

from torch import nn

from isgq.core.errors import InstrumentError
from isgq.layers.adapters import refuse_sparse_gradients

_INSTRUMENTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_free(model: nn.Module) -> None:
    """Refuse a model that cannot be instrumented now.

    Raises:
        InstrumentError: it is wrapped, instrumented already as a whole or in part, has nothing to train, or a layer
            that makes sparse gradients.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InstrumentError(
            f"{type(model).__name__} already handles gradients: instrument the module it wraps (model.module) instead, "
            "without the wrapper"
        )
    if any(module in _INSTRUMENTED for module in model.modules()):
        raise InstrumentError("the model, its part or its whole is instrumented already: close() that session first")
    if not any(p.requires_grad for p in model.parameters()):
        raise InstrumentError("the model has no trainable parameter")
    refuse_sparse_gradients(model)


def occupy(model: nn.Module) -> "weakref.WeakSet[nn.Module]":
    """Note all modules of a model, and return them for :func:`release`."""
    modules = weakref.WeakSet(model.modules())
    _INSTRUMENTED.update(modules)
    return modules


def release(modules: "weakref.WeakSet[nn.Module]") -> None:
    """The session is closed."""
    _INSTRUMENTED.difference_update(modules)
