"""Tells when a backward pass of a model begins and ends.

The end is a callback of the autograd engine, queued by the first hook of the pass. The output's gradient comes before
everything inside the model, so announcing the pass there puts its end where the *outer* pass ends, also if
checkpointing runs inner passes of its own.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from isgq.windows import Window


class BackwardWatch:
    """Hooks on a model's output and parameters.

    Args:
        model: the model.
        windows: of its trainable parameters; their hooks are placed here.
        on_end: called when a backward pass has added a gradient to one of them and ends.
    """

    def __init__(self, model: nn.Module, windows: Collection[Window], on_end: Callable[[], None]) -> None:
        self._windows, self._on_end = windows, on_end
        self._queued = False
        self._handles: list[RemovableHandle] = [handle for w in windows for handle in w.watch(self.begins)]
        self._handles.append(model.register_forward_hook(self._watch_output))

    @property
    def closed(self) -> bool:
        """Whether the hooks are removed."""
        return not self._handles

    def forward_begins(self) -> None:
        """A forward pass outside any backward pass: one that was announced and has not ended has raised."""
        if self._queued and torch._C._current_graph_task_id() == -1:
            self._queued = False
            for window in self._windows:
                window.abort_backward()

    def begins(self) -> None:
        """Called by any hook during a backward pass."""
        if not self._queued and self._handles:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def close(self) -> None:
        """Remove the hooks, drop what the windows hold."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for window in self._windows:
            window.pending.clear()
            window.reset()

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.forward_begins()
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self.begins())  # type: ignore[no-untyped-call]

    def _ends(self) -> None:
        self._queued = False
        arrived = [window.end_backward() for window in self._windows]
        if any(arrived) and self._handles:
            self._on_end()
