"""Nested dithered quantization (Abdi and Fekri 2019): fewer bits for a receiver who already knows something similar.

Data: symbols ``q`` ``[numel]`` of ``ratio`` values; tensor ``scale`` float32, the step s of each bucket; the digest.

1. Sender: ``n = round(x / s + u)`` with step ``s = max|x| / levels`` and shared dither u in (-1/2, 1/2), as in plain
   subtractive dithering; of n it sends only the remainder modulo ``ratio``.
2. Receiver: of the numbers -levels .. levels with this remainder it takes the n that is nearest to ``y / s + u``, where
   y, the *side information*, is its own guess of x: for instance the mean of the gradients of other ranks.
3. It decodes ``s (n - u)``.

Where ``|x + s e - y| < ratio s / 2``, with ``s e = s (n - u) - x`` the error of plain dithering, n is the sender's and
the result equals that of plain dithering at step s. Elsewhere it is off by a multiple of ``ratio s``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets, check_bucket, nonzero
from isgq.codecs.flat import flatten_with_peaks, require_codec, restore
from isgq.codecs.grid import round_
from isgq.core.codec import Codec
from isgq.core.errors import CodecError, OptionError
from isgq.core.kernels import compiled
from isgq.core.keys import Key, State, map_stream, uniform
from isgq.core.memory import empty
from isgq.core.payload import Payload, Symbols, symbol_dtype
from isgq.core.registry import register_codec

_MAX_LEVELS = 4095  # float32 must hold n and the dither together
_LARGEST = torch.finfo(torch.float32).max


@register_codec("nested_dithered")
@dataclass(frozen=True)
class NestedDithered:
    """Dithered quantization to 2 levels + 1 values of which ``log2(ratio)`` bits are sent.

    Attributes:
        levels: steps between zero and the largest element, 1 .. 4095; fewer is more aggressive.
        ratio: odd, 3 .. 2 levels + 1; smaller is more aggressive and asks for better side information. At
            2 levels + 1 the remainder is all of n, and no side information is needed.
        bucket: what shares a step: ``tensor``, ``row`` or a number of elements.
    """

    name: ClassVar[str]
    levels: int = 3
    ratio: int = 3
    bucket: Bucket = "tensor"

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if not 1 <= self.levels <= _MAX_LEVELS:
            raise OptionError(f"levels={self.levels} must be in 1 .. {_MAX_LEVELS}")
        if self.ratio % 2 == 0 or not 3 <= self.ratio <= 2 * self.levels + 1:
            raise OptionError(f"ratio={self.ratio} must be odd and in 3 .. 2 levels + 1 = {2 * self.levels + 1}")

    @property
    def unbiased(self) -> bool:
        """Whether :meth:`decode`, without side information, is unbiased."""
        return self.ratio == 2 * self.levels + 1

    def _kernels(self, device: torch.device) -> ModuleType | None:
        """Compiled kernels, which write symbols as bytes."""
        return compiled("quantize", device) if self.ratio <= 256 else None

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress; NonFiniteError on NaN or Inf."""
        (flat, buckets, peaks), digest = flatten_with_peaks(x, key, self.bucket), key.digest
        scale = peaks.div_(self.levels)
        divisors = nonzero(scale)
        symbols = empty(flat.numel(), symbol_dtype(self.ratio), flat.device)

        def work(block: Tensor, elements: slice, rows: slice) -> None:
            dither = uniform(digest, "dither", block.shape, block.device, start=elements.start)
            n = round_((block / divisors[rows].unsqueeze(1)).add_(dither).clamp_(-self.levels, self.levels))
            # The ratio being odd, this is n + ratio // 2 modulo ratio.
            n.sub_(round_(n * (1 / self.ratio)), alpha=self.ratio).add_(self.ratio // 2)
            symbols[elements].view(block.shape).copy_(n)

        if kernels := self._kernels(flat.device):
            values, steps, out = kernels.arrays(flat, divisors, symbols)

            def nest(start: int, stop: int, state: State) -> None:
                kernels.nest(values, steps, buckets.size, start, stop, state, self.levels, self.ratio, out)

            map_stream(nest, buckets.numel, digest, "dither", flat.device)
        else:
            buckets.map(flat, work)
        return Payload(
            self.name, tuple(x.shape), x.dtype, {"q": Symbols(symbols, self.ratio)}, {"scale": scale}, digest
        )

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild without side information (y = 0): right where ``|x + s e| < ratio s / 2``, or if :attr:`unbiased`."""
        return self.decode_with(payload, None)

    def decode_with(self, payload: Payload, side: Tensor | None) -> Tensor:
        """Rebuild with side information.

        Args:
            payload: of a codec with the same options.
            side: the receiver's guess y of the tensor, of its shape, any floating dtype; None stands for zeros.

        Raises:
            CodecError: the payload does not fit the codec, or y does not fit the payload.
        """
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        symbols = payload.require_symbols("q", buckets.numel, self.ratio).values
        scale = payload.require_tensor("scale", buckets.count, torch.float32).reshape(-1)
        if side is not None and tuple(side.shape) != payload.shape:
            raise CodecError(f"side information has shape {tuple(side.shape)}, must be the payload's {payload.shape}")
        guess = None if side is None else side.detach().reshape(-1).to(symbols.device, torch.float32)
        divisor = nonzero(scale)
        if kernels := self._kernels(symbols.device):
            # The guess is written over, so it has to be a copy.
            flat = torch.zeros(buckets.numel, device=symbols.device) if guess is None else guess.clone()
            given, scales, steps, out = kernels.arrays(symbols, scale, divisor, flat)

            def unnest(start: int, stop: int, state: State) -> None:
                kernels.unnest(given, scales, steps, buckets.size, start, stop, state, self.levels, self.ratio, out)

            map_stream(unnest, buckets.numel, payload.digest, "dither", flat.device)
            return restore(flat, payload)
        flat = empty(buckets.numel, torch.float32, symbols.device)

        def work(block: Tensor, elements: slice, rows: slice) -> None:
            dither = uniform(payload.digest, "dither", block.shape, block.device, start=elements.start)
            remainder = symbols[elements].view(block.shape).to(torch.float32).sub_(self.ratio // 2)
            target = (
                dither if guess is None else guess[elements].view(block.shape) / divisor[rows].unsqueeze(1) + dither
            )
            n = self._nearest(remainder, target)
            torch.mul(n.sub_(dither), scale[rows].unsqueeze(1), out=block).clamp_(-_LARGEST, _LARGEST)

        buckets.map(flat, work)
        return restore(flat, payload)

    def _nearest(self, remainder: Tensor, target: Tensor) -> Tensor:
        """The number n in -levels .. levels, congruent to ``remainder`` modulo ratio, that is nearest to ``target``."""
        half = self.ratio // 2  # the ratio being odd, floor(m / ratio) is round((m - half) / ratio)
        turns = round_(target.sub(remainder).div_(self.ratio))
        lowest = round_(remainder.add(self.levels - half).div_(self.ratio)).neg_()
        highest = round_(remainder.neg().add_(self.levels - half).div_(self.ratio))
        return turns.clamp_(lowest, highest).mul_(self.ratio).add_(remainder)

    def variance(self, x: Tensor) -> Tensor:
        """Variance of each decoded element over keys, ``s**2 / 12``, where the side information is good enough.

        Args:
            x: the tensor that is to be sent; the result is float32 of its shape.
        """
        _, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        step = peaks / self.levels
        return buckets.spread(step.square() / 12).reshape(x.shape)


def decode_in_order(messages: Iterable[tuple[Codec, Payload]]) -> list[Tensor]:
    """Decode the messages of several ranks for the same tensor, each nested one with the mean of those before it.

    Args:
        messages: codec and payload of each rank. The first must be decodable by itself: of any other codec, or of a
            nested one whose ratio is 2 levels + 1.

    Returns:
        The decoded tensors, in the same order.

    Raises:
        CodecError: a first message that needs side information, or a payload that does not fit its codec.
    """
    decoded: list[Tensor] = []
    total: Tensor | None = None
    for codec, payload in messages:
        if not isinstance(codec, NestedDithered):
            decoded.append(codec.decode(payload))
        elif total is not None:
            decoded.append(codec.decode_with(payload, total / len(decoded)))
        elif codec.unbiased:
            decoded.append(codec.decode(payload))
        else:
            raise CodecError(
                f"the first message is nested ({codec}) and there is nothing yet to serve as side information: "
                "put a rank with another codec, or one with ratio = 2 levels + 1, first"
            )
        latest = decoded[-1].to(torch.float32)
        total = latest if total is None else total + latest
    return decoded
