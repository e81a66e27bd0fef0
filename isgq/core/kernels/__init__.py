"""Compiled kernels: chains of elementwise operations in one pass, on the CPU; the plain code beside them is the oracle.

Whoever has a kernel asks :func:`compiled` for the module that holds it and goes on in plain torch or numpy where the
answer is None: on other devices, where kernels are off, and where they cannot be had. Results are the same bits.

- Nothing is imported or compiled before a kernel is first asked for. Numba compiles each kernel at its first call and
  keeps the machine code on disk, beside this package or where ``NUMBA_CACHE_DIR`` says; a line on stderr says so when
  there is something to wait for.
- Every kernel is called with arguments of the same types always: processes that start together and compile the same
  kernel then write the same file, each replacing it as a whole.
- Kernels hold no lock (:func:`isgq.core.parallel.map_parts` gives them threads) and draw no numbers of their own.

``ISGQ_KERNELS=0`` in the environment turns kernels off for a process, :func:`disabled` for a while.
"""

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import torch

SWITCH = "ISGQ_KERNELS"
"""Name of the environment variable."""

_disabled = 0  # how many blocks that disable kernels are being run


def compiled(module: Literal["quantize", "coding", "laplace"], device: torch.device) -> ModuleType | None:
    """The module of compiled kernels for tensors of a device; None where plain code has to do.

    Args:
        module: which of the modules of this package.
        device: where the tensors are.
    """
    return None if device.type != "cpu" or _disabled else _load(module)


@contextmanager
def disabled() -> Iterator[None]:
    """Work without kernels within a ``with`` block, in all threads."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def is_main_rank() -> bool:
    """Whether this process speaks for all that do the same."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0


@functools.cache
def _load(module: str) -> ModuleType | None:
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        return importlib.import_module(f"{__name__}.{module}")
    # A missing or unfitting Numba, and no folder to keep machine code in, end in many kinds of exceptions.
    except Exception as error:
        _say_why_not(f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _say_why_not(why: str) -> None:
    if is_main_rank():
        print(f"isgq: no compiled kernels, plain code is used, which is slower ({why})", file=sys.stderr)
