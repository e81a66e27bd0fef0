"""Bytes and accuracy against the number of workers at a fixed total batch.

    python -m analysis.scaling --codecs dense isgq --workers 1 2 4 8 --beyond 16 32

Up to 8 workers are real processes, started by train.py; their bytes are measured. Beyond, the number of workers is
that of a model: one process trains a few steps with as many samples as one of the workers would have, which gives
messages of real sizes, and :func:`isgq.bandwidth.predict` says what so many workers would move with such messages. The
model is also shown where there is a measurement. It leaves out that messages are padded to the longest one.
"""

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes

import train
from analysis import report
from analysis.methods import name_of
from analysis.report import Cell, Figure, Report, ReportError, Table, draw, style
from analysis.runs import Summary, load_summary
from isgq.bandwidth import Moved, predict

_MOST = 8
_STEPS = 5  # of the model's messages; the first one describes itself

_COLUMNS = {
    "codec": "spec of the codec",
    "method": "its name in the literature",
    "workers": "number of workers",
    "batch_per_worker": "samples of each in a step",
    "sent_bytes": "per worker and step, measured in real processes",
    "received_bytes": "per worker and step, measured in real processes",
    "accuracy": "share of test images, measured",
    "model_sent_bytes": "the same by the ledger's model, from the size of real messages",
    "model_received_bytes": "the same by the ledger's model",
}


def modelled(config: train.Config, codec: str, workers: int) -> Moved:
    """What a worker moves in a step, by the ledger's model with messages of real size."""
    config = replace(config, workers=(1,), codecs=(codec,), total_batch=config.batch_of_each(workers))
    [run] = train.check(config)
    dataset, model = train.load(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    with train.instrument(model, config, run) as session:
        for _, mine in zip(range(_STEPS), train.shares(len(dataset.train_y), run, 0, config.seed, 0), strict=False):
            F.cross_entropy(model(dataset.train_x[mine]), dataset.train_y[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return predict("gather", session.messages(), workers, 0)


def measured(config: train.Config) -> list[Summary]:
    """Train all combinations in real processes."""
    with contextlib.redirect_stdout(io.StringIO()):  # its table is part of the report
        train.train_all(config)
    return load_summary(config.out)


def table(config: train.Config, beyond: Sequence[int]) -> Table:
    """A line for each codec and number of workers."""
    found = {(s.codec, s.workers): s for s in measured(config)}
    rows: list[list[Cell]] = []
    for codec in config.codecs:
        for workers in (*config.workers, *beyond):
            moved = modelled(config, codec, workers)
            run = found.get((codec, workers))
            real = (run.sent_bytes_per_step, run.received_bytes_per_step, run.test_accuracy) if run else (None,) * 3
            batch = config.batch_of_each(workers)
            rows.append([codec, name_of(codec), workers, batch, *real, moved.sent, moved.received])
    return Table("scaling", "Bytes and accuracy against workers at a fixed total batch", _COLUMNS, rows)


def _figure(scaling: Table, name: str, label: str, caption: str) -> Figure:
    def paint(axes: Axes) -> None:
        for i, codec in enumerate(dict.fromkeys(line["codec"] for line in scaling.records())):
            lines = [line for line in scaling.records() if line["codec"] == codec]
            real = [(line["workers"], line[name]) for line in lines if line[name]]
            axes.plot(*zip(*real, strict=True), label=codec, **style(i))
            model = [(line["workers"], line[f"model_{name}"]) for line in lines if line.get(f"model_{name}")]
            if model:
                hollow = {"linestyle": ":", "markerfacecolor": "white"}
                axes.plot(*zip(*model, strict=True), label=f"{codec}, model", zorder=1, **(style(i) | hollow))
        counts = list(dict.fromkeys(line["workers"] for line in scaling.records() if line[name] or "bytes" in name))
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        if "bytes" in name:
            axes.set_yscale("log")
        axes.set_xlabel("workers")
        axes.set_ylabel(label)

    return draw(name, caption, paint)


def summary(scaling: Table) -> list[str]:
    """What each codec sends with few and with many workers, and how far the model is off."""
    sentences = []
    for codec in dict.fromkeys(line["codec"] for line in scaling.records()):
        lines = [line for line in scaling.records() if line["codec"] == codec and line["sent_bytes"]]
        few, many = lines[0], lines[-1]
        sent, received = (f"from {few[name]:,.0f} to {many[name]:,.0f}" for name in ("sent_bytes", "received_bytes"))
        sentences.append(
            f"{codec}: from {few['workers']} to {many['workers']} workers the bytes that a worker sends in a step go "
            f"{sent}, those it receives {received}, the accuracy from {few['accuracy']:.4f} to {many['accuracy']:.4f}."
        )
    off = max(abs(line["model_sent_bytes"] / line["sent_bytes"] - 1) for line in scaling.records() if line["accuracy"])
    sentences.append(f"Where both exist, the model's sent bytes are within {100 * off:.1f} % of the measured ones.")
    return sentences


def build(options: argparse.Namespace) -> Report:
    """The report of the command's options.

    Raises:
        ReportError: more real processes than a machine should start.
    """
    if max(options.workers) > _MOST:
        raise ReportError(f"--workers {max(options.workers)}: real processes go to {_MOST}; give more as --beyond")
    config = train.Config(
        workers=tuple(options.workers),
        codecs=tuple(options.codecs),
        model=options.model,
        data=options.data,
        total_batch=options.total_batch,
        epochs=options.epochs,
        lr=options.lr,
        seed=options.seed,
        out=options.out / "train",
        timeout=options.timeout,
    )
    for workers in options.beyond:
        if workers <= _MOST or options.total_batch % workers:
            raise ReportError(f"--beyond {workers} must be more than {_MOST} and divide --total-batch exactly")
    runs = train.check(config)
    train.prepare(config, runs)
    scaling = table(config, options.beyond)
    figures = [
        _figure(scaling, "sent_bytes", "bytes sent per worker and step", "Bytes sent; hollow: the ledger's model"),
        _figure(scaling, "received_bytes", "bytes received per worker and step", "Bytes received; hollow: the model"),
        _figure(scaling, "accuracy", "test accuracy", "Accuracy of the runs in real processes"),
    ]
    title = f"Scaling of {config.model} on {config.data}, total batch {config.total_batch}"
    notes = [
        f"Up to {_MOST} workers are real processes on one machine, {config.epochs} epochs each, seed {config.seed}; "
        "all workers get all messages.",
        "Model: header and message of one process with as many samples as a worker would have, moved by the rule of "
        "isgq.bandwidth. It is no measurement, and has no accuracy.",
    ]
    return Report(title, summary(scaling), [scaling], figures, notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.scaling", description="Bytes and accuracy against workers at a fixed total batch"
    )
    parser.add_argument("--model", default="fc", help="(default: %(default)s)")
    parser.add_argument("--data", default="mnist5k", help="(default: %(default)s)")
    parser.add_argument("--codecs", nargs="+", default=["dense", "isgq", "rotated"], metavar="SPEC")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8], help="real processes, at most 8")
    parser.add_argument("--beyond", nargs="*", type=int, default=[16, 32], help="numbers of workers for the model")
    parser.add_argument("--total-batch", type=int, default=128, help="samples of all workers (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.2, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a missing worker")
    report.run(parser, build, arguments)


if __name__ == "__main__":
    main()
