"""Shows a run's telemetry in the terminal as it grows: ``isgq watch runs/demo``.

RUN is a file that :class:`isgq.Telemetry` writes, or a folder, of whose ``*telemetry.jsonl`` the latest is shown. The
numbers are means over the ranks that wrote the last observed step; bytes are the sum.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from isgq.core.errors import OptionError

_TAIL = 4 << 20  # bytes of a file's end that are looked at; a line of a thousand parameters has a twentieth of this
_HOME = "\x1b[H\x1b[2J"  # clear the terminal


def find(source: Path) -> Path:
    """The file to show.

    Raises:
        OptionError: there is none.
    """
    if source.is_file():
        return source
    files = sorted(source.glob("*telemetry.jsonl"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise OptionError(f"no telemetry in {source}: train with train.py --telemetry 50, or isgq.Telemetry(session)")
    return files[-1]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines at the end of a file, without halves and what is no telemetry."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        lines = file.read().split(b"\n")
    if size > _TAIL:
        del lines[0]  # begins somewhere
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            if isinstance(entry["parameters"], dict):
                found.append({key: entry[key] for key in ("step", "rank", "staleness", "parameters")})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def show(entries: Sequence[Mapping[str, Any]], name: str) -> str:
    """The last observed step as a table.

    Args:
        entries: as read.
        name: of the run.
    """
    if not entries:
        return f"{name}: nothing observed yet"
    step = entries[-1]["step"]
    ranks = {entry["rank"]: entry for entry in entries if entry["step"] == step}
    of: dict[str, list[Mapping[str, Any]]] = {}
    for entry in ranks.values():
        for parameter, each in entry["parameters"].items():
            of.setdefault(parameter, []).append(each)
    staleness = max(entry["staleness"] for entry in ranks.values())
    total = sum(each["bytes"] for measures in of.values() for each in measures)
    width = max(map(len, ["parameter", *of]))
    lines = [
        f"{name}: step {step}, {len(ranks)} rank(s), {total:,} bytes sent"
        + (f", staleness {staleness}" * bool(staleness)),
        f"{'parameter':<{width}}  {'bytes':>12}  {'NMSE':>9}  {'cosine':>7}  {'gradient':>9}  {'memory':>9}",
    ]
    for parameter, measures in of.items():
        size = sum(each["bytes"] for each in measures)
        nmse, cosine, gradient, memory = (_mean(measures, key) for key in ("nmse", "cosine", "gradient", "memory"))
        lines.append(
            f"{parameter:<{width}}  {size:>12,}  {nmse:>9.3g}  {cosine:>7.3f}  {gradient:>9.3g}  {memory:>9.3g}"
        )
    return "\n".join(lines)


def _mean(measures: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over the ranks that have one; NaN where none has."""
    values = [each[key] for each in measures if each[key] is not None]
    return fmean(values) if values else float("nan")


def configure(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument(
        "source", metavar="RUN", type=Path, help="a folder, such as train.py's --out, or a file of telemetry"
    )
    parser.add_argument("--refresh", type=float, default=1.0, help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="show it once and end")


def run(options: argparse.Namespace, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show it until Ctrl-C; returns the exit status. OptionError or OSError where there is nothing to show.

    Args:
        options: of the command line.
        sleep: waits between two looks.
    """
    try:
        while True:
            path = find(options.source)
            print((_HOME if sys.stdout.isatty() else "") + show(read(path), path.name), flush=True)
            if options.once:
                return 0
            sleep(max(options.refresh, 0.1))
    except KeyboardInterrupt:
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    Args:
        arguments: of the command line; by default this process'.
    """
    parser = argparse.ArgumentParser(prog="isgq watch", description="show a run's telemetry as it grows")
    configure(parser)
    try:
        return run(parser.parse_args(arguments))
    except (OptionError, OSError) as error:
        print(f"isgq watch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
