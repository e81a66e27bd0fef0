"""Checks of arguments that several modules share."""

import numpy as np
from numpy.typing import NDArray

from isgq.core.errors import OptionError

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def at_least(name: str, value: int, least: int = 1) -> int:
    """The value, if it is an integer and large enough.

    Raises:
        OptionError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OptionError(f"{name} = {value!r} must be an integer of at least {least}")
    return int(value)


def within(name: str, value: float, low: float, high: float) -> float:
    """The value, if it lies strictly between two others.

    Raises:
        OptionError: it does not, or is no number.
    """
    if not low < value < high:
        raise OptionError(f"{name} = {value!r} must lie strictly between {low:g} and {high:g}")
    return float(value)


def parameters(name: str, theta: Array, low: float, high: float) -> Array:
    """A parameter vector: float64 ``[d]``.

    Raises:
        OptionError: not one-dimensional, empty, or an entry outside of the open interval from low to high.
    """
    theta = np.asarray(theta, float)
    if theta.ndim != 1 or theta.size < 1 or not bool(((theta > low) & (theta < high)).all()):
        raise OptionError(
            f"theta of {name} must be a vector of at least one number strictly between {low:g} and {high:g}; "
            f"it has shape {theta.shape}"
            + (f" and values from {theta.min():g} to {theta.max():g}" if theta.size else "")
        )
    return theta
