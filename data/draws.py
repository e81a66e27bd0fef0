"""Random numbers for splits and positions: the same on every machine and with every numpy.

NumPy promises that the raw stream of a bit generator stays as it is; it does not promise so for ``permutation`` or
``integers``. So both are made here from the raw stream.
"""

import numpy as np
from numpy.typing import NDArray


def raw(count: int, seed: int, stream: int = 0) -> NDArray[np.uint64]:
    """[count] independent uniform 64-bit integers, a function of (seed, stream) alone."""
    return np.asarray(np.random.PCG64([seed, stream]).random_raw(count), np.uint64)


def permutation(count: int, seed: int) -> NDArray[np.intp]:
    """[count] indices in random order: the order that sorts ``count`` random numbers."""
    return np.argsort(raw(count, seed), kind="stable")


def below(limit: int, count: int, seed: int, stream: int) -> NDArray[np.intp]:
    """[count] uniform integers in [0, limit); the bias of the remainder is below limit / 2**64."""
    return (raw(count, seed, stream) % np.uint64(limit)).astype(np.intp)
