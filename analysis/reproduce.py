"""Runs a fixed list of reports and rewrites the tables of ``docs/results.md`` from them.

    python -m analysis.reproduce [--only NAME ...]

In the document, what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is written here: the commands,
what the report found, and a table. All else is left alone.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.report import Cell, Report, ReportError, Table, load
from analysis.runs import write_atomically

DOCUMENT = Path(__file__).parent.parent / "docs" / "results.md"
RUNS = Path("runs/reproduce")


@dataclass(frozen=True)
class Entry:
    """A part of the document.

    Attributes:
        commands: what makes the report, arguments of Python; the last one writes the report to ``RUNS / name``.
        table: whose rows are shown.
        columns: that are shown.
        where: column -> value of the rows that are shown.
    """

    commands: Sequence[str]
    table: str
    columns: Sequence[str]
    where: Mapping[str, Cell] = field(default_factory=dict)


def _reconstruction(model: str, data: str, *steps: int) -> Entry:
    options = f"--model {model} --data {data} --codecs all --steps {' '.join(map(str, steps))}"
    columns = ("codec", "coded_bits", "alphabet_bits", "entropy_bits", "nmse", "cosine")
    return Entry([f"-m analysis.reconstruction {options}"], "totals", columns, {"step": steps[-1]})


_TRAIN = "train.py --data fashion --workers 4 --batch-per-worker 16 --epochs 2 --lr 0.05 --seed 0 --timeout 600"
_CODECS = "--codecs dense isgq dithered:levels=2,bucket=row rotated"
ENTRIES: Mapping[str, Entry] = {
    "reconstruction_fc": _reconstruction("fc", "fashion", 0, 100, 1000),
    "reconstruction_lenet": _reconstruction("lenet", "fashion", 0, 100, 1000),
    "reconstruction_cifarnet": _reconstruction("cifarnet", "patches", 0, 100),
    "rate_distortion": Entry(
        ["-m analysis.rate_distortion --model lenet --data fashion --steps 100"],
        "curves",
        ("codec", "method", "bytes", "coded_bits", "nmse", "unbiased"),
        {"front": True},
    ),
    "scaling": Entry(
        ["-m analysis.scaling --codecs dense isgq rotated --workers 1 2 4 8 --beyond 16 32"],
        "scaling",
        (
            *("codec", "workers", "batch_per_worker", "sent_bytes", "received_bytes", "accuracy"),
            *("model_sent_bytes", "model_received_bytes"),
        ),
    ),
    "convergence": Entry(
        [f"{_TRAIN} {_CODECS} --out {RUNS}/fashion", f"-m analysis.convergence {RUNS}/fashion"],
        "epochs",
        ("run", "step", "train_loss", "test_loss", "test_accuracy", "sent_bytes", "modelled_10Mbit/20ms"),
    ),
    "estimation": Entry(
        ["-m analysis.estimation"],
        "reproduced",
        ("quantity", "closed_form", "measured", "error", "deviations", "bound", "stands_on"),
    ),
}


def select(table: Table, where: Mapping[str, Cell]) -> Table:
    """The rows that have these values."""
    rows = [
        row
        for row, line in zip(table.rows, table.records(), strict=True)
        if all(line[name] == value for name, value in where.items())
    ]
    return Table(table.name, table.caption, table.columns, rows)


def block(entry: Entry, commands: Sequence[str], report: Report) -> str:
    """What stands between the markers."""
    table = select(report.table(entry.table), entry.where)
    kept = ", ".join(f"{name} {value}" for name, value in entry.where.items())
    lines = ["```sh", *(f".venv/bin/python {command}" for command in commands), "```", ""]
    lines += [f"- {sentence}" for sentence in report.summary]
    lines += ["", f"{table.caption}{f' ({kept})' if kept else ''}:", "", table.markdown(entry.columns)]
    return "\n".join(lines)


def replaced(text: str, name: str, content: str) -> str:
    """The document with another content between the markers of a name.

    Raises:
        ReportError: the markers are missing.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ReportError(f"{DOCUMENT.name} needs the lines {begin} and {end} once each")
    return re.sub(rf"{begin}.*{end}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL)


def reproduce(name: str) -> Path:
    """Run the commands of an entry and rewrite its part of the document; returns the report's folder.

    Raises:
        ReportError: a command failed.
    """
    entry, folder = ENTRIES[name], RUNS / name
    commands = [*entry.commands[:-1], f"{entry.commands[-1]} --out {folder}"]
    for command in commands:
        print(f"\n$ python {command}", flush=True)
        status = subprocess.run([sys.executable, *shlex.split(command)], check=False).returncode
        if status:
            raise ReportError(f"python {command} ended with status {status}")
    rewrite(name, block(entry, commands, load(folder)))
    return folder


def rewrite(name: str, content: str) -> None:
    """Write what stands between the markers of a name.

    Raises:
        ReportError: the markers are missing.
    """
    write_atomically(DOCUMENT, replaced(DOCUMENT.read_text(), name, content))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all entries, or some, and join their reports."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.reproduce", description="Run the reports of docs/results.md and rewrite its tables"
    )
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="NAME")
    options = parser.parse_args(arguments)
    try:
        folders = [reproduce(name) for name in options.only]
    except (ReportError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(
        subprocess.run([sys.executable, "-m", "analysis.report", *map(str, folders), "--out", str(RUNS)]).returncode
    )


if __name__ == "__main__":
    main()
