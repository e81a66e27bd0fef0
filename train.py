"""Train a model over one or several workers, dense or with compressed gradients.

    python train.py --workers 1 2 4 --codecs dense isgq --out runs/demo     # starts its own processes
    torchrun --nproc-per-node 4 train.py --codecs isgq                      # or be one rank of torchrun's

Every combination of codec and number of workers is one run; the total batch is the same for all, so more workers have
smaller shares. Writes summary.json, metrics.jsonl, accuracy_and_bytes.png and a checkpoint per run and epoch.
"""

import io
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
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
from analysis.runs import Summary, append_metrics, plot, save_summary, table
from isgq.core.errors import OptionError, RankError
from isgq.launch import launch


@dataclass(frozen=True)
class Config:
    """Train a model over one or several workers, dense or with compressed gradients."""

    workers: tuple[int, ...] = (4,)
    """numbers of workers; one run for each"""
    codecs: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--codec"])] = ("isgq",)
    """codecs, e.g. isgq, dithered:levels=2,bucket=row, error_feedback(top_k:k=0.01); dense is the baseline"""
    dense: str | None = None
    """codec for the parameters without factors; plain all-reduce if not given"""
    model: str = "fc"
    """fc, fc:hidden=1000-300-100, lenet, cifarnet, alexnet"""
    data: str = "mnist5k"
    """mnist5k, fashion, patches, idx:DIR, cifar10:DIR"""
    total_batch: int | None = None
    """samples of all workers together in a step (128 if neither batch is given)"""
    batch_per_worker: int | None = None
    """samples of each worker in a step, instead of --total-batch"""
    epochs: int = 6
    """passes over the training data"""
    lr: float = 0.05
    """learning rate of SGD"""
    momentum: float = 0.9
    """momentum of SGD"""
    schedule: Literal["constant", "cosine"] = "cosine"
    """how the learning rate goes over the run"""
    standardize: bool = False
    """shift and scale pixels to mean 0 and deviation 1; learns faster, but the input factor is no longer sparse"""
    routes: Literal["auto", "factors", "dense"] = "auto"
    """auto sends factors where they are fewer bytes, factors wherever there are any"""
    seed: int = 0
    """of initialisation, order and dither"""
    out: Path = Path("runs/latest")
    """folder for results"""
    resume: bool = False
    """continue from the checkpoints in --out"""
    timeout: float = 60.0
    """seconds to wait for a missing worker"""

    def batch_of_each(self, workers: int) -> int:
        """Samples of each worker in a step.

        Raises:
            OptionError: both or no usable batch sizes.
        """
        if self.total_batch is not None and self.batch_per_worker is not None:
            raise OptionError("give --total-batch or --batch-per-worker, not both")
        if self.batch_per_worker is not None:
            each = self.batch_per_worker
        else:
            total = 128 if self.total_batch is None else self.total_batch
            each, rest = divmod(total, workers)
            if rest:
                raise OptionError(f"--total-batch {total} cannot be shared equally by {workers} workers")
        if each < 1:
            raise OptionError(f"{each} samples for each of {workers} workers: must be at least 1")
        return each


@dataclass(frozen=True)
class Run:
    """One combination of codec and workers."""

    codec: str
    workers: int
    batch: int

    @property
    def name(self) -> str:
        """Used for files and in the metrics."""
        letters = "".join(c if c.isalnum() else "-" for c in self.codec)
        return f"{letters}-{self.workers}x{self.batch}"


def batches(n: int, run: Run, rank: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """This rank's indices of each step of an epoch: one permutation for all ranks, cut into equal shares."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    total = run.batch * run.workers
    for start in range(0, n - total + 1, total):
        yield order[start + rank * run.batch : start + (rank + 1) * run.batch]


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    outputs = torch.cat([model(part) for part in x.split(1000)])
    model.train()
    return float(F.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


def train(config: Config, run: Run) -> Summary:
    """Train one run as one of its ranks; every rank gets the summary."""
    rank = dist.get_rank()
    dataset = data.load(config.data, seed=config.seed)
    dataset = dataset.standardized() if config.standardize else dataset
    model = models.build(config.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=config.seed)
    session = isgq.instrument(model, run.codec, dense=config.dense, routes=config.routes, seed=config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    steps = len(dataset.train_y) // (run.batch * run.workers)
    checkpoint = config.out / run.name / f"rank{rank}.pt"
    first, spent, history = 0, 0.0, [0, 0, 0]
    if config.resume and checkpoint.exists():
        first, spent, history = restore(checkpoint, config, run, model, optimizer, session)
    scores = evaluate(model, dataset.test_x, dataset.test_y)
    bar = tqdm(total=config.epochs * steps, initial=first * steps, desc=run.name, unit="step", disable=rank > 0)
    for epoch in range(first, config.epochs):
        started, losses = time.perf_counter(), 0.0
        for step, index in enumerate(batches(len(dataset.train_y), run, rank, config.seed, epoch)):
            if config.schedule == "cosine":
                done = (epoch * steps + step) / (config.epochs * steps)
                optimizer.param_groups[0]["lr"] = config.lr * 0.5 * (1 + math.cos(math.pi * done))
            loss = F.cross_entropy(model(dataset.train_x[index]), dataset.train_y[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses += loss.item()
            bar.update()
        spent += time.perf_counter() - started
        scores = evaluate(model, dataset.test_x, dataset.test_y)
        bar.set_postfix(loss=f"{scores[0]:.3f}", accuracy=f"{scores[1]:.3f}")
        total = [before + now for before, now in zip(history, traffic_of(session), strict=True)]
        save(checkpoint, config, run, epoch + 1, spent, total, model, optimizer, session)
        if rank == 0:
            entry = {"run": run.name, "epoch": epoch + 1, "step": (epoch + 1) * steps, "train_loss": losses / steps}
            entry |= {"test_loss": scores[0], "test_accuracy": scores[1]}
            append_metrics(config.out, entry | {"sent_bytes": total[0], "received_bytes": total[1], "seconds": spent})
    bar.close()
    total = [before + now for before, now in zip(history, traffic_of(session), strict=True)]
    mean = torch.tensor([*total, spent], dtype=torch.float64)
    dist.all_reduce(mean)
    sent, received, dense, _ = (mean / (run.workers * max(config.epochs * steps, 1))).tolist()
    session.close()
    return Summary(
        config.model,
        config.data,
        run.codec,
        run.workers,
        run.batch,
        config.epochs,
        config.seed,
        test_accuracy=scores[1],
        test_loss=scores[0],
        sent_bytes_per_step=sent,
        received_bytes_per_step=received,
        dense_bytes_per_step=dense,
        compression=dense / sent if sent else 1.0,
        seconds=float(mean[3]) / run.workers,
    )


def traffic_of(session: isgq.Session) -> tuple[int, int, int]:
    """Bytes sent, received and dense of this rank in all steps so far."""
    return session.traffic.sent - session.traffic.setup, session.traffic.received, session.traffic.dense


def save(
    path: Path,
    config: Config,
    run: Run,
    epoch: int,
    spent: float,
    traffic: list[int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: isgq.Session,
) -> None:
    """Write this rank's checkpoint; a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": settings(config, run),
        "epoch": epoch,
        "spent": spent,
        "traffic": traffic,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "session": session.state_dict(),
    }
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def restore(
    path: Path, config: Config, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, session: isgq.Session
) -> tuple[int, float, list[int]]:
    """Read this rank's checkpoint: epochs done, seconds spent and bytes so far.

    Raises:
        OptionError: it was made with other settings.
    """
    content: dict[str, Any] = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    if content["settings"] != settings(config, run):
        changed = [k for k, v in settings(config, run).items() if content["settings"].get(k) != v]
        raise OptionError(f"{path} was made with other settings of {', '.join(changed)}: choose another --out")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    session.load_state_dict(content["session"])
    return content["epoch"], content["spent"], content["traffic"]


def settings(config: Config, run: Run) -> dict[str, Any]:
    """What must be the same to resume."""
    keep = ("dense", "model", "data", "epochs", "lr", "momentum", "schedule", "standardize", "routes", "seed")
    return {"codec": run.codec, "workers": run.workers, "batch": run.batch} | {k: asdict(config)[k] for k in keep}


def check(config: Config) -> list[Run]:
    """All runs, after everything that can be wrong has been looked at."""
    for codec in config.codecs:
        isgq.choose_codecs(codec, config.dense)
    for workers in config.workers:
        if workers < 1:
            raise OptionError(f"--workers {workers}: must be at least 1")
    dataset = data.load(config.data, seed=config.seed)
    models.build(config.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=config.seed)
    runs = [Run(c, w, config.batch_of_each(w)) for c, w in itertools.product(config.codecs, config.workers)]
    for run in runs:
        if run.batch * run.workers > len(dataset.train_y):
            total = run.batch * run.workers
            raise OptionError(f"a step of {total} samples exceeds the {len(dataset.train_y)} of {config.data}")
    return runs


def finish(config: Config, summaries: list[Summary]) -> None:
    """Write and show the results."""
    save_summary(config.out, summaries)
    plot(summaries, config.out / "accuracy_and_bytes.png")
    print(f"\n{table(summaries)}\n\nwritten to {config.out}/: summary.json, metrics.jsonl, accuracy_and_bytes.png")


def main() -> int:
    """Command line; 2 for a mistake in it, 1 for a failed run, 130 for Ctrl-C."""
    config = tyro.cli(Config)
    try:
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= set(os.environ)
        if under_torchrun:
            config = replace(config, workers=(int(os.environ["WORLD_SIZE"]),))
        runs = check(config)
        if under_torchrun and len(runs) > 1:
            raise OptionError("under torchrun there is one run: give one codec")
        config.out.mkdir(parents=True, exist_ok=True)
        if not config.resume:
            (config.out / "metrics.jsonl").unlink(missing_ok=True)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    try:
        if under_torchrun:
            dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout))
            summary = train(config, runs[0])
            if dist.get_rank() == 0:
                finish(config, [summary])
            dist.destroy_process_group()
            return 0
        summaries: list[Summary] = []
        for run in runs:
            summaries.append(launch(train, run.workers, args=(config, run), timeout=config.timeout)[0])
            save_summary(config.out, summaries)
        finish(config, summaries)
    except RankError as error:
        print(f"train.py: the run has failed and all its ranks are ended\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted; all ranks are ended. Go on with --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
