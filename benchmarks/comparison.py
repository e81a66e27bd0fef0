"""Many methods at one task: each at its own best rate of one grid, several seeds, a table, and figures."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from analysis.report import Cell, Figure, Report, Table, draw, style
from benchmarks.methods import in_ring
from benchmarks.simulation import Outcome
from benchmarks.store import run_all
from isgq.bandwidth import Link
from training.config import Config

DENSE = "dense"
COLUMNS: Mapping[str, str] = {
    "setting": "what is varied besides the method",
    "method": "see benchmarks.methods",
    "rate": "learning rate of the grid with the least loss of the first seed",
    "seeds": "runs at that rate",
    "sent": "bytes that a worker sends in a step",
    "moved": "bytes that it sends and receives",
    "compression": "bytes of float32 gradients over those sent",
    "accuracy": "on what is held out, mean over seeds",
    "loss": "on what is held out, mean over seeds",
    "deviation": "standard deviation of that loss over seeds",
    "to_dense": "mean over seeds of the loss relative to that of dense training, per cent",
}


@dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
        title: of the report.
        base: all options of a run but method, rate and seed.
        methods: see :mod:`benchmarks.methods`; dense training is always among them.
        rates: the grid of all of them.
        settings: name -> options that differ from the base.
        only: setting -> its methods, where not all of them fit.
        links: for which the time of the communication is modelled.
        notes: how to read it.
    """

    title: str
    base: Config
    methods: Sequence[str]
    rates: Sequence[float]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    links: Sequence[str] = ()
    notes: Sequence[str] = ()

    def configs(self, setting: str, method: str) -> list[Config]:
        """One for each rate."""
        base = replace(self.base, codecs=(method,), **self.settings[setting])
        return [replace(base, lr=rate) for rate in self.rates]


@dataclass(frozen=True)
class Row:
    """A method in a setting, at its best rate: one run a seed, first seed first."""

    setting: str
    method: str
    runs: Sequence[Outcome]

    def mean(self, name: str) -> float:
        """Of a number over seeds."""
        return statistics.fmean(getattr(run, name) for run in self.runs)

    def to_dense(self, dense: "Row") -> float:
        """Mean over seeds of the loss relative to dense training with that seed, per cent."""
        pairs = zip(self.runs, dense.runs, strict=True)
        return 100 * statistics.fmean(run.loss / base.loss - 1 for run, base in pairs)

    def cells(self, dense: "Row") -> list[Cell]:
        """In the order of :data:`COLUMNS`."""
        losses = [run.loss for run in self.runs]
        deviation = statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None
        sizes = round(self.mean("sent")), round(self.mean("moved")), self.mean("compression")
        scores = self.mean("accuracy"), self.mean("loss"), deviation, self.to_dense(dense)
        return [self.setting, self.method, self.runs[0].config.lr, len(self.runs), *sizes, *scores]


def compare(study: Study, seeds: Sequence[int], folder: Path, processes: int) -> Report:
    """Make all runs that are missing, and the report."""
    pairs = [
        (setting, method)
        for setting in study.settings
        for method in dict.fromkeys([DENSE, *study.only.get(setting, study.methods)])
    ]
    grid = [[replace(c, seed=seeds[0]) for c in study.configs(*pair)] for pair in pairs]
    outcomes = iter(run_all([config for configs in grid for config in configs], folder, processes))
    best = [min((next(outcomes) for _ in configs), key=lambda run: run.loss) for configs in grid]
    others = iter(run_all([replace(b.config, seed=s) for b in best for s in seeds[1:]], folder, processes))
    rows = [Row(*pair, [first, *(next(others) for _ in seeds[1:])]) for pair, first in zip(pairs, best, strict=True)]
    tables = [_table(rows)]
    if study.links:
        tables.append(_times(rows, [Link.parse(link) for link in study.links]))
    return Report(study.title, [_protocol(study, seeds), *_summary(rows)], tables, _figures(study, rows), study.notes)


def _protocol(study: Study, seeds: Sequence[int]) -> str:
    base = study.base
    rates = ", ".join(f"{rate:g}" for rate in study.rates)
    return (
        f"{base.model} on {base.data}, {base.workers[0]} simulated workers with "
        f"{base.batch_of_each(base.workers[0])} samples each unless said otherwise, {base.epochs} x {base.epoch_steps} "
        f"steps, SGD with momentum {base.momentum:g}, cosine to 0. Learning rates {rates} for every method, dense "
        f"training included, chosen by the loss of seed {seeds[0]}; seeds {', '.join(map(str, seeds))} at that rate."
    )


def _dense(rows: Sequence[Row], setting: str) -> Row:
    return next(row for row in rows if (row.setting, row.method) == (setting, DENSE))


def _table(rows: Sequence[Row]) -> Table:
    caption = "Every method at its best rate"
    return Table("methods", caption, COLUMNS, [row.cells(_dense(rows, row.setting)) for row in rows])


def _summary(rows: Sequence[Row]) -> list[str]:
    """For each setting, what sends the fewest bytes within one per cent of dense training, and what is best of all."""
    sentences = []
    for setting in dict.fromkeys(row.setting for row in rows):
        mine, dense = [row for row in rows if row.setting == setting], _dense(rows, setting)
        where = f"{setting}: " if setting else ""
        near = [row for row in mine if row.to_dense(dense) <= 1]
        fewest = min(near, key=lambda row: row.mean("sent"))
        others = [row for row in mine if row.method != DENSE]
        if not others:
            sentences.append(f"{where}dense {dense.mean('loss'):.4f}.")
            continue
        least = min(others, key=lambda row: row.mean("loss"))
        sentences.append(
            f"{where}dense {dense.mean('loss'):.4f}; of {len(near) - 1} methods within 1 % of it, the fewest bytes are "
            f"those of {fewest.method}, x{fewest.mean('compression'):.0f}; the least loss is that of {least.method}, "
            f"{least.to_dense(dense):+.2f} % at x{least.mean('compression'):.0f}."
        )
    return sentences


def seconds(run: Outcome, link: Link) -> float:
    """A model: what the whole run's communication takes if nothing else uses the link and nothing overlaps."""
    busiest = run.moved / 2 if in_ring(run.method) else run.moved - run.sent
    return run.config.epochs * (run.config.epoch_steps or 0) * (busiest / link.bytes_per_second + 2 * link.latency)


def _times(rows: Sequence[Row], links: Sequence[Link]) -> Table:
    columns = {name: COLUMNS[name] for name in ("setting", "method", "loss")}
    columns |= {str(link): f"modelled seconds of the run's communication over {link}" for link in links}
    cells: list[list[Cell]] = []
    for row in rows:
        cells.append([row.setting, row.method, row.mean("loss"), *(seconds(row.runs[0], link) for link in links)])
    return Table("times", "A model of the link, no measurement", columns, cells)


def _figures(study: Study, rows: Sequence[Row]) -> list[Figure]:
    found = []
    for i, setting in enumerate(study.settings):
        mine = [row for row in rows if row.setting == setting]
        of = f" ({setting})" if setting else ""
        found.append(draw(f"bytes{i}", f"Loss against bytes{of}", _painter(mine, _against_bytes)))
        if study.base.epochs > 1:
            found.append(
                draw(f"epochs{i}", f"Loss of the first seed against epochs{of}", _painter(mine, _against_epochs))
            )
    if study.links:
        found.append(draw("links", "Modelled time of the communication", _painter(rows, _against_links)))
    return found


def _painter(rows: Sequence[Row], curve: Callable[[Axes, Row, dict[str, Any]], None]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        for i, row in enumerate(rows):
            curve(axes, row, {**style(i), "label": row.method})

    return paint


def _against_bytes(axes: Axes, row: Row, look: dict[str, Any]) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a worker sends in a step")
    axes.set_ylabel("loss on what is held out")
    axes.plot([row.mean("sent")], [row.mean("loss")], linestyle="none", **look)


def _against_epochs(axes: Axes, row: Row, look: dict[str, Any]) -> None:
    points = row.runs[0].points
    axes.set_xlabel("epochs")
    axes.set_ylabel("loss on what is held out")
    axes.plot(range(1, len(points) + 1), [point.test_loss for point in points], **look)


def _against_links(axes: Axes, row: Row, look: dict[str, Any]) -> None:
    rates = [10**exponent for exponent in range(6, 11)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bandwidth, bit/s")
    axes.set_ylabel("seconds of communication, modelled")
    axes.plot(rates, [seconds(row.runs[0], Link(rate / 8)) for rate in rates], **look)
