"""The two sides of a gradient's atoms: in which coordinates their vectors are sent, and with which steps.

In standard coordinates nothing is known of the entries of a vector: one step for all. In learned ones
(:mod:`isgq.codecs.bases`) coordinate i holds the share ``lambda_i / n`` of the energy, and dithered steps with noises

    N_i = (-lambda_i + sqrt(lambda_i**2 + 4 N (N + 1) lambda_i)) / 2        (steps sqrt(12 N_i))

minimise the noise for the bits, ``sum_i N_i + slope log2(1 + lambda_i / N_i) / 2``: reverse water-filling under the
condition that even the smallest coordinate stays unbiased. N is the noise of a coordinate of mean energy; its step is
that of the code. Entries are in units in which a vector of length 1 has mean square 1.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Reals = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COARSEST = 3.5
"""Largest step, in units of the root mean square: beyond, a vector's error exceeds the vector."""

FINEST_CODE = 127
"""Step codes are 0 .. 127, eight to an octave."""

MOST_ENERGY = 1024.0
"""Of a coordinate, in units of the mean: that of code 0."""

_SPACE_FILLING = 0.5 * math.log2(2 * math.pi * math.e / 12)


@functools.cache
def step_table() -> Reals:
    """Steps of the codes: ``3.5 * 2**(-code / 8)``."""
    eighth = math.sqrt(math.sqrt(math.sqrt(2.0)))
    octave = [COARSEST]
    for _ in range(7):
        octave.append(octave[-1] / eighth)
    codes = np.arange(FINEST_CODE + 1)
    table: Reals = np.ldexp(np.array(octave)[codes % 8], -(codes // 8))
    return table


def rate(noises: Reals) -> Reals:
    """Bits of an entry, by its noise over its energy.

    The rate of a Gaussian with a Gaussian error, and what a uniform error costs above it (Zamir and Feder, "On lattice
    quantization noise", 1996).
    """
    bits: Reals = 0.5 * np.log2(1 + 1 / noises) + _SPACE_FILLING
    return bits


def energies(codes: Ints) -> Reals:
    """Energies of coordinates, in units of their mean, from their codes 0 .. 127, eight to an octave."""
    values: Reals = step_table()[codes] * (MOST_ENERGY / COARSEST)
    return values


def energy_codes(values: Reals) -> Ints:
    """Nearest codes of energies in units of their mean."""
    codes: Ints = np.clip(np.rint(8 * np.log2(MOST_ENERGY / values)), 0, FINEST_CODE).astype(np.int64)
    return codes


@dataclass(frozen=True, eq=False)
class Side:
    """One side of all atoms of a gradient.

    Attributes:
        size: n, entries of a vector.
        energy: int64 ``[n]``: energy code of each coordinate; None where all have the mean.
        basis: float64 ``[n, n]``, a coordinate's direction in each row; None for standard coordinates.
    """

    size: int
    energy: Ints | None = None
    basis: torch.Tensor | None = None

    @functools.cached_property
    def _classes(self) -> tuple[Reals, Ints, Reals]:
        """Energies that occur, which of them each coordinate has, and how many coordinates have each."""
        if self.energy is None:
            return np.ones(1), np.zeros(self.size, dtype=np.int64), np.full(1, float(self.size))
        codes, classes, counts = np.unique(self.energy, return_inverse=True, return_counts=True)
        return energies(codes), classes, counts.astype(np.float64)

    @functools.cached_property
    def _steps(self) -> Reals:
        """Steps by step code and class."""
        table = step_table()[:, None]
        if self.energy is None:
            return table
        noise, energy = table**2 / 12, self._classes[0]
        steps: Reals = np.sqrt(6 * (np.sqrt(energy**2 + 4 * noise * (noise + 1) * energy) - energy))
        return steps

    @functools.cached_property
    def noises(self) -> Reals:
        """Expected squared error of a unit vector, by step code."""
        each = self._steps**2 / 12
        noises: Reals = each[:, 0] if self.energy is None else each @ self._classes[2] / self.size
        return noises

    @functools.cached_property
    def bits(self) -> Reals:
        """What a vector takes, by step code."""
        energy, _, counts = self._classes
        bits: Reals = rate(self._steps**2 / 12 / energy) @ counts
        return bits

    @property
    def classes(self) -> Ints:
        """Which class each coordinate belongs to, those of one energy being one: ``[n]``."""
        return self._classes[1]

    def ladder(self, low: int, high: int) -> tuple[Reals, Reals]:
        """Steps by step code from ``low`` to ``high - 1`` and class, and the same by the class's root mean square."""
        steps = self._steps[low:high]
        return steps, steps if self.energy is None else steps / np.sqrt(self._classes[0])

    def noise_of(self, codes: Ints) -> Reals:
        """Expected squared error of each entry of vectors with these step codes: ``[k, n]``."""
        noises: Reals = self._steps[codes][:, self._classes[1]] ** 2 / 12
        return noises

    def turn(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors ``[k, n]`` in these coordinates."""
        return vectors if self.basis is None else vectors @ self.basis.T

    def turn_back(self, vectors: Reals) -> Reals:
        """Vectors ``[k, n]`` from these coordinates."""
        return vectors if self.basis is None else (torch.from_numpy(vectors) @ self.basis).numpy()


@functools.lru_cache(maxsize=256)
def standard(size: int) -> Side:
    """A side of which nothing is known; the same object each time."""
    return Side(size)
