"""Kernels that choose what is sent: plans of spectra, and samples of given probabilities. For the CPU alone."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isgq.core.kernels.compiler import kernel
from isgq.core.kernels.quantize import State, mix

_Reals = NDArray[np.float64]
_Ints = NDArray[np.int64]

_HALF_BITS = np.int64((1 << 26) - 1)


@kernel
def plan_totals(
    weights: _Reals, ends: _Ints, losses: _Reals, kappa: _Reals, bits: _Reals, places: _Ints,
    light_kappa: _Reals, light_bits: _Reals, slope: float, fixed_bits: float, out: _Reals,
) -> None:  # fmt: skip
    """Variance and bits of the plan of each spectrum: :func:`isgq.codecs.rotation_plan.plan_at_slope`.

    Args:
        weights: of all spectra, one after the other.
        ends: where each of them ends.
        losses: of all curves, one after the other: of each one less than of kappa and bits.
        kappa: of all curves.
        bits: of all curves.
        places: where each curve begins in kappa and bits, and last where the last one ends.
        light_kappa: of each spectrum's light atoms.
        light_bits: likewise.
        slope: as for the plans.
        fixed_bits: of each plan.
        out: ``[2, spectra]``.
    """
    start = 0
    for at in range(len(ends)):
        end, first, last = ends[at], places[at], places[at + 1]
        own, more = losses[first - at : last - at - 1], 1 + light_kappa[at]
        tau = math.sqrt(slope * light_bits[at] / more)
        variance, total, heavy = 0.0, 0.0, start
        while heavy < end and weights[heavy] >= tau:
            square = weights[heavy] * weights[heavy]
            chosen = first + np.searchsorted(own, -slope / square, side="right")
            variance += square * kappa[chosen]
            total += bits[chosen]
            heavy += 1
        light, energy = 0.0, 0.0
        for i in range(end - 1, heavy - 1, -1):
            light += weights[i]
            energy += weights[i] * weights[i]
        out[0, at] = variance + light * tau * more - energy
        out[1, at] = total + light / tau * light_bits[at] + fixed_bits
        start = end


@kernel
def _order(state: State, n: int) -> Any:
    """Where the first n numbers of a stream stand among one another, as int32: by bytes, from the lowest on."""
    x, k1, k2, k3 = np.uint32(state[0]), np.uint32(state[1]), np.uint32(state[2]), np.uint32(state[3])
    keys, order = np.empty(n, dtype=np.uint32), np.arange(n)
    for i in range(n):
        keys[i] = np.uint32(mix(np.uint32(x + np.uint32(i)), k1, k2, k3) ^ np.uint32(1 << 31))
    moved, starts = np.empty(n, dtype=np.int64), np.empty(257, dtype=np.int64)
    for shift in range(0, 32, 8):
        starts[:] = 0
        for i in range(n):
            starts[np.int64((keys[i] >> np.uint32(shift)) & np.uint32(255)) + 1] += 1
        for at in range(256):
            starts[at + 1] += starts[at]
        for i in range(n):
            byte = np.int64((keys[order[i]] >> np.uint32(shift)) & np.uint32(255))
            moved[starts[byte]] = order[i]
            starts[byte] += 1
        order, moved = moved, order
    return order


@kernel
def systematic(
    weights: _Reals, count: int, above: float, shuffle: State, turn: State, begin: State, out: _Ints
) -> int:  # fmt: skip
    """Positions of :func:`isgq.codecs.eus_sample._points_on_host`, each row being an entry.

    Args:
        weights: ``[n]``.
        count: how many points.
        above: by what factor the last end lies above the last point, or a rounding error less.
        shuffle: state of the stream whose numbers order the rows.
        turn: state of the stream whose first number says by how much entries and rows differ.
        begin: state of the stream whose first two numbers make the first point.
        out: room for n positions.

    Returns:
        The number of positions.
    """
    n = len(weights)
    x, k1, k2, k3 = np.uint32(turn[0]), np.uint32(turn[1]), np.uint32(turn[2]), np.uint32(turn[3])
    offset = np.int64(np.int32(mix(x, k1, k2, k3))) % n
    x, k1, k2, k3 = np.uint32(begin[0]), np.uint32(begin[1]), np.uint32(begin[2]), np.uint32(begin[3])
    high = np.int64(mix(x, k1, k2, k3)) & _HALF_BITS
    low = np.int64(mix(np.uint32(x + np.uint32(1)), k1, k2, k3)) & _HALF_BITS
    start = (np.float64((high << np.int64(26)) + low) + 0.5) * 2.0**-52
    order = _order(shuffle, n)
    entries, cumulated, total = np.empty(n, dtype=np.int64), np.empty(n), 0.0
    for place in range(n):
        entry = order[place] - offset
        entry += n if entry < 0 else 0
        total += weights[entry]
        entries[place], cumulated[place] = entry, total
    scale, passed, drawn = 1 / total * (count * above), 0.0, np.zeros(n, dtype=np.bool_)
    for place in range(n):
        reached = np.ceil(cumulated[place] * scale - start)
        reached = count if reached > count else reached
        drawn[entries[place]] = reached > passed
        passed = reached
    size = 0
    for entry in range(n):
        out[size] = entry
        size += drawn[entry]
    return size
