"""How kernels are compiled: the one place that knows Numba."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import event, types
from numba.extending import intrinsic

from isgq.core.kernels import is_main_rank

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compile at the first call, keep on disk, hold no lock; IEEE arithmetic as it is written."""
    return cast(_Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


def _multiply_high(_: Any, a: Any, b: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


multiply_high: Any = intrinsic(_multiply_high)
"""Upper half of the 128-bit product of two uint64."""


def _bit_count(_: Any, a: Any) -> Any:
    return types.uint64(types.uint64), lambda _, builder, __, arguments: builder.ctpop(arguments[0])


bit_count: Any = intrinsic(_bit_count)
"""How many bits of a uint64 are set."""


class _Notice(event.Listener):
    """Says once, when a kernel has to be compiled because no machine code is kept, what is being waited for."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.startswith("isgq.")
        if ours and not self.said:
            self.said = True
            if is_main_rank():
                print("isgq: compiling kernels, once on this machine, a second each", file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        """The next kernel may follow at once."""


event.register("numba:compile", _Notice())  # type: ignore[no-untyped-call]
