"""What each parameter has gathered on this rank since the last synchronisation.

A *window* opens with the first gradient after a synchronisation and closes with the next. It remembers what was in
``p.grad`` before (gradients the user lets accumulate over several synchronised steps), the captured pairs, and
whether those pairs still account for all that autograd has added: a user who zeroes, clips or replaces a gradient
between two backward passes of one window makes them worthless, and the gradient itself must travel.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isgq.core.memory import Place
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
        owed: make what autograd has left out of ``p.grad`` in this window, see :mod:`isgq.sparing`.
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
    owed: list[Callable[[], Tensor]] = field(default_factory=list)
    _foreign: bool = False
    _place: Place | None = None
    _arrived: bool = False
    _ever: int = 0  # like arrivals, but never anew: another gradient may be where one was that has been dropped
    _seen: tuple[int, int] | None = None

    @property
    def touched(self) -> bool:
        """Whether there is a contribution of this rank."""
        return self.arrivals > 0

    @property
    def captured(self) -> Sequence[Factors]:
        """All pairs so far, those of the running backward pass included."""
        return [*self.pairs, *self.pending] if self.pending else self.pairs

    def watch(
        self, on_gradient: Callable[[], None], on_arrival: Callable[["Window"], None] = lambda _: None
    ) -> list[RemovableHandle]:
        """Put the two hooks on the parameter.

        Args:
            on_gradient: called during each backward that reaches it.
            on_arrival: called when autograd has added to ``p.grad``.
        """

        def before(gradient: Tensor | None) -> None:
            on_gradient()
            self._open(adds=gradient is not None)

        def after(parameter: Tensor) -> None:
            self.arrivals += 1
            self._ever += 1
            self._arrived = True
            self._seen = self._identity()
            on_arrival(self)

        return [
            self.parameter.register_hook(before),  # type: ignore[no-untyped-call]
            self.parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
        ]

    def _open(self, adds: bool) -> None:
        grad = self.parameter.grad
        self._foreign = self._foreign or adds
        if grad is None:  # nothing yet, or the user has dropped what was there
            self._forget()
        elif not self.touched:
            self.before = grad.detach()
        else:
            self.check_edits()
        if adds:
            self._part_from_before()

    def _part_from_before(self) -> None:
        """``p.grad`` is about to change."""
        grad, before = self.parameter.grad, self.before
        if grad is not None and before is not None and before.data_ptr() == grad.data_ptr():
            self.before = before.clone()

    @property
    def fresh(self) -> bool:
        """Whether nothing has happened since the last synchronisation, and no hook but the window's would see it."""
        return not self.touched and self._unwatched

    @property
    def _unwatched(self) -> bool:
        """Whether no hooks are on the parameter but the window's."""
        p, ours = self.parameter, 1
        return (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) == (ours, ours)

    @property
    def steady(self) -> bool:
        """Whether what has come so far is likely to be all of the running backward pass, as it stands."""
        return self._unwatched and not self.edited and not (self.owed and self._foreign)

    @property
    def content(self) -> Hashable:
        """Differs wherever something has come, or was changed, since."""
        return self._ever, self.edited, len(self.captured), self._seen

    def owe(self, gradient: Callable[[], Tensor]) -> None:
        """The running pass leaves this out of ``p.grad``."""
        self.owed.append(gradient)

    def settle(self) -> None:
        """Add what is owed to ``p.grad``."""
        if not self.owed:
            return
        owed, self.owed = torch.stack([make() for make in self.owed]).sum(0).to(self.parameter.dtype), []
        grad = self.parameter.grad
        if grad is None:
            self.parameter.grad = owed
        else:
            self._part_from_before()
            grad.detach().add_(owed)
        self._seen = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        grad = self.parameter.grad
        return None if grad is None else (id(grad), grad._version)

    def check_edits(self) -> None:
        """Notice a gradient that was changed, replaced or dropped since autograd last added to it."""
        if self.owed:
            return  # autograd has added nothing, and the pass has only just ended
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
            if self._foreign:  # something has come besides
                self.settle()
        else:
            self.owed.clear()
        self._foreign = False
        self.pending.clear()
        return arrived

    def abort_backward(self) -> None:
        """A backward pass broke off: what it added to ``p.grad`` has no complete pairs."""
        if self.pending or self._arrived:
            self.edited = self.edited or self._arrived
            self.pairs.clear()
        self.pending.clear()
        self.owed.clear()
        self._arrived = self._foreign = False

    def contribution(self) -> Tensor:
        """This rank's gradient of the window, unscaled: what autograd added to ``p.grad``; zeros if nothing."""
        self.settle()
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
        self.owed.clear()
        grad = self.parameter.grad
        before = self.before if self.touched else (grad.detach() if grad is not None else None)
        scaled = mean if self.scale == 1 else mean * self.scale
        result = scaled.to(self.parameter.device, self.parameter.dtype).reshape(self.parameter.shape)
        result = result if before is None else before + result
        if grad is None:
            self._give(result if _is_whole(result) else result.clone())
        else:
            grad.detach().copy_(result)  # keeps the tensor that optimizers and users may hold
        self.reset()

    def _give(self, gradient: Tensor) -> None:
        """Make a tensor that nobody else holds the gradient."""
        place = self._place
        if place is not None and place.tensor is not None and place.tensor.data_ptr() == gradient.data_ptr():
            self.parameter.grad = place.tensor
            return
        self.parameter.grad = gradient.data  # which is no view of what it was made from
        if place is not None:
            place.tensor = self.parameter.grad

    def memory(self) -> Tensor | None:
        """Where the next mean may be written, once this rank's contribution is not needed any more.

        That is the contribution itself, or what ``p.grad`` was before it was dropped, if nobody holds it.
        """
        grad = self.parameter.grad
        if grad is not None:
            replaced = self.touched and self.before is None and not self.owed
            return grad.detach() if replaced and grad.is_contiguous() else None
        if self.parameter.device.type != "cpu":
            return None
        self._place = self._place or Place()
        last = self._place.free()
        fits = last is not None and last.shape == self.parameter.shape and last.dtype == self.parameter.dtype
        if not fits or last is None or last.untyped_storage().is_shared():  # with another process, that is
            return None
        return last if last.is_contiguous() else None

    def reset(self) -> None:
        """Start anew, with all in ``p.grad`` that belongs there."""
        self.settle()
        self._forget()

    def _forget(self) -> None:
        self.arrivals = 0
        self.before, self.edited, self.filled = None, False, False
        self.pairs.clear()


def _is_whole(x: Tensor) -> bool:
    """Whether the tensor is all that its memory holds, and no part of several, which share a count of versions."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


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


def parts_of(flat: Tensor, windows: Sequence[Window]) -> dict[str, Tensor]:
    """What each window has of such a vector, by name: views."""
    parts = torch.split(flat, [window.parameter.numel() for window in windows])
    return {window.name: part for window, part in zip(windows, parts, strict=True)}
