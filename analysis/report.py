"""Reports that people look at: numbers as JSON and CSV, figures as PNG and SVG, and one HTML page that holds it all.

    python -m analysis.report RUNS... [--out FOLDER]     # joins the reports of several folders into one page

A folder of a report has ``report.html`` (the whole of it: images are embedded, nothing is fetched), ``NAME.csv`` for
each table, ``NAME.png`` and ``NAME.svg`` for each figure, and ``report.json``, one object::

    schema     1
    title      of the report
    summary    list of sentences: what was found
    notes      list of sentences: what one has to know to read it
    tables     list of {name, caption, columns, rows}: columns is a list of {name, meaning}, the meaning with its unit;
               rows is a list of lists of one cell a column: text, a number, true, false, or null for "no such number"
    figures    list of {name, caption}
    command    the command that made it
    versions   {python, torch, numpy, matplotlib, isgq}

To make one, build a :class:`Report` from :class:`Table` and :func:`draw`, and let :func:`run` do the rest of a command.
"""

import argparse
import base64
import csv
import io
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

import isgq
from analysis.runs import COLORS, MARKERS, write_atomically
from data import DataError
from isgq.core.errors import IsgqError
from models import ModelError

SCHEMA = 1
Cell = str | int | float | bool | None

_WIDTH = 5.0  # inches: on a phone, where that is as wide as the screen, a letter stays as large as it is in print
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.hashsalt": "isgq",  # ids in the file, which otherwise differ each time
}
_PAGE = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


class ReportError(ValueError):
    """What a report is to be made of is missing, half-written or of another form."""


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ReportError(f"name {name!r} becomes a file's and must consist of lower-case letters, digits and _")


@dataclass(frozen=True)
class Table:
    """Rows of numbers.

    Attributes:
        name: of its CSV file.
        caption: what it shows.
        columns: name -> what it is, with its unit.
        rows: a cell for each column; numbers that do not exist are None.

    Raises:
        ReportError: a name that no file can have, or a row of another length.
    """

    name: str
    caption: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        _check_name(self.name)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ReportError(f"table {self.name!r} has {len(self.columns)} columns, but the row {row}")

    def records(self) -> list[dict[str, Any]]:
        """The rows as name -> cell."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def csv(self) -> str:
        """As CSV, numbers in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if _missing(cell) else cell for cell in row] for row in self.rows])
        return text.getvalue()

    def markdown(self, columns: Sequence[str] | None = None) -> str:
        """As Markdown, rounded; some columns or all.

        Raises:
            ReportError: an unknown column.
        """
        names = list(self.columns)
        if unknown := set(columns or ()) - set(names):
            raise ReportError(f"table {self.name!r} has no column {sorted(unknown)}; it has {names}")
        chosen = [names.index(name) for name in columns or names]
        lines = [[names[i] for i in chosen], ["---"] * len(chosen)]
        lines += [[show(row[i]) for i in chosen] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Figure:
    """A drawn figure; :func:`draw` makes one.

    Attributes:
        name: of its files.
        caption: what it shows.
        svg: the drawing.
        png: the same as pixels.
    """

    name: str
    caption: str
    svg: str
    png: bytes

    @property
    def source(self) -> str:
        """The drawing as an address that holds it."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


def style(index: int) -> dict[str, Any]:
    """Colour and marker of the ``index``-th curve: told apart by either alone, as long as there are few."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def draw(name: str, caption: str, paint: Callable[[Axes], None], *, height: float = 3.8) -> Figure:
    """Draw one pair of axes in the style of all reports; what has a label is named in a legend below.

    Args:
        name: of the files.
        caption: what it shows.
        paint: draws, and names the axes with their units.
        height: of the axes without legend, in inches.

    Raises:
        ReportError: a name that no file can have, or an axis without a name.
    """
    _check_name(name)
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(_WIDTH, height), layout="constrained")
        axes = canvas.subplots()
        paint(axes)
        if not (axes.get_xlabel() and axes.get_ylabel()):
            raise ReportError(f"figure {name!r} needs names and units on both of its axes")
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            columns = 2 if max(map(len, labels)) < 32 else 1
            lines = math.ceil(len(handles) / columns)
            canvas.set_size_inches(_WIDTH, height + 0.19 * lines)
            canvas.legend(handles, labels, loc="outside lower left", ncols=columns)
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None})
        canvas.set_layout_engine("none")  # found for the first file already, and as dear as all else
        canvas.savefig(png, format="png", dpi=144)
    return Figure(name, caption, svg.getvalue(), png.getvalue())


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "matplotlib": mpl.__version__,
        "isgq": isgq.__version__,
    }


@dataclass(frozen=True)
class Report:
    """What was found, and what it was found with.

    Attributes:
        title: of the report.
        summary: sentences that say what was found.
        tables: all numbers.
        figures: of the most important ones.
        notes: sentences that say how to read it: methods, assumptions, limits.
        command: what made it.
        versions: of the software.
    """

    title: str
    summary: Sequence[str]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=_versions)

    def table(self, name: str) -> Table:
        """The table of this name.

        Raises:
            ReportError: there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise ReportError(f"report {self.title!r} has no table {name!r}; it has {[t.name for t in self.tables]}")

    def save(self, folder: Path) -> None:
        """Write all files of the report; ``report.json``, the last, says that it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        for table in self.tables:
            write_atomically(folder / f"{table.name}.csv", table.csv())
        for figure in self.figures:
            write_atomically(folder / f"{figure.name}.svg", figure.svg)
            (folder / f"{figure.name}.png").write_bytes(figure.png)
        write_atomically(folder / "report.html", page([self]))
        write_atomically(folder / "report.json", json.dumps(self._content(), indent=1, allow_nan=False) + "\n")

    def _content(self) -> dict[str, Any]:
        tables = [
            {
                "name": table.name,
                "caption": table.caption,
                "columns": [{"name": name, "meaning": meaning} for name, meaning in table.columns.items()],
                "rows": [[None if _missing(cell) else cell for cell in row] for row in table.rows],
            }
            for table in self.tables
        ]
        return {
            "schema": SCHEMA,
            "title": self.title,
            "summary": list(self.summary),
            "notes": list(self.notes),
            "tables": tables,
            "figures": [{"name": figure.name, "caption": figure.caption} for figure in self.figures],
            "command": self.command,
            "versions": dict(self.versions),
        }


def _missing(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and not math.isfinite(cell))


def show(cell: Cell) -> str:
    """A cell for readers: four digits of a number, no more."""
    if _missing(cell):
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if 1e3 <= abs(cell) < 1e12 else f"{cell:.4g}"
    return str(cell)


def page(reports: Sequence[Report]) -> str:
    """One HTML page of one or several reports."""
    title = reports[0].title if len(reports) == 1 else f"{len(reports)} reports"
    return _PAGE.get_template("report.html").render(title=title, reports=reports, show=show)


def load(folder: Path) -> Report:
    """Read what :meth:`Report.save` wrote.

    Raises:
        ReportError: there is no report, or it is half-written or of another form; the message says what to do.
    """
    path = folder / "report.json"
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise ReportError(f"{path} is of schema {content['schema']}, this version reads {SCHEMA}: make it again")
        tables = [
            Table(t["name"], t["caption"], {c["name"]: c["meaning"] for c in t["columns"]}, t["rows"])
            for t in content["tables"]
        ]
        figures = [_load_figure(folder, f["name"], f["caption"]) for f in content["figures"]]
        names = ("title", "summary", "notes", "command", "versions")
        return Report(tables=tables, figures=figures, **{name: content[name] for name in names})
    except FileNotFoundError as error:
        raise ReportError(f"{error.filename} is missing: {folder} is no folder of a complete report") from error
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} is no report ({type(error).__name__}: {error}): make it again") from error


def _load_figure(folder: Path, name: str, caption: str) -> Figure:
    _check_name(name)
    return Figure(name, caption, (folder / f"{name}.svg").read_text(), (folder / f"{name}.png").read_bytes())


def run(
    parser: argparse.ArgumentParser,
    build: Callable[[argparse.Namespace], Report],
    arguments: Sequence[str] | None = None,
) -> None:
    """The command of a report: read the options, build it, write it to ``--out``, and print the summary.

    What a user can do something about (an unknown codec, a missing run) ends with a message and status 2.

    Args:
        parser: its ``prog`` is ``python -m analysis.NAME``; gets the option ``--out``.
        build: makes the report from the options, without command.
        arguments: of the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = parser.prog.rpartition(".")[2]
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder to write (default: %(default)s)")
    options = parser.parse_args(given)
    try:
        report = build(options)
        command = shlex.join([*parser.prog.split(), *given])
        report = replace(report, command=command)
        report.save(options.out)
    except (IsgqError, DataError, ModelError, ReportError, OSError) as error:
        parser.error(str(error))
    print(f"{report.title}\n")
    for sentence in report.summary:
        print(f"- {sentence}")
    print(f"\nwritten to {options.out}/: report.html, report.json, tables as CSV, figures as PNG and SVG")


def main(arguments: Sequence[str] | None = None) -> None:
    """Join reports."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description="Join reports into one HTML page")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders with a report.json")
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="folder to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        reports = [load(folder) for folder in options.runs]
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "report.html", page(reports))
    except (ReportError, OSError) as error:
        parser.error(str(error))
    print(f"written {options.out / 'report.html'}: {len(reports)} reports")


if __name__ == "__main__":
    main()
