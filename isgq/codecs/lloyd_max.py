"""Lloyd-Max quantization: the points of least mean squared error for a model distribution, or for the data itself.

Layout of a payload of n elements:

    symbols["codes"]      [n]       sparse: 0 for an exact zero, 1 .. L for the points; else 0 .. L - 1
    tensors["codebook"]   [L + 1]   sparse: float32, 0 and then the points in ascending order; else [L], the points

Decoding is one look-up in the codebook, whatever made it; codecs that improve the points send the same payload.

Sources: Lloyd 1982 (IEEE Trans. Inf. Theory 28), Max 1960 (IRE Trans. Inf. Theory 6); for the factors of gradients,
with an exact-zero symbol: Abdi and Fekri, "Indirect Stochastic Gradient Quantization", AAAI 2020.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isgq.codecs.buckets import Buckets
from isgq.codecs.compare import above, not_zero
from isgq.codecs.flat import flatten, require_codec, restore
from isgq.core.errors import OptionError
from isgq.core.kernels import compiled
from isgq.core.keys import Key
from isgq.core.memory import empty
from isgq.core.parallel import map_parts
from isgq.core.payload import Payload, Symbols, symbol_dtype
from isgq.core.registry import register_codec

Model = Literal["auto", "normal", "half_normal", "uniform", "empirical"]
"""What the points are optimal for; see :class:`LloydMax`."""

_MAX_LEVELS = 256
_MANY = 16  # from so many edges on, a binary search is faster than comparing with each
_EMPIRICAL_STEPS = 100


def _centroids(model: str, edges: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mass and mean of the cells between consecutive edges under a standard (half-)normal law: ``[L]`` each.

    The half-normal density is twice the normal one on [0, inf), so only the first edge differs and the factor 2 of
    the masses cancels wherever they are used.
    """
    from scipy.special import ndtr  # here, because importing it takes longer than the rest of the package

    low, high = edges[:-1], edges[1:]
    # The smaller tail, so that nothing cancels.
    mass = np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    return mass, (density[:-1] - density[1:]) / mass


@lru_cache(maxsize=64)
def model_points(model: Literal["normal", "half_normal"], levels: int) -> tuple[float, ...]:
    """Lloyd-Max points of the standard normal or half-normal law, both of mean square 1, in ascending order.

    Steps:
        1. Start at the points of high-resolution theory: quantiles of the density to the power 1/3 (Panter and Dite
           1951), which for a normal law is the normal law of three times the variance.
        2. Solve "each point is the mean of its cell" by Newton's method; the edges are the midpoints. Both densities
           are log-concave, so the solution is unique (Fleischer 1964).

    Args:
        model: the law.
        levels: number of points, L >= 1.
    """
    from scipy.special import ndtri

    first, share = (-np.inf, 0.0) if model == "normal" else (0.0, 0.5)
    quantiles = share + (1 - share) * (np.arange(levels) + 0.5) / levels
    points = math.sqrt(3.0) * ndtri(quantiles)
    for _ in range(100):
        edges = np.concatenate(([first], (points[1:] + points[:-1]) / 2, [np.inf]))
        mass, means = _centroids(model, edges)
        gap = means - points
        if np.abs(gap).max() < 1e-13:
            break
        # How the mean of a cell moves with its two edges, which move half as far as the points.
        inner = np.where(np.isfinite(edges), edges, 0.0)
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        down = density[:-1] * (means - inner[:-1]) / mass / 2
        up = density[1:] * (inner[1:] - means) / mass / 2
        down[0] = 0.0  # the first edge is fixed
        jacobian = np.diag(down + up - 1) + np.diag(up[:-1], 1) + np.diag(down[1:], -1)
        points -= np.linalg.solve(jacobian, gap)
    return tuple(float(p) for p in points)


def empirical_points(values: Tensor, levels: int) -> Tensor:
    """Lloyd's algorithm on numbers: float32 ``[levels]``, ascending; a local optimum, the same for the same values.

    Starts at equidistant quantiles; a cell that runs empty keeps its point. Costs a sort of the values.

    Args:
        values: float32 ``[n]``; points are 0 where n is 0.
        levels: number of points.
    """
    n = values.numel()
    if n == 0:
        return values.new_zeros(levels)
    values = values.sort().values
    sums = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    at = (2 * torch.arange(levels, device=values.device) + 1) * n // (2 * levels)
    points, bounds = values[at].double(), at.new_zeros(0)
    for _ in range(_EMPIRICAL_STEPS):
        inner = torch.searchsorted(values, _edges(points).to(torch.float32), right=True)
        moved = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])
        if torch.equal(moved, bounds):
            break
        bounds = moved
        counts = bounds.diff()
        points = torch.where(counts > 0, sums[bounds].diff() / counts.clamp(min=1), points)
    return points.to(torch.float32)


def _edges(points: Tensor) -> Tensor:
    """Midpoints of ascending points, without overflow."""
    return points[1:] / 2 + points[:-1] / 2


def nearest(flat: Tensor, points: Tensor, *, zero_symbol: bool = False) -> Tensor:
    """Index of the nearest of ascending points, the lower one at a tie.

    Args:
        flat: float32 ``[n]``.
        points: float32 ``[L]``.
        zero_symbol: give 0 for exact zeros, and 1 more than the index elsewhere.

    Returns:
        Integers ``[n]`` of dtype ``symbol_dtype(L + 1)``, in ``0 .. L - 1``, or ``0 .. L``.
    """
    edges = _edges(points)
    codes = empty(flat.numel(), symbol_dtype(points.numel() + 1), flat.device)

    if (kernels := compiled("search", flat.device)) and points.numel() <= _MANY:
        numbers, borders, counts = flat.numpy(), edges.to(torch.float32).contiguous().numpy(), codes.numpy()

        def count(start: int, stop: int) -> None:
            kernels.count_above(numbers, borders, start, stop, zero_symbol, counts)

        map_parts(count, flat.numel())
        return codes

    def work(values: Tensor, elements: slice, _: slice) -> None:
        values, out = values.view(-1), codes[elements]
        if edges.numel() >= _MANY:
            out.copy_(torch.bucketize(values, edges, out_int32=True))
            if zero_symbol:
                out.add_(1)
        else:
            out.fill_(int(zero_symbol))
            for edge in edges:
                out.add_(above(values, edge))
        if zero_symbol:
            out.mul_(not_zero(values))

    Buckets.of(flat.shape, "tensor").map(flat, work)
    return codes


def make_codebook(points: Tensor, dtype: torch.dtype, sparse: bool) -> Tensor:
    """What is sent: the points as float32, within the range of the tensor's dtype, after a 0 if sparse."""
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    inside: Tensor = points.clamp(-most, most).to(torch.float32)
    return torch.cat([inside.new_zeros(1), inside]) if sparse else inside


def look_up(payload: Payload) -> Tensor:
    """Decode a payload of codes and codebook.

    Raises:
        CodecError: either is missing or does not fit the other.
    """
    codes = payload.require_symbols("codes", payload.numel)
    codebook = payload.require_tensor("codebook", codes.alphabet, torch.float32)
    kernels = compiled("search", codes.values.device) if codes.values.dtype is torch.uint8 else None
    if kernels is None or not payload.numel or int(codes.values.max()) >= codes.alphabet:
        return restore(codebook.index_select(0, codes.values.int()), payload)  # refuses codes outside the book
    table, flat = np.zeros(256, dtype=np.float32), empty(payload.numel, torch.float32, torch.device("cpu"))
    table[: codes.alphabet] = codebook.numpy()
    given, out = codes.values.numpy(), flat.numpy()
    map_parts(lambda start, stop: kernels.look_up(given, table, start, stop, out), payload.numel)
    return restore(flat, payload)


@register_codec("lloyd_max")
@dataclass(frozen=True)
class LloydMax:
    """Sends the nearest of a few points that are optimal for a model of the tensor.

    Attributes:
        levels: number of points L, 1 .. 256; more is finer. A sparse codebook holds the zero besides.
        model: law that the points are optimal for. ``"normal"`` has mean 0, ``"half_normal"`` is its magnitude; both
            are scaled to the mean square of the tensor. ``"uniform"`` spans from the smallest to the largest element.
            ``"empirical"`` runs Lloyd's algorithm on the elements. ``"auto"`` is half-normal if no element is
            negative (as after a ReLU) and normal otherwise.
        sparse: give exact zeros a symbol of their own; the model then describes the other elements.
    """

    levels: int = 2
    model: Model = "auto"
    sparse: bool = True
    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= _MAX_LEVELS:
            raise OptionError(f"levels is {self.levels}, must be in 1 .. {_MAX_LEVELS}")
        if self.model not in get_args(Model):
            raise OptionError(f"model is {self.model!r}, must be one of {', '.join(get_args(Model))}")

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Quantize a floating-point tensor of any shape. The key only names it: nothing is random.

        Raises:
            NonFiniteError: x holds NaN or Inf, also as float32.
        """
        flat = flatten(x, key)
        codebook = make_codebook(self._points(flat), x.dtype, self.sparse)
        codes = nearest(flat, codebook[int(self.sparse) :], zero_symbol=self.sparse)
        symbols = {"codes": Symbols(codes, codebook.numel())}
        return Payload(self.name, tuple(x.shape), x.dtype, symbols, {"codebook": codebook})

    def _points(self, flat: Tensor) -> Tensor:
        """Points for float32 ``[n]``, to its scale: ``[L]``, ascending; 0 where there is nothing to describe."""
        if flat.numel() == 0:
            return flat.new_zeros(self.levels)
        if self.model == "empirical":
            return empirical_points(flat[flat != 0] if self.sparse else flat, self.levels)
        if self.model == "uniform":
            low, high = (end.double() for end in self._range(flat))
            return torch.lerp(low, high, (torch.arange(self.levels, device=flat.device).double() + 0.5) / self.levels)
        return self._unit_points(flat) * self._rms(flat)

    def _unit_points(self, flat: Tensor) -> Tensor:
        """Points of the model law of mean square 1, chosen without asking the device: float64 ``[L]``."""
        normal, half = (
            torch.tensor(model_points(law, self.levels), dtype=torch.float64, device=flat.device)
            for law in ("normal", "half_normal")
        )
        known = {"normal": normal, "half_normal": half}
        return known[self.model] if self.model in known else torch.where(flat.amin() < 0, normal, half)

    def _rms(self, flat: Tensor) -> Tensor:
        """Root mean square of the elements that the model describes: float64 scalar; no square overflows."""

        def work(block: Tensor, _: slice, __: slice) -> tuple[Tensor, Tensor]:
            norm: Tensor = torch.linalg.vector_norm(block, dtype=torch.float64)
            return norm, not_zero(block).sum()

        norms, counts = map(torch.stack, zip(*Buckets.of(flat.shape, "tensor").map(flat, work), strict=True))
        count = counts.sum().clamp(min=1) if self.sparse else flat.numel()
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm / count**0.5

    def _range(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest of the elements that the model describes; 0 where there are none."""
        if not self.sparse:
            return flat.amin(), flat.amax()
        zeros = flat == 0
        low, high = flat.masked_fill(zeros, math.inf).amin(), flat.masked_fill(zeros, -math.inf).amax()
        return low.masked_fill(zeros.all(), 0.0), high.masked_fill(zeros.all(), 0.0)

    def decode(self, payload: Payload) -> Tensor:
        """Look the codes up in the codebook.

        Raises:
            CodecError: the payload is of another codec, or its parts do not fit.
        """
        require_codec(payload, self.name)
        alphabet = self.levels + self.sparse
        payload.require_symbols("codes", payload.numel, alphabet)
        return look_up(payload)
