"""Train a model over one or several workers, with plain or with compressed gradients.

    python train.py --workers 1 2 4 --codecs dense isgq --out runs/demo     # starts its own processes
    torchrun --nproc-per-node 4 train.py --codec isgq                       # or is one worker of torchrun's

Every combination of codec and number of workers is one run. By default the total batch is the same for all, so that
more workers have smaller shares. Writes summary.json, metrics.jsonl, accuracy_and_bytes.png and a checkpoint per run,
renewed after every epoch. The same seed gives the same bits, also over an interruption and --resume.
"""

import itertools
import math
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm

import data
import isgq
import models
from analysis.runs import Summary, append_metrics, plot, save_summary, table, trim_metrics
from isgq.choice import choose
from isgq.core.errors import NonFiniteError, OptionError
from isgq.core.keys import random_int32
from isgq.launch import launch


@dataclass(frozen=True)
class Config:
    """Train a model over one or several workers, with plain or with compressed gradients."""

    workers: tuple[int, ...] = (4,)
    """numbers of workers, a run for each; under torchrun its number of processes counts instead"""
    codecs: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--codec"])] = ("isgq",)
    """codecs, a run for each, e.g. isgq, dithered:levels=2,bucket=row, error_feedback(top_k:k=0.01); dense is the
    uncompressed baseline"""
    dense: str | None = None
    """codec for the parameters whose gradients have no factors; plain all-reduce if not given"""
    aggregate: Literal["gather", "two_pass", "server", "async"] = "gather"
    """who averages: every worker for itself, each worker a shard (DoubleSqueeze), the first worker all, or a further
    process that serves the workers as they come, each gradient with lr / workers"""
    down: str | None = None
    """codec of the averages, or of what an asynchronous server replies; plain if not given"""
    memory: Literal["both", "worker", "none"] = "both"
    """who remembers what biased codecs leave out, unless --aggregate is gather: workers and servers, workers, nobody"""
    max_staleness: int | None = None
    """how many updates old an asynchronous gradient may get before fast workers have to wait"""
    routes: Literal["auto", "factors", "dense"] = "auto"
    """auto sends factors where they are fewer bytes, factors wherever there are any"""
    model: str = "fc"
    """fc, fc:hidden=1000-300-100, lenet, cifarnet or alexnet"""
    data: str = "mnist5k"
    """mnist5k, fashion, patches, idx:DIR or cifar10:DIR"""
    standardize: bool = False
    """shift and scale the pixels to mean 0 and deviation 1; the raw ones, in [0, 1], make sparser factors"""
    total_batch: int | None = None
    """samples of all workers together in a step; 128 if neither batch is given"""
    batch_per_worker: int | None = None
    """samples of each worker in a step, instead of --total-batch"""
    epochs: int = 6
    """passes over the training data"""
    lr: float = 0.2
    """learning rate of SGD"""
    momentum: float = 0.9
    """momentum of SGD"""
    schedule: Literal["constant", "cosine"] = "cosine"
    """whether the learning rate stays or falls to 0 over the run"""
    seed: int = 0
    """of weights, order of the samples and dither"""
    out: Path = Path("runs/latest")
    """folder for results; those of an earlier command are replaced"""
    resume: bool = False
    """go on from the checkpoints in --out"""
    timeout: float = 60.0
    """seconds to wait for a missing worker"""

    def batch_of_each(self, workers: int) -> int:
        """Samples of each worker in a step.

        Raises:
            OptionError: both batch sizes are given, or the total cannot be shared equally.
        """
        if self.batch_per_worker is None:
            total = 128 if self.total_batch is None else self.total_batch
            each, rest = divmod(total, workers)
            if rest:
                raise OptionError(f"--total-batch {total} cannot be shared equally by {workers} workers")
            return each
        if self.total_batch is not None:
            raise OptionError("give --total-batch or --batch-per-worker, not both")
        return self.batch_per_worker


@dataclass(frozen=True)
class Run:
    """One combination of codec and workers; ``batch`` is each worker's."""

    codec: str
    workers: int
    batch: int
    aggregate: str = "gather"
    down: str = "dense"

    @property
    def name(self) -> str:
        """Names its files and its lines in the metrics."""
        passes = "" if self.aggregate == "gather" else f"-{self.aggregate}-{self.down}"
        return f"{re.sub(r'[^A-Za-z0-9._=]+', '-', self.codec + passes).strip('-')}-{self.workers}x{self.batch}"

    @property
    def processes(self) -> int:
        """An asynchronous server is a further process."""
        return self.workers + (self.aggregate == "async")


def train(config: Config, run: Run) -> Summary:
    """Train one run as one of its workers; every worker gets the summary.

    Raises:
        NonFiniteError: the loss is not finite any more.
    """
    if run.aggregate == "async":
        return train_asynchronously(config, run)
    rank, checkpoint = dist.get_rank(), config.out / f"{run.name}.pt"
    dataset, model = load(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    steps = len(dataset.train_y) // (run.batch * run.workers)  # an epoch; what is left over is dropped
    with instrument(model, config, run) as session:
        first, spent = 0, torch.zeros(4, dtype=torch.float64)
        if config.resume and checkpoint.exists():
            first, spent = restore(checkpoint, model, optimizer, session)
        before, seconds = spent.clone(), 0.0
        if rank == 0:
            trim_metrics(config.out, run.name, first)
        test_loss, accuracy = evaluate(model, dataset, rank, run.workers)
        tqdm.set_lock(threading.RLock())  # its own is a system semaphore, which outlives a rank that is ended
        bar = tqdm(total=config.epochs * steps, initial=first * steps, desc=run.name, unit="step", disable=rank > 0)
        for epoch in range(first, config.epochs):
            started, losses = time.perf_counter(), 0.0
            for step, mine in enumerate(shares(len(dataset.train_y), run, rank, config.seed, epoch), epoch * steps):
                optimizer.param_groups[0]["lr"] = learning_rate(config, step / (config.epochs * steps))
                loss = F.cross_entropy(model(dataset.train_x[mine]), dataset.train_y[mine])
                loss.backward()  # type: ignore[no-untyped-call]  # p.grad is now the mean over all workers
                optimizer.step()
                optimizer.zero_grad()
                losses += loss.item()
                bar.update()
            seconds += time.perf_counter() - started
            [train_loss] = mean_over_workers(losses / steps)
            test_loss, accuracy = evaluate(model, dataset, rank, run.workers)
            if not math.isfinite(train_loss + test_loss):
                raise NonFiniteError(diverged(config, epoch))
            bar.set_postfix(loss=f"{test_loss:.3f}", accuracy=f"{accuracy:.3f}")
            traffic = session.traffic
            now = [traffic.sent - traffic.setup, traffic.received, traffic.dense, seconds]
            spent = before + torch.tensor(now, dtype=torch.float64)
            if rank == 0:
                entry = {"run": run.name, "epoch": epoch + 1, "step": (epoch + 1) * steps, "train_loss": train_loss}
                entry |= {"test_loss": test_loss, "test_accuracy": accuracy, "seconds": float(spent[3])}
                append_metrics(config.out, entry | {"sent_bytes": int(spent[0]), "received_bytes": int(spent[1])})
            save(checkpoint, settings(config, run), epoch + 1, spent, model, optimizer, session)
        bar.close()
    sent, received, dense, seconds = mean_over_workers(*spent.tolist())
    each = [total / (config.epochs * steps) for total in (sent, received, dense)]
    return summarise(config, run, (test_loss, accuracy), each, seconds)


def load(config: Config) -> tuple[data.Dataset, nn.Module]:
    """The data and a new model for them."""
    dataset = data.load(config.data, seed=config.seed)
    dataset = dataset.standardized() if config.standardize else dataset
    return dataset, models.build(config.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=config.seed)


def instrument(model: nn.Module, config: Config, run: Run) -> isgq.Session:
    """The session of a run."""
    return isgq.instrument(
        model,
        run.codec,
        dense=config.dense,
        aggregate=config.aggregate,
        down=config.down,
        memory=config.memory,
        max_staleness=config.max_staleness,
        routes=config.routes,
        seed=config.seed,
    )


def train_asynchronously(config: Config, run: Run) -> Summary:
    """Train one run as its server or one of its workers; only the server's summary knows all."""
    rank = dist.get_rank()
    dataset, model = load(config)
    with instrument(model, config, run) as session:
        if session.serves:
            return serve(config, run, model, dataset, session)
        # Every worker takes all samples, in an order of its own, as fast as it can.
        alone, n = replace(run, workers=1), len(dataset.train_y)
        epochs = (shares(n, alone, 0, config.seed, epoch, order=rank) for epoch in itertools.count())
        for mine in itertools.chain.from_iterable(epochs):
            loss = F.cross_entropy(model(dataset.train_x[mine]), dataset.train_y[mine])
            loss.backward()  # type: ignore[no-untyped-call]  # the server has stepped, the model follows it
            if session.done:
                break
    return summarise(config, run, (math.nan, math.nan), [math.nan] * 3, 0.0)


def serve(config: Config, run: Run, model: nn.Module, dataset: data.Dataset, session: isgq.Session) -> Summary:
    """Serve the workers of one run; an epoch ends when as many samples as the data have were used.

    Raises:
        NonFiniteError: the loss is not finite any more.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(config, 0) / run.workers, momentum=config.momentum)
    epoch_updates = len(dataset.train_y) // (run.batch * run.workers) * run.workers
    total = config.epochs * epoch_updates
    bar = tqdm(total=total, desc=run.name, unit="gradient")
    result, started, spent = (math.nan, math.nan), time.perf_counter(), 0.0
    trim_metrics(config.out, run.name, 0)

    def on_update(updates: int) -> None:
        nonlocal result, spent
        optimizer.param_groups[0]["lr"] = learning_rate(config, updates / total) / run.workers
        bar.update()
        epoch, rest = divmod(updates, epoch_updates)
        if rest == 0:
            begin = time.perf_counter()
            result = evaluate(model, dataset, 0, 1)
            if not math.isfinite(result[0]):
                raise NonFiniteError(diverged(config, epoch - 1))
            bar.set_postfix(loss=f"{result[0]:.3f}", accuracy=f"{result[1]:.3f}")
            entry = {
                "run": run.name,
                "epoch": epoch,
                "step": updates,
                "test_loss": result[0],
                "test_accuracy": result[1],
            }
            append_metrics(config.out, entry | {"seconds": begin - started - spent})
            spent += time.perf_counter() - begin

    service = session.serve(optimizer, on_update, total)
    bar.close()
    if service.updates < total:  # some worker was lost
        result = evaluate(model, dataset, 0, 1)
    dense = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    each = [service.received / service.updates, service.sent / service.updates, dense]
    return summarise(config, run, result, each, time.perf_counter() - started - spent, service.staleness)


def diverged(config: Config, epoch: int) -> str:
    """What to say of a loss that is not finite."""
    return f"the loss is not finite after epoch {epoch + 1}: --lr {config.lr} is too large"


def summarise(
    config: Config,
    run: Run,
    result: tuple[float, float],
    each: Sequence[float],
    seconds: float,
    staleness: Mapping[int, int] | None = None,
) -> Summary:
    """The summary from test loss and accuracy; bytes sent, received and dense per step and worker; and seconds."""
    return Summary(
        model=config.model,
        data=config.data,
        codec=run.codec,
        workers=run.workers,
        batch_per_worker=run.batch,
        epochs=config.epochs,
        seed=config.seed,
        test_accuracy=result[1],
        test_loss=result[0],
        sent_bytes_per_step=each[0],
        received_bytes_per_step=each[1],
        dense_bytes_per_step=each[2],
        compression=each[2] / each[0] if each[0] else math.inf,
        seconds=seconds,
        aggregate=run.aggregate,
        down=run.down,
        staleness={str(age): count for age, count in sorted((staleness or {}).items())},
    )


def shares(n: int, run: Run, rank: int, seed: int, epoch: int, order: int = 0) -> Iterator[Tensor]:
    """This worker's indices [batch] of each step of an epoch: one order for all, cut into equal parts by rank."""
    digest = isgq.Key("order", seed, epoch, order).digest
    shuffled = torch.argsort(random_int32(digest, "train.shares", n), stable=True)
    for total in torch.split(shuffled, run.batch * run.workers):
        if len(total) == run.batch * run.workers:
            yield total[rank * run.batch : (rank + 1) * run.batch]


def learning_rate(config: Config, done: float) -> float:
    """The schedule's value when ``done``, in [0, 1), of the run is over."""
    return config.lr * (0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0)


@torch.no_grad()
def evaluate(model: nn.Module, dataset: data.Dataset, rank: int, workers: int) -> tuple[float, float]:
    """Mean loss and accuracy on the test images; each worker takes its share of them."""
    model.eval()
    x, y = dataset.test_x[rank::workers], dataset.test_y[rank::workers]
    outputs = torch.cat([model(part) for part in torch.split(x, 1000)]).double()
    sums = [F.cross_entropy(outputs, y, reduction="sum"), (outputs.argmax(1) == y).sum()]
    parts = [workers * float(each) / len(dataset.test_y) for each in sums]
    loss, accuracy = mean_over_workers(*parts) if workers > 1 else parts
    model.train()
    return loss, accuracy


def mean_over_workers(*values: float) -> list[float]:
    """The same numbers on every worker; waits for all of them."""
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return [value / dist.get_world_size() for value in mean.tolist()]


def settings(config: Config, run: Run) -> dict[str, Any]:
    """What must be the same to resume; a constant learning rate may go on for more epochs."""
    keep = ["dense", "routes", "model", "data", "standardize", "lr", "momentum", "schedule", "seed"]
    keep += ["memory"]
    keep += ["epochs"] if config.schedule == "cosine" else []
    return asdict(run) | {name: asdict(config)[name] for name in keep}


def save(
    path: Path,
    made_with: dict[str, Any],
    epoch: int,
    spent: Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: isgq.Session,
) -> None:
    """Write the state of all workers as one file: a reader finds the old one or the new one."""
    states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object({"session": session.state_dict(), "spent": spent}, states)
    if states is not None:
        content = {"settings": made_with, "epoch": epoch, "workers": states}
        content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, path)


def restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, session: isgq.Session
) -> tuple[int, Tensor]:
    """Read what :func:`save` wrote: epochs done, and this worker's bytes and seconds."""
    content = torch.load(path, weights_only=True)
    mine = content["workers"][dist.get_rank()]
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    session.load_state_dict(mine["session"])
    return content["epoch"], mine["spent"]


def check_resume(path: Path, wanted: dict[str, Any], epochs: int) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        OptionError: it is none, was made with other settings, or is further than asked for.
    """
    try:
        content = torch.load(path, weights_only=True, mmap=True)
        made_with, done = content["settings"], content["epoch"]
    except (RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise OptionError(f"{path} is no checkpoint of train.py; remove it or choose another --out") from error
    changed = [f"{k}={made_with.get(k)!r}" for k, value in wanted.items() if made_with.get(k) != value]
    if changed or done > epochs:
        was = ", ".join(changed) or f"epochs={done}"
        raise OptionError(f"{path} was made with {was}: use the same, or another --out")


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
        ("momentum", 0 <= config.momentum < 1, "in [0, 1)"),
        ("timeout", 0 < config.timeout < math.inf, "positive"),
    ):
        if not fine:
            raise OptionError(f"--{name} {getattr(config, name)}: must be {wanted}")
    for codec in config.codecs:
        choose(codec, config.dense, "tensor", config.aggregate, config.down, config.memory, config.max_staleness)
    if config.aggregate == "async" and config.resume:
        raise OptionError(
            "an asynchronous run depends on who comes first, so it has no checkpoints: leave --resume out"
        )
    dataset, _ = load(config)
    runs = [
        Run(codec, workers, config.batch_of_each(workers), config.aggregate, config.down or "dense")
        for codec, workers in dict.fromkeys(itertools.product(config.codecs, config.workers))
    ]
    for run in runs:
        if not 1 <= run.batch <= len(dataset.train_y) // run.workers:
            size = len(dataset.train_y)
            raise OptionError(
                f"{run.workers} workers with {run.batch} samples each: {config.data} has 1 .. {size} for all"
            )
        path = config.out / f"{run.name}.pt"
        if config.resume and path.exists():
            check_resume(path, settings(config, run), config.epochs)
    return runs


def prepare(config: Config, runs: Sequence[Run]) -> None:
    """Make the folder; without --resume, remove what an earlier command left of the same names."""
    config.out.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        for name in ("metrics.jsonl", "summary.json", *(f"{run.name}.pt" for run in runs)):
            (config.out / name).unlink(missing_ok=True)


def finish(config: Config, summaries: Sequence[Summary]) -> None:
    """Write and show the results."""
    save_summary(config.out, summaries)
    plot(summaries, config.out / "accuracy_and_bytes.png")
    print(f"\n{table(summaries)}\n\nwritten to {config.out}/: summary.json, metrics.jsonl, accuracy_and_bytes.png")


def train_all(config: Config) -> None:
    """Every run in processes of its own."""
    runs = check(config)
    prepare(config, runs)
    summaries: list[Summary] = []
    for run in runs:
        may_fail = range(1, run.processes) if config.aggregate == "async" else ()
        results = launch(train, run.processes, args=(config, run), timeout=config.timeout, may_fail=may_fail)
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
    summary = train(config, runs[0])
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
