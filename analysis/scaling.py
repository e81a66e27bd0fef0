"""Bytes and accuracy against the number of workers at a fixed total batch.

    python -m analysis.scaling --codecs dense isgq --workers 1 2 4 8 --beyond 16 32

Up to 8 workers are real processes, started by train.py; their bytes are measured. Beyond, the number of workers is
that of a model: one process trains with the total batch and now and then encodes the gradient of one worker's share,
which gives messages of real sizes, and :func:`isgq.bandwidth.predict` says what so many workers would move with such
messages. The model is also shown where there is a measurement. It leaves out that messages are padded to the longest.
"""

import argparse
import contextlib
import copy
import io
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes

import train
from analysis import report
from analysis.methods import name_of
from analysis.report import Cell, Figure, Report, ReportError, Table, draw, style
from analysis.runs import Summary, load_summary
from isgq.bandwidth import Messages, Moved, predict
from training.config import Config, Run, learning_rate
from training.road import session_of
from training.task import build, load, optimizer_of, task_of

_MOST = 8
_PROBES = 10  # how often in a training the model looks at messages

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


def modelled(config: Config, codec: str, counts: Sequence[int]) -> dict[int, Moved]:
    """What each of so many workers moves in a step, by the ledger's model with messages of real size.

    One process trains with the total batch, without compression. At some steps the gradient of one worker's share at
    these weights is encoded; messages of sizes between theirs are what the model moves.
    """
    source = load(config)
    alone = Run(codec, 1, config.batch_of_each(1))
    task, model = task_of(source, config, alone, 0), build(config, source)
    optimizer, steps = optimizer_of(model, config), config.epochs * task.epoch_steps
    shares = {
        workers: task_of(source, config, Run(codec, workers, config.batch_of_each(workers)), 0) for workers in counts
    }
    sizes: dict[int, list[Messages]] = {workers: [] for workers in counts}
    with contextlib.ExitStack() as stack:
        probes = {workers: copy.deepcopy(model) for workers in counts}
        sessions = {w: stack.enter_context(session_of(probe, config, alone)) for w, probe in probes.items()}
        for step in range(steps):
            for workers, probe in probes.items() if step % max(1, steps // _PROBES) == 0 else ():
                probe.load_state_dict(model.state_dict())
                for _ in range(2 if step == 0 else 1):  # a session's first message describes itself
                    shares[workers].loss(probe, step).backward()  # type: ignore[no-untyped-call]
                sizes[workers].append(sessions[workers].messages())
            optimizer.param_groups[0]["lr"] = learning_rate(config, step / steps)
            task.loss(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return {workers: predict("gather", _mean(sizes[workers]), workers, 0) for workers in counts}


def _mean(messages: Sequence[Messages]) -> Messages:
    up = sum(sum(message.up) for message in messages) / len(messages)
    return replace(messages[0], up=(round(up),))


def measured(config: Config) -> list[Summary]:
    """Train all combinations in real processes."""
    with contextlib.redirect_stdout(io.StringIO()):  # its table is part of the report
        train.train_all(config)
    return load_summary(config.out)


def table(config: Config, beyond: Sequence[int]) -> Table:
    """A line for each codec and number of workers."""
    found = {(s.codec, s.workers): s for s in measured(config)}
    rows: list[list[Cell]] = []
    for codec in config.codecs:
        for workers, moved in modelled(config, codec, [*config.workers, *beyond]).items():
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
        off = max(abs(line["model_sent_bytes"] / line["sent_bytes"] - 1) for line in lines)
        sentences.append(
            f"{codec}: from {few['workers']} to {many['workers']} workers the bytes that a worker sends in a step go "
            f"{sent}, those it receives {received}, the accuracy from {few['accuracy']:.4f} to "
            f"{many['accuracy']:.4f}; the model's sent bytes are within {100 * off:.1f} % of these."
        )
    return sentences


def build_report(options: argparse.Namespace) -> Report:
    """The report of the command's options.

    Raises:
        ReportError: more real processes than a machine should start.
    """
    if max(options.workers) > _MOST:
        raise ReportError(f"--workers {max(options.workers)}: real processes go to {_MOST}; give more as --beyond")
    config = Config(
        workers=tuple(options.workers),
        codecs=tuple(options.codecs),
        model=options.model,
        data=options.data,
        total_batch=options.total_batch,
        epochs=options.epochs,
        lr=options.lr,
        seed=options.seed,
        resume=options.resume,
        out=options.out / "train",
        timeout=options.timeout,
    )
    for workers in options.beyond:
        if workers <= _MOST or options.total_batch % workers:
            raise ReportError(f"--beyond {workers} must be more than {_MOST} and divide --total-batch exactly")
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
        f"Model: messages of one worker's share at {_PROBES} steps of a training in one process, moved by the rule of "
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
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a missing worker")
    report.run(parser, build_report, arguments)


if __name__ == "__main__":
    main()
