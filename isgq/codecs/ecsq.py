"""Entropy-coded scalar quantization: uniform steps, and symbols in as few bits as a model of known scale allows.

*Dithered* (ECDQ, Zamir and Feder 1992): ``q = round(x / s + u)``, decoded ``s (q - u)``, symbols coded given the dither
u: the error of every element is uniform, independent of everything else, and of variance ``s^2 / 12``. *Dead zone*:
thresholds a little higher than half-way, decoded to what the model expects there: fewer bits, but biased, for what has
memory. Its error is smaller than the tensor, whatever the step.

There is one step for the tensor. The code takes the elements of a bucket for Laplace distributed with the bucket's own
root mean square (:mod:`isgq.codecs.rotation_code`), so that weak buckets, whose elements are below the step, cost
little: reverse water-filling.

Layout of the payload, little-endian:

    tensors["scales"]  bfloat16: the step, then the root mean square of each bucket
    tensors["code"]    uint8: symbols of all elements but those of buckets that are 0
    digest             from which the dither is drawn again; 0 without
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets, check_bucket
from isgq.codecs.flat import flatten, require_codec, restore
from isgq.codecs.rotation_code import decode_symbols, dequantize, digits_for, encode_symbols, quantize
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key, uniform
from isgq.core.payload import Payload
from isgq.core.registry import register_codec

_Reals = npt.NDArray[np.float64]

_FINEST, _COARSEST = 1e-6, 8.0
_WEAKEST = 64.0  # steps: the model takes no bucket for weaker than a step over this
_OVERSHOOT = 1.01  # how far rounding a scale to bfloat16 may understate it
_EXPANSION = 1024  # symbols that a byte may stand for
_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True)
class _Scales:
    """What both sides know of a tensor besides the symbols.

    Attributes:
        step: of all elements.
        rms: of each bucket; 0 for those that are not coded.
        buckets: how the elements are cut.
    """

    step: float
    rms: _Reals
    buckets: Buckets

    @staticmethod
    def of(sent: Tensor, buckets: Buckets) -> "_Scales":
        """From what is sent: bfloat16 ``[1 + buckets]``; CodecError where no scales are that."""  # noqa: DOC501
        step, *rms = sent.double().tolist()
        known = np.asarray(rms)
        if not (math.isfinite(step) and step >= 0 and np.isfinite(known).all() and (known >= 0).all()):
            raise CodecError(f"step {step} and scales {rms} of an ecsq payload must be finite and not negative")
        return _Scales(step, known if step else known * 0, buckets)

    def coded(self) -> npt.NDArray[np.int64]:
        """Bucket of each element that is coded, and nothing of the others: ``[n]``."""
        group: npt.NDArray[np.int64] = np.repeat(np.arange(len(self.rms)), self.buckets.sizes(torch.device("cpu")))
        return group[self.rms[group] > 0]

    def model(self) -> tuple[_Reals, int]:
        """Step in units of each bucket's root mean square, and the digits of the largest symbol there can be."""
        steps = np.minimum(self.step / np.where(self.rms > 0, self.rms, np.inf), _WEAKEST)
        largest = self.rms.max(initial=0.0) * math.sqrt(self.buckets.size) / (self.step or 1.0)
        return np.where(steps > 0, steps, 1.0), digits_for(_OVERSHOOT * largest)


@register_codec("ecsq")
@dataclass(frozen=True)
class ECSQ:
    """Entropy-coded scalar quantization.

    Attributes:
        step: in units of the tensor's root mean square, 1e-6 .. 8; larger is more aggressive. With dither the expected
            squared error is ``step^2 / 12`` of the tensor's squared norm.
        bucket: what shares a scale of the code's model: ``tensor``, ``row`` or a number of elements. Of no effect on
            a dithered error.
        dither: whether there is one; otherwise a dead zone.
    """

    step: float = 1.0
    bucket: Bucket = "row"
    dither: bool = True
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_bucket(self.bucket)
        if not _FINEST <= self.step <= _COARSEST:
            raise OptionError(f"step={self.step} of ecsq must be in {_FINEST} .. {_COARSEST}")

    @property
    def unbiased(self) -> bool:
        """With dither."""
        return self.dither

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a tensor of any shape, on the host."""
        flat, buckets, digest = flatten(x, key), Buckets.of(x.shape, self.bucket), key.digest if self.dither else 0
        sent = self._scales(flat, buckets)
        scales = _Scales.of(sent, buckets)
        group = scales.coded()
        steps, digits = scales.model()
        dither = self._dither(digest, len(group))
        coded = torch.from_numpy(scales.rms > 0).repeat_interleave(buckets.sizes(torch.device("cpu")))
        symbols = quantize(flat.cpu()[coded].double().numpy() / (scales.step or 1.0), dither)
        code = encode_symbols(symbols, dither, group, steps, digits)
        body = torch.frombuffer(bytearray(code), dtype=torch.uint8) if code else torch.empty(0, dtype=torch.uint8)
        tensors = {"scales": sent.to(x.device), "code": body.to(x.device)}
        return Payload(self.name, tuple(x.shape), x.dtype, tensors=tensors, digest=digest)

    def _scales(self, flat: Tensor, buckets: Buckets) -> Tensor:
        """The step and the buckets' root mean squares: bfloat16 ``[1 + buckets]``, on the host."""
        norms = buckets.l2(flat, buckets.absmax(flat)).double().cpu()
        step = self.step * torch.linalg.vector_norm(norms) / math.sqrt(max(buckets.numel, 1))
        rms = norms / buckets.sizes(norms.device).sqrt()
        return torch.cat([step[None], rms]).clamp_(max=_LARGEST).to(torch.bfloat16)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild, drawing the dither again.

        Raises:
            CodecError: the payload is of another codec, or malformed.
        """
        require_codec(payload, self.name)
        buckets = Buckets.of(payload.shape, self.bucket)
        scales = _Scales.of(payload.require_tensor("scales", buckets.count + 1, torch.bfloat16).cpu(), buckets)
        code = payload.tensors.get("code")
        if code is None or code.dtype != torch.uint8 or code.dim() != 1:
            raise CodecError(f"ecsq payload lacks the bytes 'code'; it has {sorted(payload.tensors)}")
        raw = code.cpu().numpy().tobytes()
        if scales.rms.any() and buckets.numel > _EXPANSION * (len(raw) + 64):
            raise CodecError(f"{len(raw)} bytes of an ecsq payload cannot hold {buckets.numel} elements")
        group = scales.coded()
        steps, digits = scales.model()
        dither = self._dither(payload.digest, len(group))
        symbols = decode_symbols(raw, dither, group, steps, digits)
        flat = torch.zeros(buckets.numel, dtype=torch.float64)
        coded = torch.from_numpy(scales.rms > 0).repeat_interleave(buckets.sizes(flat.device))
        values = dequantize(symbols, dither, group, steps) * (scales.step / steps)[group]
        flat[coded] = torch.from_numpy(values)
        limit = torch.finfo(torch.float32).max  # decoded values reach beyond the largest by half a step
        return restore(flat.clamp_(-limit, limit).float().to(code.device), payload)

    def variance(self, x: Tensor) -> Tensor:
        """Variance of each element that is decoded with dither, over keys, exact; float32 of x's shape."""
        flat, buckets = flatten(x, Key("x")), Buckets.of(x.shape, self.bucket)
        scales = _Scales.of(self._scales(flat, buckets), buckets)
        each = torch.from_numpy((scales.rms > 0) * scales.step**2 / 12).float().to(x.device)
        return buckets.spread(each).reshape(x.shape)

    def _dither(self, digest: int, count: int) -> _Reals | None:
        if not self.dither:
            return None
        dither: _Reals = uniform(digest, "ecsq", (count,)).double().numpy()
        return dither
