"""From measurements to a plan, and from the plan to the carriers of a session.

Pure but for the measuring: the session shares the sizes between the ranks, so that all ranks make the same plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from isgq.core.codec import Codec, PairCodec
from isgq.core.keys import Key
from isgq.layers.capture import Unit
from isgq.planner import Line, Plan, decide
from isgq.records import Carrier, DirectCarrier, FactorCarrier, names_of
from isgq.windows import Window


def measure(
    units: Sequence[Unit], codec: PairCodec | None, windows: Mapping[str, Window], key: Callable[[str], Key]
) -> Tensor:
    """This rank's message size for every unit, int64 ``[units]``; see :meth:`FactorCarrier.measure`."""
    carriers = [FactorCarrier(codec, unit, windows) for unit in units] if codec is not None else []
    return torch.tensor([carrier.measure(key(carrier.name)) for carrier in carriers], dtype=torch.int64)


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
        return Line(names[0], "dense", reason, 0, size)

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
    scope: Literal["tensor", "model"],
    windows: Mapping[str, Window],
) -> list[Carrier]:
    """One carrier per factored unit, then one per direct tensor, or one for all of a dtype."""
    carriers: list[Carrier] = []
    if codec is not None:
        carriers += [FactorCarrier(codec, unit, windows) for unit in units if plan.route(unit.name) == "factors"]
    if direct is not None:
        carried = {name for carrier in carriers for name in carrier.names}
        groups: dict[str, list[Window]] = {}
        for window in windows.values():
            if window.name not in carried:
                whole = f"model/{window.parameter.dtype}/{window.parameter.device.type}"
                groups.setdefault(window.name if scope == "tensor" else whole, []).append(window)
        carriers += [DirectCarrier(direct, name, group) for name, group in groups.items()]
    return carriers
