"""The figures of the report."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.estimation.bridge import METHODS, Verdict
from analysis.estimation.cases import CASES, Point
from analysis.estimation.study import Curves
from analysis.runs import COLORS

_MARKERS = "osD^vP*X"
_WORDS = {"d": "dimension d", "k": "bits a node, k", "n": "nodes n"}


def _grid(count: int, columns: int) -> tuple[Figure, Sequence[Axes]]:
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 3.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    for used in axes[:count]:
        used.grid(alpha=0.3)
    return figure, list(axes[:count])


def information_figure(panels: Mapping[str, Curves]) -> Figure:
    """Information of a message against its bits; bounds are dashed."""
    figure, axes = _grid(len(panels), len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (label, (k, trace)) in enumerate(curves.items()):
            style = "--" if label.startswith("bound") else "-"
            axis.plot(k, trace, style, color=COLORS[i], marker=_MARKERS[i], markersize=4, label=label)
        axis.set(title=title, xlabel=_WORDS["k"], ylabel="Tr I_M", yscale="log")
        axis.legend(fontsize=8)
    return figure


def risk_figure(found: Sequence[Point], against: str) -> Figure:
    """Risk of the schemes against d, k or n, with the bound on every protocol."""
    cases = [case for case in CASES if any(p.model == case.model and p.against == against for p in found)]
    figure, axes = _grid(len(cases), 3)
    for axis, case in zip(axes, cases, strict=True):
        own = [p for p in found if p.model == case.model and p.against == against]
        x = [p.place["dkn".index(against)] for p in own]
        axis.plot(x, [p.risk for p in own], "-o", color=COLORS[5], label="scheme")
        axis.plot(x, [p.bound.value for p in own], "--s", color=COLORS[4], label="van Trees' bound")
        fixed = ", ".join(
            f"{name} = {value}"
            for name, value, all_of in zip("dkn", case.middle, (case.dims, case.bits, case.nodes), strict=True)
            if name != against and len(all_of) > 1
        )
        axis.set(title=f"{case.model}: {case.rate}\n{fixed}", xlabel=_WORDS[against], ylabel="squared error")
        axis.title.set_fontsize(10)
        axis.set(yscale="log")
        exponential = against == "k" and max(x) < 8
        axis.set_xscale("linear") if exponential else axis.set_xscale("log")
        axis.set_xticks(x, [f"{value:g}" for value in x])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    return figure


def bridge_figure(verdicts: Sequence[Verdict]) -> Figure:
    """Error against workers for each layer and k: measured as marks, predicted as lines."""
    places = list(dict.fromkeys((v.layer, v.size, v.k) for v in verdicts))
    figure, axes = _grid(len(places), len({v.k / v.size for v in verdicts}) or 1)
    for axis, (layer, size, k) in zip(axes, places, strict=True):
        own = sorted((v for v in verdicts if (v.layer, v.k) == (layer, k)), key=lambda v: v.n)
        n = np.array([v.n for v in own])
        for name, color, marker in zip(METHODS, (COLORS[0], COLORS[1], COLORS[2]), _MARKERS, strict=False):
            axis.plot(n, [v.predicted[name].error for v in own], color=color)
            axis.plot(n, [v.measured[name] for v in own], marker, color=color, label=name)
        axis.set(title=f"{layer}: k = {k} of {size}", xlabel="workers n", ylabel="relative squared error")
        axis.title.set_fontsize(10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(n, [str(value) for value in n])
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, title="marks: measured, lines: model", title_fontsize=8)
    return figure
