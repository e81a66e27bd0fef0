"""What one rank says of some gradients in one step (a *record*), and how all ranks' records make their mean.

Two routes travel by records. *Factors*: a pair payload; where this rank has no valid pairs (the gradient was edited, a
convolution ran at several image sizes) the plain gradient instead, weight and riding bias in one vector; a record
describes itself, so the other ranks need not know beforehand. *Direct*: a payload of the gradient, of some of its rows,
or of several gradients as one vector; where this rank does not trust its codec any more, the plain gradient with all
that was left out of earlier ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from isgq.codecs.exact import Exact
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec, PairCodec, PlansTogether, learned_by, pair_digests
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.extremes import check_finite
from isgq.core.keys import Key
from isgq.core.payload import Factors, LowRank, PairPayload, Payload
from isgq.layers.capture import Unit, merge
from isgq.layers.trust import fit, make_up, surely_make_up
from isgq.planner import NO_PAIR, NO_PRODUCT, PAIRLESS, REFUSED, UNSEEN
from isgq.rows import Rows, split
from isgq.windows import Window

Record = Payload | PairPayload
Decoded = Factors | LowRank | Tensor
_EXACT = Exact()
_PLAIN = _EXACT.name  # of a record that holds a plain gradient


def ledger_name(carrier: "Carrier") -> str:
    """The parameter that a carrier's bytes are counted for, or what stands for several."""
    names = {rows.name for rows in carrier.rows}
    return names.pop() if len(names) == 1 else carrier.name


def names_of(unit: Unit) -> Sequence[str]:
    """Parameter names of a unit: its weight, then its riding bias."""
    return [unit.name] if unit.bias_name is None else [unit.name, unit.bias_name]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A record that its codec makes together with others: see :func:`finish`."""

    codec: PlansTogether
    prepared: Any


def finish(
    records: Sequence[Record | Unfinished], overhead: int = 0, say: Callable[[str], None] = lambda _: None
) -> list[Record]:
    """Let each codec make what is unfinished among a step's records.

    Args:
        records: of one session.
        overhead: bytes that are sent besides the records.
        say: see :class:`PlansTogether`.
    """
    begun: dict[int, list[Unfinished]] = {}
    for record in records:
        if isinstance(record, Unfinished):
            begun.setdefault(id(record.codec), []).append(record)
    made = {
        codec: iter(group[0].codec.encode_together([each.prepared for each in group], overhead, say))
        for codec, group in begun.items()
    }
    return [next(made[id(record.codec)]) if isinstance(record, Unfinished) else record for record in records]


class Carrier(Protocol):
    """Carries the gradients of one or more parameters as one record a step.

    Attributes:
        name: addresses randomness and memory; the ledger's name.
        names: the parameters it carries, or some rows of them.
        rows: what it carries.
        server: the rank that averages it, where not every rank does so for itself.
        distrusted: why this rank's gradient travels whole from now on; empty if it does not.
    """

    name: str
    names: Sequence[str]
    rows: Sequence[Rows]
    server: int
    distrusted: str

    @property
    def alone(self) -> bool:
        """Whether its record depends on no other's, so that it may be made and sent before the others."""
        ...

    def encode(self, gradients: Mapping[str, Tensor], key: Key) -> Record | Unfinished:
        """This rank's record; NonFiniteError on NaN or Inf in what would travel.

        Args:
            gradients: this rank's, whole, by parameter name.
            key: of this carrier's name.
        """
        ...

    def decode(self, record: Record) -> Decoded:
        """One rank's record; CodecError where it does not fit."""
        ...

    def digests(self, key: Key) -> int | tuple[int, int]:
        """Digests of a record encoded with this key, unless it says otherwise."""
        ...

    def means(self, parts: Sequence[Decoded], world_size: int, replace: bool = False) -> list[Tensor]:
        """Of all ranks' decoded records (in rank order; absent ranks count as zero), for each of ``rows``, flat.

        Tensors that nobody else holds, though they may be views of one; with ``replace``, written over this rank's
        gradients, where possible.
        """
        ...


@dataclass(eq=False)
class FactorCarrier:
    """Carries a unit's weight and riding bias as factors.

    Attributes:
        codec: compresses the pair.
        unit: whose gradient.
        windows: every parameter's window by name.
        server: see :class:`Carrier`.
        say: told, by name, of gradients whose pairs are missing or wrong.
        distrusted: see :class:`Carrier`.
    """

    codec: PairCodec
    unit: Unit
    windows: Mapping[str, Window]
    server: int = 0
    say: Callable[[str], None] = lambda _: None
    distrusted: str = ""

    def __post_init__(self) -> None:
        self.name, self.names = self.unit.name, names_of(self.unit)
        self.rows: Sequence[Rows] = [Rows.whole(name, self.windows[name].parameter.shape) for name in self.names]
        self._weight = self.windows[self.name].parameter  # the module's, unless it has been parametrised since
        self._planner = self.codec if isinstance(self.codec, PlansTogether) else None

    @property
    def alone(self) -> bool:
        """See :class:`Carrier`; what all ranks learn they learn in the order of the carriers."""
        return learned_by(self.codec) is None and not (self._planner and self._planner.together)

    def _flat(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """This rank's gradient as autograd made it: weight and riding bias as one flat vector."""
        return torch.cat([gradients[name].reshape(-1) for name in self.names])

    def encode(self, gradients: Mapping[str, Tensor], key: Key) -> Record | Unfinished:
        """See :class:`Carrier`."""
        factors = self._trusted_factors(gradients, key)
        if isinstance(factors, Factors):
            return self.begin(factors, key)
        flat = self._flat(gradients)
        check_finite(flat, f"the gradient of {self.name!r}")
        self.say(f"{self.name} travels whole wherever this happens: {factors}")
        return Payload(_PLAIN, tuple(flat.shape), flat.dtype, {}, {"values": flat})

    def begin(self, factors: Factors, key: Key) -> Record | Unfinished:
        """The record of these factors, or what :func:`finish` makes it of."""
        if self._planner is None or not self._planner.together:
            return self.codec.encode_pair(factors, self.unit.contract, key)
        prepared = self._planner.prepare(factors, self.unit.contract, key)
        return prepared if isinstance(prepared, PairPayload) else Unfinished(self._planner, prepared)

    def _trusted_factors(self, gradients: Mapping[str, Tensor], key: Key) -> Factors | str:
        """All of this step's pairs as one, unscaled; or why the gradient itself must travel."""
        if self.distrusted:
            return self.distrusted
        windows = [self.windows[name] for name in self.names]
        if any(w.edited or w.arrivals != windows[0].arrivals for w in windows):
            return "its gradient was changed, or broke off, between two backward passes of one step"
        if not windows[0].captured:
            return NO_PAIR
        try:
            factors = windows[0].unscaled(merge(windows[0].captured))
        except CodecError as error:
            return str(error)
        dtype = windows[0].captured[0].d.dtype  # of autograd's product; these factors may be unscaled
        if windows[0].owed:
            fine = surely_make_up(self.unit, factors, [gradients[name] for name in self.names[1:]], dtype)
        else:
            fine = make_up(self.unit, factors, [gradients[name] for name in self.names], dtype, key)
        return factors if fine else NO_PRODUCT

    def decode(self, record: Record) -> Decoded:
        """Factors, or the plain gradient as one flat vector; at least float32, on the weight's device.

        Raises:
            CodecError: the record does not fit the unit.
        """
        weight = self._weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if isinstance(record, PairPayload):
            factors = self.codec.decode_pair(record)
            if isinstance(factors, LowRank):
                return self._fitting(factors)
            x = factors.x.to(weight.device, dtype if factors.x.is_floating_point() else factors.x.dtype)
            return Factors(x, factors.d.to(weight.device, dtype))
        if record.codec != _PLAIN:
            raise CodecError(f"the plain gradient of {self.name!r} came as {record.codec!r}")
        size = sum(rows.numel for rows in self.rows)
        return record.require_tensor("values", size, record.dtype).to(weight.device, dtype)

    def _fitting(self, product: LowRank) -> LowRank:
        """The same in the dtype and on the device of the mean; CodecError if it is not of the weight's size."""  # noqa: DOC501
        weight = self._weight
        outputs, columns = weight.shape[0], weight[0].numel() + 1
        if (product.left.shape[1], product.right.shape[1]) != (outputs, columns):
            raise CodecError(
                f"{self.name!r} takes a gradient of {outputs} x {columns}, got one of "
                f"{product.left.shape[1]} x {product.right.shape[1]}"
            )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return LowRank(product.left.to(weight.device, dtype), product.right.to(weight.device, dtype))

    def digests(self, key: Key) -> tuple[int, int]:
        """See :class:`Carrier`."""
        return pair_digests(self.codec, key)

    def means(self, parts: Sequence[Decoded], world_size: int, replace: bool = False) -> list[Tensor]:
        """One contraction for all pairs of one size, one for all sums of outer products, and what came plainly.

        One factor is divided by the number of ranks, which takes less than to divide the gradient.
        """
        by_size: dict[tuple[torch.Size, torch.Size], list[Factors]] = {}
        for part in parts:
            if isinstance(part, Factors):
                by_size.setdefault((part.x.shape[1:], part.d.shape[1:]), []).append(part)
        sums: list[Factors | LowRank] = []
        for group in by_size.values():
            pair = merge(group)
            sums.append(Factors(pair.x, pair.d / world_size))
        if products := [part for part in parts if isinstance(part, LowRank)]:
            left, right = (_joined([getattr(p, side) for p in products]) for side in ("left", "right"))
            sums.append(LowRank(left / world_size, right))
        fits = [(each.d if isinstance(each, Factors) else each.left).dtype for each in sums] == [self._weight.dtype]
        memory = self.windows[self.name].memory() if fits and replace else None
        gradients = [self.unit.gradients(each, memory) for each in sums]
        gradients += [split(self.rows, part / world_size) for part in parts if isinstance(part, Tensor)]
        return [_sum([each.reshape(-1) for each in every]) for every in zip(*gradients, strict=True)]

    def candidate(self, gradients: Mapping[str, Tensor], key: Key) -> Record | Unfinished | int:
        """This rank's record of its pairs; UNSEEN without a gradient, or why there is no record of it."""
        window = self.windows[self.name]
        if not any(self.windows[name].touched for name in self.names):
            return UNSEEN
        if not window.pairs:
            return PAIRLESS
        try:
            factors = window.unscaled(merge(window.pairs))
            if not fit(self.unit, factors, [gradients[name] for name in self.names], window.pairs[0].d.dtype):
                return REFUSED
            return self.begin(factors, key)
        except NonFiniteError:
            return UNSEEN
        except CodecError:
            return REFUSED


@dataclass(eq=False)
class DirectCarrier:
    """Carries rows of one gradient, in their shape, or of several gradients as one flat vector.

    Attributes:
        codec: compresses them.
        name: see :class:`Carrier`.
        rows: see :class:`Carrier`; of gradients of one dtype.
        server: see :class:`Carrier`.
        distrusted: see :class:`Carrier`.
        riding: further parameters that the rows tell of; see :mod:`isgq.rounds`.
    """

    codec: Codec
    name: str
    rows: Sequence[Rows]
    server: int = 0
    distrusted: str = ""
    riding: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.names: Sequence[str] = list(dict.fromkeys([*(rows.name for rows in self.rows), *self.riding]))

    @property
    def alone(self) -> bool:
        """See :class:`Carrier`."""
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what the codec sees."""
        first = self.rows[0]
        if len(self.rows) > 1:
            return (sum(rows.numel for rows in self.rows),)
        return (first.stop - first.start, *first.shape[1:]) if first.shape else ()

    def encode(self, gradients: Mapping[str, Tensor], key: Key) -> Record:
        """See :class:`Carrier`."""
        parts = [rows.of(gradients[rows.name]) for rows in self.rows]
        whole = parts[0] if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])
        if not self.distrusted:
            return self.codec.encode(whole, key)
        memory = memory_of(self.codec)
        return _EXACT.encode(whole, key) if memory is None else memory.encode_by(_EXACT, whole, key)

    def decode(self, record: Record) -> Tensor:
        """See :class:`Carrier`: at least float32.

        Raises:
            CodecError: the record is no payload of that shape.
        """
        if not isinstance(record, Payload) or record.shape != self.shape:
            came = getattr(record, "shape", type(record).__name__)
            raise CodecError(f"{self.name!r} of shape {self.shape} came as {came}")
        codec = _EXACT if record.codec == _EXACT.name else self.codec
        return codec.decode(record).to(torch.promote_types(record.dtype, torch.float32))

    def digests(self, key: Key) -> int:
        """See :class:`Carrier`."""
        return key.digest

    def means(self, parts: Sequence[Decoded], world_size: int, replace: bool = False) -> list[Tensor]:
        """See :class:`Carrier`."""
        return split(self.rows, _sum([part for part in parts if isinstance(part, Tensor)]) / world_size)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum in the given order, so that every rank rounds alike."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
