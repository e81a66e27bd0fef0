"""The figures of the report."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from analysis.estimation.bridge import METHODS, Verdict
from analysis.estimation.cases import Point
from analysis.estimation.study import Curves
from analysis.report import Figure, draw, style

_WORDS = {"d": "dimension d", "k": "bits a node, k", "n": "nodes n"}


def information_figures(panels: Mapping[str, Curves]) -> list[Figure]:
    """Information of a message against its bits, for each model; bounds are dashed."""
    return [_information_figure(i, title, curves) for i, (title, curves) in enumerate(panels.items(), 1)]


def _information_figure(number: int, title: str, curves: Curves) -> Figure:
    def paint(axes: Axes) -> None:
        for i, (label, (k, trace)) in enumerate(curves.items()):
            axes.plot(k, trace, linestyle="--" if label.startswith("bound") else "-", label=label, **style(i))
        axes.set(xlabel=_WORDS["k"], ylabel="Tr I_M", yscale="log")

    return draw(f"information_{number}", f"Information of a message against its bits: {title}", paint)


def risk_figures(found: Sequence[Point]) -> list[Figure]:
    """Risk of the schemes against d, k and n, with the bounds on every protocol."""
    return [_risk_figure(found, against) for against in "dkn"]


def _risk_figure(found: Sequence[Point], against: str) -> Figure:
    def paint(axes: Axes) -> None:
        for i, model in enumerate(dict.fromkeys(p.model for p in found)):
            own = [p for p in found if p.model == model and p.against == against]
            if own:
                x = [p.place["dkn".index(against)] for p in own]
                axes.plot(x, [p.risk for p in own], label=model, **style(i))
                axes.plot(x, [p.bound.value for p in own], linestyle="--", **style(i))
        axes.set(xlabel=_WORDS[against], ylabel="squared error", yscale="log")
        axes.set_xscale("log", base=2)

    caption = f"Squared error of the schemes against {_WORDS[against]}; dashed: van Trees' bounds on every protocol"
    return draw(f"risk_{against}", caption, paint)


def bridge_figures(verdicts: Sequence[Verdict]) -> list[Figure]:
    """Error against workers for each layer and k: measured as marks, predicted as lines."""
    places = dict.fromkeys((v.layer, v.size, v.k) for v in verdicts)
    return [
        _bridge_figure(i, sorted((v for v in verdicts if (v.layer, v.size, v.k) == place), key=lambda v: v.n))
        for i, place in enumerate(places, 1)
    ]


def _bridge_figure(number: int, own: Sequence[Verdict]) -> Figure:
    n = [v.n for v in own]

    def paint(axes: Axes) -> None:
        for i, name in enumerate(METHODS):
            axes.plot(n, [v.predicted[name].error for v in own], color=style(i)["color"])
            axes.plot(n, [v.measured[name] for v in own], linestyle="", label=name, **style(i))
        axes.set(xlabel="workers n", ylabel="relative squared error")
        axes.set_xscale("log", base=2)
        axes.set_xticks(n, [str(value) for value in n])
        axes.set_ylim(bottom=0)

    place = f"{own[0].layer}, k = {own[0].k} of {own[0].size}"
    return draw(f"bridge_{number}", f"Sparsifiers on real gradients, measured (marks) and predicted: {place}", paint)
