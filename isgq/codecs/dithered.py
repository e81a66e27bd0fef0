"""Dithered quantization: the error is a uniform number that does not depend on the tensor.

Layout of a payload of n elements in row-major order, cut into buckets of equal size (the last may be shorter):

    symbols["levels"]   [n]        q + L in 0 .. 2L; 2L + 1 is an exact zero (sparse); 0, 1 for q = -1, +1 (one bit)
    tensors["scales"]   [buckets]  float32: the step s (subtractive, half) or the peak (one bit); 0 for a zero bucket
    digest                         of the key, from which the dither is drawn again

With dither u uniform in (-1/2, 1/2), drawn alike by sender and receiver:

    subtractive  s = max|w| / L    q = round(w/s + u)      decoded s (q - u)        error variance s^2 / 12
    half         s = max|w| / L    q = round(w/s + u)      decoded s q              s^2 f (1 - f), f = frac(w/s)
    one_bit      sigma = 2 max|w|  q = sign(w/sigma + u)   decoded sigma (q/2 - u)  sigma^2 / 12

All three are unbiased. Sources: Abdi and Fekri, "Indirect Stochastic Gradient Quantization", AAAI 2020; subtractive
dither: Schuchman 1964; half: the stochastic rounding of QSGD (Alistarh et al., NeurIPS 2017).
"""

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets, check_bucket, nonzero
from isgq.codecs.compare import not_negative, not_zero
from isgq.codecs.flat import elements, flatten, flatten_with_peaks, require_codec, restore
from isgq.codecs.grid import nearest_integer
from isgq.core.errors import OptionError
from isgq.core.kernels import compiled
from isgq.core.keys import Key, State, map_stream, stream_state, uniform
from isgq.core.memory import empty
from isgq.core.parallel import is_one_part
from isgq.core.payload import Payload, Symbols, symbol_dtype
from isgq.core.registry import register_codec

_ROLE = "dither"
_MAX_LEVELS = 4095  # float32 must hold w/s + u with bits to spare for u
_LARGEST = torch.finfo(torch.float32).max


@register_codec("dithered")
@dataclass(frozen=True)
class Dithered:
    """Dithered uniform quantization with one scale a bucket; unbiased, error independent of the tensor.

    Attributes:
        levels: L, positive levels; q is in -L .. L. More is finer. 1 .. 4095, and 1 for ``mode="one_bit"``.
        bucket: elements that share a scale: ``"row"`` (a row is an entry of the first dimension; tensors of one
            dimension or none are one row), ``"tensor"``, or that many elements. Smaller is finer.
        sparse: give exact zeros a symbol of their own and decode them as zeros (alphabet 2L + 2 instead of 2L + 1).
            Concerns ``mode="subtractive"`` alone: half decodes zeros as zeros anyway, one_bit has no room for them.
        mode: ``"subtractive"``, ``"half"`` (the dither is added, but not subtracted: the receiver draws no random
            numbers, the variance is up to three times larger) or ``"one_bit"``.
    """

    levels: int = 1
    bucket: Bucket = "row"
    sparse: bool = True
    mode: Literal["subtractive", "half", "one_bit"] = "subtractive"
    name: ClassVar[str]
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in {"subtractive", "half", "one_bit"}:
            raise OptionError(f"mode is {self.mode!r}, must be 'subtractive', 'half' or 'one_bit'")
        most = 1 if self.mode == "one_bit" else _MAX_LEVELS
        if not 1 <= self.levels <= most:
            raise OptionError(f"levels is {self.levels}, must be in 1 .. {most} for mode {self.mode!r}")
        check_bucket(self.bucket)

    @cached_property  # like the next, asked for again and again
    def _marks_zeros(self) -> bool:
        return self.sparse and self.mode == "subtractive"

    @cached_property
    def _alphabet(self) -> int:
        return 2 if self.mode == "one_bit" else 2 * self.levels + 1 + self._marks_zeros

    def _scales(self, peaks: Tensor) -> Tensor:
        return peaks if self.mode == "one_bit" or self.levels == 1 else peaks.div_(self.levels)

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Quantize a floating-point tensor of any shape.

        Raises:
            NonFiniteError: x holds NaN or Inf, also as float32.
        """
        kernels, digest = self._kernels(x.device), key.digest
        if kernels and is_one_part(x):
            scales, symbols = self._encode_part(kernels, x, key, digest)
        else:
            scales, symbols = self._encode_pieces(kernels, x, key, digest)
        streams = {"levels": Symbols(symbols, self._alphabet)}
        shared = 0 if self.mode == "half" else digest
        return Payload(self.name, tuple(x.shape), x.dtype, streams, {"scales": scales}, shared)

    def _kernels(self, device: torch.device) -> ModuleType | None:
        """Compiled kernels, which write symbols as bytes."""
        return compiled("quantize", device) if self._alphabet <= 256 else None

    def _encode_part(self, kernels: ModuleType, x: Tensor, key: Key, digest: int) -> tuple[Tensor, Tensor]:
        """Scales and symbols, by one kernel."""
        flat, buckets = elements(x, key), Buckets.of(x.shape, self.bucket)
        scales = torch.empty(buckets.count, dtype=torch.float32)
        symbols = torch.empty(buckets.numel, dtype=torch.uint8)
        state, options = stream_state(digest, _ROLE, 0), (self.levels, self.mode == "one_bit", self._marks_zeros)
        if not kernels.dither_part(flat.numpy(), buckets.size, state, *options, scales.numpy(), symbols.numpy()):
            flatten(x, key)  # raises, and says what is wrong
        return scales, symbols

    def _encode_pieces(self, kernels: ModuleType | None, x: Tensor, key: Key, digest: int) -> tuple[Tensor, Tensor]:
        """The same, piece by piece."""
        flat, buckets, peaks = flatten_with_peaks(x, key, self.bucket)
        scales, symbols = self._scales(peaks), empty(flat.numel(), symbol_dtype(self._alphabet), flat.device)
        divisors = nonzero(scales)
        if kernels:
            self._encode_compiled(kernels, flat, divisors, buckets, digest, symbols)
        else:
            column = divisors.unsqueeze(1)

            def work(block: Tensor, elements: slice, rows: slice) -> None:
                dither = uniform(digest, _ROLE, block.shape, block.device, start=elements.start)
                self._quantize(block, column[rows], dither, symbols[elements].view(block.shape))

            buckets.map(flat, work)
        return scales, symbols

    def _encode_compiled(
        self, kernels: ModuleType, flat: Tensor, divisors: Tensor, buckets: Buckets, digest: int, symbols: Tensor
    ) -> None:
        """:meth:`_quantize` of all elements."""
        values, scales, out = kernels.arrays(flat, divisors, symbols)

        def work(start: int, stop: int, state: State) -> None:
            if self.mode == "one_bit":
                kernels.dither_signs(values, scales, buckets.size, start, stop, state, out)
            else:
                sparse = self._marks_zeros
                kernels.dither(values, scales, buckets.size, start, stop, state, self.levels, sparse, out)

        map_stream(work, buckets.numel, digest, _ROLE, flat.device)

    def _quantize(self, block: Tensor, divisor: Tensor, dither: Tensor, out: Tensor) -> None:
        """Write the symbols of a block ``[rows, columns]`` with divisors ``[rows, 1]``."""
        w = torch.div(block, divisor)
        if self.mode == "one_bit":  # sign(w/sigma + u) with sigma = 2 peak
            out.copy_(not_negative(w.add_(dither, alpha=2)))
            return
        # |w/s + u| < L + 1/2, but float32 may round the sum up to it.
        q = nearest_integer(w.add_(dither).clamp_(-self.levels, self.levels))
        if self._marks_zeros:
            zero = 2 * self.levels + 1
            out.copy_(q.add_(self.levels - zero)).mul_(not_zero(block)).add_(zero)  # bytes wrap, and back
        else:
            out.copy_(q.add_(self.levels))

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor from symbols and scales, drawing the sender's dither again.

        Raises:
            CodecError: the payload is of another codec, or its parts do not fit its shape and these options.
        """
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        symbols = payload.require_symbols("levels", buckets.numel, self._alphabet).values
        scales = payload.require_tensor("scales", buckets.count, torch.float32).reshape(-1)
        flat = empty(buckets.numel, torch.float32, symbols.device)
        if kernels := self._kernels(flat.device):
            self._decode_compiled(kernels, symbols, scales, buckets, payload.digest, flat)
        else:
            column = scales.unsqueeze(1)

            def work(block: Tensor, elements: slice, rows: slice) -> None:
                decoded = self._rebuild(symbols[elements].view(block.shape), payload.digest, elements.start)
                # s (q - u) reaches beyond the peak by half a step, which may be beyond float32.
                torch.mul(decoded, column[rows], out=block).clamp_(-_LARGEST, _LARGEST)

            buckets.map(flat, work)
        return restore(flat, payload)

    def _decode_compiled(
        self, kernels: ModuleType, symbols: Tensor, scales: Tensor, buckets: Buckets, digest: int, flat: Tensor
    ) -> None:
        """:meth:`_rebuild` of all elements, times their scales."""
        given, each, out = kernels.arrays(symbols, scales, flat)
        step, shift = (2, 1) if self.mode == "one_bit" else (1, self.levels)
        if self.mode != "half" and is_one_part(flat):
            state = stream_state(digest, _ROLE, 0)
            kernels.undither(given, each, buckets.size, 0, buckets.numel, state, step, shift, self._marks_zeros, out)
            return

        def work(start: int, stop: int, state: State) -> None:
            if self.mode == "half":
                kernels.rescale(given, each, buckets.size, start, stop, shift, 1, out)
            else:
                sparse = self._marks_zeros
                kernels.undither(given, each, buckets.size, start, stop, state, step, shift, sparse, out)

        map_stream(work, buckets.numel, digest, _ROLE, flat.device)
        if self.mode == "half":  # L (peak / L) may round up to infinity
            flat.clamp_(-_LARGEST, _LARGEST)

    def _rebuild(self, symbols: Tensor, digest: int, first: int) -> Tensor:
        """Decoded values in units of the scale, of a block that begins at element ``first``."""
        q = symbols.to(torch.float32)
        if self.mode == "half":
            return q.sub_(self.levels)
        dither = uniform(digest, _ROLE, symbols.shape, symbols.device, start=first)
        if self.mode == "one_bit":  # sigma (q/2 - u) = peak (q - 2u)
            return q.mul_(2).sub_(1).sub_(dither, alpha=2)
        q.sub_(self.levels).sub_(dither)
        return q.mul_(symbols.ne(2 * self.levels + 1)) if self._marks_zeros else q

    def variance(self, x: Tensor) -> Tensor:
        """Variance over keys of each decoded element: float32 of the shape of x, exact (see the module's table).

        Args:
            x: the tensor that is to be sent.
        """
        flat, buckets, peaks = flatten_with_peaks(x, Key("x"), self.bucket)
        scale = buckets.spread(self._scales(peaks))
        if self.mode == "one_bit":
            return (scale.square() / 3).view(x.shape)
        if self.mode == "half":
            fraction = (flat / nonzero(scale)).frac_().abs_()
            return (scale.square() * fraction * (1 - fraction)).view(x.shape)
        variance = scale.square() / 12
        return (variance.masked_fill(flat == 0, 0.0) if self.sparse else variance).view(x.shape)
