"""Tells when a backward pass of a model begins and ends.

The end is a callback of the autograd engine, queued by the first hook of the pass. The output's gradient comes before
everything inside the model, so announcing the pass there puts its end where the *outer* pass ends, also if
checkpointing runs inner passes of its own. The engine drops the callbacks of a pass that raises: then the callback's
token is gone without having been called.

A pass is *empty* if all that is known of it says so: captured pairs without rows, an output without elements, or a
forward pass none of whose tensors had any sample. Its gradients are zeros, which nobody wants in a mean.
"""

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from isgq.windows import Window


class _Pass:
    """Token of a running backward pass, held by nobody but the engine."""


class BackwardWatch:
    """Hooks on a model's output and parameters.

    Args:
        model: the model.
        windows: of its trainable parameters; their hooks are placed here.
        on_end: called when a backward pass has added a gradient to one of them and ends.
        on_arrival: called each time autograd has added a gradient to one of them.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: Collection[Window],
        on_end: Callable[[], None],
        on_arrival: Callable[[Window], None] = lambda _: None,
    ) -> None:
        self._windows, self._on_end = windows, on_end
        self._running: weakref.ref[_Pass] | None = None
        self._sizes: list[int] = []  # of what the running pass went through; 0 for an empty batch
        self._handles: list[RemovableHandle] = [handle for w in windows for handle in w.watch(self.begins, on_arrival)]
        self._handles.append(model.register_forward_hook(self._output_hook(model), with_kwargs=True))

    @property
    def closed(self) -> bool:
        """Whether the hooks are removed."""
        return not self._handles

    def forward_begins(self) -> None:
        """Called at forward passes; what a backward pass that raised has left behind is worth nothing."""
        if self._running is not None and self._running() is None:
            self._running = None
            self._sizes.clear()
            for window in self._windows:
                window.abort_backward()

    def begins(self) -> None:
        """Called by any hook during a backward pass."""
        self.forward_begins()
        if self._running is None and self._handles:
            token = _Pass()
            self._running = weakref.ref(token)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ends, token))

    def close(self) -> None:
        """Remove the hooks, drop what the windows hold."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for window in self._windows:
            window.abort_backward()
            window.reset()

    def _output_hook(self, watched: nn.Module) -> Callable[..., None]:
        model = weakref.ref(watched)

        # A function and not a method: a deep copy of the model, an average of weights say, must not copy the session.
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled() and module is model():
                self.forward_begins()
                samples = _samples((*args, *kwargs.values()))
                for leaf in [output] if isinstance(output, Tensor) else tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        size = min(samples, leaf.numel())
                        leaf.register_hook(lambda _, size=size: self._goes_through(size))  # type: ignore[no-untyped-call]

        return hook

    def _goes_through(self, size: int) -> None:
        self.begins()
        if self._running is not None:
            self._sizes.append(size)

    def _ends(self, token: _Pass) -> None:
        self._running = None
        sizes = self._sizes + [pair.d.shape[0] for window in self._windows for pair in window.pending]
        self._sizes.clear()
        empty = bool(sizes) and not any(sizes)
        arrived = [window.end_backward(empty) for window in self._windows]
        if any(arrived) and self._handles:
            self._on_end()


def _samples(inputs: tuple[Any, ...]) -> int:
    """The largest first dimension among a forward pass' tensors; 1 where there is none to tell."""
    leaves = inputs if all(isinstance(each, Tensor) for each in inputs) else tree_leaves(inputs)  # which takes longer
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return max(sizes, default=1)
