"""Quantizers: samples to messages ``0 .. 2^bits - 1``, an int64 a sample."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from analysis.estimation.checks import Array, Integers, at_least
from isgq.core.errors import OptionError

_MAX_BITS = 62


class Quantizer(Protocol):
    """A map from samples to messages, possibly random."""

    @property
    def bits(self) -> int:
        """Bits of a message."""

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """Messages of samples ``[count, ...]``; only random quantizers use the generator."""


@dataclass(frozen=True, eq=False)
class HalfSpace:
    """One bit: ``<direction, x> > threshold``. Through the mean it is the best bit of a Gaussian location.

    Attributes:
        direction: ``[d]``.
        threshold: a number.
    """

    direction: Array
    threshold: float = 0.0
    bits: int = 1

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """0 or 1."""
        return np.asarray(x @ self.direction > self.threshold, np.int64)


@dataclass(frozen=True, eq=False)
class CoordinateBits:
    """A bit for each of some coordinates: ``x_j > threshold_j``.

    Attributes:
        coordinates: which, ``[k]``, up to 62.
        thresholds: of each, ``[k]``.
        magnitude: compare ``|x_j|`` instead.
    """

    coordinates: Integers
    thresholds: Array
    magnitude: bool = False

    def __post_init__(self) -> None:
        if len(self.coordinates) != len(self.thresholds) or not 1 <= len(self.coordinates) <= _MAX_BITS:
            raise OptionError(
                f"CoordinateBits needs 1 to {_MAX_BITS} coordinates with a threshold each; "
                f"got {len(self.coordinates)} and {len(self.thresholds)}"
            )

    @property
    def bits(self) -> int:
        """One for each coordinate."""
        return len(self.coordinates)

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """The bits as a number, the first coordinate lowest."""
        chosen = x[:, self.coordinates]
        above = (np.abs(chosen) if self.magnitude else chosen) > self.thresholds
        return above @ (np.int64(1) << np.arange(self.bits))


@dataclass(frozen=True)
class Argmax:
    """Which of the first 2^k coordinates is largest.

    Attributes:
        bits: k.
        magnitude: largest in magnitude instead.
    """

    bits: int
    magnitude: bool = False

    def __post_init__(self) -> None:
        at_least("bits", self.bits)

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """The coordinate.

        Raises:
            OptionError: there are fewer than 2^k.
        """
        if x.shape[1] < 2**self.bits:
            raise OptionError(f"the argmax in {self.bits} bits needs {2**self.bits} coordinates; x has {x.shape[1]}")
        chosen = x[:, : 2**self.bits]
        return np.asarray((np.abs(chosen) if self.magnitude else chosen).argmax(1), np.int64)


@dataclass(frozen=True)
class RandomOnes:
    """The number N of ones in a binary vector, and up to ``ones`` random ones: the statistical scheme of rTop-k.

    Attributes:
        dim: d.
        ones: at most so many indices.
    """

    dim: int
    ones: int = 1

    def __post_init__(self) -> None:
        at_least("dim", self.dim)
        at_least("ones", self.ones)
        if self.bits > _MAX_BITS:
            raise OptionError(f"a message of {self.bits} bits is no int64: take fewer than {self.ones} ones")

    @property
    def bits(self) -> int:
        """Of N and of an index or none in each slot."""
        return (1 + self.ones) * index_bits(self.dim + 1)

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """N and the chosen indices, increasing, as digits in base 2^ceil(log2(d + 1)); d stands for none."""
        base = 1 << index_bits(self.dim + 1)
        message: Integers = x.sum(1).astype(np.int64)
        for slot in chosen_ones(x, self.ones, rng).T:
            message = message * base + slot
        return message


def index_bits(size: int) -> int:
    """Bits that tell ``size`` things apart: ``ceil(log2 size)``, at least 1."""
    return max(1, (size - 1).bit_length())


def chosen_ones(x: Array, ones: int, rng: np.random.Generator) -> Integers:
    """Random positions of ones, without replacement.

    Args:
        x: zeros and ones, ``[count, d]``.
        ones: how many to choose, of what there is.
        rng: source of the choice.

    Returns:
        int64 ``[count, ones]``, increasing in each row; d stands for none.
    """
    d = x.shape[1]
    order = np.where(x > 0, rng.random(x.shape), 2.0).argsort(1)[:, :ones]
    padded = np.full((len(x), ones), d, np.int64)
    padded[:, : order.shape[1]] = np.where(np.take_along_axis(x, order, 1) > 0, order, d)
    return np.sort(padded, 1)


@dataclass(frozen=True)
class SymbolGroup:
    """A symbol's place in one group of 2^k - 1 symbols, or that it is not there: histograms in k bits.

    Attributes:
        bits: k.
        group: number of the group, from 0.
    """

    bits: int
    group: int = 0

    def __post_init__(self) -> None:
        at_least("bits", self.bits)
        at_least("group", self.group, 0)

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """1 + the place, or 0."""
        return group_message(np.asarray(x, np.int64), np.int64(self.group), self.bits)


def group_message(symbols: Integers, group: Integers | np.int64, bits: int) -> Integers:
    """The message of :class:`SymbolGroup` for symbols with a group each."""
    size = 2**bits - 1
    place = symbols - group * size
    return np.where((place >= 0) & (place < size), place + 1, 0)


@dataclass(frozen=True, eq=False)
class Voronoi:
    """The nearest of 2^k points of the score: the form of every quantizer that maximises ``Tr I_M``.

    Attributes:
        model: whose score.
        centres: ``[2^k, dim]``.
    """

    model: "HasScore"
    centres: Array

    @property
    def bits(self) -> int:
        """Of the number of a centre."""
        return max(1, math.ceil(math.log2(len(self.centres))))

    def __call__(self, x: Array, rng: np.random.Generator) -> Integers:
        """The nearest centre of each sample's score."""
        closeness = self.model.score(x) @ self.centres.T - (self.centres**2).sum(1) / 2
        return np.asarray(closeness.argmax(1), np.int64)


class HasScore(Protocol):
    """What :class:`Voronoi` needs of a model."""

    def score(self, x: Array) -> Array:
        """Scores of samples."""
