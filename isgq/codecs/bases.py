"""Bases in which the atoms of later gradients are short, learned by all ranks from what all of them have decoded.

The singular vectors of a layer's gradients lie mostly in few directions, the same for many steps and for all ranks. For
each side of each layer this keeps

* the second moment ``sum_a w_a (c_a c_a^T - diag(noise_a))`` of the decoded vectors: quantization noise is independent
  of the vectors and of known variance, so what it adds is taken off; ``w_a = 1 / (1 + noise)`` trusts fine vectors
  more. Its eigenvectors are the coordinates;
* the energies of later vectors in these coordinates, which no eigenvector was fitted to: averages by position, made
  falling by isotonic regression, and stored as codes. They decide steps and the model of the symbols.

All of it is made anew every :data:`EVERY` applied steps. Energies come from symbols, steps and dithers by elementwise
IEEE operations, so that all machines make the same of them; a basis may differ in the last bits from machine to
machine, as a product of matrices may. What is known of the energies is part of every message's digest, so that a rank
that has learned something else refuses the message.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isgq.codecs.rotation_sides import Ints, Reals, Side, energy_codes, standard
from isgq.core.errors import CodecError

EVERY = 25
"""Applied steps between two renewals, but for the first."""

_EARLY = (5, 10)
_KEPT_MOMENT, _KEPT_ENERGY = 0.9, 0.5  # of what was known before a renewal
_FLOOR = 0.01  # of the mean energy: no coordinate is given up
_SMALLEST, _LARGEST = 8, 1024  # sides beyond are not worth it, or too dear: a renewal takes n**3
_MOST_HEARD = 1 << 12  # vectors of a layer between two steps, where nobody commits
_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a layer.

    Attributes:
        left: side of the outputs.
        right: side of the columns.
        address: names the layer and what is known of it; 0 where nothing can be.
    """

    left: Side
    right: Side
    address: int = 0


def nothing_known(outputs: int, columns: int) -> Known:
    """Standard coordinates."""
    return Known(standard(outputs), standard(columns))


class _Learner:
    """Learns one side."""

    def __init__(self, size: int) -> None:
        self.side, self.moment = standard(size), torch.zeros(size, size, dtype=torch.float64)
        self.energy, self.weight = np.zeros(size), 0.0

    def hear(self, vectors: Reals, codes: Ints) -> None:
        """Take decoded vectors ``[k, n]`` in the side's coordinates in."""
        noise = self.side.noise_of(codes)
        weights = 1 / (1 + self.side.noises[codes])
        scaled = torch.from_numpy(vectors * np.sqrt(weights)[:, None])
        self.moment.addmm_(scaled.T, scaled)
        self.moment.diagonal().sub_(torch.from_numpy(weights @ noise))
        for vector, off, weight in zip(vectors, noise, weights, strict=True):  # one by one: sums in a fixed order
            self.energy += (vector * vector - off) * weight
            self.weight += float(weight)

    def renew(self) -> None:
        """New coordinates."""
        if not self.weight:
            return
        values, vectors = torch.linalg.eigh(self.moment)
        values, turn = values.flip(0), vectors.flip(1).T.contiguous()
        old, energy = self.side.basis, None
        if old is not None:  # else nothing was measured in any of its coordinates
            from scipy.optimize import isotonic_regression  # slow to import, and needed by few

            falling = np.maximum(isotonic_regression(self.energy / self.weight, increasing=False).x, _FLOOR)
            energy = energy_codes(falling * (len(falling) / math.fsum(falling)))
        self.side = Side(self.side.size, energy, turn if old is None else turn @ old)
        self.moment = torch.diag(values * _KEPT_MOMENT)
        self.energy, self.weight = self.energy * _KEPT_ENERGY, self.weight * _KEPT_ENERGY

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        side = self.side
        state = {"moment": self.moment, "energy": torch.from_numpy(self.energy), "weight": torch.tensor(self.weight)}
        if side.basis is not None:
            state["basis"] = side.basis
        if side.energy is not None:
            state["codes"] = torch.from_numpy(side.energy)
        return {name: tensor.clone() for name, tensor in state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything."""
        self.moment, self.energy = state["moment"].clone(), state["energy"].numpy().copy()
        self.weight = float(state["weight"])
        codes = state["codes"].numpy().copy() if "codes" in state else None
        self.side = Side(self.side.size, codes, state["basis"].clone()) if "basis" in state else self.side


class Bases:
    """What is known of each layer; the same on all ranks, because it changes only with steps that all have applied."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._steps = 0
        self._learners: dict[str, tuple[_Learner | None, _Learner | None]] = {}
        self._known: dict[str, Known] = {}
        self._names: dict[int, str] = {}
        self._heard: dict[str, list[tuple[Reals, Reals, Ints]]] = {}

    def of(self, name: str, outputs: int, columns: int) -> Known:
        """What is known of the layer with this name and a gradient ``[outputs, columns]``.

        Raises:
            CodecError: its gradient had another shape.
        """
        known = self._known.get(name)
        if known is None:
            known = self._describe(name, standard(outputs), standard(columns))
            self._learners[name] = (_learner(outputs), _learner(columns))
        if (known.left.size, known.right.size) != (outputs, columns):
            raise CodecError(
                f"the gradient of {name!r} was {known.left.size} x {known.right.size} when its bases were learned, "
                f"now it is {outputs} x {columns}"
            )
        return known

    def address(self, name: str) -> int:
        """Of a layer, as far as it is known."""
        known = self._known.get(name)
        return known.address if known is not None else self._announce(name, _digest(name, None, None))

    def at(self, address: int, outputs: int, columns: int) -> Known:
        """What a message with this address was encoded with.

        Raises:
            CodecError: it is not known here.
        """
        name = self._names.get(address)
        if name is None:
            raise CodecError(
                "a rotated payload was encoded with learned bases that are not known here: sender and receiver must "
                "have decoded the same messages, with one codec for both ways"
            )
        known = self.of(name, outputs, columns)
        if known.address != address:
            raise CodecError(f"a payload of {name!r} was encoded with bases of another step")
        return known

    def hear(self, known: Known, left: Reals, right: Reals, codes: Ints) -> None:
        """Remember decoded vectors until the step is applied.

        Args:
            known: what they were decoded with.
            left: ``[k, o]``, in its coordinates.
            right: ``[k, p]``, likewise.
            codes: ``[k, 2]`` step codes.
        """
        heard = self._heard.setdefault(self._names[known.address], [])
        if len(codes) and sum(len(each) for _, _, each in heard) < _MOST_HEARD:
            heard.append((left, right, codes))

    def commit(self) -> None:
        """The step was applied: learn from it."""
        for name, heard in self._heard.items():
            if heard:
                left, right, codes = (np.concatenate(parts) for parts in zip(*heard, strict=True))
                for learner, vectors, own in zip(self._learners[name], (left, right), codes.T, strict=True):
                    if learner is not None:
                        learner.hear(vectors, own)
        self._heard.clear()
        self._steps += 1
        if self._steps % EVERY == 0 or self._steps in _EARLY:
            for name, learners in self._learners.items():
                for learner in learners:
                    if learner is not None:
                        learner.renew()
                self._refresh(name)

    def rollback(self) -> None:
        """The step was not applied."""
        self._heard.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """All that is known, as tensors by layer, side and part."""
        state = {"steps": torch.tensor(self._steps)}
        for name, known in self._known.items():
            state[f"{name}/sizes"] = torch.tensor([known.left.size, known.right.size])
            for side, learner in zip(_SIDES, self._learners[name], strict=True):
                parts = learner.state() if learner is not None else {}
                state.update({f"{name}/{side}/{part}": tensor for part, tensor in parts.items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all that is known; nothing is an empty state."""
        self._forget()
        self._steps = int(state["steps"]) if "steps" in state else 0
        for name in [key.removesuffix("/sizes") for key in state if key.endswith("/sizes")]:
            outputs, columns = map(int, state[f"{name}/sizes"])
            self.of(name, outputs, columns)
            for side, learner in zip(_SIDES, self._learners[name], strict=True):
                prefix = f"{name}/{side}/"
                if learner is not None:
                    learner.load({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})
            self._refresh(name)

    def _refresh(self, name: str) -> None:
        before = self._known[name]
        sides = [
            old if learner is None else learner.side
            for old, learner in zip((before.left, before.right), self._learners[name], strict=True)
        ]
        self._names.pop(before.address, None)
        self._describe(name, *sides)

    def _describe(self, name: str, left: Side, right: Side) -> Known:
        address = self._announce(name, _digest(name, left.energy, right.energy))
        self._known[name] = Known(left, right, address)
        return self._known[name]

    def _announce(self, name: str, address: int) -> int:
        self._names[address] = name
        return address


def _learner(size: int) -> _Learner | None:
    return _Learner(size) if _SMALLEST <= size <= _LARGEST else None


def _digest(name: str, *energies: Ints | None) -> int:
    """64 bits of a layer's name and of what is known of its energies."""
    hashed = hashlib.blake2b(name.encode(), digest_size=8, person=b"isgq-bases")
    for energy in energies:
        hashed.update(b"-" if energy is None else energy.astype(np.uint8).tobytes())
    return int.from_bytes(hashed.digest(), "little")
