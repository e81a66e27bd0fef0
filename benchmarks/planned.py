"""Predicted and measured steps on shaped links: ``python -m benchmarks.planned --links 10Mbit/s 100Mbit/s``.

Linux, as root: every worker has a machine of its own (:mod:`benchmarks.machines`). The forecast is made in this
process, alone; then plain DistributedDataParallel and a session with the codec ``auto`` train on all workers. Times are
the least of the steps, those of measured ones with the optimizer; bytes are means of what the first worker's ledger
counts. Ways are chosen by bytes (``timed=false``), so that forecast and session choose alike.
"""

import argparse
import math
from dataclasses import replace

import torch

import isgq
from benchmarks.contenders import Task, workload
from benchmarks.links import measure
from benchmarks.machines import launch_on, machines
from isgq.bandwidth import Link


def main() -> None:
    """Forecast, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=Task.model)
    parser.add_argument("--batch", type=int, default=Task.batch)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=["10Mbit/s", "100Mbit/s"])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| link | | predicted ms | measured ms | predicted bytes sent | measured |\n|---|---|---|---|---|---|")
    for link in options.links:
        task = Task("ddp", link, model=options.model, batch=options.batch)
        model, dataset = workload(task)
        batch = dataset.train_x[: task.batch], dataset.train_y[: task.batch]
        forecast = isgq.plan(model, batch, workers=options.workers, link=link, timed=False)
        with machines(options.workers, Link.parse(link)) as found:
            plain, ours = (
                launch_on(found, measure, (replace(task, method=method), options.steps, math.inf, True), timeout=300)[0]
                for method in ("ddp", forecast.codec)
            )
        for name, seconds, size, steps in (
            ("plain DDP", forecast.ddp, forecast.dense_size, plain),
            ("`auto`", forecast.seconds, forecast.moved.sent, ours),
        ):
            real = 1e3 * min(steps.seconds)
            print(f"| {link} | {name} | {1e3 * seconds:.0f} | {real:.0f} | {size:,} | {steps.sent:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
