"""The mean over all ranks in a common subspace, in two rounds of two passes each.

With G_w a rank's gradient as a matrix ``[m, n]`` (index legend in :mod:`isgq.codecs.subspace`), M_w = G_w + memory_w,
and right directions V ``[k, n]`` common to all ranks:

    left    all send V M_w^T; their mean, made orthonormal, is U ``[k, m]``, common to all
    right   all send C_w = U M_w; their mean is C ``[k, n]``, applied is U^T C, and C made orthonormal is the next V

Each arrow is a :class:`~isgq.aggregate.TwoPass`, whose servers share out the rows, that is the directions; so a rank
sends and receives as much whatever their number. Both passes quantize. A rank remembers what was not applied,

    memory_w = M_w - U^T (C_w - e_w - N e_s)

with e_w the errors of what it has sent, and e_s those of the means that it has served, which the N ranks would have
shared. So the mean of the memories is the sum of all mean gradients less that of all that was applied, exactly, and
quantization in the left round only turns the directions. Gradients that would not become smaller are sent as they are
in the left round, with the same memory (U is the identity).
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from isgq.aggregate import Outgoing, Step, TwoPass
from isgq.choice import Choice
from isgq.codecs.feedback import ErrorFeedback, Memory
from isgq.codecs.subspace import first_basis, orthonormal
from isgq.core.errors import OptionError
from isgq.exchange import Exchange
from isgq.records import scatter
from isgq.routing import direct_carriers
from isgq.wire.header import Header

_Side = Literal["left", "right"]


class _Made(Mapping[str, Tensor]):
    """Tensors by parameter name, each made once, when it is asked for."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Tensor]) -> None:
        self._names, self._make = names, functools.cache(make)

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Rounds(TwoPass):
    """Makes the mean in a common subspace.

    Args:
        exchange: the transport.
        choice: with a subspace, the codecs of what is sent and of means, and who serves.

    Raises:
        OptionError: the choice has no subspace.
    """

    rounds = 2

    def __init__(self, exchange: Exchange, choice: Choice) -> None:
        if choice.subspace is None or choice.direct is None:
            raise OptionError(f"{choice.spec} has no common subspace")
        # With decay=0 their memory is the error of the last tensor.
        self._sent, self._served = (ErrorFeedback(each, decay=0.0) for each in (choice.direct, choice.down))
        servers = exchange.world_size if choice.aggregate == "two_pass" else 1
        super().__init__(exchange, None, self._served, servers)
        self._codec, self._memory, self._bases = choice.subspace, Memory(), Memory()
        self._memories = {"up": self._memory, "common": self._bases}
        self._left: Step | None = None
        self._compensated: dict[str, Tensor] = {}

    def encode(self, step: Step) -> Outgoing:
        """This rank's part of the left round."""
        self._compensated = {}
        shapes = {
            name: (k, shape[0]) if (k := self._codec.directions(shape)) else shape
            for name, shape in _shapes(step).items()
        }
        self._left = self._round(step, "left", shapes, functools.partial(self._project, step))
        return super().encode(self._left)

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        assert self._left is not None
        means, shapes = super()._reduce(self._left, outgoing, headers), _shapes(step)
        errors, sizes, moved = self._errors(self._left), self.sizes, (self.up, self.down)
        bases = {name: orthonormal(mean) for name, mean in means.items() if self._codec.directions(shapes[name])}

        def coefficients(name: str) -> Tensor:
            matrix = _matrix(self._compensated[name])
            return bases[name].to(matrix.device) @ matrix

        wanted = {name: (len(basis), math.prod(shapes[name][1:])) for name, basis in bases.items()}
        right = self._round(step, "right", wanted, coefficients)
        outgoing = super().encode(right)
        found = super()._reduce(right, outgoing, super().agree(right, outgoing))
        self.sizes.update(sizes)
        self.up, self.down = (
            [a + b for a, b in zip(*pair, strict=True)] for pair in zip(moved, (self.up, self.down), strict=True)
        )
        errors = {name: error for name, error in errors.items() if name not in bases} | self._errors(right)
        for name in means:
            if name in bases:
                means[name] = bases[name].T @ found[name]
                self._bases.write(name, orthonormal(found[name]))
            self._keep(name, shapes[name], bases.get(name), right.gradients, errors.get(name))
        return means

    def _keep(
        self,
        name: str,
        shape: Sequence[int],
        basis: Tensor | None,
        coefficients: Mapping[str, Tensor],
        error: Tensor | None,
    ) -> None:
        """Remember what of a parameter was not applied.

        Args:
            name: of the parameter.
            shape: its shape.
            basis: U; None where the parameter was sent as it is.
            coefficients: C_w by name, of what this rank has sent.
            error: ``e_w + N e_s``, if this rank has sent or served any of it.
        """
        held = self._compensated.get(name)
        if held is None and error is None:
            return
        if held is None:
            held = self._memory.read(name, torch.empty(tuple(shape)))
            given = torch.zeros(())
        else:
            given = held if basis is None else coefficients[name]
        if error is not None:
            given = given - error.to(held.device)
        if basis is not None:
            given = basis.T.to(held.device) @ given
        self._memory.write(name, held - given.view(held.shape))

    def _round(
        self, step: Step, side: _Side, shapes: Mapping[str, Sequence[int]], make: Callable[[str], Tensor]
    ) -> Step:
        """A step about other tensors of the same parameters."""
        for codec in (self._sent, self._served):
            codec.load_state_dict({})
        likes = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
        carriers = direct_carriers(self._sent, likes, "tensor", [0] * self.servers)
        named = [replace(carrier, name=f"{carrier.name}/{side}") for carrier in carriers]
        return replace(step, carriers=named, gradients=_Made(list(likes), make))

    def _project(self, step: Step, name: str) -> Tensor:
        """A gradient with what is remembered, on the common directions: ``[k, m]``; or as it is."""
        gradient = step.gradients[name].detach().to(torch.float32)
        self._compensated[name] = gradient + self._memory.read(name, gradient).to(gradient.device)
        k = self._codec.directions(gradient.shape)
        if not k:
            return self._compensated[name]
        matrix = _matrix(self._compensated[name])
        basis = self._bases.tensors.get(name)
        if basis is None:
            basis = first_basis(name, step.seed, k, matrix.shape[1])
        return basis.to(matrix.device) @ matrix.T

    def _errors(self, step: Step) -> dict[str, Tensor]:
        """``e_w + N e_s`` of a round, by parameter, on the host."""
        total: dict[str, Tensor] = {}
        for codec, ending, ranks in ((self._sent, "", 1), (self._served, "/down", self._exchange.world_size)):
            errors: dict[str, Tensor] = {}
            for carrier in step.carriers:
                error = codec.memory.tensors.get(carrier.name + ending)
                if error is not None:
                    scatter(carrier.rows, error.cpu().reshape(-1), errors)
            for name, error in errors.items():
                total[name] = total.get(name, 0) + ranks * error
        return total


def _shapes(step: Step) -> dict[str, tuple[int, ...]]:
    """Of all parameters that are carried; carriers hold whole ones."""
    return {rows.name: rows.shape for carrier in step.carriers for rows in carrier.rows}


def _matrix(x: Tensor) -> Tensor:
    """``[m, n]``."""
    return x.reshape(x.shape[0], -1)
