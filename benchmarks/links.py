"""Time to equal test loss on shaped links: ``python -m benchmarks.links [--links LINK ...] [--methods M ...]``.

Linux, as root: every worker is a process on a machine of its own (:mod:`benchmarks.machines`). Without root the link is
emulated: at the end of each step a worker waits as long as the bytes that it sends would take, nothing overlaps, and
there are no interface counters; the table and the file say so.

For each method (:mod:`benchmarks.contenders`), with the same network, samples and seeds:

    course      test loss every few steps, without a link, which changes none of them but those of ``auto``
    ms          median time of a step on the link, optimizer included, after some that are not counted
    sent        bytes that a worker hands over in a step, as the ledger counts: a message for all once
    wire        what gloo makes of them: a message to each other worker, or a ring's hops, and its own 144 bytes each
    alone       ms that these bytes take one way on an idle link: a model, without latency
    counted     bytes that the interface has sent and received, halved, in a step
    ratio       counted / (wire + 66 bytes a packet, for Ethernet, IP and TCP)
    to loss     steps until the test loss is that which DDP has reached after half of its steps, or that of ``--loss``
    seconds     those steps x their median time
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import isgq
from benchmarks.contenders import Task, check, trainer
from benchmarks.machines import Counters, Machine, launch_on, machines, reason_against
from data import DataError
from isgq.bandwidth import Link
from isgq.core.errors import IsgqError, OptionError, RankError
from isgq.launch import launch
from models import ModelError

LINKS = ("10Mbit/s", "100Mbit/s", "1Gbit/s")
METHODS = (
    "ddp",
    "ddp:fp16",
    "ddp:powersgd=1",
    "ddp:powersgd=2",
    "ddp:powersgd=4",
    "hook:error_feedback(top_k:k=0.01)",
    "dithered:levels=1",
    "rotated:ratio=800",
    "rotated:ratio=1500,bases=learned",
    "subspace:rank=2",
    "two_pass:one_bit",
    "auto",
)
_HEADERS = 14 + 20 + 32  # bytes of a packet for Ethernet, IP, and TCP with time stamps
_WARM = 6  # steps that are not counted: plans, DDP's buckets, PowerSGD's plain steps, first messages
_PAUSE = 0.3  # seconds until nothing is on the link any more
_PATIENCE = 300.0  # seconds that a collective may take on the slowest link


@dataclass(frozen=True)
class Steps:
    """Steps of a worker on a link.

    Attributes:
        seconds: of each.
        sent: bytes that were handed over, in the mean.
        wire: bytes that rings make of them.
        counted: bytes by the interface, half of both directions; None where there is no link.
        packets: likewise.
    """

    seconds: Sequence[float]
    sent: float
    wire: float
    counted: float | None
    packets: float | None

    @property
    def ratio(self) -> float | None:
        """Bytes by the interface over those that the ledger lets expect."""
        if self.counted is None or self.packets is None:
            return None
        return self.counted / (self.wire + _HEADERS * self.packets)


def measure(task: Task, steps: int, budget: float, on_link: bool) -> Steps:
    """Steps of one worker. A collective call.

    Args:
        task: what to train.
        steps: how many are timed.
        budget: seconds in which fewer have to do, but no less than 3.
        on_link: whether this process is on a machine with an interface.
    """
    with trainer(task) as worker:
        for _ in range(_WARM):
            begun = time.perf_counter()
            worker.step()
        affordable = budget / (time.perf_counter() - begun)
        # All agree on the number of steps and when to begin; until then the interface is quiet. One clock for all.
        agreed = torch.tensor([max(3.0, min(steps, affordable)), time.monotonic() + 2 * _PAUSE], dtype=torch.float64)
        dist.broadcast(agreed, 0)
        time.sleep(max(0.0, float(agreed[1]) - _PAUSE / 2 - time.monotonic()))
        before, moved = Counters.read() if on_link else None, worker.moved()
        time.sleep(max(0.0, float(agreed[1]) - time.monotonic()))
        marks = [time.perf_counter()]
        for _ in range(int(agreed[0])):
            worker.step()
            marks.append(time.perf_counter())
        time.sleep(_PAUSE)
        made = len(marks) - 1
        sent, wire = ((after - b) / made for after, b in zip(worker.moved(), moved, strict=True))
        counted = Counters.read() - before if before is not None else None
        dist.barrier()
    return Steps(
        [b - a for a, b in pairwise(marks)],
        sent,
        wire,
        (counted.sent + counted.received) / 2 / made if counted else None,
        (counted.packets_sent + counted.packets_received) / 2 / made if counted else None,
    )


def course(task: Task, steps: int, every: int, images: int) -> list[float]:
    """Test loss of the first worker after every so many steps. A collective call."""
    losses = []
    with trainer(task) as worker:
        for step in range(1, steps + 1):
            worker.step()
            if step % every == 0 and dist.get_rank() == 0:
                losses.append(worker.test_loss(images))
        dist.barrier()
    return losses


def reached(losses: Sequence[float], every: int, loss: float) -> int | None:
    """Steps until a test loss; None if it never came."""
    return next((every * i for i, each in enumerate(losses, 1) if each <= loss), None)


def row(task: Task, steps: Steps, losses: Sequence[float], every: int, loss: float) -> dict[str, Any]:
    """All of a method on a link."""
    median, needed = statistics.median(steps.seconds), reached(losses, every, loss)
    return {
        "link": task.link,
        "method": task.method,
        "seconds_per_step": median,
        "fastest_step": min(steps.seconds),
        "timed_steps": len(steps.seconds),
        "sent": steps.sent,
        "wire": steps.wire,
        "link_seconds": steps.wire / Link.parse(task.link).bytes_per_second,
        "counted": steps.counted,
        "packets": steps.packets,
        "ratio": steps.ratio,
        "losses": list(losses),
        "steps_to_loss": needed,
        "seconds_to_loss": None if needed is None else needed * median,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; the last column is in times DDP's on the same link, if that is among the rows."""
    columns = "link | method | ms | alone | sent | counted | ratio | last loss | to loss | seconds | DDP's over it"
    plain = {each["link"]: each.get("seconds_to_loss") for each in rows if each["method"] == "ddp"}
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    for each in rows:
        if "failed" in each:
            lines.append(f"| {each['link']} | `{each['method']}` | failed: {each['failed']} |" + " |" * 8)
            continue
        own, theirs = each["seconds_to_loss"], plain.get(each["link"])
        cells = [
            f"{1e3 * each['seconds_per_step']:.1f}",
            f"{1e3 * each['link_seconds']:.1f}",
            f"{each['sent']:,.0f}",
            _or_dash(each["counted"], ",.0f"),
            _or_dash(each["ratio"], ".3f"),
            f"{each['losses'][-1]:.4f}",
            _or_dash(each["steps_to_loss"], "d"),
            _or_dash(own, ".2f"),
            _or_dash(theirs / own if own and theirs else None, ".1f"),
        ]
        lines.append(f"| {each['link']} | `{each['method']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run(tasks: Sequence[Task], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method on every link, and what it learns."""
    courses: dict[Task, list[float]] = {}
    loss, rows = options.loss, []
    for task in tasks:
        print(f"{task.link} {task.method}", file=sys.stderr, flush=True)
        alone = replace(task, link=task.link if task.method.endswith("auto") else tasks[0].link, emulated=False)
        shape = nullcontext() if task.emulated else machines(options.workers, Link.parse(task.link))
        try:
            if alone not in courses:
                arguments = (alone, options.course, options.every, options.images)
                courses[alone] = launch(course, options.workers, args=arguments, timeout=_PATIENCE)[0]
            losses = courses[alone]
            loss = min(losses[: max(1, len(losses) // 2)]) if loss is None else loss
            with shape as found:
                steps = _measured(task, options, found)
            rows.append(row(task, steps, losses, options.every, loss))
        except RankError as error:
            rows.append({"link": task.link, "method": task.method, "failed": str(error).splitlines()[0]})
    for each in rows:
        each["loss"] = loss
    return rows


def _measured(task: Task, options: argparse.Namespace, found: Sequence[Machine] | None) -> Steps:
    arguments = (task, options.steps, options.budget, found is not None)
    if found is None:
        return launch(measure, options.workers, args=arguments, timeout=_PATIENCE)[0]
    return launch_on(found, measure, args=arguments, timeout=_PATIENCE)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file; returns 1 if a method failed."""  # noqa: DOC501
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--links", nargs="+", metavar="LINK", default=list(LINKS), help="100Mbit/s and the like")
    add("--methods", nargs="+", metavar="METHOD", default=list(METHODS), help="see benchmarks.contenders")
    add("--model", default=Task.model, help="a network by name (default: %(default)s)")
    add("--data", default=Task.data, help="images by name (default: %(default)s)")
    add("--workers", type=int, default=4, help="(default: %(default)s)")
    add("--batch", type=int, default=Task.batch, help="samples of each (default: %(default)s)")
    add("--rate", type=float, default=Task.rate, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=Task.seed)
    add("--steps", type=int, default=30, help="timed on each link (default: %(default)s)")
    add("--budget", type=float, default=30.0, help="seconds for them; then fewer do (default: %(default)s)")
    add("--course", type=int, default=400, help="steps of training for the loss (default: %(default)s)")
    add("--every", type=int, default=10, help="steps between two test losses (default: %(default)s)")
    add("--images", type=int, default=2000, help="of the test set, at most (default: %(default)s)")
    add("--loss", type=float, help="that all have to reach (default: DDP's best in the first half of its course)")
    add("--quick", action="store_true", help="few steps; the numbers mean little")
    add("--emulate", action="store_true", help="emulate the link even as root")
    add("--out", type=Path, default=Path("runs/benchmarks/links.json"), help="(default: %(default)s)")
    options = parser.parse_args(given)
    if options.quick:
        options.steps, options.course, options.every, options.images = 5, 20, 5, 500
    reason = "as asked for" if options.emulate else reason_against()
    chosen = {name: getattr(options, name) for name in ("model", "data", "batch", "rate", "seed")}
    tasks = [
        Task(method, link, emulated=bool(reason), **chosen) for link in options.links for method in options.methods
    ]
    try:
        for name in ("workers", "batch", "steps", "every", "course", "images"):
            if getattr(options, name) < 1:
                raise OptionError(f"--{name} {getattr(options, name)} must be 1 or more")
        for task in tasks:
            check(task)
    except (IsgqError, DataError, ModelError) as error:
        parser.error(str(error))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # machines have no names, which is no news
    rows = run(tasks, options)
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "isgq": isgq.__version__}
    report = {
        "schema": 1,
        "command": shlex.join(["python", "-m", "benchmarks.links", *given]),
        "versions": versions,
        "link": f"emulated: {reason}" if reason else "network namespaces, tc tbf",
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['command']}\n{', '.join(f'{k} {v}' for k, v in versions.items())}; link {report['link']}")
    print(f"{options.workers} workers, equal test loss {rows[0]['loss'] or 0:.4f}\n\n{table(rows)}")
    return int(any("failed" in each for each in rows))


if __name__ == "__main__":
    sys.exit(main())
