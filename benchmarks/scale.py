"""Bytes and time of a step up to 1024 workers, by models: ``python -m benchmarks.scale [--model lenet] [--link LINK]``.

What is measured, in one process: the messages of one worker; a step without a link; and how much longer it takes to
receive messages of several workers (:func:`isgq.bench.measure`). The rest is a model, which says so in its title:

    bytes    :func:`isgq.bandwidth.predict`, messages about shards as if records were cut into equal parts, and what
             :class:`isgq.bandwidth.Link` has of rings for plain gradients
    time     the step, decoding all that is received in one pass, and all bytes over the link, one after the other

A worker sends and receives as many bytes; with ``server`` those are the server's, which has the most. Rows are not cut
in truth, so that of more servers than a gradient has rows (in a ``subspace``: directions) some have more to do than
others, and what a codec adapts to (a scale, a distribution) is each part's own.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import Task, workload
from data import DataError
from isgq.aggregate import AggregateName
from isgq.bandwidth import Link, Messages, predict, shared
from isgq.bench import measure
from isgq.core.errors import IsgqError
from isgq.costs import ddp_seconds
from isgq.forecast import pass_times
from models import ModelError

WORKERS = tuple(2**i for i in range(1, 11))
METHODS = (
    "isgq",
    "rotated:ratio=800",
    "error_feedback(top_k:k=0.01)",
    "two_pass:one_bit",
    "two_pass:top_k:k=0.01",
    "server:one_bit",
    "two_pass:subspace:rank=2",
)
_DECODED = 8  # workers whose messages are received for the measurement


def moved(aggregate: AggregateName, messages: Messages, workers: int) -> float:
    """Bytes that a worker sends, or receives if that is more, plain gradients in rings.

    Args:
        aggregate: see :func:`isgq.instrument`.
        messages: of a worker, about a single shard.
        workers: how many.
    """
    cut = shared(messages, workers) if aggregate == "two_pass" else messages
    whole = predict(aggregate, replace(cut, dense=0), workers, 0)
    sent = whole.sent if aggregate != "gather" else (workers - 1) * whole.sent
    return max(sent, whole.received) + Link(1.0).reduce_seconds(messages.dense, workers)


def split(method: str) -> tuple[AggregateName, str]:
    """How gradients are brought together, and the codec; ``gather`` where a method does not say."""
    name, _, spec = method.partition(":")
    if name == "two_pass":
        return "two_pass", spec
    return ("server", spec) if name == "server" else ("gather", method)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one worker, model the others, print the table and write the file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--methods", nargs="+", metavar="METHOD", default=list(METHODS), help="[two_pass:|server:]codec")
    add("--model", default="fc:hidden=1000-300-100", help="a network by name (default: %(default)s)")
    add("--data", default="fashion", help="images by name (default: %(default)s)")
    add("--batch", type=int, default=16, help="samples of each worker (default: %(default)s)")
    add("--link", default="1Gbit/s", help="of each worker (default: %(default)s)")
    add("--workers", type=int, nargs="+", default=list(WORKERS), help="(default: %(default)s)")
    add("--out", type=Path, default=Path("runs/benchmarks/scale.json"), help="(default: %(default)s)")
    options = parser.parse_args(given)
    try:
        task = Task("ddp", options.link, model=options.model, data=options.data, batch=options.batch)
        (model, dataset), link = workload(task), Link.parse(task.link)
        x, y = dataset.train_x[: options.batch], dataset.train_y[: options.batch]
        rows = curves(model, (x, y), options.methods, options.workers, link)
    except (IsgqError, DataError, ModelError) as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "benchmarks.scale", *given])
    report = {"schema": 1, "command": command, "model": True, "link": str(link), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{command}\n\nModelled from one worker on this machine; {link}.\n")
    for unit, field, scale in (("bytes of a worker and step", "bytes", 1.0), ("ms a step", "seconds", 1e3)):
        print(f"| {unit} | {' | '.join(map(str, options.workers))} |")
        print("|---" * (1 + len(options.workers)) + "|")
        for row in rows:
            cells = (f"{scale * value:,.0f}" for value in row[field])
            print(f"| `{row['method']}` | {' | '.join(cells)} |")
        print()


def curves(
    model: nn.Module, batch: tuple[Tensor, Tensor], methods: Sequence[str], workers: Sequence[int], link: Link
) -> list[dict[str, Any]]:
    """Bytes and seconds of each method for each number of workers, DistributedDataParallel first.

    Args:
        model: stays as it is.
        batch: inputs and targets of one worker.
        methods: see :func:`split`.
        workers: how many.
        link: of each.
    """
    x, y = batch

    def forward(own: nn.Module) -> Tensor:
        own.zero_grad()
        return F.cross_entropy(own(x), y)

    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    passes = pass_times(lambda: forward(model))
    model.zero_grad()
    rows: list[dict[str, Any]] = [
        {
            "method": "ddp",
            "bytes": [Link(1.0).reduce_seconds(size, n) for n in workers],
            "seconds": [ddp_seconds(size, *passes, n, link) for n in workers],
        }
    ]
    for method in methods:
        aggregate, codec = split(method)
        more: dict[str, Any] = {} if aggregate == "gather" else {"aggregate": aggregate, "down": codec}
        if codec.startswith("subspace"):
            more.pop("down", None)
        one, messages = measure(model, forward, codec, 1, **more)
        several = measure(model, forward, codec, _DECODED, **more)[0] if aggregate == "gather" else one
        slope = max(0.0, several - one) / (_DECODED - 1)
        sizes = [moved(aggregate, messages, n) for n in workers]
        times = [one + (n - 1) * slope + b / link.bytes_per_second for n, b in zip(workers, sizes, strict=True)]
        rows.append({"method": method, "bytes": sizes, "seconds": times})
    return rows


if __name__ == "__main__":
    main()
