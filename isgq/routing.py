"""From measurements to a plan, and from the plan to the carriers of a session.

Pure but for the measuring: the session shares the sizes between the ranks, so that all ranks make the same plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from isgq.aggregate import Gather, Outgoing, Step
from isgq.choice import Choice, Scope
from isgq.core.codec import Codec, PairCodec
from isgq.core.keys import Key
from isgq.exchange import Exchange
from isgq.layers.capture import SKIPPED, Unit
from isgq.planner import Line, Plan, decide
from isgq.records import Carrier, DirectCarrier, FactorCarrier, Rows, finish, names_of
from isgq.sharding import assign, cut, fill
from isgq.windows import Contributions, Window
from isgq.wire import pack_message
from isgq.wire.header import Status


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
    policy: Literal["auto", "factors"],
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
    sizes, outgoing, name = torch.empty(0, dtype=torch.int64), Outgoing(), ""

    def key(of: str) -> Key:
        nonlocal name
        name = of
        return step.key(of, exchange.rank)

    try:
        sizes = measure(units, choice.pair, windows, key)
    except Exception as error:  # the other ranks must hear of it
        outgoing = Outgoing(status=Status.FAILED, parameter=step.position(name), error=error)
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
    policy: Literal["auto", "factors"],
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
        return Line(names[0], "dense", reason, 0, size, not surprise)

    lines = {unit.name: decide(dense(names_of(unit), ""), sizes[:, i].tolist(), policy) for i, unit in enumerate(units)}
    riding = {unit.bias_name for unit in units}
    for name in windows:
        if name not in riding and name not in lines:
            lines[name] = dense([name], reasons.get(name, "the session is dense"))
    ordered = [lines[name] for name in windows if name in lines]
    if direct:
        ordered = [replace(line, route="direct") if line.route == "dense" else line for line in ordered]
    return Plan(tuple(ordered))


def make_carriers(
    plan: Plan,
    units: Sequence[Unit],
    codec: PairCodec | None,
    direct: Codec | None,
    scope: Scope,
    windows: Mapping[str, Window],
    servers: int,
    say: Callable[[str], None],
) -> list[Carrier]:
    """One carrier per factored unit, then those of what ``direct`` compresses.

    Args:
        plan: the routes.
        units: the candidates for factors.
        codec: compresses factors.
        direct: compresses gradients, or None.
        scope: see :func:`direct_carriers`.
        windows: of all trainable parameters, in their order.
        servers: how many ranks, from 0, share the averaging; see :mod:`isgq.sharding`.
        say: see :class:`isgq.records.FactorCarrier`.
    """
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
