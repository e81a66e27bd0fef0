"""How much error for how many bytes: every codec family over its options, on real gradients.

    python -m analysis.rate_distortion --model lenet --data fashion --steps 100

Bytes are those of real messages of all layers, headers counted; the error is that of the whole gradient. A point is on
the Pareto front if no other one has both fewer bytes and less error. Families are compared as they are: an unbiased
codec's error averages out over workers and steps, a biased one's does not, so there is a front for either.
"""

import argparse
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from analysis import report
from analysis.methods import name_of
from analysis.reconstruction import add_recipe_options, layers_table, notes, recipe_of, totals_table
from analysis.report import Cell, Figure, Report, ReportError, Table, draw, style
from analysis.runs import COLORS
from isgq.codecs import codec

_PRECISION = 0.05  # a curve's points need not be as exact as a comparison with theory
_SHARES = (0.001, 0.01, 0.1)
_LEVELS = (1, 2, 4, 16)

FAMILIES: Mapping[str, Sequence[str]] = {
    "isgq": [f"separate(dithered:levels={levels},bucket=row)" for levels in _LEVELS],
    "naive": [f"naive:levels={levels}" for levels in (1, 2, 4)],
    "minimum_variance": [f"minimum_variance:levels={levels}" for levels in (1, 2, 4)],
    "minimum_variance_unbiased": [f"minimum_variance_unbiased:levels={levels}" for levels in (1, 2, 4)],
    "balanced": [f"balanced:step={step}" for step in (4.0, 2.0, 1.0, 0.25)],
    "rotated": [f"rotated:nmse={nmse}" for nmse in (4.0, 1.0, 0.3, 0.1, 0.03)],
    "rotated:mode=mmse": [f"rotated:mode=mmse,nmse={nmse}" for nmse in (0.7, 0.4, 0.2, 0.1, 0.03)],
    "casts": ["fp16", "bf16", "int8", "int8:rounding=stochastic", "exact"],
    "sign": ["sign"],
    "one_bit": ["one_bit"],
    "terngrad": ["terngrad"],
    "qsgd": [f"qsgd:levels={levels}" for levels in _LEVELS],
    "dithered": [f"dithered:levels={levels}" for levels in _LEVELS],
    "ecsq": [f"ecsq:step={step}" for step in (4.0, 2.0, 1.0, 0.25)],
    "nested_dithered": [f"nested_dithered:levels={levels},ratio={2 * levels + 1}" for levels in (1, 3)],
    "lloyd_max": [f"lloyd_max:levels={levels}" for levels in (1, 2, 4, 16)],
    "qcs": ["qcs", "qcs:mode=mmse"],
    "top_k": [f"top_k:k={share}" for share in _SHARES],
    "rtop_k": [f"rtop_k:r={4 * share},k={share}" for share in _SHARES],
    "random_k": [f"random_k:k={share}" for share in _SHARES],
    "eus": [f"eus:m={share}" for share in _SHARES],
}
"""Family -> specs, from few bytes to many; codecs with memory send what the codec inside them sends."""


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other one beats: none has at most as much of both, and less of one."""
    return [not any(a <= x and b <= y and (a < x or b < y) for a, b in points) for x, y in points]


def curves_table(totals: Table, families: Mapping[str, Sequence[str]]) -> Table:
    """The totals with each codec's family, whether it is unbiased, and whether it is on a front."""
    family_of = {spec: family for family, specs in families.items() for spec in specs}
    columns = {
        "family": "codec with options left open",
        **{name: totals.columns[name] for name in ("codec", "method", "on")},
        "unbiased": "whether the mean over keys is the gradient",
        **{name: totals.columns[name] for name in ("bytes", "coded_bits", "nmse")},
        "front": "whether no other codec has fewer bytes and less error",
        "unbiased_front": "the same among unbiased codecs",
    }
    lines = [line for line in totals.records() if line["nmse"] is not None]
    unbiased = [codec(line["codec"]).unbiased for line in lines]
    points = [(float(line["bytes"]), float(line["nmse"])) for line in lines]
    front = pareto(points)
    among = iter(pareto([point for point, fair in zip(points, unbiased, strict=True) if fair]))
    rows: list[list[Cell]] = [
        [
            *(family_of[line["codec"]], line["codec"], name_of(line["codec"]), line["on"], fair),
            *(line["bytes"], line["coded_bits"], line["nmse"], best, next(among) if fair else False),
        ]
        for line, fair, best in zip(lines, unbiased, front, strict=True)
    ]
    return Table("curves", "Error against real bytes", columns, rows)


def _figure(curves: Table, on: str) -> Figure:
    lines = [line for line in curves.records() if line["nmse"]]  # no logarithm of lossless
    families = dict.fromkeys(line["family"] for line in lines if line["on"] == on)

    def paint(axes: Axes) -> None:
        for mark, label, dash in (("front", "Pareto front of all", "-"), ("unbiased_front", "of the unbiased", ":")):
            best = sorted((line["coded_bits"], line["nmse"]) for line in lines if line[mark])
            axes.plot(*zip(*best, strict=True), color="#999999", linestyle=dash, linewidth=4, alpha=0.5, label=label)
        for i, family in enumerate(families):
            points = sorted((line["coded_bits"], line["nmse"]) for line in lines if line["family"] == family)
            hollow = {} if i < len(COLORS) else {"markerfacecolor": "white", "linestyle": "--"}
            axes.plot(*zip(*points, strict=True), label=family, **(style(i) | hollow))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bits per parameter (real bytes)")
        axes.set_ylabel("NMSE")

    return draw(f"{on}_codecs", f"Error against bytes: codecs of the {on}, with the fronts of all codecs", paint)


def build(options: argparse.Namespace) -> Report:
    """The report of the command's options.

    Raises:
        ReportError: an unknown family, or several steps.
    """
    if unknown := set(options.families) - {*FAMILIES, "all"}:
        raise ReportError(f"unknown family {sorted(unknown)}; known: all, {', '.join(FAMILIES)}")
    if len(options.steps) != 1:
        raise ReportError(f"--steps {options.steps} must be one step")
    families = {f: FAMILIES[f] for f in (FAMILIES if "all" in options.families else options.families)}
    recipe = recipe_of(options)
    recipe.capture(options.cache)
    specs = [spec for family in families.values() for spec in family]
    layers = layers_table(recipe, specs, options.cache, options.processes, precision=_PRECISION)
    curves = curves_table(totals_table(layers), families)
    ordered = sorted(curves.records(), key=lambda line: int(line["bytes"]))
    marks = ("front", "unbiased_front")
    fronts = {mark: ", ".join(line["codec"] for line in ordered if line[mark]) for mark in marks}
    return Report(
        f"Rate and distortion of {recipe.model}'s gradient on {recipe.data} after {recipe.steps[0]} steps",
        [
            f"On the Pareto front of all {len(curves.rows)} codecs, from few bytes to many: {fronts['front']}.",
            f"On that of the unbiased ones: {fronts['unbiased_front']}.",
        ],
        [curves],
        [_figure(curves, on) for on in dict.fromkeys(line["on"] for line in curves.records())],
        notes(recipe, _PRECISION),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.rate_distortion", description="Error against real bytes of every codec family"
    )
    add_recipe_options(parser, (100,))
    parser.add_argument("--families", nargs="+", default=["all"], help="families of codecs, or all")
    report.run(parser, build, arguments)


if __name__ == "__main__":
    main()
