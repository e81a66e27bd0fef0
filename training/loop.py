"""A run as one of its workers."""

import math
import threading
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from analysis.runs import Summary, append_metrics, trim_metrics
from isgq.core.errors import NonFiniteError
from training.checkpoint import restore, save, settings
from training.config import Config, Run, learning_rate
from training.report import diverged, summarise
from training.road import road_of
from training.task import build, evaluate, load, mean_over_workers, optimizer_of, task_of


def train(config: Config, run: Run) -> Summary:
    """Train one run as one of its workers; every worker gets the summary.

    Raises:
        NonFiniteError: the loss is not finite any more.
    """
    rank, checkpoint = dist.get_rank(), config.out / f"{run.name}.pt"
    source = load(config)
    task, model = task_of(source, config, run, rank), build(config, source)
    optimizer, steps = optimizer_of(model, config), task.epoch_steps
    with road_of(model, optimizer, config, run) as road:
        first, spent = 0, torch.zeros(4, dtype=torch.float64)
        if config.resume and checkpoint.exists():
            first, spent = restore(checkpoint, task, model, optimizer, road)
        before, seconds = spent.clone(), 0.0
        if rank == 0:
            trim_metrics(config.out, run.name, first)
        test_loss, accuracy = math.nan, math.nan
        if first == config.epochs:  # a checkpoint of the whole run
            test_loss, accuracy = evaluate(task, model, rank, run.workers)
        tqdm.set_lock(threading.RLock())  # its own is a system semaphore, which outlives a rank that is ended
        bar = tqdm(total=config.epochs * steps, initial=first * steps, desc=run.name, unit="step", disable=rank > 0)
        for epoch in range(first, config.epochs):
            started, losses = time.perf_counter(), 0.0
            for step in range(epoch * steps, (epoch + 1) * steps):
                optimizer.param_groups[0]["lr"] = learning_rate(config, step / (config.epochs * steps))
                loss = task.loss(model, step)
                loss.backward()  # type: ignore[no-untyped-call]  # unless steps are local, p.grad is now the mean
                optimizer.step()
                optimizer.zero_grad()
                road.stepped(ends_epoch=step + 1 == (epoch + 1) * steps)
                losses += loss.item()
                bar.update()
            seconds += time.perf_counter() - started
            [train_loss] = mean_over_workers(losses / steps)
            test_loss, accuracy = evaluate(task, model, rank, run.workers)
            if not math.isfinite(train_loss + test_loss):
                raise NonFiniteError(diverged(config, epoch))
            bar.set_postfix(loss=f"{test_loss:.3f}", accuracy=f"{accuracy:.3f}")
            spent = before + torch.tensor([*road.spent(), seconds], dtype=torch.float64)
            if rank == 0:
                entry = {"run": run.name, "epoch": epoch + 1, "step": (epoch + 1) * steps, "train_loss": train_loss}
                entry |= {"test_loss": test_loss, "test_accuracy": accuracy, "seconds": float(spent[3])}
                append_metrics(config.out, entry | {"sent_bytes": int(spent[0]), "received_bytes": int(spent[1])})
                (config.out / f"{run.name}.plan.txt").write_text(road.plan() + "\n")
            save(checkpoint, settings(config, run), epoch + 1, spent, task, model, optimizer, road)
        bar.close()
    sent, received, dense, seconds = mean_over_workers(*spent.tolist())
    each = [total / (config.epochs * steps) for total in (sent, received, dense)]
    return summarise(config, run, (test_loss, accuracy), each, seconds)
