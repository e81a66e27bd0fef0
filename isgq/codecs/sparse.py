"""Sparsifiers that keep k entries: top-k, random-k, and rTop-k, of which the other two are limits.

All three are one selection: k positions drawn at random from the r largest magnitudes (Barnes, Inan, Isik and Özgür,
"rTop-k: A Statistical Estimation Approach to Distributed SGD", IEEE JSAIT 2020). r = k is top-k, r = d is random-k.
The error is, for every r,

    E ||w - rTop_k(w)||**2 = ||w||**2 - (k / r) * ||top_r(w)||**2  <=  (1 - k / d) * ||w||**2

so on one worker r = k is best. n workers with nearly the same gradient gain from r > k: their draws are independent,
and together they cover ``r * (1 - (1 - k / r)**n)`` positions instead of k.

Payload: the positions (:mod:`isgq.codecs.indices`) and ``values`` in the order of the positions. Entries that are
exactly zero are not sent, so a tensor with fewer than k nonzero entries costs less.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from isgq.codecs.flat import flatten, require_codec
from isgq.codecs.indices import decode_indices, encode_indices
from isgq.core.errors import OptionError
from isgq.core.keys import Key, random_int32
from isgq.core.payload import Payload
from isgq.core.registry import register_codec

Values = Literal["float32", "float16"]

_SAMPLE = 1 << 16  # how many elements estimate the selection threshold


def check_amount(codec: str, option: str, amount: int | float) -> None:
    """Check an option that is a share or a count of the entries.

    Args:
        codec: its codec's name, for the message.
        option: its name, for the message.
        amount: a float is a share of all entries, in (0, 1]; an int is a number of entries, at least 1.

    Raises:
        OptionError: outside these ranges.
    """
    good = amount >= 1 if isinstance(amount, int) else 0 < amount <= 1
    if not good or isinstance(amount, bool):
        raise OptionError(
            f"option {option}={amount} of codec {codec!r} must be an integer count >= 1 (such as 1 or 500) "
            "or a share with a decimal point in (0, 1] (such as 0.01 or 1.0)"
        )


def check_choice(codec: str, option: str, choice: str, kind: Any) -> None:
    """Check an option that is one of a few words; ``kind`` is the ``Literal`` that lists them.

    Raises:
        OptionError: another word.
    """
    if choice not in get_args(kind):
        raise OptionError(f"option {option}={choice!r} of codec {codec!r} must be one of {', '.join(get_args(kind))}")


def to_count(amount: int | float, size: int) -> int:
    """Number of entries, at most ``size``, that an option asks for; a share keeps at least one, if there is one."""
    wanted = amount if isinstance(amount, int) else max(1, round(amount * size))
    return min(wanted, size)


def _floor(scores: Tensor, count: int) -> Tensor | None:
    """A value that most likely at least ``count`` scores reach, and not many more; None where it would not pay."""
    stride = scores.numel() // _SAMPLE
    if stride < 2:
        return None
    sample = scores[::stride]
    expected = count / stride
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 16)
    if 2 * rank > sample.numel():
        return None
    return sample.topk(rank, sorted=False).values.amin()


def _is_largest(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest; among equals the earlier."""
    limit = scores.topk(count, sorted=False).values.amin()
    above, equal = scores > limit, scores == limit
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def largest(scores: Tensor, count: int) -> Tensor:
    """Positions of the largest elements, increasing; among equals the earlier, on every device.

    1. Guess a floor from a sample of the scores.
    2. Where at least ``count`` scores reach the floor, the largest are among them; otherwise look at all scores.

    Args:
        scores: ``[d]``, any dtype, no NaN.
        count: how many, in ``0 .. d``.

    Returns:
        int64 ``[count]``.
    """
    if count == 0 or count == scores.numel():
        return torch.arange(count, device=scores.device)
    floor = _floor(scores, count)
    if floor is not None:
        near = (scores >= floor).nonzero().squeeze(1)
        if near.numel() >= count:
            return near[_is_largest(scores[near], count)]
    return _is_largest(scores, count).nonzero().squeeze(1)


def random_subset(size: int, count: int, digest: int, device: torch.device) -> Tensor:
    """A uniformly random set of positions, increasing: int64 ``[count]``, without replacement.

    The positions of the ``count`` largest of ``size`` random 32-bit keys. Within a stream the keys are a bijection of
    the counter, so no two are equal (beyond 2**32 elements the earlier wins).

    Args:
        size: positions to draw from.
        count: how many to draw, at most ``size``.
        digest: of the key that names the draw.
        device: where to make them; the set does not depend on it.
    """
    if count == size:
        return torch.arange(size, device=device)
    return largest(random_int32(digest, "sparse.subset", size, device), count)


def rtop_k(w: Tensor, r: int, k: int, digest: int) -> Tensor:
    """Positions that rTop-k keeps, increasing: int64 ``[k]`` (Barnes et al. 2020).

    Args:
        w: ``[d]``.
        r: how many of the largest magnitudes to draw from, at most d; k of them is top-k, d of them is random-k.
        k: how many to draw, at most r.
        digest: of the key that names the draw.
    """
    drawn = random_subset(r, k, digest, w.device)
    return drawn if r == w.numel() else largest(w.abs(), r)[drawn]


def pack_values(values: Tensor, kind: Values) -> dict[str, Tensor]:
    """Raw tensors of a payload that hold float32 values ``[k]``.

    In float16 the largest magnitude is brought to 2**14 .. 2**15 by a power of two, sent along as ``scale``: nothing
    overflows, and 29 binary orders of magnitude keep the full 11 bits.
    """
    if kind == "float32":
        return {"values": values}
    peak = float(values.abs().amax()) if values.numel() else 1.0
    exponent = max(math.frexp(peak)[1] - 15, -120)  # so that the scale itself is a normal float32
    scaled = (values * 2.0**-exponent).to(torch.float16)
    return {"values": scaled, "scale": values.new_full((1,), 2.0**exponent)}


def unpack_values(payload: Payload, kind: Values, count: int) -> Tensor:
    """Read what :func:`pack_values` stored: float32 ``[count]``.

    Raises:
        CodecError: a tensor is missing, or of the wrong dtype or size.
    """
    if kind == "float32":
        return payload.require_tensor("values", count, torch.float32).reshape(-1)
    values = payload.require_tensor("values", count, torch.float16).reshape(-1).to(torch.float32)
    return values * payload.require_tensor("scale", 1, torch.float32).reshape(-1)


def scatter(payload: Payload, indices: Tensor, values: Tensor) -> Tensor:
    """A tensor that is zero but for some entries, of the payload's shape and dtype.

    Args:
        payload: names shape and dtype.
        indices: int64 ``[k]``, positions in row-major order.
        values: float32 ``[k]``; what the dtype cannot hold saturates.
    """
    # float64's own range is wider than float32's, where the values come from.
    top = min(torch.finfo(payload.dtype).max, torch.finfo(torch.float32).max)
    out = torch.zeros(payload.numel, dtype=payload.dtype, device=values.device)
    out[indices] = values.clamp(-top, top).to(payload.dtype)
    return out.reshape(payload.shape)


def _counts(r: int | float, k: int | float, size: int) -> tuple[int, int]:
    """The options r and k as numbers of entries; k wins where, of a share and a count, r turns out the smaller."""
    count = to_count(k, size)
    return max(to_count(r, size), count), count


def _encode(name: str, x: Tensor, r: int | float, k: int | float, values: Values, key: Key) -> Payload:
    """Send the k entries that :func:`rtop_k` keeps, with their positions."""
    flat = flatten(x, key)
    size = flat.numel()
    indices = rtop_k(flat, *_counts(r, k, size), key.digest)
    kept = flat[indices]
    present = kept != 0
    return Payload(
        codec=name,
        shape=tuple(x.shape),
        dtype=x.dtype,
        symbols=encode_indices(indices[present], size),
        tensors=pack_values(kept[present], values),
    )


def _decode(name: str, payload: Payload, values: Values, factor: float = 1.0) -> Tensor:
    """Put the entries back, times a factor."""
    require_codec(payload, name)
    indices = decode_indices(payload.symbols, payload.numel)
    return scatter(payload, indices, unpack_values(payload, values, indices.numel()) * factor)


@register_codec("top_k")
@dataclass(frozen=True)
class TopK:
    """The k entries of largest magnitude; among equals the earlier.

    Attributes:
        k: entries to keep: an int is a count, a float is a share in (0, 1] (so 1 is one entry and 1.0 is all of
            them). Smaller is more aggressive.
        values: how an entry is sent; ``float16`` comes with one scale a tensor.
    """

    k: int | float = 0.01
    values: Values = "float32"
    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_amount("top_k", "k", self.k)
        check_choice("top_k", "values", self.values, Values)

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a tensor; NonFiniteError on NaN or Inf."""
        return _encode(self.name, x, self.k, self.k, self.values, key)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor; CodecError on a malformed payload."""
        return _decode(self.name, payload, self.values)


@register_codec("rtop_k")
@dataclass(frozen=True)
class RTopK:
    """k entries drawn uniformly from the r of largest magnitude, independently on every rank (Barnes et al. 2020).

    Attributes:
        r: entries to draw from, as a count or a share like k. r = k is top-k, r = 1.0 is random-k. Smaller keeps more
            of the norm on one worker; more workers cover more of a larger r.
        k: entries to keep, as in :class:`TopK`.
        debias: multiply by r / k, so that the mean is the vector's r largest entries instead of k / r of them. Not
            with error feedback, which needs a contraction.
        values: as in :class:`TopK`.
    """

    r: int | float = 0.04
    k: int | float = 0.01
    debias: bool = False
    values: Values = "float32"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_amount("rtop_k", "r", self.r)
        check_amount("rtop_k", "k", self.k)
        check_choice("rtop_k", "values", self.values, Values)
        if isinstance(self.r, int) == isinstance(self.k, int) and self.r < self.k:
            raise OptionError(f"option r={self.r} of codec 'rtop_k' must be at least k={self.k}")

    @property
    def unbiased(self) -> bool:
        """Only if it draws from all entries, and scales."""
        return self.debias and isinstance(self.r, float) and self.r == 1 and self.values == "float32"

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a tensor; NonFiniteError on NaN or Inf."""
        return _encode(self.name, x, self.r, self.k, self.values, key)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor; CodecError on a malformed payload."""
        r, k = _counts(self.r, self.k, payload.numel)
        return _decode(self.name, payload, self.values, r / k if self.debias and k else 1.0)


@register_codec("random_k")
@dataclass(frozen=True)
class RandomK:
    """k entries drawn uniformly from all.

    Attributes:
        k: entries to keep, as in :class:`TopK`.
        scale: multiply by d / k, which makes it unbiased. Turn it off under error feedback, which needs a contraction.
        shared: send no positions; the receiver draws them again from the payload's digest.
        common: with ``shared``, every rank keeps the same positions (a step's positions then depend on name, seed and
            step alone); otherwise each rank its own.
        values: as in :class:`TopK`.
    """

    k: int | float = 0.01
    scale: bool = True
    shared: bool = False
    common: bool = False
    values: Values = "float32"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_amount("random_k", "k", self.k)
        check_choice("random_k", "values", self.values, Values)
        if self.common and not self.shared:
            raise OptionError("option common=True of codec 'random_k' needs shared=True: it says how ranks share")

    @property
    def unbiased(self) -> bool:
        """Only if it scales and does not round."""
        return self.scale and self.values == "float32"

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a tensor; NonFiniteError on NaN or Inf."""
        if not self.shared:
            return _encode(self.name, x, 1.0, self.k, self.values, key)
        flat = flatten(x, key)
        digest = (dataclasses.replace(key, rank=0) if self.common else key).digest
        size = flat.numel()
        kept = flat[rtop_k(flat, size, to_count(self.k, size), digest)]
        tensors = pack_values(kept, self.values)
        return Payload(self.name, tuple(x.shape), x.dtype, tensors=tensors, digest=digest)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor; CodecError on a malformed payload."""
        size = payload.numel
        k = to_count(self.k, size)
        factor = size / k if self.scale and k else 1.0
        if not self.shared:
            return _decode(self.name, payload, self.values, factor)
        require_codec(payload, self.name)
        values = unpack_values(payload, self.values, k)
        return scatter(payload, random_subset(size, k, payload.digest, values.device), values * factor)
