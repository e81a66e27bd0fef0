"""A run whose server takes the workers' gradients as they come."""

import itertools
import math
import time

import torch.distributed as dist
from torch import nn
from tqdm import tqdm

import isgq
from analysis.runs import Summary, append_metrics, trim_metrics
from isgq.core.errors import NonFiniteError
from training.config import Config, Run, learning_rate
from training.report import diverged, summarise
from training.road import session_of
from training.task import Task, build, evaluate, load, optimizer_of, task_of


def train_asynchronously(config: Config, run: Run) -> Summary:
    """Train one run as its server or one of its workers; only the server's summary knows all."""
    rank = dist.get_rank()
    source = load(config)
    task, model = task_of(source, config, run, rank), build(config, source)
    with session_of(model, config, run) as session:
        if session.serves:
            return serve(config, run, task, model, session)
        for step in itertools.count():  # as fast as it can
            task.loss(model, step).backward()  # type: ignore[no-untyped-call]  # the server has stepped, the model follows it
            if session.done:
                break
    return summarise(config, run, (math.nan, math.nan), [math.nan] * 3, 0.0)


def serve(config: Config, run: Run, task: Task, model: nn.Module, session: isgq.Session) -> Summary:
    """Serve the workers of one run; an epoch ends when as many samples as the data have were used.

    Raises:
        NonFiniteError: the loss is not finite any more.
    """
    optimizer, epoch_updates = optimizer_of(model, config), task.epoch_steps * run.workers
    optimizer.param_groups[0]["lr"] = learning_rate(config, 0) / run.workers
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
            result = evaluate(task, model, 0, 1)
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
        result = evaluate(task, model, 0, 1)
    dense = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    each = [service.received / service.updates, service.sent / service.updates, dense]
    return summarise(config, run, result, each, time.perf_counter() - started - spent, service.staleness)
