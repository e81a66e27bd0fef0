"""Ways to make the mean of several workers' gradients, the workers simulated in one process, with real messages.

What a worker would send is really encoded, packed, unpacked and decoded; only process and network are simulated.
Bytes are those of the message of one worker and step (``isgq.wire.pack_message``, with a template and digests that the
receiver makes itself) and of the header that a session sends before it. *Moved* is what a worker sends and receives: a
message is received from each of the others; float32 in a ring all-reduce is sent 2 (N-1)/N times and received as often.

    dense                           float32, counted as 4 bytes a parameter
    powersgd:rank=R                 PowerSGD with error feedback (Vogels, Karimireddy and Jaggi, 2019) as in torch's
                                    hook, one warm-started power iteration, vectors dense; counted as float32, without
                                    any header
    two_pass(UP;DOWN):memory=M,scope=S
                                    each worker averages a shard and compresses it again, with the memory of M (both,
                                    worker, none), tensor by tensor or the whole model (S) as one vector:
                                    DoubleSqueeze; MEM-SGD where DOWN is dense and M worker
    subspace:rank=R,step=S          a common subspace
    CODEC [ + CODEC]                any codec of isgq; pair codecs take the factors, direct ones each parameter's
                                    gradient. The second one is for what travels without factors; without it that is
                                    plain

The workers of ``two_pass`` and ``subspace`` are threads that take part as ranks of a session do, all headers included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

import isgq
from benchmarks.simulated import exchanges, together
from isgq.aggregate import Step
from isgq.aggregation import aggregation
from isgq.choice import Choice, Scope, choose
from isgq.codecs import split_spec
from isgq.codecs.roles import MemoryPolicy
from isgq.core.codec import learned_by
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.core.registry import split_outside
from isgq.layers.capture import Unit
from isgq.planner import RoutePolicy
from isgq.records import Carrier, DirectCarrier, FactorCarrier, Record, Unfinished, finish, names_of
from isgq.routing import direct_carriers
from isgq.rows import Rows, place
from isgq.windows import Window
from isgq.wire import pack_message, unpack_message
from isgq.wire.header import header_size
from isgq.wire.template import Template

_FRAME_BYTES = 22  # of a message besides its records: a frame's 5 and a session's 17


@dataclass(frozen=True)
class Share:
    """What one worker has to average in a step.

    Attributes:
        gradients: of its own mean loss, by parameter name; or whatever else is to be averaged.
        factors: of those of some weights, by the weight's name.
    """

    gradients: Mapping[str, Tensor]
    factors: Mapping[str, Factors]

    @staticmethod
    def of(units: Sequence[Unit], factors: Mapping[str, Factors]) -> "Share":
        """With the gradients that the factors make up."""
        gradients: dict[str, Tensor] = {}
        for unit in units:
            flat, size = unit.flat_gradient(factors[unit.name]), unit.weight.numel()
            gradients[unit.name] = flat[:size].view_as(unit.weight)
            if unit.bias_name is not None:
                gradients[unit.bias_name] = flat[size:]
        return Share(gradients, factors)


Mean = tuple[dict[str, Tensor], float, float]
"""Mean of the gradients by parameter name, bytes that a worker sends, bytes that it sends and receives."""
Method = Callable[[Sequence[Share], int], Mean]
"""``(shares, step) -> mean``; steps count from 0."""


def _average(shares: Sequence[Share], names: Sequence[str]) -> Mean:
    """The mean itself; its bytes are those of float32."""
    means = {name: torch.stack([share.gradients[name] for share in shares]).mean(0) for name in names}
    return means, *_ring(sum(g.numel() for g in means.values()), len(shares))


def _ring(numel: int, workers: int) -> tuple[float, float]:
    """Bytes of float32, and what of them a worker sends and receives in a ring all-reduce."""
    return 4.0 * numel, 16.0 * numel * (workers - 1) / workers


class Coded:
    """Factors by a pair codec, gradients by a direct one, or as they are where there is none; a :data:`Method`.

    Every worker has a direct codec of its own, with its own memory; what a pair codec learns is common to all.

    Args:
        units: whose factors there are.
        like: the parameters by name.
        spec: a codec of either kind, or ``"dense"``.
        dense: a direct codec for what has no factors, or whose factors are more bytes.
        workers: how many.
        seed: of the codecs.
        routes: ``"factors"`` wherever there are any, ``"auto"`` where they are fewer bytes in the first step.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        like: Mapping[str, nn.Parameter],
        spec: str,
        dense: str | None,
        workers: int,
        seed: int,
        routes: RoutePolicy,
    ) -> None:
        choices = [isgq.choose_codecs(spec, dense) for _ in range(workers)]
        self._pair, self._directs = choices[0][0], [direct for _, direct in choices]
        self._units, self._like, self._seed, self._routes = units, like, seed, routes
        self._factored: list[FactorCarrier] = []
        self._rest: list[str] = []
        self._template: Template | None = None

    def __call__(self, shares: Sequence[Share], step: int) -> Mean:
        """See :data:`Method`."""
        if self._template is None:
            self._route(shares[0])
        means, sent, moved = _average(shares, [] if self._directs[0] is not None else self._rest)
        received, size = [], 0
        for worker, share in enumerate(shares):
            carriers = self._carriers(worker, share)
            keys = [Key(carrier.name, self._seed, step, worker) for carrier in carriers]
            digests = [carrier.digests(key) for carrier, key in zip(carriers, keys, strict=True)]
            records = _records(carriers, share, keys)
            self._template = self._template or Template.of(records)
            message, _ = pack_message(records, digests=digests, template=self._template)
            received.append(unpack_message(message, digests=digests, template=self._template))
            size += message.numel() + header_size(len(share.gradients)) if records else 0
        for carrier, every in zip(self._carriers(0, shares[0]), zip(*received, strict=True), strict=True):
            place(carrier.rows, carrier.means([carrier.decode(record) for record in every], len(shares)), means)
        if (learned := learned_by(self._pair)) is not None:
            learned.commit()
        return means, sent + size / len(shares), moved + size

    def _route(self, share: Share) -> None:
        """Decide which way each gradient takes."""
        for unit in self._units:
            if self._pair is not None:
                windows = {name: Window(name, self._like[name]) for name in names_of(unit)}
                carrier = FactorCarrier(self._pair, unit, windows)
                if self._routes == "factors" or self._pays(carrier, share):
                    self._factored.append(carrier)
        carried = {name for carrier in self._factored for name in carrier.names}
        self._rest = [name for name in share.gradients if name not in carried]

    def _pays(self, carrier: FactorCarrier, share: Share) -> bool:
        """Whether factors are fewer bytes."""
        record = _records([carrier], share, [Key(carrier.name, self._seed)])
        return pack_message(record)[1][0] < 4 * sum(self._like[name].numel() for name in carrier.names)

    def _carriers(self, worker: int, share: Share) -> list[Carrier]:
        """What a worker's records are made with, in their order."""
        own = self._directs[worker]
        if own is None:
            return [*self._factored]
        rows = [Rows.whole(name, share.gradients[name].shape) for name in self._rest]
        return [*self._factored, *(DirectCarrier(own, each.name, [each]) for each in rows)]


def _records(carriers: Sequence[Carrier], share: Share, keys: Sequence[Key]) -> list[Record]:
    """Of one worker; a codec that shares the bytes of a step out does so among all of them."""
    begun: list[Record | Unfinished] = []
    for carrier, key in zip(carriers, keys, strict=True):
        if isinstance(carrier, FactorCarrier):
            begun.append(carrier.begin(share.factors[carrier.name], key))
        else:
            begun.append(carrier.encode(share.gradients, key))
    return finish(begun, _FRAME_BYTES)


def powersgd(rank: int, like: Mapping[str, nn.Parameter], seed: int) -> Method:
    """PowerSGD: P = mean M_w Q, made orthonormal; Q = mean M_w^T P; the mean is P Q^T, the rest goes to the memory."""
    generator = torch.Generator().manual_seed(seed)
    bases = {
        name: torch.randn(g[0].numel(), min(rank, *g.flatten(1).shape), generator=generator)
        for name, g in like.items()
        if g.dim() > 1
    }
    memory: dict[tuple[int, str], Tensor] = {}

    def mean(shares: Sequence[Share], step: int) -> Mean:
        total, sent, moved = _average(shares, [name for name in like if name not in bases])
        numel = 0
        for name, basis in bases.items():
            own = [share.gradients[name] + memory.get((w, name), 0) for w, share in enumerate(shares)]
            left, _ = torch.linalg.qr(sum(m.flatten(1) @ basis for m in own) / len(own))
            right = sum(m.flatten(1).T @ left for m in own) / len(own)
            bases[name], total[name] = right, (left @ right.T).view_as(own[0])
            memory.update({(w, name): m - total[name] for w, m in enumerate(own)})
            numel += left.numel() + right.numel()
        low_rank = _ring(numel, len(shares))
        return total, sent + low_rank[0], moved + low_rank[1]

    return mean


def in_rounds(choices: Sequence[Choice], like: Mapping[str, nn.Parameter], seed: int) -> Method:
    """Every worker is a thread that takes part as a rank of a session does, in two passes or in a common subspace.

    Args:
        choices: one a worker, each with codecs of its own.
        like: the parameters by name.
        seed: of the codecs.
    """
    workers = len(choices)
    parameters = {name: tensor.detach() for name, tensor in like.items()}
    ends = exchanges(workers)
    ranks, carriers = [], []
    for exchange, choice in zip(ends, choices, strict=True):
        assert choice.direct is not None
        ranks.append(aggregation(choice, exchange))
        carriers.append(direct_carriers(choice.direct, parameters, choice.scope, [0] * choice.shards(workers)))

    def mean(shares: Sequence[Share], step: int) -> Mean:
        before = sum(exchange.sent + exchange.received for exchange in ends), sum(exchange.sent for exchange in ends)

        def take_part(rank: int) -> dict[str, Tensor]:
            gradients = shares[rank].gradients
            this = Step(step, 0, seed, list(gradients), [True] * len(gradients), carriers[rank], gradients)
            outgoing = ranks[rank].encode(this)
            means = ranks[rank].reduce(this, outgoing, ranks[rank].agree(this, outgoing))
            ranks[rank].commit()
            return means

        means = together(take_part, ends)[0]
        after = sum(exchange.sent + exchange.received for exchange in ends), sum(exchange.sent for exchange in ends)
        moved, sent = ((b - a) / workers for a, b in zip(before, after, strict=True))
        return {name: means[name].view(p.shape) for name, p in parameters.items()}, sent, moved

    return mean


def build(
    spec: str,
    units: Sequence[Unit],
    like: Mapping[str, nn.Parameter],
    workers: int,
    seed: int,
    routes: RoutePolicy = "auto",
) -> Method:
    """The method that a spec names.

    Args:
        spec: see the module's docstring.
        units: whose factors there are.
        like: the parameters by name.
        workers: how many.
        seed: of all randomness.
        routes: see :class:`Coded`.

    Raises:
        OptionError: malformed, or a codec that does not fit.
    """
    first, _, dense = spec.partition(" + ")
    name, inner, options = split_spec(first)
    given = dict(option.partition("=")[::2] for option in options)
    if name == "powersgd":
        if set(given) != {"rank"} or not given["rank"].isdecimal() or int(given["rank"]) < 1:
            raise OptionError(f"method {first!r} must have the form powersgd:rank=R with R of 1 or more")
        return powersgd(int(given["rank"]), like, seed)
    if name == "subspace":
        return in_rounds([choose(first, None, "tensor", "gather", None, "both") for _ in range(workers)], like, seed)
    if name == "two_pass":
        memory, scope = cast(MemoryPolicy, given.get("memory", "both")), cast(Scope, given.get("scope", "tensor"))
        parts = split_outside(inner or "", ";")
        if len(parts) != 2 or set(given) - {"memory", "scope"}:
            raise OptionError(f"method {first!r} must have the form two_pass(UP;DOWN) or ...:memory=M,scope=S")
        up, down = parts
        return in_rounds([choose(up, None, scope, "two_pass", down, memory) for _ in range(workers)], like, seed)
    return Coded(units, like, first, dense or None, workers, seed, routes)


def in_ring(spec: str) -> bool:
    """Whether a worker sends as much as it receives; otherwise it sends once what all others receive."""
    return split_spec(spec)[0] in {"dense", "powersgd", "two_pass", "subspace"}
