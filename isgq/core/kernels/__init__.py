"""Compiled kernels: chains of elementwise operations in one pass; the plain code beside them is the oracle.

Whoever has a kernel asks :func:`compiled` for the module that holds it and goes on in plain torch or numpy where the
answer is None: on other devices, where kernels are off, and where they cannot be had. Results are the same bits.

- Nothing is imported or compiled before a kernel is first asked for. Numba compiles each kernel at its first call and
  keeps the machine code on disk, beside this package or where ``NUMBA_CACHE_DIR`` says; a line on stderr says so when
  there is something to wait for. On GPUs Triton compiles the quantizers' kernels, for ``TRITON_CACHE_DIR``.
- A kernel works on what ``arrays`` of its module makes of tensors, and has the same arguments on every device.
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

_ON_CUDA = {"quantize": "triton_quantize"}

_told: set[str] = set()  # types of devices whose lack of kernels has been told
_disabled = 0  # how many blocks that disable kernels are being run


def compiled(
    module: Literal["quantize", "search", "coding", "laplace", "choose", "outer"], device: torch.device
) -> ModuleType | None:
    """The module of compiled kernels for tensors of a device; None where plain code has to do.

    Args:
        module: which kernels.
        device: where the tensors are.
    """
    if _disabled:
        return None
    if device.type == "cpu":
        return _on_cpu(module)
    return _load(_ON_CUDA[module], device) if device.type == "cuda" and module in _ON_CUDA else None


@functools.cache  # a step asks a hundred times
def _on_cpu(module: str) -> ModuleType | None:
    return _load(module, torch.device("cpu"))


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
def _load(module: str, device: torch.device) -> ModuleType | None:
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        kernels = importlib.import_module(f"{__name__}.{module}")
        if device.type == "cuda":  # that a GPU is too old, or a C compiler missing, the first launch tells
            kernels.words((0, 0, 0, 0), torch.empty(1, dtype=torch.uint32, device=device))
        return kernels
    # A missing or unfitting compiler, and no folder to keep machine code in, end in many kinds of exceptions.
    except Exception as error:
        _say_why_not(device, f"{type(error).__name__}: {error}")
        return None


def _say_why_not(device: torch.device, why: str) -> None:
    if device.type not in _told and is_main_rank():
        _told.add(device.type)
        print(
            f"isgq: no compiled kernels, plain code is used on {device.type}, which is slower ({why})", file=sys.stderr
        )
