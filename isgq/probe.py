"""What each codec takes for each gradient of one step, measured on this rank.

Every codec really encodes, packs, unpacks and decodes the gradients, all of one codec in one message, some times with
other random numbers: bytes are means, times the least. What a codec does for all gradients together (a shared budget,
packing) is shared out by their bytes. Errors are closed forms where there are any:

    rotated                            the variance of its plan
    dithered on the factors of Linear  :func:`isgq.codecs.variance.product_variance`, and the bias's
    dithered, qsgd, ... on gradients   the codec's ``variance``

and otherwise the mean squared distance between the gradient and what was decoded.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from isgq.codecs.pair import Separate
from isgq.codecs.rotated import Prepared, Rotated, spectrum_of
from isgq.codecs.variance import product_variance
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.core.registry import AnyCodec
from isgq.correspondence import Correspondence
from isgq.costs import Estimate, dense
from isgq.layers.capture import Unit, merge
from isgq.planner import REFUSED, UNSEEN
from isgq.records import Carrier, DirectCarrier, FactorCarrier, Record, Unfinished, finish, names_of
from isgq.rows import Rows
from isgq.windows import Contributions, Window

_T = TypeVar("_T")
_ROUNDS = 3  # the first says what the messages after it leave out, and warms up

FIELDS = ("size", "error", "encode", "decode")
"""What a measurement consists of, in this order; see :class:`isgq.costs.Estimate`. A size may be REFUSED or UNSEEN."""


@runtime_checkable
class _KnowsVariance(Protocol):
    def variance(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Item:
    """What takes one way: a weight and its riding bias, or any other parameter.

    Attributes:
        name: of the weight or parameter.
        names: all parameters.
        unit: whose factors there are, or None.
        reason: why there are none.
    """

    name: str
    names: Sequence[str]
    unit: Unit | None = None
    reason: str = ""

    def carrier(self, way: AnyCodec, windows: Mapping[str, Window]) -> Carrier | None:
        """Carries it that way; None if it cannot. A direct codec carries the weight, and the bias stays plain."""
        if not isinstance(way, PairCodec):
            return DirectCarrier(way, self.name, [Rows.whole(self.name, windows[self.name].parameter.shape)])
        return None if self.unit is None else FactorCarrier(way, self.unit, windows)

    def plain_size(self, names: Sequence[str], windows: Mapping[str, Window]) -> int:
        """Bytes of the plain gradients but for those of these parameters."""
        rest = [windows[name].parameter for name in self.names if name not in names]
        return sum(p.numel() * p.element_size() for p in rest)


def items_of(units: Sequence[Unit], windows: Mapping[str, Window], reasons: Mapping[str, str]) -> list[Item]:
    """All of a model, in the order of the parameters."""
    found = {unit.name: Item(unit.name, names_of(unit), unit) for unit in units}
    riding = {unit.bias_name for unit in units}
    rest = {name: Item(name, [name], None, reasons.get(name, "")) for name in windows if name not in riding}
    return [found.get(name, rest.get(name, Item(name, [name]))) for name in windows if name not in riding]


def probe(items: Sequence[Item], ways: Sequence[AnyCodec], windows: Mapping[str, Window], seed: int) -> Tensor:
    """Every codec's measurement of every gradient: float64 ``[items, ways, FIELDS]``.

    Args:
        items: the gradients.
        ways: the codecs.
        windows: of all trainable parameters, after a backward pass.
        seed: of the codecs' random numbers.
    """
    table = torch.zeros(len(items), len(ways), len(FIELDS), dtype=torch.float64)
    for j, way in enumerate(ways):
        carriers = [item.carrier(way, windows) for item in items]
        gradients, sound = Contributions(windows), []
        for i, carrier in enumerate(carriers):
            verdict = REFUSED if carrier is None else _verdict(carrier, windows, seed)
            table[i, j, 0] = verdict
            if carrier is not None and verdict > 0:
                sound.append((i, carrier))
        try:
            measured = _measure(way, [carrier for _, carrier in sound], gradients, seed) if sound else []
        except NonFiniteError:
            measured = [(UNSEEN, 0.0, 0.0, 0.0)] * len(sound)  # the step itself will say so
        except CodecError:
            measured = [(REFUSED, 0.0, 0.0, 0.0)] * len(sound)
        for (i, _), row in zip(sound, measured, strict=True):
            table[i, j] = torch.tensor(row, dtype=torch.float64)
    return table


def estimates(
    item: Item, tables: Tensor, ways: Mapping[str, AnyCodec], windows: Mapping[str, Window]
) -> list[Estimate]:
    """The ways that a gradient has, plain first: the largest record and times of any rank, the mean error of those.

    Args:
        item: the gradient.
        tables: ``[ranks, ways, FIELDS]``.
        ways: the codecs by name.
        windows: of all trainable parameters.
    """
    found = [dense(item.plain_size([], windows))]
    for j, (name, way) in enumerate(ways.items()):
        seen = tables[tables[:, j, 0] != UNSEEN, j]
        carrier = item.carrier(way, windows)
        if carrier is not None and len(seen) and float(seen[:, 0].min()) > 0:
            size, _, encode, decode = seen.amax(0).tolist()
            plain, error = item.plain_size(carrier.names, windows), float(seen[:, 1].mean())
            found.append(Estimate(name, size, plain, error, encode, decode, way.unbiased))
    return found


def energies(items: Sequence[Item], windows: Mapping[str, Window]) -> list[float]:
    """Squared norm of each gradient of this rank; infinite where it holds NaN."""
    squares = [sum(float(windows[n].contribution().double().square().sum()) for n in item.names) for item in items]
    return [square if math.isfinite(square) else math.inf for square in squares]


def _verdict(carrier: Carrier, windows: Mapping[str, Window], seed: int) -> int:
    """REFUSED, UNSEEN, or 1 where the carrier has a record."""
    if isinstance(carrier, FactorCarrier):
        found = carrier.candidate(Contributions(windows), Key(carrier.name, seed))
        return found if isinstance(found, int) else 1
    return 1 if windows[carrier.name].touched and windows[carrier.name].parameter.numel() else UNSEEN


def timed(work: Callable[..., _T], *args: Any) -> tuple[float, _T]:
    """Seconds and result: as on an idle machine, the time by the clock or that of the processors if it is less.

    With a GPU, for which processors only wait, that by the clock.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    result = work(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter() - wall, result
    return min(time.perf_counter() - wall, time.process_time() - cpu), result


def _rebuild(carrier: Carrier, record: Record) -> list[Tensor]:
    return carrier.means([carrier.decode(record)], 1)


def _measure(
    way: AnyCodec, carriers: Sequence[Carrier], gradients: Mapping[str, Tensor], seed: int
) -> list[tuple[float, ...]]:
    truth = [torch.cat([gradients[name].reshape(-1) for name in carrier.names]) for carrier in carriers]
    here, there = Correspondence(), Correspondence()  # a rank does not read what it has written
    closed, rounds = [math.nan] * len(carriers), []
    for step in range(1, 1 + _ROUNDS):
        keys = [Key(carrier.name, seed, step) for carrier in carriers]
        begun = [timed(carrier.encode, gradients, key) for carrier, key in zip(carriers, keys, strict=True)]
        if step == 1:
            closed = list(_closed_forms(way, carriers, [record for _, record in begun], gradients))
        together, records = timed(finish, [record for _, record in begun])
        packing, (message, sizes) = timed(here.write, carriers, records, keys)
        unpacking, read = timed(there.read, message, carriers, keys)
        here.commit()
        there.commit()
        rebuilt = [timed(_rebuild, carrier, record) for carrier, record in zip(carriers, read, strict=True)]
        rows = []
        for size, exact, (begin, _), (rebuild, means) in zip(sizes, truth, begun, rebuilt, strict=True):
            share, error = size / sum(sizes), float((torch.cat(means).double() - exact.double()).square().sum())
            rows.append((size, error, begin + share * (together + packing), rebuild + share * unpacking))
        rounds.append(torch.tensor(rows, dtype=torch.float64))
    table = torch.stack(rounds[1:])
    return [
        (size, error if math.isnan(exact) else exact, encode, decode)
        for (size, error), (encode, decode), exact in zip(
            table[..., :2].mean(0).tolist(), table[..., 2:].amin(0).tolist(), closed, strict=True
        )
    ]


def _closed_forms(
    way: AnyCodec, carriers: Sequence[Carrier], begun: Sequence[Any], gradients: Mapping[str, Tensor]
) -> Iterator[float]:
    """Expected squared error of each gradient; NaN where no formula is known."""
    together = [record.prepared for record in begun if isinstance(record, Unfinished)]
    planned = iter(_planned(way, together) if isinstance(way, Rotated) else ())
    for carrier, record in zip(carriers, begun, strict=True):
        if isinstance(record, Unfinished):
            yield next(planned, math.nan)
        elif isinstance(carrier, FactorCarrier):
            yield _of_factors(way, carrier.unit, merge(carrier.windows[carrier.name].pairs))
        elif isinstance(way, _KnowsVariance) and isinstance(way, Codec):
            yield float(way.variance(gradients[carrier.name]).double().sum())
        else:
            yield math.nan


def _planned(way: Rotated, prepared: Sequence[Prepared]) -> list[float]:
    """Expected squared errors of gradients that share their bytes."""
    spectra = [spectrum_of(each.atoms, each.known) for each in prepared]
    return [plan.variance for plan in way.plans(spectra, way.budget(spectra))[0]]


def _of_factors(way: AnyCodec, unit: Unit, factors: Factors) -> float:
    """Expected squared error of a gradient that is rebuilt from factors with independent noises, bias included."""
    if isinstance(way, Rotated) and factors.x.is_floating_point():
        return way.variance(factors, unit.contract)
    known = isinstance(way, Separate) and isinstance(way.x, _KnowsVariance) and isinstance(way.d, _KnowsVariance)
    if not known or not isinstance(unit.module, nn.Linear):
        return math.nan
    vx, vd = way.x.variance(factors.x), way.d.variance(factors.d)  # type: ignore[union-attr]
    bias = float(vd.double().sum()) if unit.bias_name is not None else 0.0
    return float(product_variance(factors, vx, vd)) + bias
