"""A *record*: what one rank says of one factored parameter in one step.

Usually a pair payload of its codec. Where this rank has no valid pairs (the gradient was edited, a convolution ran at
several image sizes) it is the plain gradient instead, weight and riding bias in one vector; a record describes itself,
so the other ranks need not know beforehand.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isgq.core.codec import PairCodec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import Key
from isgq.core.payload import Factors, PairPayload, Payload, check_finite
from isgq.layers.capture import Unit, merge
from isgq.planner import REFUSED, UNSEEN
from isgq.windows import Window
from isgq.wire import pack_message

Record = Payload | PairPayload
_PLAIN = "exact"  # codec name of a record that holds a plain gradient
# How far the captured pairs' product may be from autograd's gradient, relative, before they are not trusted.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def names_of(unit: Unit) -> list[str]:
    """Parameter names of a unit: its weight, then its riding bias."""
    return [unit.name] if unit.bias_name is None else [unit.name, unit.bias_name]


def is_used(unit: Unit, windows: Mapping[str, Window]) -> bool:
    """Whether the unit got a gradient on this rank."""
    return any(windows[name].touched for name in names_of(unit))


def local_gradient(unit: Unit, windows: Mapping[str, Window]) -> Tensor:
    """This rank's gradient as autograd made it: weight and riding bias as one flat vector."""
    return torch.cat([windows[name].contribution().reshape(-1) for name in names_of(unit)])


def encode_unit(codec: PairCodec, unit: Unit, windows: Mapping[str, Window], key: Key) -> Record:
    """This rank's record of a unit.

    Raises:
        NonFiniteError: NaN or Inf in what would travel.
    """
    window = windows[unit.name]
    if window.pairs and not any(windows[name].edited for name in names_of(unit)):
        try:
            factors = merge(window.pairs)
        except CodecError:
            pass  # a convolution called at several image sizes: the gradient itself travels
        else:
            return codec.encode_pair(factors, unit.contract, key)
    flat = local_gradient(unit, windows)
    check_finite(flat, f"the gradient of {unit.name!r}")
    return Payload(_PLAIN, tuple(flat.shape), flat.dtype, {}, {"values": flat})


def decode_unit(codec: PairCodec, unit: Unit, record: Record) -> Factors | Tensor:
    """Factors, or the plain gradient as one flat vector; at least float32, on the weight's device.

    Raises:
        CodecError: the record does not fit the unit.
    """
    device = unit.weight.device
    dtype = torch.promote_types(unit.weight.dtype, torch.float32)
    if isinstance(record, PairPayload):
        factors = codec.decode_pair(record)
        x = factors.x.to(device, dtype) if factors.x.is_floating_point() else factors.x.to(device)
        return Factors(x, factors.d.to(device, dtype))
    if record.codec != _PLAIN:
        raise CodecError(f"the plain gradient of {unit.name!r} came as {record.codec!r}")
    size = unit.weight.numel() + (unit.bias.numel() if unit.bias is not None else 0)
    return record.require_tensor("values", size, record.dtype).to(device, dtype)


def reconstruct(unit: Unit, parts: Sequence[Factors | Tensor]) -> Tensor:
    """Sum of the parts' gradients, flat: one contraction for all pairs of one size, plus what came plainly.

    Args:
        unit: whose gradient.
        parts: at least one, in rank order.
    """
    by_size: dict[tuple[torch.Size, torch.Size], list[Factors]] = {}
    for part in parts:
        if isinstance(part, Factors):
            by_size.setdefault((part.x.shape[1:], part.d.shape[1:]), []).append(part)
    gradients = [unit.flat_gradient(merge(group)) for group in by_size.values()]
    gradients += [part for part in parts if isinstance(part, Tensor)]
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


def measure(codec: PairCodec, unit: Unit, windows: Mapping[str, Window], key: Key) -> int:
    """Bytes of this unit's record here; REFUSED where its pairs do not make up autograd's gradient, or UNSEEN."""
    window = windows[unit.name]
    if not is_used(unit, windows):
        return UNSEEN
    if not window.pairs:
        return REFUSED
    try:
        factors = merge(window.pairs)
        local, product = local_gradient(unit, windows), unit.flat_gradient(factors)
        tolerance = _TOLERANCE.get(factors.d.dtype, 1e-3)
        if not torch.linalg.vector_norm(product - local) <= tolerance * torch.linalg.vector_norm(local) + 1e-30:
            return REFUSED if bool(torch.isfinite(local).all()) else UNSEEN  # NaN is reported by the step itself
        return max(1, pack_message([codec.encode_pair(factors, unit.contract, key)])[1][0])
    except NonFiniteError:
        return UNSEEN
    except CodecError:
        return REFUSED
