"""What each parameter has gathered on this rank since the last synchronisation.

A *window* opens with the first gradient after a synchronisation and closes with the next. It remembers what was in
``p.grad`` before (gradients the user lets accumulate over several synchronised steps), the captured pairs, and
whether those pairs still account for all that autograd has added: a user who zeroes, clips or replaces a gradient
between two backward passes of one window makes them worthless, and the gradient itself must travel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isgq.core.payload import Factors


@dataclass(eq=False)
class Window:
    """One parameter's window.

    Attributes:
        name: parameter name.
        parameter: the parameter.
        before: content of ``p.grad`` when the window opened, or None.
        arrivals: how often autograd has added a gradient since the last synchronisation.
        edited: whether somebody else changed ``p.grad`` in between.
        filled: whether any of those gradients may come from samples, and not from an empty batch.
        scale: of the loss; ``p.grad`` and the captured pairs have it, contributions and means have not.
        pairs: factors captured by completed backward passes of this window.
        pending: factors captured by the backward pass that is running.
    """

    name: str
    parameter: nn.Parameter
    before: Tensor | None = None
    arrivals: int = 0
    edited: bool = False
    filled: bool = False
    scale: float = 1.0
    pairs: list[Factors] = field(default_factory=list)
    pending: list[Factors] = field(default_factory=list)
    _arrived: bool = False
    _seen: tuple[int, int] | None = None

    @property
    def touched(self) -> bool:
        """Whether there is a contribution of this rank."""
        return self.arrivals > 0

    def watch(self, on_gradient: Callable[[], None]) -> list[RemovableHandle]:
        """Put the two hooks on the parameter; ``on_gradient`` is called during each backward that reaches it."""

        def before(gradient: Tensor) -> None:
            on_gradient()
            self._open()

        def after(parameter: Tensor) -> None:
            self.arrivals += 1
            self._arrived = True
            self._seen = self._identity()

        return [
            self.parameter.register_hook(before),  # type: ignore[no-untyped-call]
            self.parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
        ]

    def _open(self) -> None:
        grad = self.parameter.grad
        if grad is None:  # nothing yet, or the user has dropped what was there
            self.reset()
        elif not self.touched:
            self.before = grad.detach().clone()
        else:
            self.check_edits()

    def _identity(self) -> tuple[int, int] | None:
        grad = self.parameter.grad
        return None if grad is None else (id(grad), grad._version)

    def check_edits(self) -> None:
        """Notice a gradient that was changed, replaced or dropped since autograd last added to it."""
        if self.touched and self.parameter.grad is None:
            self.reset()
        elif self.touched and self._identity() != self._seen:
            self.before, self.edited = None, True
            self.pairs.clear()

    def end_backward(self, empty: bool) -> bool:
        """Keep the pairs of a completed backward pass if its gradient arrived (returned); else, drop them.

        ``autograd.grad`` makes pairs but adds no gradient.

        Args:
            empty: whether the pass was that of an empty batch.
        """
        arrived, self._arrived = self._arrived, False
        if arrived:
            self.pairs += self.pending
            self.filled = self.filled or not empty
        self.pending.clear()
        return arrived

    def abort_backward(self) -> None:
        """A backward pass broke off: what it added to ``p.grad`` has no complete pairs."""
        if self.pending or self._arrived:
            self.edited = self.edited or self._arrived
            self.pairs.clear()
        self.pending.clear()
        self._arrived = False

    def contribution(self) -> Tensor:
        """This rank's gradient of the window, unscaled: what autograd added to ``p.grad``; zeros if nothing."""
        grad = self.parameter.grad
        if not self.touched or grad is None:
            return self.parameter.detach().new_zeros(self.parameter.shape)
        added = grad.detach() if self.before is None else grad.detach() - self.before
        return added if self.scale == 1 else added / self.scale

    def unscaled(self, pair: Factors) -> Factors:
        """A captured pair without the loss scale, in float32 where half precision could not hold it."""
        if self.scale == 1:
            return pair
        dtype = torch.promote_types(pair.d.dtype, torch.float32)
        x = pair.x.to(dtype) if pair.x.is_floating_point() else pair.x
        return Factors(x, pair.d.to(dtype) / self.scale)

    def close(self, mean: Tensor) -> None:
        """Put the mean over ranks, scaled again, in the place of this rank's contribution, and start anew."""
        grad = self.parameter.grad
        before = self.before if self.touched else (grad.detach() if grad is not None else None)
        scaled = mean if self.scale == 1 else mean * self.scale
        result = scaled.to(self.parameter.device, self.parameter.dtype).reshape(self.parameter.shape)
        result = result if before is None else before + result
        if grad is None:
            self.parameter.grad = result.clone() if result.data_ptr() == mean.data_ptr() else result
        else:
            grad.detach().copy_(result)  # keeps the tensor that optimizers and users may hold
        self.reset()

    def reset(self) -> None:
        """Start anew without touching ``p.grad``."""
        self.arrivals = 0
        self.before, self.edited, self.filled = None, False, False
        self.pairs.clear()


class Contributions(Mapping[str, Tensor]):
    """This rank's gradients by parameter name, made when they are asked for."""

    def __init__(self, windows: Mapping[str, Window]) -> None:
        self._windows = windows

    def __getitem__(self, name: str) -> Tensor:
        return self._windows[name].contribution()

    def __iter__(self) -> Iterator[str]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)


def captured_size(windows: Mapping[str, Window]) -> int:
    """Elements of all captured factors: tells batch sizes, sequence lengths and pixels apart."""
    return sum(pair.x.numel() + pair.d.numel() for window in windows.values() for pair in window.pairs)


def flat_gradients(windows: Sequence[Window]) -> Iterator[tuple[list[Window], Tensor]]:
    """This rank's gradients as one flat vector per dtype and device, in the order of the windows."""
    groups: dict[tuple[torch.dtype, torch.device], list[Window]] = {}
    for window in windows:
        groups.setdefault((window.parameter.dtype, window.parameter.device), []).append(window)
    for group in groups.values():
        yield group, torch.cat([window.contribution().reshape(-1) for window in group])
