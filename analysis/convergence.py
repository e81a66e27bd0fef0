"""Loss against steps, bytes and modelled time at chosen links, from what train.py has left behind.

    python train.py --workers 4 --codecs dense isgq --out runs/fc
    python -m analysis.convergence runs/fc --links 10Mbit/20ms 1Gbit

Steps, losses and bytes are measured. The time is a model, not a measurement: steps times the seconds that
:class:`isgq.bandwidth.Link` says a step's bytes take on the link, plus ``--compute`` seconds a step for all else.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes

from analysis import report
from analysis.methods import name_of
from analysis.report import Cell, Figure, Report, ReportError, Table, draw, style
from analysis.runs import Summary, load_metrics, load_summary
from isgq.aggregate import AggregateName
from isgq.bandwidth import Link, Messages, Moved, predict

_UNITS = {"kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    Attributes:
        label: what figures call it.
        summary: of all of it.
        entries: its lines of the metrics, one an epoch.
    """

    label: str
    summary: Summary
    entries: Sequence[dict[str, Any]]

    def seconds(self, entry: dict[str, Any], link: Link) -> float:
        """Time until then that the link takes, by the model: so many exchanges of mean size, one after another."""
        aggregate = cast("AggregateName", self.summary.aggregate)
        rounds = predict(aggregate, Messages((0,), (0,), 0, 1), self.summary.workers, 0).rounds
        exchanges: int = max(1, entry["step"] // (self.summary.local_steps or 1))
        sent, received = entry["sent_bytes"] // exchanges, entry["received_bytes"] // exchanges
        return exchanges * link.seconds(Moved(sent, received, rounds))


def parse_link(text: str) -> Link:
    """Read ``"100Mbit"`` or ``"100Mbit/10ms"``: bits a second and the latency of a transfer.

    Raises:
        ReportError: of another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|Mbit|Gbit)(?:/(\d+(?:\.\d+)?)ms)?", text)
    if not found or not float(found[1]):
        raise ReportError(f"link {text!r} must look like 100Mbit or 100Mbit/10ms, with kbit, Mbit or Gbit")
    return Link(float(found[1]) * _UNITS[found[2]], float(found[3] or 0) / 1e3)


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs of some folders of train.py.

    Raises:
        ReportError: a file is missing or half-written, or no run has what is needed.
    """
    runs = []
    for folder in folders:
        try:
            summaries, metrics = load_summary(folder), load_metrics(folder)
        except ValueError as error:
            raise ReportError(str(error)) from error
        for summary in summaries:
            entries = [entry for entry in metrics if entry["run"] == summary.run and "sent_bytes" in entry]
            label = f"{summary.codec}, {summary.workers}x{summary.batch_per_worker}"
            if summary.aggregate != "gather":
                label += f", {summary.aggregate}, {summary.down} down"
            if summary.local_steps is not None:
                label += f", {summary.local_steps} local steps"
            if entries:
                runs.append(Run(label if len(folders) == 1 else f"{folder.name}: {label}", summary, entries))
    if not runs:
        raise ReportError(
            f"no run in {', '.join(map(str, folders))} has metrics of its bytes, as synchronous runs have"
        )
    return runs


def epochs_table(runs: Sequence[Run], links: dict[str, Link], compute: float) -> Table:
    """A line for each epoch of each run."""
    columns = {
        "run": "codec, workers x samples of each",
        "method": "the codec's name in the literature",
        "step": "training steps so far",
        "train_loss": "mean training loss of the epoch (nats)",
        "test_loss": "on the test images (nats)",
        "test_accuracy": "share of test images",
        "sent_bytes": "of the first worker so far, measured",
        "received_bytes": "of the first worker so far, measured",
        "seconds": "of the first worker so far, measured on the machine that trained",
        **{f"modelled_{name}": f"seconds so far, by the model of the link {name}" for name in links},
    }
    rows: list[list[Cell]] = []
    for run in runs:
        for entry in run.entries:
            times = [entry["step"] * compute + run.seconds(entry, link) for link in links.values()]
            measured = [entry[name] for name in list(columns)[2:9]]
            rows.append([run.label, name_of(run.summary.codec), *measured, *times])
    return Table("epochs", "Every epoch of every run", columns, rows)


def _curves(name: str, caption: str, table: Table, x: str, x_label: str, *, log: bool = False) -> Figure:
    def paint(axes: Axes) -> None:
        for i, label in enumerate(dict.fromkeys(line["run"] for line in table.records())):
            lines = [line for line in table.records() if line["run"] == label]
            axes.plot([line[x] for line in lines], [line["test_loss"] for line in lines], label=label, **style(i))
        if log:
            axes.set_xscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel("test loss (nats)")

    return draw(name, caption, paint)


def build(options: argparse.Namespace) -> Report:
    """The report of the command's options.

    Raises:
        ReportError: a negative time.
    """
    if options.compute < 0:
        raise ReportError(f"--compute {options.compute} must be 0 or more seconds")
    links = {text: parse_link(text) for text in options.links}
    runs = load_runs(options.runs)
    table = epochs_table(runs, links, options.compute)
    figures = [
        _curves("steps", "Test loss against training steps", table, "step", "training steps"),
        _curves("sent", "Test loss against bytes", table, "sent_bytes", "bytes sent per worker", log=True),
    ]
    for i, text in enumerate(links):
        caption = f"Test loss against modelled time on a link of {text}"
        figures.append(_curves(f"time{i}", caption, table, f"modelled_{text}", f"modelled seconds, {text}", log=True))
    datasets = ", ".join(dict.fromkeys(f"{run.summary.model} on {run.summary.data}" for run in runs))
    return Report(f"Convergence of {datasets}", summary(runs, table, links), [table], figures, _notes(options.compute))


def summary(runs: Sequence[Run], table: Table, links: dict[str, Link]) -> list[str]:
    """How far every run came, with how many bytes, in which modelled time."""
    sentences = []
    for run in runs:
        last = next(line for line in reversed(table.records()) if line["run"] == run.label)
        times = ", ".join(f"{report.show(last[f'modelled_{name}'])} s at {name}" for name in links)
        sentences.append(
            f"{run.label}: test loss {last['test_loss']:.4f}, accuracy {last['test_accuracy']:.4f} after "
            f"{last['step']:,} steps with {last['sent_bytes']:,} bytes sent per worker; modelled time {times}."
        )
    return sentences


def _notes(compute: float) -> list[str]:
    return [
        "Bytes are measured by the session's ledger on the first worker, all headers counted.",
        "Modelled time: steps x compute + exchanges x (max(sent, received) / bandwidth + rounds x latency), if nothing "
        f"else uses the link, with {compute:g} seconds of compute a step. It is a model; the measured seconds, on one "
        "machine whose processes share its cores, are in the table.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.convergence", description="Loss against steps, bytes and modelled time"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders that train.py has written")
    parser.add_argument("--links", nargs="+", default=["10Mbit/20ms", "100Mbit/5ms", "1Gbit/1ms"], help="e.g. 1Gbit")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a step besides communication")
    report.run(parser, build, arguments)


if __name__ == "__main__":
    main()
