"""The mean over all ranks in a common subspace, in two rounds of two passes each.

With G_w a rank's gradient as a matrix ``[m, n]`` (index legend in :mod:`isgq.codecs.subspace`; the bias gradient is its
last column), M_w = G_w + memory_w, and right directions V ``[k, n]`` common to all ranks:

    left    all send V M_w^T; their mean, made orthonormal, is U ``[k, m]``, common to all
    right   all send C_w = U M_w; their mean is C ``[k, n]``, applied is U^T C, and C made orthonormal is the next V

Each arrow is a :class:`~isgq.two_pass.TwoPass`, whose servers share out the rows, that is the directions; so a rank
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
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from isgq.aggregate import Outgoing, Step
from isgq.choice import Choice
from isgq.codecs.feedback import ErrorFeedback, Memory
from isgq.codecs.subspace import Subspace, first_basis, orthonormal
from isgq.core.errors import OptionError
from isgq.exchange import Exchange
from isgq.routing import direct_carriers
from isgq.rows import scatter
from isgq.two_pass import TwoPass
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
        turning = choice.subspace.turning
        pairs = (turning, turning if choice.down == choice.direct else choice.down), (choice.direct, choice.down)
        # With decay=0 their memory is the error of the last tensor.
        left, right = ([ErrorFeedback(each, decay=0.0) for each in pair] for pair in pairs)
        self._sides: Mapping[_Side, Sequence[ErrorFeedback]] = {"left": left, "right": right}
        self._sent, self._served = left
        servers = exchange.world_size if choice.aggregate == "two_pass" else 1
        super().__init__(exchange, None, self._served, servers)
        self._codec, self._memory, self._bases = choice.subspace, Memory(), Memory()
        self._memories = {"up": self._memory, "common": self._bases}
        self._left: Step | None = None
        self._blocks: dict[str, _Block] = {}
        self._compensated: dict[str, Tensor] = {}

    def encode(self, step: Step) -> Outgoing:
        """This rank's part of the left round."""
        self._compensated, self._blocks = {}, _blocks(step, self._codec)
        shapes = {name: block.projected for name, block in self._blocks.items()}
        self._left = self._round(step, "left", shapes, functools.partial(self._project, step))
        return super().encode(self._left)

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        left, blocks = self._left, self._blocks
        assert left is not None
        answers = self._answers(left, outgoing, headers)
        errors, moved = self._errors(left), (self.up, self.down)
        answered = dict.fromkeys(rows.name for carriers, _ in answers for carrier in carriers for rows in carrier.rows)
        means: dict[str, Tensor] = {}
        bases: dict[str, Tensor] = {}

        def coefficients(name: str) -> Tensor:
            matrix = self._compensated[name]
            return bases[name].to(matrix.device) @ matrix

        wanted = {name: (blocks[name].directions, blocks[name].columns) for name in answered if blocks[name].directions}
        right = self._round(step, "right", wanted, coefficients)

        def turn() -> Outgoing:
            means.update(self._means_in(left, answers))
            bases.update({name: orthonormal(means[name]) for name in wanted})
            return self._encode(right)

        outgoing = self._told(right, turn)  # what cannot be read on one rank only, all must hear of
        found = super()._reduce(right, outgoing, super()._agree_again(right, outgoing, headers))
        self.up, self.down = (
            [a + b for a, b in zip(*pair, strict=True)] for pair in zip(moved, (self.up, self.down), strict=True)
        )
        errors = {name: error for name, error in errors.items() if name not in bases} | self._errors(right)
        for name in list(means):
            if name in bases:
                self._bases.write(name, orthonormal(found[name]))
                means.update(blocks[name].split(bases[name].T @ found[name]))
            self._keep(blocks[name], bases.get(name), right.gradients, errors.get(name))
        return means

    def _keep(
        self, block: "_Block", basis: Tensor | None, coefficients: Mapping[str, Tensor], error: Tensor | None
    ) -> None:
        """Remember what of a block was not applied.

        Args:
            block: the block.
            basis: U; None where the block was sent as it is.
            coefficients: C_w by name, of what this rank has sent.
            error: ``e_w + N e_s``, if this rank has sent or served any of it.
        """
        held = self._compensated.get(block.name)
        if held is None and error is None:
            return
        if held is None:
            held, given = self._remembered(block, None), torch.zeros((), dtype=torch.float32)
        else:
            given = held if basis is None else coefficients[block.name]
        if error is not None:
            given = given - error.to(held.device)
        if basis is not None:
            given = basis.T.to(held.device) @ given
        for name, part in block.split(held - given.view(held.shape)).items():
            self._memory.write(name, part)

    def _remembered(self, block: "_Block", gradients: Mapping[str, Tensor] | None) -> Tensor:
        """The memory of a block, plus the gradients if given."""
        parts = {}
        for name, shape in block.shapes.items():
            given = torch.zeros(shape) if gradients is None else gradients[name].detach()
            parts[name] = given.float() + self._memory.read(name, given).to(given.device)
        return block.join(parts)

    def _round(
        self, step: Step, side: _Side, shapes: Mapping[str, Sequence[int]], make: Callable[[str], Tensor]
    ) -> Step:
        """A step about other tensors of the same parameters."""
        self._sent, self._served = self._sides[side]
        self._down = self._served
        for codec in self._sides[side]:
            codec.load_state_dict({})
        likes = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
        carriers = direct_carriers(self._sent, likes, "tensor", [0] * self.servers)
        named = [
            replace(c, name=f"{c.name}/{side}", riding=list(self._blocks[c.rows[0].name].shapes)) for c in carriers
        ]
        return replace(step, carriers=named, gradients=_Made(list(likes), make))

    def _project(self, step: Step, name: str) -> Tensor:
        """A block with what is remembered, on the common directions: ``[k, m]``; or as it is."""
        block = self._blocks[name]
        matrix = self._compensated[name] = self._remembered(block, step.gradients)
        if not block.directions:
            return matrix
        basis = self._bases.tensors.get(name)
        if basis is None:
            basis = first_basis(name, step.seed, block.directions, block.columns)
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


@dataclass(frozen=True)
class _Block:
    """Gradients that travel together: a weight as a matrix, its bias as the last column; or one as it is.

    Attributes:
        shapes: by parameter name, the weight first.
        directions: how many; 0 where it is sent as it is.
    """

    shapes: Mapping[str, tuple[int, ...]]
    directions: int

    @property
    def name(self) -> str:
        """Of the weight."""
        return next(iter(self.shapes))

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return math.prod(self.shapes[self.name][1:]) + len(self.shapes) - 1

    @property
    def projected(self) -> tuple[int, ...]:
        """Shape of what is sent in the left round."""
        shape = self.shapes[self.name]
        return (self.directions, shape[0]) if self.directions else shape

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The matrix ``[m, n]``; what is sent as it is, in its shape."""
        if not self.directions:
            return parts[self.name]
        return torch.cat([parts[name].reshape(shape[0], -1) for name, shape in self.shapes.items()], 1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Inverse of :meth:`join`."""
        if not self.directions:
            return {self.name: matrix}
        sizes = [math.prod(shape[1:]) for shape in self.shapes.values()]
        parts = torch.split(matrix, sizes, 1)
        return {
            name: part.reshape(shape).contiguous()
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def _blocks(step: Step, codec: Subspace) -> dict[str, _Block]:
    """All parameters that are carried, by the name of the block's first; carriers hold whole ones."""
    shapes = {rows.name: rows.shape for carrier in step.carriers for rows in carrier.rows}
    blocks: dict[str, _Block] = {}
    riding = set()
    for name, shape in shapes.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith("weight") and shapes.get(bias) == shape[:1] and codec.directions(shape):
            m, n = shape[0], math.prod(shape[1:])
            blocks[name] = _Block({name: shape, bias: shapes[bias]}, codec.directions((m, n + 1)))
            riding.add(bias)
    for name, shape in shapes.items():
        if name not in riding:
            blocks.setdefault(name, _Block({name: shape}, codec.directions(shape)))
    return {name: blocks[name] for name in shapes if name in blocks}
