"""In and out of a direct codec: a tensor to its float32 elements, and elements back to the payload's tensor."""

import torch
from torch import Tensor

from isgq.codecs.buckets import Bucket, Buckets
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.extremes import are_finite, check_finite
from isgq.core.keys import Key
from isgq.core.payload import FLOAT_DTYPES, PairPayload, Payload


def flatten(x: Tensor, key: Key) -> Tensor:
    """Elements in row-major order: float32 ``[numel]``, detached, possibly sharing memory with x.

    Args:
        x: floating point, any shape and strides.
        key: names x in messages.

    Raises:
        CodecError: x is not of a floating dtype.
        NonFiniteError: NaN or Inf in x, or float64 values beyond the range of float32.
    """
    flat = elements(x, key)
    check_finite(x, key.name)
    if x.dtype == torch.float64:
        try:
            check_finite(flat, key.name)
        except NonFiniteError as error:
            limit = torch.finfo(torch.float32).max
            raise NonFiniteError(f"{key.name} (float64) holds values beyond +-{limit:.3g}; scale it down") from error
    return flat


def elements(x: Tensor, key: Key) -> Tensor:
    """The same, of which nobody knows yet whether they are finite.

    Raises:
        CodecError: x is not of a floating dtype.
    """
    if x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in FLOAT_DTYPES)
        raise CodecError(f"{key.name}: cannot compress a tensor of {x.dtype}; allowed are {allowed}")
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def flatten_with_peaks(x: Tensor, key: Key, bucket: Bucket) -> tuple[Tensor, Buckets, Tensor]:
    """Elements as :func:`flatten` gives them, their buckets, and the largest absolute value of each: ``[count]``.

    One pass tells the peaks and, from them, that all is finite.

    Args:
        x: as for :func:`flatten`.
        key: as for :func:`flatten`.
        bucket: the option.
    """
    flat, buckets = elements(x, key), Buckets.of(x.shape, bucket)
    peaks = buckets.absmax(flat)
    if not are_finite(peaks):
        flatten(x, key)  # raises, and says what is wrong
    return flat, buckets, peaks


def restore(flat: Tensor, payload: Payload) -> Tensor:
    """Elements ``[numel]`` to the payload's shape and dtype; what its dtype cannot hold becomes its largest number.

    Raises:
        CodecError: the payload's dtype is not floating point.
    """
    if payload.dtype is flat.dtype:
        return flat.view(payload.shape)
    if payload.dtype not in FLOAT_DTYPES:
        raise CodecError(f"payload of codec {payload.codec!r} is of {payload.dtype}, must be floating point")
    limit = torch.finfo(payload.dtype).max
    if payload.dtype != torch.float32 and limit < torch.finfo(torch.float32).max:
        flat = flat.clamp(-limit, limit)
    return flat.to(payload.dtype).reshape(payload.shape)


def require_codec(payload: Payload | PairPayload, name: str) -> None:
    """Refuse a payload of another codec.

    Raises:
        CodecError: the payload names another codec.
    """
    if payload.codec != name:
        raise CodecError(f"codec {name!r} cannot decode a payload of codec {payload.codec!r}")
