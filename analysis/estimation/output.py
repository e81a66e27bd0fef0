"""The files of a report: JSON, CSV, PNG, SVG and one HTML file that holds everything.

``report.json`` is one object::

    schema      1
    title       of the report
    command     how it was made
    versions    name -> version
    summary     list of sentences
    tables      list of {name, caption, header, rows}: rows of strings, numbers and null; also in NAME.csv
    figures     list of {name, caption}: in NAME.png and NAME.svg
"""

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment
from matplotlib.figure import Figure

from analysis.runs import write_atomically

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its file.
        caption: what it shows.
        header: a name for each column.
        rows: of as many cells each.
    """

    name: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, eq=False)
class Plot:
    """A figure.

    Attributes:
        name: of its files.
        caption: what it shows.
        figure: matplotlib's.
    """

    name: str
    caption: str
    figure: Figure


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><link rel="icon" href="data:,"><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; color: #111 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ccc; white-space: nowrap }
th:first-child, td:first-child { text-align: left } img { max-width: 100%; height: auto }
figure { margin: 2rem 0 } footer { margin-top: 3rem; color: #444; font-size: .9rem } code { overflow-wrap: anywhere }
</style></head><body><h1>{{ title }}</h1>
<ul>{% for line in summary %}<li>{{ line }}</li>{% endfor %}</ul>
{% for plot, source in plots %}<figure><img alt="{{ plot.caption }}" src="{{ source }}">
<figcaption>{{ plot.caption }}</figcaption></figure>{% endfor %}
{% for table in tables %}<h2>{{ table.caption }}</h2><div class="wide"><table>
<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell|text }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endfor %}
<footer><code>{{ command }}</code><br>{% for name, version in versions.items() %}{{ name }} {{ version }} {% endfor %}
</footer></body></html>
"""


def text(cell: Cell) -> str:
    """A cell for people."""
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def write_report(
    folder: Path,
    title: str,
    summary: Sequence[str],
    tables: Sequence[Table],
    plots: Sequence[Plot],
    command: str,
    versions: Mapping[str, str],
) -> None:
    """Write all files of a report; the module says which."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for plot in plots:
        for kind in ("png", "svg"):
            plot.figure.savefig(
                folder / f"{plot.name}.{kind}", dpi=120, metadata={"Date": None} if kind == "svg" else {}
            )
        source = base64.b64encode((folder / f"{plot.name}.svg").read_bytes()).decode()
        shown.append((plot, f"data:image/svg+xml;base64,{source}"))
    for table in tables:
        rows = io.StringIO()
        csv.writer(rows, lineterminator="\n").writerows([table.header, *table.rows])
        write_atomically(folder / f"{table.name}.csv", rows.getvalue())
    report = {
        "schema": 1,
        "title": title,
        "command": command,
        "versions": dict(versions),
        "summary": list(summary),
        "tables": [asdict(table) for table in tables],
        "figures": [{"name": plot.name, "caption": plot.caption} for plot in plots],
    }
    write_atomically(folder / "report.json", json.dumps(report, indent=1) + "\n")
    environment = Environment(autoescape=True)
    environment.filters["text"] = text
    page = environment.from_string(_PAGE).render(
        title=title, summary=summary, tables=tables, plots=shown, command=command, versions=versions
    )
    write_atomically(folder / "report.html", page)
