"""Train a model over one or several workers, with plain or with compressed gradients.

    python train.py --workers 1 2 4 --codecs dense isgq --out runs/demo     # starts its own processes
    torchrun --nproc-per-node 4 train.py --codec isgq                       # or is one worker of torchrun's

Every combination of codec and number of workers is one run. By default the total batch is the same for all, so that
more workers have smaller shares. Writes summary.json, metrics.jsonl, accuracy_and_bytes.png, and for each run its plan
and a checkpoint, renewed after every epoch. The same seed gives the same bits, also over an interruption and --resume.
The parts are in :mod:`training`.
"""

import itertools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
import tyro

import data
import isgq
import models
from analysis.runs import Summary, plot, save_summary, table
from isgq.choice import choose, choose_direct
from isgq.core.errors import OptionError
from isgq.launch import launch
from training.checkpoint import check_resume, settings
from training.config import Config, Run
from training.loop import train
from training.serving import train_asynchronously
from training.task import build, load, task_of


def check(config: Config) -> list[Run]:
    """All runs, after a look at everything that can be wrong with them.

    Raises:
        OptionError: a value outside its range, or values that do not fit together.
    """
    for name, fine, wanted in (
        ("workers", min(config.workers, default=0) >= 1, "1 or more"),
        ("codecs", len(config.codecs) >= 1, "one or more"),
        ("epochs", config.epochs >= 1, "1 or more"),
        ("lr", 0 < config.lr < math.inf, "positive"),
        ("sequence", config.sequence is None or config.sequence >= 1, "1 or more"),
        ("epoch-steps", config.epoch_steps is None or config.epoch_steps >= 1, "1 or more"),
        ("local-steps", config.local_steps is None or config.local_steps >= 1, "1 or more"),
        ("telemetry", config.telemetry is None or config.telemetry >= 1, "1 or more"),
        ("clip", config.clip is None or 0 < config.clip < math.inf, "positive"),
        ("momentum", 0 <= config.momentum < 1, "in [0, 1)"),
        ("seed", 0 <= config.seed < 2**63, "in [0, 2^63)"),
        ("timeout", 0 < config.timeout < math.inf, "positive"),
    ):
        if not fine:
            raise OptionError(f"--{name} {getattr(config, name.replace('-', '_'))}: must be {wanted}")
    for codec in config.codecs:
        check_codec(codec, config)
    if config.aggregate == "async" and config.resume:
        raise OptionError(
            "an asynchronous run depends on who comes first, so it has no checkpoints: leave --resume out"
        )
    source = load(config)
    build(config, source)
    runs = [
        Run(codec, workers, config.batch_of_each(workers), config.aggregate, config.down or "dense", config.local_steps)
        for codec, workers in dict.fromkeys(itertools.product(config.codecs, config.workers))
    ]
    for run in runs:
        task_of(source, config, run, 0)
        path = config.out / f"{run.name}.pt"
        if config.resume and path.exists():
            check_resume(path, settings(config, run), config.epochs)
    return runs


def check_codec(codec: str, config: Config) -> None:
    """Refuse a codec, or what is given beside it, that does not fit.

    Raises:
        OptionError: as said.
    """
    if config.local_steps is None:
        choose(codec, config.dense, "tensor", config.aggregate, config.down, config.memory, config.max_staleness)
        return
    for name in ("dense", "aggregate", "down", "memory", "max_staleness", "routes", "telemetry"):
        if getattr(config, name) != getattr(Config, name):
            option = name.replace("_", "-")
            raise OptionError(f"--local-steps averages changes of the model, all by --codec: leave --{option} out")
    if codec != "dense":
        choose_direct(codec, "a model's change has no factors", "tensor", "gather", None, "none")


def prepare(config: Config, runs: Sequence[Run]) -> None:
    """Make the folder; without --resume, remove what an earlier command left of the same names."""
    config.out.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        of_runs = [f"{run.name}{end}" for run in runs for end in (".pt", ".plan.txt", ".telemetry.jsonl")]
        for name in ("metrics.jsonl", "summary.json", *of_runs):
            (config.out / name).unlink(missing_ok=True)


def finish(config: Config, summaries: Sequence[Summary]) -> None:
    """Write and show the results."""
    save_summary(config.out, summaries)
    plot(summaries, config.out / "accuracy_and_bytes.png")
    print(f"\n{table(summaries)}\n\nwritten to {config.out}/: summary.json, metrics.jsonl, accuracy_and_bytes.png")


def run_one(config: Config, run: Run) -> Summary:
    """One run as one of its processes."""
    return (train_asynchronously if run.aggregate == "async" else train)(config, run)


def train_all(config: Config) -> None:
    """Every run in processes of its own."""
    runs = check(config)
    prepare(config, runs)
    summaries: list[Summary] = []
    for run in runs:
        may_fail = range(1, run.processes) if config.aggregate == "async" else ()
        results = launch(run_one, run.processes, args=(config, run), timeout=config.timeout, may_fail=may_fail)
        summaries.append(results[0])
        save_summary(config.out, summaries)
    finish(config, summaries)


def train_as_worker(config: Config, rank: int, workers: int) -> None:
    """The one run of a process that torchrun has started.

    Raises:
        OptionError: more than one codec.
    """
    runs = check(replace(config, workers=(workers - (config.aggregate == "async"),)))
    if len(runs) > 1:
        raise OptionError(f"torchrun starts the workers of one run: give one of the codecs {', '.join(config.codecs)}")
    if rank == 0:
        prepare(config, runs)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout))
    summary = run_one(config, runs[0])
    dist.destroy_process_group()
    if rank == 0:
        finish(config, [summary])


def main() -> int:
    """Run the command line: 0, 2 for a mistake in it, 1 for a run that failed, 130 for Ctrl-C."""
    config = tyro.cli(Config)
    rank, workers = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    try:
        if rank is not None and workers is not None:
            train_as_worker(config, int(rank), int(workers))
        else:
            train_all(config)
    except (OptionError, data.DataError, models.ModelError, OSError) as error:
        message, code = str(error), 2
    except isgq.IsgqError as error:
        message, code = f"a run failed, all its workers have ended\n{error}", 1
        if traces := getattr(error, "__notes__", []):
            (config.out / "traceback.txt").write_text("\n".join(traces))
            message += f"\n(tracebacks in {config.out / 'traceback.txt'})"
    except KeyboardInterrupt:
        message, code = "interrupted, all workers have ended; --resume goes on after the last full epoch", 130
    else:
        return 0
    if rank in {None, "0"} or code == 1:
        line_end = "\n" if code != 2 else ""  # of the progress bar
        print(f"{line_end}train.py: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
