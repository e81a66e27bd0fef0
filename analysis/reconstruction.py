"""How well every codec rebuilds real gradients, layer by layer and over training, with the theory beside.

    python -m analysis.reconstruction --model lenet --data fashion --codecs all --steps 0 100 1000

Factors are captured at some steps of training in one process (:mod:`analysis.gradients`; a second run finds them in
``runs/cache``), and every codec compresses every layer for several keys. Codecs of factors (ISGQ) compress the pair
X, D and are judged by the gradient that the decoded pair makes up; the others compress the gradient G itself.
"""

import argparse
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor
from tqdm import tqdm

from analysis import report
from analysis.gradients import CACHE, LayerGradient, Recipe, each
from analysis.measure import Quality, measure
from analysis.methods import SPECS, name_of
from analysis.report import Cell, Figure, Report, ReportError, Table, draw, style
from analysis.theory import Prediction, predict
from isgq.codecs import codec
from isgq.core.codec import PairCodec
from isgq.launch import launch

AGREES = 0.02
"""How far a measured error may be from its closed form, relatively."""
_PRECISION = 0.006  # standard error of a mean, relative to it, at which no more keys are taken
_KEYS = 8
_MOST_KEYS = 16_000
_PATIENCE = 3600.0  # seconds that processes wait for one another
_LINE = 25  # letters of a codec in a figure

_COLUMNS = {
    "step": "training steps before",
    "layer": "parameter",
    "codec": "spec of the codec",
    "method": "its name in the literature",
    "on": "factors (X and D), or the gradient G",
    "nmse": "mean over keys of |decoded - G|^2 / |G|^2",
    "nmse_error": "standard error of that mean",
    "theory": "closed form of the same expectation; – where there is none",
    "measured_to_theory": "their ratio",
    "bound": "upper bound of nmse where that is all that is known",
    "cosine": "mean over keys of the cosine between decoded and true gradient",
    "bias": "|mean over keys of decoded - G| / |G|",
    "bias_noise": "what bias would be about without any, from chance alone",
    "keys": "number of keys that the means are over",
    "coded_bits": "bits per parameter of the real message, headers counted",
    "alphabet_bits": "bits per parameter at fixed width, log2 of the alphabet, with what is sent raw",
    "entropy_bits": "bits per parameter by the symbols' empirical entropy, with what is sent raw; no measured size",
    "bytes": "of the real message",
    "parameters": "weights of the layer",
    "norm": "|G|^2",
}


def row(step: int, layer: LayerGradient, spec: str, found: Quality, expected: Prediction | None) -> list[Cell]:
    """One line of the table; a relative error of a zero gradient does not exist."""
    parameters = layer.gradient.numel()
    nmse = found.error / found.norm if found.norm else None
    exact = expected.error / found.norm if expected and expected.exact and found.norm else None
    bound = expected.error / found.norm if expected and not expected.exact and found.norm else None
    alphabet, entropy = (math.fsum(s[i] for s in found.symbols.values()) for i in (1, 2))
    return [
        *(step, layer.name, spec, name_of(spec), "factors" if isinstance(codec(spec), PairCodec) else "gradient"),
        *(nmse, found.deviation / found.norm if found.norm else None, exact),
        nmse / exact if nmse is not None and exact else None,
        *(bound, found.cosine),
        *((found.offset / found.norm) ** 0.5 if found.norm else None,),
        *((found.noise / found.norm) ** 0.5 if found.norm else None,),
        found.keys,
        *(8 * found.size / parameters, (alphabet + found.raw_bits) / parameters),
        *((entropy + found.raw_bits) / parameters, found.size, parameters, found.norm),
    ]


def measure_with_theory(
    spec: str, layer: LayerGradient, precision: float = _PRECISION
) -> tuple[Quality, Prediction | None]:
    """Measure a codec on a layer, for as many keys as a comparison with the closed form needs, and the closed form."""
    expected = predict(codec(spec), layer)
    if expected is None or not expected.exact:
        return measure(spec, layer, _KEYS), expected
    return measure(spec, layer, _KEYS, precision=precision, most=_MOST_KEYS), expected


def effective_rank(matrix: Tensor) -> float:
    """``exp`` of the entropy of the singular values' shares (Roy and Vetterli 2007); 0 of a zero matrix.

    Args:
        matrix: ``[rows, columns]``; singular values are square roots of the smaller Gram matrix's eigenvalues.
    """
    a = matrix.double()
    gram = a.T @ a if a.shape[0] >= a.shape[1] else a @ a.T
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    values = values[values > 1e-12 * values.amax()].sqrt()  # below are errors of rounding
    share = values / values.sum()
    return float(torch.exp(torch.special.entr(share).sum())) if len(share) else 0.0


def _matrix(factor: Tensor) -> Tensor:
    """Rows of a factor: samples, or samples and positions of a convolution, whose columns are channels."""
    return factor.flatten(2).transpose(1, 2).flatten(0, 1) if factor.dim() > 2 else factor


def _sparsity(matrix: Tensor) -> float:
    return 1 - int(matrix.count_nonzero()) / matrix.numel()


def factors_table(stages: Mapping[int, Sequence[LayerGradient]]) -> Table:
    """Sparsity and effective rank of X, D and G."""
    columns = {"step": "training steps before", "layer": "parameter", "rows": "rows of D (samples x positions)"}
    for name, what in (("x", "input X"), ("d", "output gradient D"), ("g", "weight gradient G")):
        columns[f"{name}_sparsity"] = f"share of exact zeros in the {what}"
        columns[f"{name}_rank"] = f"effective rank of the {what}: exp of the entropy of its singular values' shares"
    rows: list[list[Cell]] = []
    for step, layer in each(stages):
        x, d = layer.factors.x, _matrix(layer.factors.d)
        line: list[Cell] = [step, layer.name, len(d)]
        for matrix in (_matrix(x) if x.is_floating_point() else None, d, layer.gradient.flatten(1)):
            line += [None, None] if matrix is None else [_sparsity(matrix), effective_rank(matrix)]
        rows.append(line)
    return Table("factors", "Sparsity and effective rank of X, D and G", columns, rows)


def layers_table(
    recipe: Recipe, specs: Sequence[str], cache: Path, processes: int, *, precision: float = _PRECISION
) -> Table:
    """Every codec on every layer at every step.

    Args:
        recipe: of the factors, which are in the cache.
        specs: the codecs.
        cache: where the factors are.
        processes: that measure; their number changes no number.
        precision: standard error, relative to the mean, of the errors that have a closed form.
    """
    shares = launch(_measure_share, processes, args=(recipe, tuple(specs), cache, precision), timeout=_PATIENCE)
    rows = dict(itertools.chain.from_iterable(shares))
    return Table("layers", "Every codec on every layer", _COLUMNS, [rows[i] for i in sorted(rows)])


def _measure_share(recipe: Recipe, specs: Sequence[str], cache: Path, precision: float) -> list[tuple[int, list[Cell]]]:
    """Numbered rows, from the factors in the cache; whoever is free takes the next, as some take much longer."""
    work = list(itertools.product(each(recipe.capture(cache)), specs))
    group, rows = dist.group.WORLD, []
    assert group is not None
    tqdm.set_lock(threading.RLock())  # its own is a system semaphore, which outlives a rank that is ended
    with tqdm(total=len(work), desc="measuring", unit="mean", disable=dist.get_rank() > 0) as bar:
        while (number := group.get_group_store().add("isgq/measured", 1) - 1) < len(work):
            (step, layer), spec = work[number]
            rows.append((number, row(step, layer, spec, *measure_with_theory(spec, layer, precision))))
            bar.update(number + 1 - bar.n)
    return rows


def totals_table(table: Table) -> Table:
    """All layers of a step together: the error of the whole gradient for the bytes of all messages."""
    columns = {name: _COLUMNS[name] for name in ("step", "codec", "method", "on")}
    columns |= {
        "bytes": "of all layers' real messages",
        "coded_bits": "the same in bits per parameter",
        "alphabet_bits": _COLUMNS["alphabet_bits"],
        "entropy_bits": _COLUMNS["entropy_bits"],
        "nmse": "sum over layers of mean squared errors / sum of |G|^2",
        "cosine": "mean of the layers' cosine",
    }
    groups: dict[tuple[Cell, ...], list[dict[str, Any]]] = {}
    for line in table.records():
        groups.setdefault(tuple(line[name] for name in ("step", "codec", "method", "on")), []).append(line)
    rows: list[list[Cell]] = []
    for key, lines in groups.items():
        parameters = sum(line["parameters"] for line in lines)
        norm = math.fsum(line["norm"] for line in lines)
        bits = [
            math.fsum(line[name] * line["parameters"] for line in lines) / parameters
            for name in ("coded_bits", "alphabet_bits", "entropy_bits")
        ]
        nmse = math.fsum(line["nmse"] * line["norm"] for line in lines if line["norm"]) / norm if norm else None
        cosine = math.fsum(line["cosine"] for line in lines) / len(lines)
        rows.append([*key, sum(line["bytes"] for line in lines), *bits, nmse, cosine])
    return Table("totals", "All layers together", columns, rows)


def agreement(table: Table) -> tuple[int, int, dict[str, Any] | None]:
    """How many rows have a closed form, how many of them agree with it, and the row that is farthest from its own.

    An error of exactly 0 that is also expected to be 0 agrees.
    """
    lines = [line for line in table.records() if line["theory"] is not None]
    off = {i: abs((line["measured_to_theory"] or 1.0) - 1) for i, line in enumerate(lines)}
    worst = max(off, key=lambda i: off[i], default=None)
    return len(lines), sum(each <= AGREES for each in off.values()), None if worst is None else lines[worst]


def summary(layers: Table, totals: Table, factors: Table) -> list[str]:
    """What was found."""
    count, agree, worst = agreement(layers)
    drawn = sum(line["theory"] is not None and line["nmse_error"] > 0 for line in layers.records())
    sentences = []
    if worst:
        off = 100 * abs((worst["measured_to_theory"] or 1.0) - 1)
        sentences.append(
            f"Measured error and closed form agree within {100 * AGREES:.0f} % in {agree} of {count} comparisons, "
            f"{drawn} of them with codecs that are random; the largest difference is {off:.2f} % "
            f"({worst['codec']} on {worst['layer']} after {worst['step']} steps, {worst['keys']:,} keys)."
        )
    last = max(line["step"] for line in totals.records())
    useful = [line for line in totals.records() if line["step"] == last and (line["nmse"] or 0.0) <= 1]
    for on in ("factors", "gradient"):
        fewest = min((line for line in useful if line["on"] == on), key=lambda line: line["bytes"], default=None)
        if fewest:
            sentences.append(
                f"After {last} steps the fewest bytes with an error below the gradient's own norm, among codecs of the "
                f"{on}: {fewest['codec']} ({fewest['method']}) with {fewest['bytes']:,} bytes, "
                f"{fewest['coded_bits']:.3f} bits per parameter, NMSE {fewest['nmse']:.3f}."
            )
    for line in factors.records():
        if line["step"] == last:
            known = [n for n in "xdg" if line[f"{n}_rank"] is not None]  # indices have no rank
            zeros = ", ".join(f"{100 * line[f'{n}_sparsity']:.0f} % of {n.upper()}" for n in known)
            ranks = ", ".join(f"{line[f'{n}_rank']:.1f}" for n in known)
            sentences.append(f"{line['layer']} after {last} steps: zeros are {zeros}; effective ranks {ranks}.")
    return sentences


def figures(layers: Table, totals: Table, factors: Table) -> list[Figure]:
    """The main ones."""
    found = [_agreement_figure(layers), _error_figure(totals), _bits_figure(totals)]
    for kind, label in (("sparsity", "share of exact zeros"), ("rank", "effective rank")):
        found.append(_course_figure(factors, kind, label))
    return found


def _agreement_figure(layers: Table) -> Figure:
    def paint(axes: Axes) -> None:
        for i, on in enumerate(("factors", "gradient")):
            lines = [line for line in layers.records() if line["on"] == on and line["measured_to_theory"]]
            points = [(line["theory"], 100 * (line["measured_to_theory"] - 1)) for line in lines]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []), linestyle="", label=f"on {on}", **style(i + 1)
            )
        axes.axhspan(-100 * AGREES, 100 * AGREES, color="#999999", alpha=0.2, label=f"{100 * AGREES:.0f} %")
        axes.set_xscale("log")
        axes.set_xlabel("NMSE, closed form")
        axes.set_ylabel("measured minus closed form (%)")

    return draw("agreement", "Measured errors against closed forms: every layer, codec and step that has one", paint)


def _label(spec: str) -> str:
    """A spec in at most two lines."""
    cut = max(spec.rfind(letter, 0, _LINE) for letter in ":,(;") + 1
    return spec if len(spec) <= _LINE or not cut else f"{spec[:cut]}\n{spec[cut:]}"


def _by_codec(axes: Axes, curves: Mapping[str, Mapping[str, float | None]]) -> None:
    """A line for each codec, a marker for each curve: label -> codec -> value."""
    codecs = list(dict.fromkeys(spec for curve in curves.values() for spec in curve))
    for i, (label, curve) in enumerate(curves.items()):
        points = [(value, codecs.index(spec)) for spec, value in curve.items() if value]  # 0 has no logarithm
        axes.plot(*zip(*points, strict=True) if points else ([], []), linestyle="", label=label, **style(i))
    axes.set_yticks(range(len(codecs)), [_label(spec) for spec in codecs], fontsize=7.5)
    axes.set_ylim(len(codecs) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_ylabel("codec")


def _error_figure(totals: Table) -> Figure:
    lines = totals.records()
    curves = {
        f"after {step} steps": {line["codec"]: line["nmse"] for line in lines if line["step"] == step}
        for step in dict.fromkeys(line["step"] for line in lines)
    }

    def paint(axes: Axes) -> None:
        _by_codec(axes, curves)
        axes.axvline(1, color="#666666", linewidth=1)
        axes.set_xlabel("NMSE of all layers together")

    caption = "Error of the whole gradient; right of the line it exceeds the gradient's own norm. Lossless: no marker"
    return draw("error", caption, paint, height=_height(curves))


def _bits_figure(totals: Table) -> Figure:
    last = max(line["step"] for line in totals.records())
    curves = {
        label: {line["codec"]: line[name] for line in totals.records() if line["step"] == last}
        for name, label in (("coded_bits", "coded"), ("alphabet_bits", "alphabet"), ("entropy_bits", "entropy"))
    }

    def paint(axes: Axes) -> None:
        _by_codec(axes, curves)
        axes.set_xlabel("bits per parameter")

    caption = f"Size of all layers' messages after {last} steps: real bytes (coded), fixed width, empirical entropy"
    return draw("bits", caption, paint, height=_height(curves))


def _height(curves: Mapping[str, Mapping[str, float | None]]) -> float:
    return 1.2 + 0.26 * max(len(curve) for curve in curves.values())


def _course_figure(factors: Table, kind: str, label: str) -> Figure:
    def paint(axes: Axes) -> None:
        for i, layer in enumerate(dict.fromkeys(line["layer"] for line in factors.records())):
            lines = [line for line in factors.records() if line["layer"] == layer]
            for name, dash in (("x", "-"), ("d", "--"), ("g", ":")):
                values = [line[f"{name}_{kind}"] for line in lines]
                steps = [line["step"] for line in lines]
                axes.plot(steps, values, linestyle=dash, label=f"{name.upper()} of {layer}", **style(i))
        steps = list(dict.fromkeys(line["step"] for line in factors.records()))
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.set_xlabel("training steps")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)

    title = f"{label[0].upper()}{label[1:]}"
    return draw(kind, f"{title} of input X, output gradient D and weight gradient G over training", paint)


def add_recipe_options(parser: argparse.ArgumentParser, steps: Sequence[int]) -> None:
    """Options of what is captured, and of how it is measured."""
    parser.add_argument("--model", default="lenet", help="fc, lenet, cifarnet, ... (default: %(default)s)")
    parser.add_argument("--data", default="fashion", help="a data set by name (default: %(default)s)")
    parser.add_argument("--steps", nargs="+", type=int, default=list(steps), help="training steps before each capture")
    parser.add_argument("--batch", type=int, default=Recipe.batch, help="images of a step (default: %(default)s)")
    parser.add_argument("--standardize", action="store_true", help="pixels of mean 0 and deviation 1")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of images")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of captured factors (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="that measure side by side (default: %(default)s)")


def recipe_of(options: argparse.Namespace) -> Recipe:
    """What the options say is to be captured.

    Raises:
        ReportError: no process.
    """
    if options.processes < 1:
        raise ReportError(f"--processes {options.processes} must be 1 or more")
    steps = tuple(sorted(set(options.steps)))
    return Recipe(options.model, options.data, steps, options.batch, options.standardize, options.seed)


def build(options: argparse.Namespace) -> Report:
    """The report of the command's options."""
    specs = SPECS if options.codecs == ["all"] else options.codecs
    for spec in specs:
        codec(spec)
    recipe = recipe_of(options)
    stages = recipe.capture(options.cache)
    layers = layers_table(recipe, specs, options.cache, options.processes)
    totals, factors = totals_table(layers), factors_table(stages)
    return Report(
        f"Reconstruction of {recipe.model}'s gradients on {recipe.data}",
        summary(layers, totals, factors),
        [totals, factors, layers],
        figures(layers, totals, factors),
        notes(recipe),
    )


def notes(recipe: Recipe, precision: float = _PRECISION) -> list[str]:
    """How to read the numbers of :func:`layers_table`."""
    pixels = "standardized" if recipe.standardize else "raw"
    return [
        f"Factors are captured in one process, on a batch of {recipe.batch} images after each number of steps of SGD "
        f"with momentum on {pixels} pixels, seed {recipe.seed}.",
        f"Means are over {_KEYS} keys at least; where there is a closed form, over as many as bring the standard error "
        f"below {100 * precision:.1f} % of the mean, at most {_MOST_KEYS:,}. The table says how many.",
        "Closed forms: stated variances of the codecs; for ISGQ, Var(G^) = contract(X^2 + vx, vd) + contract(vx, D^2); "
        "for codecs that keep entries, the identities of rTop-k and EUS. Rotated factors' error includes the bias's.",
        "Coded bits are real bytes; alphabet and entropy bits are computed from the symbols and are no message's size.",
        "Codecs with memory are shown in their first step, with an empty memory.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.reconstruction", description="How well every codec rebuilds real gradients"
    )
    add_recipe_options(parser, (0, 100, 1000))
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", default=["all"], help="specs, or all")
    report.run(parser, build, arguments)


if __name__ == "__main__":
    main()
