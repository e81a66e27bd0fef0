"""What one rank says of a parameter in one step (a *record*), and how all ranks' records make its mean gradient.

Two routes travel by records. *Factors*: a pair payload; where this rank has no valid pairs (the gradient was edited, a
convolution ran at several image sizes) the plain gradient instead, weight and riding bias in one vector; a record
describes itself, so the other ranks need not know beforehand. *Direct*: a payload of the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isgq.aggregate import decode_direct
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import Key
from isgq.core.payload import Factors, PairPayload, Payload, check_finite
from isgq.layers.capture import Unit, merge
from isgq.planner import REFUSED, UNSEEN
from isgq.windows import Window
from isgq.wire import pack_message

Record = Payload | PairPayload
_PLAIN = "exact"  # codec name of a record that holds a plain gradient
_CHECK_EVERY = 64  # steps between two checks that the pairs still make up the gradient; each costs one contraction
# How far the captured pairs' product may be from autograd's gradient, relative, before they are not trusted.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def names_of(unit: Unit) -> list[str]:
    """Parameter names of a unit: its weight, then its riding bias."""
    return [unit.name] if unit.bias_name is None else [unit.name, unit.bias_name]


class Carrier(Protocol):
    """Carries the gradients of one or more parameters as one record a step.

    Attributes:
        name: addresses randomness and memory; the ledger's name.
        names: the parameters it carries.
    """

    name: str
    names: list[str]

    def encode(self, key: Key) -> Record:
        """This rank's record; NonFiniteError on NaN or Inf in what would travel."""
        ...

    def decode(self, record: Record) -> Factors | Tensor:
        """One rank's record; CodecError where it does not fit."""
        ...

    def close(self, parts: Sequence[Factors | Tensor], world_size: int) -> None:
        """Write the mean of all ranks' decoded records (in rank order; absent ranks count as zero) to ``p.grad``."""
        ...


@dataclass(eq=False)
class FactorCarrier:
    """Carries a unit's weight and riding bias as factors.

    Attributes:
        codec: compresses the pair.
        unit: whose gradient.
        windows: every parameter's window by name.
    """

    codec: PairCodec
    unit: Unit
    windows: Mapping[str, Window]

    def __post_init__(self) -> None:
        self.name, self.names = self.unit.name, names_of(self.unit)
        self._trusted = True

    def local_gradient(self) -> Tensor:
        """This rank's gradient as autograd made it: weight and riding bias as one flat vector."""
        return torch.cat([self.windows[name].contribution().reshape(-1) for name in self.names])

    def encode(self, key: Key) -> Record:
        """See :class:`Carrier`."""
        factors = self._trusted_factors(key.step)
        if factors is not None:
            return self.codec.encode_pair(factors, self.unit.contract, key)
        flat = self.local_gradient()
        check_finite(flat, f"the gradient of {self.name!r}")
        return Payload(_PLAIN, tuple(flat.shape), flat.dtype, {}, {"values": flat})

    def _trusted_factors(self, step: int) -> Factors | None:
        """All of this step's pairs as one, or None where the gradient itself must travel."""
        windows = [self.windows[name] for name in self.names]
        pairs, arrivals = windows[0].pairs, windows[0].arrivals
        if not self._trusted or not pairs or any(w.edited or w.arrivals != arrivals for w in windows):
            return None
        try:
            factors = merge(pairs)
        except CodecError:  # a convolution called at several image sizes
            return None
        if arrivals > 1 and not self._reproduces(factors):
            return None  # changed behind autograd's back between two backward passes, by way of p.grad.data
        if step % _CHECK_EVERY == 0 and not self._reproduces(factors):
            self._trusted = False
            return None
        return factors

    def _reproduces(self, factors: Factors) -> bool:
        """Whether the factors make up autograd's gradient, or autograd's gradient holds NaN or Inf."""
        local, product = self.local_gradient(), self.unit.flat_gradient(factors)
        tolerance = _TOLERANCE.get(factors.d.dtype, 1e-3)
        error, size = torch.linalg.vector_norm(product - local), torch.linalg.vector_norm(local)
        return bool(error <= tolerance * size + 1e-30) or not bool(torch.isfinite(size))

    def decode(self, record: Record) -> Factors | Tensor:
        """Factors, or the plain gradient as one flat vector; at least float32, on the weight's device.

        Raises:
            CodecError: the record does not fit the unit.
        """
        weight, bias = self.unit.weight, self.unit.bias
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if isinstance(record, PairPayload):
            factors = self.codec.decode_pair(record)
            x = factors.x.to(weight.device, dtype if factors.x.is_floating_point() else factors.x.dtype)
            return Factors(x, factors.d.to(weight.device, dtype))
        if record.codec != _PLAIN:
            raise CodecError(f"the plain gradient of {self.name!r} came as {record.codec!r}")
        size = weight.numel() + (bias.numel() if bias is not None else 0)
        return record.require_tensor("values", size, record.dtype).to(weight.device, dtype)

    def close(self, parts: Sequence[Factors | Tensor], world_size: int) -> None:
        """One contraction for all pairs of one size, plus what came plainly."""
        by_size: dict[tuple[torch.Size, torch.Size], list[Factors]] = {}
        for part in parts:
            if isinstance(part, Factors):
                by_size.setdefault((part.x.shape[1:], part.d.shape[1:]), []).append(part)
        gradients = [self.unit.flat_gradient(merge(group)) for group in by_size.values()]
        mean = _sum([*gradients, *(part for part in parts if isinstance(part, Tensor))]) / world_size
        split = self.unit.weight.numel()
        self.windows[self.name].close(mean[:split])
        if self.unit.bias_name is not None:
            self.windows[self.unit.bias_name].close(mean[split:])

    def measure(self, key: Key) -> int:
        """Bytes of this rank's record; REFUSED where its pairs do not make up autograd's gradient, or UNSEEN."""
        window = self.windows[self.name]
        if not any(self.windows[name].touched for name in self.names):
            return UNSEEN
        if not window.pairs:
            return REFUSED
        try:
            factors = merge(window.pairs)
            if not self._reproduces(factors):
                return REFUSED
            return max(1, pack_message([self.codec.encode_pair(factors, self.unit.contract, key)])[1][0])
        except NonFiniteError:
            return UNSEEN
        except CodecError:
            return REFUSED


@dataclass(eq=False)
class DirectCarrier:
    """Carries gradients of one dtype as one compressed tensor: a single one in its shape, several as one flat vector.

    Attributes:
        codec: compresses the gradient.
        name: addresses randomness and memory.
        windows: of the parameters it carries.
    """

    codec: Codec
    name: str
    windows: Sequence[Window]

    def __post_init__(self) -> None:
        self.names = [window.name for window in self.windows]

    def _gradient(self) -> Tensor:
        parts = [window.contribution() for window in self.windows]
        return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])

    def encode(self, key: Key) -> Record:
        """See :class:`Carrier`."""
        return self.codec.encode(self._gradient(), key)

    def decode(self, record: Record) -> Tensor:
        """See :class:`Carrier`."""
        first = self.windows[0].parameter
        whole = sum(window.parameter.numel() for window in self.windows)
        like = first.detach() if len(self.windows) == 1 else first.detach().new_empty(1).expand(whole)
        return decode_direct(self.codec, record, self.name, like)

    def close(self, parts: Sequence[Factors | Tensor], world_size: int) -> None:
        """See :class:`Carrier`."""
        mean = _sum([part for part in parts if isinstance(part, Tensor)]).reshape(-1) / world_size
        for window, part in zip(
            self.windows, torch.split(mean, [w.parameter.numel() for w in self.windows]), strict=True
        ):
            window.close(part)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum in the given order, so that every rank rounds alike."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
