"""From measurements to a plan, and from the plan to the carriers of a session.

Pure but for the measuring: the session shares the sizes between the ranks, so that all ranks make the same plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isgq.aggregate import Gather, Outgoing, Step, refused
from isgq.auto import Auto
from isgq.choice import Choice, Scope
from isgq.core.codec import Codec, PairCodec
from isgq.core.keys import Key
from isgq.costs import DENSE, Estimate, choose, explain
from isgq.exchange import Exchange
from isgq.layers.capture import SKIPPED, Unit
from isgq.planner import Line, Plan, Route, RoutePolicy, decide
from isgq.probe import Item, energies, estimates, items_of, probe
from isgq.records import Carrier, DirectCarrier, FactorCarrier, finish, names_of
from isgq.rows import Rows
from isgq.sharding import assign, cut, fill
from isgq.windows import Contributions, Window
from isgq.wire import pack_message


def measure(
    units: Sequence[Unit], codec: PairCodec | None, windows: Mapping[str, Window], key: Callable[[str], Key]
) -> Tensor:
    """Bytes of this rank's record of every unit, int64 ``[units]``, or what :meth:`FactorCarrier.candidate` says."""
    carriers = [FactorCarrier(codec, unit, windows) for unit in units] if codec is not None else []
    gradients = Contributions(windows)
    candidates = [carrier.candidate(gradients, key(carrier.name)) for carrier in carriers]
    records = iter(finish([candidate for candidate in candidates if not isinstance(candidate, int)]))
    sizes = [c if isinstance(c, int) else max(1, pack_message([next(records)])[1][0]) for c in candidates]
    return torch.tensor(sizes, dtype=torch.int64)


def plan_together(
    exchange: Exchange,
    step: Step,
    units: Sequence[Unit],
    choice: Choice,
    windows: Mapping[str, Window],
    reasons: Mapping[str, str],
    policy: RoutePolicy,
) -> Plan:
    """Measure every candidate's message on this rank, share the sizes, decide alike. A collective call.

    Args:
        exchange: the transport.
        step: addresses the measured messages.
        units: the candidates for factors.
        choice: the codecs.
        windows: see :func:`make_plan`.
        reasons: see :func:`make_plan`.
        policy: see :func:`make_plan`.

    Raises:
        PeerError: some rank cannot measure; the same error on every rank.
    """
    if choice.auto is not None:
        return plan_automatically(exchange, step, units, choice.auto, windows, reasons)
    sizes, outgoing, name = torch.empty(0, dtype=torch.int64), Outgoing(), ""

    def key(of: str) -> Key:
        nonlocal name
        name = of
        return step.key(of, exchange.rank)

    try:
        sizes = measure(units, choice.pair, windows, key)
    except Exception as error:  # the other ranks must hear of it
        outgoing = refused(error, step.position(name))
    shared = sizes[None]
    if units:
        Gather(exchange).agree(step, outgoing)  # are all ranks here to plan?
        length = sizes.numel() * sizes.element_size()
        gathered = exchange.all_gather(sizes.view(torch.uint8), [length] * exchange.world_size).wait()
        shared = torch.stack([each.clone().view(torch.int64) for each in gathered])
    return make_plan(units, shared, windows, reasons, policy, direct=choice.direct is not None)


def make_plan(
    units: Sequence[Unit],
    sizes: Tensor,
    windows: Mapping[str, Window],
    reasons: Mapping[str, str],
    policy: RoutePolicy,
    direct: bool,
) -> Plan:
    """One line per parameter, a riding bias under its weight's.

    Args:
        units: the candidates for factors.
        sizes: int64 ``[ranks, units]``, measured on every rank.
        windows: of all trainable parameters, in their order.
        reasons: why the other parameters have no factors.
        policy: see :func:`isgq.planner.decide`.
        direct: whether what travels without factors is compressed.
    """

    def dense(names: Sequence[str], reason: str) -> Line:
        size = sum(windows[n].parameter.numel() * windows[n].parameter.element_size() for n in names)
        surprise = windows[names[0]].parameter.dim() > 1 and reasons.get(names[0], SKIPPED) != SKIPPED
        return Line(names[0], "dense", reason, 0, size, expected=not surprise)

    lines = {unit.name: decide(dense(names_of(unit), ""), sizes[:, i].tolist(), policy) for i, unit in enumerate(units)}
    riding = {unit.bias_name for unit in units}
    for name in windows:
        if name not in riding and name not in lines:
            lines[name] = dense([name], reasons.get(name, "the session is dense"))
    ordered = [lines[name] for name in windows if name in lines]
    if direct:
        ordered = [replace(line, route="direct") if line.route == "dense" else line for line in ordered]
    return Plan(tuple(ordered))


@dataclass(frozen=True)
class Decision:
    """What an automatic session's ranks found, and the ways that are best.

    Attributes:
        items: the gradients.
        options: every way of each.
        chosen: the best way of each.
        energies: squared norm of each on one worker.
    """

    items: Sequence[Item]
    options: Sequence[Sequence[Estimate]]
    chosen: Sequence[Estimate]
    energies: Sequence[float]


def look(items: Sequence[Item], auto: Auto, windows: Mapping[str, Window], seed: int) -> Tensor:
    """What this rank finds: float64 ``[items, 1 + ways * FIELDS]``, the first number that of :func:`energies`."""
    found = probe(items, list(auto.ways.values()), windows, seed).flatten(1)
    return torch.cat([torch.tensor(energies(items, windows), dtype=torch.float64)[:, None], found], 1)


def decide_automatically(
    items: Sequence[Item], found: Tensor, auto: Auto, windows: Mapping[str, Window], workers: int
) -> Decision:
    """The best ways, from what all ranks found. Pure.

    Args:
        items: the gradients.
        found: ``[ranks, items, 1 + ways * FIELDS]``.
        auto: what to choose from.
        windows: of all trainable parameters.
        workers: how many share the gradients; of which some have looked.
    """
    energy = found[:, :, 0].mean(0).tolist()
    tables = found[:, :, 1:].reshape(len(found), len(items), len(auto.ways), -1)
    options = [estimates(item, tables[:, i], auto.ways, windows) for i, item in enumerate(items)]
    chosen = choose(options, workers, auto.link, auto.error * sum(energy), auto.timed)
    return Decision(items, options, chosen, energy)


def measure_chosen(decision: Decision, auto: Auto, windows: Mapping[str, Window], seed: int) -> Decision:
    """The same with every codec measured on just the gradients it was chosen for, which share what it shares out.

    Args:
        decision: the best ways.
        auto: what was to choose from.
        windows: of all trainable parameters, after a backward pass.
        seed: of the codecs' random numbers.
    """
    chosen = list(decision.chosen)
    for name, way in auto.ways.items():
        mine = [i for i, each in enumerate(chosen) if each.way == name]
        rows = probe([decision.items[i] for i in mine], [way], windows, seed)
        for i, row in zip(mine, rows, strict=True):
            chosen[i] = estimates(decision.items[i], row[None], {name: way}, windows)[1]
    return replace(decision, chosen=chosen)


def plan_automatically(
    exchange: Exchange,
    step: Step,
    units: Sequence[Unit],
    auto: Auto,
    windows: Mapping[str, Window],
    reasons: Mapping[str, str],
) -> Plan:
    """Measure every codec on this rank, share what was found, decide alike. A collective call.

    Args:
        exchange: the transport.
        step: addresses the collective call.
        units: the candidates for factors.
        auto: what to choose from.
        windows: of all trainable parameters, in their order.
        reasons: why the other parameters have no factors.
    """
    items, workers = items_of(units, windows, reasons), exchange.world_size
    found, outgoing = torch.empty(0), Outgoing()
    try:
        found = look(items, auto, windows, step.seed)
    except Exception as error:  # the other ranks must hear of it
        outgoing = refused(error)
    Gather(exchange).agree(step, outgoing)  # are all ranks here to plan?
    raw = found.flatten().view(torch.uint8)
    every = exchange.all_gather(raw, [raw.numel()] * workers).wait()
    shared = torch.stack([each.clone().view(torch.float64).view_as(found) for each in every])
    decision = decide_automatically(items, shared, auto, windows, workers)
    lines = []
    for item, options, best in zip(items, decision.options, decision.chosen, strict=True):
        whole = item.plain_size([], windows)
        reason = explain(options, best, workers, auto.link)
        if best.way == DENSE:
            lines.append(Line(item.name, "dense", "; ".join(filter(None, [item.reason, reason])), 0, whole))
        else:
            route: Route = "factors" if isinstance(auto.ways[best.way], PairCodec) else "direct"
            lines.append(Line(item.name, route, reason, round(best.size), whole, best.way))
    return Plan(tuple(lines))


def make_carriers(
    plan: Plan,
    units: Sequence[Unit],
    choice: Choice,
    windows: Mapping[str, Window],
    servers: int,
    say: Callable[[str], None],
) -> list[Carrier]:
    """One carrier per factored unit, then those of what a direct codec compresses.

    Args:
        plan: the routes.
        units: the candidates for factors.
        choice: the codecs.
        windows: of all trainable parameters, in their order.
        servers: how many ranks, from 0, share the averaging; see :mod:`isgq.sharding`.
        say: see :class:`isgq.records.FactorCarrier`.
    """
    if choice.auto is not None:
        ways, items = choice.auto.ways, {item.name: item for item in items_of(units, windows, {})}
        coded = [items[line.name].carrier(ways[line.codec], windows) for line in plan.lines if line.codec]
        return [carrier for carrier in coded if carrier is not None]
    codec, direct, scope = choice.pair, choice.direct, choice.scope
    factored = [unit for unit in units if codec is not None and plan.route(unit.name) == "factors"]
    sizes = [sum(windows[name].parameter.numel() for name in names_of(unit)) for unit in factored]
    chosen = assign(sizes, servers)
    carriers: list[Carrier] = []
    loads = [0] * servers
    if codec is not None:
        for unit, size, server in zip(factored, sizes, chosen, strict=True):
            carriers.append(FactorCarrier(codec, unit, windows, server, say))
            loads[server] += size
    if direct is not None:
        carried = {name for carrier in carriers for name in carrier.names}
        rest = {name: window.parameter.detach() for name, window in windows.items() if name not in carried}
        carriers += direct_carriers(direct, rest, scope, loads)
    return carriers


def direct_carriers(
    direct: Codec, tensors: Mapping[str, Tensor], scope: Scope, loads: Sequence[int]
) -> list[DirectCarrier]:
    """Carriers of gradients, cut into shards for the servers.

    Args:
        direct: compresses them.
        tensors: like the gradients, by parameter name.
        scope: ``"tensor"``: one carrier per gradient and server; ``"model"``: one per server for all of a dtype.
        loads: elements that each server averages already.
    """
    wholes = [Rows.whole(name, tensor.shape) for name, tensor in tensors.items()]
    groups: dict[str, list[tuple[int, Rows]]] = {}
    for server, rows in cut(wholes, fill(loads, sum(rows.numel for rows in wholes))):
        name = rows.label
        if scope == "model":
            like = tensors[rows.name]
            name = f"model/{like.dtype}/{like.device.type}" + (f"/{server}" if len(loads) > 1 else "")
        groups.setdefault(name, []).append((server, rows))
    return [DirectCarrier(direct, name, [rows for _, rows in group], group[0][0]) for name, group in groups.items()]
