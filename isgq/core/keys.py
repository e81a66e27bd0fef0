"""Randomness from explicit keys: a counter hash that gives the same integers on every device and platform.

Layout: a :class:`Key` is hashed once (BLAKE2b, on the host) to a 64-bit *digest*; digest and *role* give four
32-bit words k0 .. k3. Element i of a stream is a keyed integer hash of the counter i, modulo 2**32:

    x = i + k0
    x ^= x >> 17;  x *= 0xED5AD4BB;  x += k1
    x ^= x >> 11;  x *= 0xAC4C1B51;  x += k2
    x ^= x >> 15;  x *= 0x31848BAB;  x += k3
    x ^= x >> 14

with logical shifts and wrapping int32 arithmetic, which torch computes alike on every device. Each step is a bijection,
so no value repeats within 2**32 elements; keys enter between the rounds, so two streams are no shifts of one another.
torch's own generators are not used: their CUDA stream depends on the GPU model, and a global generator makes the order
of calls part of the protocol.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isgq.core.errors import OptionError
from isgq.core.kernels import compiled
from isgq.core.memory import empty
from isgq.core.parallel import PIECE, map_parts, map_pieces, piece_size

_Result = TypeVar("_Result")

# (shift, multiplier) of a well-mixing 32-bit permutation.
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


@dataclass(frozen=True, slots=True)
class Key:
    """Names one tensor of one step on one rank: the only source of randomness, the only address of state.

    Attributes:
        name: the parameter's name in the model.
        seed: the run's seed, the same on every rank.
        step: number of the synchronisation, from 0.
        rank: the sender's rank.
    """

    name: str
    seed: int = 0
    step: int = 0
    rank: int = 0

    @property
    def digest(self) -> int:
        """64-bit hash of the key; what a receiver needs to draw the same numbers."""
        text = f"{self.seed}\x1f{self.step}\x1f{self.rank}\x1f{self.name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def child(self, part: str) -> "Key":
        """Key of a part of this tensor, e.g. ``key.child("x")`` of the gradient's factor x; independent of its own."""
        return Key(f"{self.name}/{part}", self.seed, self.step, self.rank)


@functools.lru_cache(maxsize=64)
def _words(digest: int, role: str, block: int) -> Sequence[int]:
    text = digest.to_bytes(8, "little") + block.to_bytes(8, "little") + role.encode()
    raw = hashlib.blake2b(text, digest_size=16, person=b"isgq-stream").digest()
    return tuple(int.from_bytes(raw[i : i + 4], "little") for i in (0, 4, 8, 12))


State = tuple[int, int, int, int]
"""Where a stream of random numbers stands: the counter ``i + k0`` modulo 2**32, then k1, k2, k3; all unsigned."""


def stream_state(digest: int, role: str, start: int) -> State:
    """State of the stream (digest, role) at element ``start``; good up to the next multiple of 2**31."""
    block, low = divmod(start, 1 << 31)
    k0, k1, k2, k3 = _words(digest, role, block)
    return (low + k0) % (1 << 32), k1, k2, k3


def map_stream(
    work: Callable[[int, int, State], _Result], numel: int, digest: int, role: str, device: torch.device
) -> list[_Result]:
    """``work(start, stop, state at start)`` for parts of the first ``numel`` elements of a stream, by threads.

    Args:
        work: as for :func:`isgq.core.parallel.map_parts`.
        numel: number of elements.
        digest: as in :func:`random_int32`.
        role: as in :func:`random_int32`.
        device: where the elements are.
    """
    return map_parts(lambda start, stop: work(start, stop, stream_state(digest, role, start)), numel, device)


def _xor_shift(x: Tensor, shift: int, scratch: Tensor) -> None:
    """``x ^= x >> shift`` with a logical shift: torch shifts int32 arithmetically, so the sign bits are masked off."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _fill(out: Tensor, digest: int, role: str, start: int) -> None:
    """Write elements ``start ..`` of a stream into int32 ``out``; no block boundary lies within."""
    state = first, *later = stream_state(digest, role, start)
    if kernels := compiled("quantize", out.device):
        kernels.words(state, *kernels.arrays(out.view(torch.uint32)))
        return
    if out.device.type == "cpu":
        _fill_numpy(out.numpy().view(np.uint32), first, later)
        return
    torch.arange(out.numel(), out=out).add_(_signed(first))
    scratch = torch.empty_like(out)
    for (shift, multiplier), word in zip(_ROUNDS, later, strict=True):
        _xor_shift(out, shift, scratch)
        out.mul_(_signed(multiplier)).add_(_signed(word))
    _xor_shift(out, _LAST_SHIFT, scratch)


@functools.cache
def _ramp() -> NDArray[np.uint32]:
    return np.arange(PIECE, dtype=np.uint32)


def _fill_numpy(x: NDArray[np.uint32], first: int, later: Sequence[int]) -> None:
    """The same integers on the CPU, where numpy's unsigned shifts and small calls are two to three times as fast."""
    np.add(_ramp()[: x.size], np.uint32(first), out=x)
    scratch = np.empty_like(x)
    for (shift, multiplier), word in zip(_ROUNDS, later, strict=True):
        np.bitwise_xor(x, np.right_shift(x, np.uint32(shift), out=scratch), out=x)
        np.multiply(x, np.uint32(multiplier), out=x)
        np.add(x, np.uint32(word), out=x)
    np.bitwise_xor(x, np.right_shift(x, np.uint32(_LAST_SHIFT), out=scratch), out=x)


def _each_piece(out: Tensor, start: int, fill: Callable[[Tensor, int], None]) -> None:
    """Cut ``out``, which begins at element ``start``, into pieces that cross no block boundary; fill every piece."""
    n, size = out.numel(), piece_size(out.numel(), out.device)
    pieces: list[tuple[Tensor, int]] = []
    first = 0
    while first < n:
        last = min(n, first + size, first + (1 << 31) - (start + first) % (1 << 31))
        pieces.append((out[first:last], start + first))
        first = last
    map_pieces(lambda piece: fill(*piece), pieces)


def _check_range(n: int, start: int) -> None:
    if n < 0 or start < 0:
        raise OptionError(f"a stream has no {n} elements from {start}: both numbers must be >= 0")


def random_int32(digest: int, role: str, n: int, device: torch.device | str = "cpu", *, start: int = 0) -> Tensor:
    """Elements ``start .. start + n - 1`` of the stream (digest, role): int32 ``[n]``, all 32 bits random.

    Args:
        digest: ``Key.digest``, or the digest of a received payload.
        role: what the numbers are for, e.g. ``"x.dither"``; different roles give independent streams.
        n: how many numbers.
        device: where to make them; the values do not depend on it.
        start: first element, so that long streams can be made in pieces.

    Raises:
        OptionError: n or start is negative.
    """
    _check_range(n, start)
    out = empty(n, torch.int32, torch.device(device))
    _each_piece(out, start, lambda part, first: _fill(part, digest, role, first))
    return out


def to_uniform(bits: Tensor) -> Tensor:
    """Random int32 bits as float32 in the open interval (-1/2, 1/2).

    The 2**24 odd multiples of 2**-25, exact in float32 and symmetric about 0, so the mean is exactly 0.
    """
    return bits.bitwise_right_shift(7).bitwise_or_(1).to(torch.float32).mul_(2.0**-25)


def uniform(
    digest: int, role: str, shape: Sequence[int], device: torch.device | str = "cpu", *, start: int = 0
) -> Tensor:
    """Uniform numbers in (-1/2, 1/2): float32 of the given shape, the same on every device.

    Args:
        digest: as in :func:`random_int32`.
        role: as in :func:`random_int32`.
        shape: shape of the result, filled in row-major order.
        device: where to make them; the values do not depend on it.
        start: first element of the stream.

    Raises:
        OptionError: a negative size or start.
    """
    n = math.prod(shape)
    _check_range(n, start)
    out = empty(n, torch.float32, torch.device(device))

    kernels = compiled("quantize", out.device)

    def fill(part: Tensor, first: int) -> None:
        if kernels:
            kernels.uniforms(stream_state(digest, role, first), *kernels.arrays(part))
            return
        bits = torch.empty_like(part, dtype=torch.int32)
        _fill(bits, digest, role, first)
        if part.device.type == "cpu":
            words, numbers = bits.numpy(), part.numpy()
            np.copyto(numbers, np.bitwise_or(np.right_shift(words, 7, out=words), 1, out=words), casting="unsafe")
            np.multiply(numbers, np.float32(2.0**-25), out=numbers)
        else:
            part.copy_(bits.bitwise_right_shift_(7).bitwise_or_(1)).mul_(2.0**-25)

    _each_piece(out, start, fill)
    return out.reshape(tuple(shape))
