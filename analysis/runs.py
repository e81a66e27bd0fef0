"""What training leaves behind: ``summary.json``, ``metrics.jsonl``, a table and a plot.

``summary.json`` is a list of runs, each with the keys of :class:`Summary`; bytes are per worker, mean over steps and
workers; seconds are those of the training steps, without start-up and evaluation; staleness -> number of gradients
that had it, where the server is asynchronous; perplexity = exp(test_loss), where the data are a text. Loss and accuracy
are those on the test images or on a text's validation part. ``metrics.jsonl`` has one object a
line: run, epoch, step, train_loss, test_loss, test_accuracy, seconds, and the first worker's sent_bytes and
received_bytes since the run began.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7")
"""Okabe and Ito's colours: told apart with every kind of colour vision."""
MARKERS = "osD^vP*X"
"""Matplotlib's markers that go with them."""


@dataclass(frozen=True)
class Summary:
    """One finished run."""

    model: str
    data: str
    codec: str
    workers: int
    batch_per_worker: int
    epochs: int
    seed: int
    test_accuracy: float
    test_loss: float
    sent_bytes_per_step: float
    received_bytes_per_step: float
    dense_bytes_per_step: float
    compression: float
    seconds: float
    aggregate: str
    down: str
    staleness: dict[str, int]
    perplexity: float | None = None
    local_steps: int | None = None

    @property
    def run(self) -> str:
        """The run's name in ``metrics.jsonl``."""
        return run_name(self.codec, self.workers, self.batch_per_worker, self.aggregate, self.down, self.local_steps)


def run_name(codec: str, workers: int, batch: int, aggregate: str, down: str, local_steps: int | None) -> str:
    """Names the files of a run, and its lines in the metrics."""
    passes = "" if aggregate == "gather" else f"-{aggregate}-{down}"
    passes += f"-local={local_steps}" if local_steps is not None else ""
    return f"{re.sub(r'[^A-Za-z0-9._=]+', '-', codec + passes).strip('-')}-{workers}x{batch}"


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file so that a reader finds the old or the new content, never half of it, also after a crash.

    Raises:
        OSError: it cannot be written, as on a full disk; the old file stays, and nothing else is left.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name must outlive a crash, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_summary(folder: Path, summaries: Sequence[Summary]) -> None:
    """Write ``summary.json``."""
    write_atomically(folder / "summary.json", json.dumps([asdict(s) for s in summaries], indent=1) + "\n")


def load_summary(folder: Path) -> list[Summary]:
    """Read ``summary.json``.

    Raises:
        ValueError: the file is missing, half-written or of another form.
    """
    path = folder / "summary.json"
    try:
        return [Summary(**run) for run in json.loads(path.read_text())]
    except (OSError, TypeError, ValueError) as error:
        wanted = ", ".join(f.name for f in fields(Summary))
        raise ValueError(
            f"{path} is no summary of runs ({error}); it must be a JSON list of objects with {wanted}"
        ) from error


def append_metrics(folder: Path, entry: dict[str, Any]) -> None:
    """Add a line to ``metrics.jsonl``."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``.

    Raises:
        ValueError: the file is missing, or a line is half-written or of another form.
    """
    path = folder / "metrics.jsonl"
    try:
        entries: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        for number, entry in enumerate(entries, 1):
            if missing := {"run", "epoch", "step", "test_loss", "test_accuracy", "seconds"} - entry.keys():
                raise ValueError(f"line {number} lacks {', '.join(sorted(missing))}")
    except (OSError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no file of metrics ({error}): train again, or --resume") from error
    return entries


def trim_metrics(folder: Path, run: str, epochs: int) -> None:
    """Drop the lines of a run after its first ``epochs`` epochs, which are about to be trained again."""
    path = folder / "metrics.jsonl"
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not _is_later(line, run, epochs)]
        write_atomically(path, "".join(kept))


def _is_later(line: str, run: str, epochs: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:  # half a line of a run that was killed
        return True
    return bool(entry["run"] == run and entry["epoch"] > epochs)


def table(summaries: Sequence[Summary]) -> str:
    """The runs as aligned text."""
    rows: list[tuple[str, ...]] = [
        ("codec", "workers", "batch each", "accuracy", "loss", "sent B/step", "received B/step", "compression", "s")
    ]
    passes = any(s.aggregate != "gather" for s in summaries)
    for s in summaries:
        local = f", {s.local_steps} local steps" if s.local_steps is not None else ""
        rows.append((
            (f"{s.codec}, {s.aggregate}, {s.down} down" if passes else s.codec) + local,
            str(s.workers),
            str(s.batch_per_worker),
            f"{s.test_accuracy:.4f}",
            f"{s.test_loss:.4f}",
            f"{s.sent_bytes_per_step:,.0f}",
            f"{s.received_bytes_per_step:,.0f}",
            f"x{s.compression:.1f}",
            f"{s.seconds:.1f}",
        ))
    if any(s.perplexity is not None for s in summaries):
        cells = ["perplexity", *("-" if s.perplexity is None else f"{s.perplexity:.1f}" for s in summaries)]
        rows = [(*row[:5], cell, *row[5:]) for row, cell in zip(rows, cells, strict=True)]
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Cells as aligned text, the first column to the left, the others to the right, a rule under the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Accuracy (perplexity of a text) and sent bytes against the number of workers, one line per codec, as PNG."""
    import matplotlib  # heavy, and needed here alone

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    codecs = list(dict.fromkeys(s.codec for s in summaries))
    for codec, color, marker in zip(codecs, COLORS * len(codecs), MARKERS * len(codecs), strict=False):
        runs = sorted((s for s in summaries if s.codec == codec), key=lambda s: s.workers)
        workers = [s.workers for s in runs]
        style = {"color": color, "marker": marker, "label": codec}
        left.plot(workers, [100 * s.test_accuracy if s.perplexity is None else s.perplexity for s in runs], **style)
        right.plot(workers, [s.sent_bytes_per_step for s in runs], **style)
    counts = sorted({s.workers for s in summaries})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(c) for c in counts])
        axes.minorticks_off()
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
    first, totals = summaries[0], {s.workers * s.batch_per_worker for s in summaries}
    left.set_ylabel("test accuracy (%)" if first.perplexity is None else "perplexity of the validation part")
    low, high = left.get_ylim()
    if high - low < 5:  # a few samples more or less are no difference to show
        left.set_ylim((low + high - 5) / 2, (low + high + 5) / 2)
    right.set_yscale("log")
    right.set_ylabel("bytes sent per worker and step")
    right.legend()
    batch = f"total batch {totals.pop()}" if len(totals) == 1 else f"{first.batch_per_worker} samples per worker"
    figure.suptitle(f"{first.model} on {first.data}, {first.epochs} epochs, {batch}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
