"""The uniform grid of 2 L + 1 points ``-norm, .., 0, .., +norm`` of a bucket, and the two ways to round to it.

Symbol ``k + L`` stands for ``norm * k / L``, ``-L <= k <= L``. Elements beyond the norm are clipped to it.

Stochastic rounding, ``k = floor(t + u)`` with ``t = L x / norm`` and u uniform in [0, 1), is computed in fixed point
with 24 fractional bits: the sum carries no rounding error, so the mean of k is t to 2**-24, points of the grid (zero,
the largest element) stay where they are, and every device gives the same symbols.
"""

import torch
from torch import Tensor

from isgq.codecs.buckets import Buckets, nonzero
from isgq.core.errors import OptionError
from isgq.core.kernels import compiled
from isgq.core.keys import State, map_stream, random_int32
from isgq.core.memory import empty
from isgq.core.parallel import map_parts

MAX_LEVELS = 127  # so that symbols are bytes, and t has room in 8.24 bits
_ONE = 1 << 24
_INTEGERS = 1.5 * 2**23


def check_levels(levels: int) -> None:
    """Refuse what is no number of levels.

    Raises:
        OptionError: not in 1 .. 127.
    """
    if not 1 <= levels <= MAX_LEVELS:
        raise OptionError(
            f"levels={levels} must be in 1 .. {MAX_LEVELS}: it counts the steps between zero and the norm"
        )


def alphabet(levels: int) -> int:
    """Number of different symbols."""
    return 2 * levels + 1


def round_stochastic(flat: Tensor, norm: Tensor, levels: int, buckets: Buckets, digest: int) -> Tensor:
    """Round to one of the two nearest points, with probabilities that make the mean exact.

    Args:
        flat: float32 ``[numel]``.
        norm: float32 ``[buckets.count]``.
        levels: L.
        buckets: which elements share a norm.
        digest: ``Key.digest``; the sender alone draws from it.

    Returns:
        uint8 symbols ``[numel]``.
    """
    divisor = nonzero(norm)
    symbols = empty(flat.numel(), torch.uint8, flat.device)
    if kernels := compiled("quantize", flat.device):
        values, scales, out = kernels.arrays(flat, divisor, symbols)

        def round_part(start: int, stop: int, state: State) -> None:
            kernels.round_stochastic(values, scales, buckets.size, start, stop, state, levels, out)

        map_stream(round_part, buckets.numel, digest, "round", flat.device)
        return symbols
    norm = divisor.unsqueeze(1)

    def work(block: Tensor, elements: slice, rows: slice) -> None:
        t = torch.div(block, norm[rows]).clamp_(-1.0, 1.0).mul_(levels * _ONE).to(torch.int32).view(-1)
        # The random bits lie in [-1/2, 1/2): the missing half is added, then the fraction is cut off.
        u = random_int32(digest, "round", t.numel(), flat.device, start=elements.start).bitwise_right_shift_(8)
        # A negative k is wrapped to k + 256; so is the sum, back to k + L.
        symbols[elements].copy_(t.add_(u).add_(_ONE // 2).bitwise_right_shift_(24)).add_(levels)

    buckets.map(flat, work)
    return symbols


def round_nearest(flat: Tensor, norm: Tensor, levels: int, buckets: Buckets) -> Tensor:
    """Round to the nearest point, ties to even; arguments and result as in :func:`round_stochastic`."""
    divisor = nonzero(norm)
    symbols = empty(flat.numel(), torch.uint8, flat.device)
    if kernels := compiled("quantize", flat.device):
        values, scales, out = kernels.arrays(flat, divisor, symbols)

        def round_part(start: int, stop: int) -> None:
            kernels.round_nearest(values, scales, buckets.size, start, stop, levels, out)

        map_parts(round_part, buckets.numel, flat.device)
        return symbols
    norm = divisor.unsqueeze(1)

    def work(block: Tensor, elements: slice, rows: slice) -> None:
        k = nearest_integer(torch.div(block, norm[rows]).clamp_(-1.0, 1.0).mul_(levels))
        symbols[elements].view(block.shape).copy_(k).add_(levels)  # wrapped and back, as above

    buckets.map(flat, work)
    return symbols


def nearest_integer(t: Tensor) -> Tensor:
    """Round in place, ties to even: a view of float32 ``t`` as int32, for magnitudes below 2**22.

    Next to 1.5 * 2**23 float32 holds the integers alone, and its last 22 bits count them.
    """
    return t.add_(_INTEGERS).view(torch.int32).sub_(0x4B400000)


def round_(t: Tensor) -> Tensor:
    """The same, staying float32."""
    return t.add_(_INTEGERS).sub_(_INTEGERS)


def rebuild(symbols: Tensor, norm: Tensor, levels: int, buckets: Buckets) -> Tensor:
    """Points of the grid: float32 ``[numel]``."""
    flat = empty(symbols.numel(), torch.float32, symbols.device)
    if kernels := compiled("quantize", flat.device):
        given, scales, out = kernels.arrays(symbols, norm.reshape(-1), flat)

        def rescale(start: int, stop: int) -> None:
            kernels.rescale(given, scales, buckets.size, start, stop, levels, levels, out)

        map_parts(rescale, buckets.numel, flat.device)
        return flat
    norm = norm.reshape(-1, 1)

    def work(block: Tensor, elements: slice, rows: slice) -> None:
        # Divided by L before the norm comes in: the ends of the grid are the norm itself, and nothing overflows.
        block.copy_(symbols[elements].view(block.shape)).sub_(levels).div_(levels).mul_(norm[rows])

    buckets.map(flat, work)
    return flat


def rounding_variance(flat: Tensor, norm: Tensor, levels: int, buckets: Buckets) -> Tensor:
    """Variance of stochastic rounding: ``(norm / L)**2 r (1 - r)``, r the fraction of t; float32 ``[numel]``."""
    each = buckets.spread(norm)
    t = (flat / nonzero(each)).clamp(-1.0, 1.0) * levels
    r = t - t.floor()
    return (each / levels) ** 2 * r * (1 - r)
