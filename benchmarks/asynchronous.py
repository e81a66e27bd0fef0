"""A slow worker: asynchronous against synchronous training, on real processes.

    python -m benchmarks.asynchronous

Four workers train the FC model on mnist5k; one pauses four times as long a step as the others (pauses stand for slower
machines, so that the workers do not compete for this one's cores). First every worker measures its own rate, alone
with its model; then all train asynchronously and in two passes, over as many samples. Prints the rates, their sum, the
accuracies and the staleness.
"""

import json
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import nn

import data
import isgq
import models
from isgq.core.keys import random_int32
from isgq.launch import launch


@dataclass(frozen=True)
class Config:
    """Asynchronous against synchronous training with a slow worker."""

    workers: int = 4
    """number of workers; the last is the slow one"""
    pause: float = 0.2
    """seconds that a fast worker's step takes at least"""
    slower: float = 4.0
    """how many times as long the slow worker's step takes"""
    batch: int = 32
    """samples of a worker in a step"""
    gradients: int = 1000
    """how many gradients of any worker are used in all"""
    lr: float = 0.1
    """learning rate of a step over all workers"""
    codec: str = "top_k:k=0.05"
    """of the workers"""
    down: str = "top_k:k=0.05"
    """of the server"""
    max_staleness: int = 24
    """bound of the asynchronous server"""


def order(rank: int, epoch: int, n: int) -> torch.Tensor:
    """A worker's own order of the samples."""
    return torch.argsort(random_int32(isgq.Key("order", 0, epoch, rank).digest, "benchmark", n), stable=True)


class Worker:
    """A model with its data and its speed."""

    def __init__(self, config: Config, rank: int) -> None:
        self.set = data.load("mnist5k", seed=0)
        self.model = models.build("fc", classes=10, in_shape=self.set.in_shape, seed=0)
        self.rank, self.batch = rank, config.batch
        self.pause = config.pause * (config.slower if rank == config.workers - 1 else 1)
        self.step = 0

    def backward(self, model: nn.Module) -> None:
        """One forward and backward pass, which takes as long as this worker's do."""
        start = time.perf_counter()
        n = len(self.set.train_y)
        epoch, position = divmod(self.step * self.batch, n - n % self.batch)
        mine = order(self.rank, epoch, n)[position : position + self.batch]
        self.step += 1
        loss = F.cross_entropy(model(self.set.train_x[mine]), self.set.train_y[mine])
        time.sleep(max(0.0, self.pause - (time.perf_counter() - start)))
        loss.backward()  # type: ignore[no-untyped-call]

    def accuracy(self, model: nn.Module) -> float:
        """On the test images."""
        with torch.no_grad():
            return float((model(self.set.test_x).argmax(1) == self.set.test_y).float().mean())


def own_rate(worker: Worker, steps: int = 12) -> float:
    """Gradients a second of this worker alone."""
    worker.backward(worker.model)
    start = time.perf_counter()
    for _ in range(steps):
        worker.backward(worker.model)
    worker.model.zero_grad()
    return steps / (time.perf_counter() - start)


def asynchronous(config: Config) -> dict[str, Any]:
    """One process of the asynchronous run: rank 0 is the server."""
    worker = Worker(config, dist.get_rank() - 1)
    model = worker.model
    rate = own_rate(worker) if dist.get_rank() else 0.0
    dist.barrier()
    options: dict[str, Any] = {"aggregate": "async", "down": config.down, "max_staleness": config.max_staleness}
    with isgq.instrument(model, config.codec, **options) as session:
        if not session.serves:
            while not session.done:
                worker.backward(model)
            return {"rate": rate}
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr / config.workers, momentum=0.9)

        def schedule(updates: int) -> None:
            optimizer.param_groups[0]["lr"] = cosine(config.lr, updates / config.gradients) / config.workers

        start = time.perf_counter()
        service = session.serve(optimizer, schedule, config.gradients)
        seconds = time.perf_counter() - start
        staleness = {str(age): count for age, count in sorted(service.staleness.items())}
        by_worker = {str(rank): count for rank, count in sorted(service.by_worker.items())}
        found = {"rate": service.updates / seconds, "accuracy": worker.accuracy(model)}
        return found | {"staleness": staleness, "gradients by worker": by_worker}


def synchronous(config: Config) -> dict[str, Any]:
    """One process of the synchronous run."""
    worker = Worker(config, dist.get_rank())
    model = worker.model
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    steps = config.gradients // config.workers
    with isgq.instrument(model, config.codec, aggregate="two_pass", down=config.down):
        start = time.perf_counter()
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = cosine(config.lr, step / steps)
            worker.backward(model)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - start
    return {"rate": steps * config.workers / seconds, "accuracy": worker.accuracy(model)}


def cosine(lr: float, done: float) -> float:
    """A learning rate that falls to 0."""
    return lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def main() -> None:
    """Run both and print."""
    config = tyro.cli(Config)
    server, *workers = launch(asynchronous, config.workers + 1, args=(config,), timeout=300)
    together = launch(synchronous, config.workers, args=(config,), timeout=300)[0]
    rates = [worker["rate"] for worker in workers]
    print(f"own rates, gradients/s: {', '.join(f'{rate:.2f}' for rate in rates)}; sum {sum(rates):.2f}")
    print(f"asynchronous: {server['rate']:.2f} gradients/s = {server['rate'] / sum(rates):.0%} of the sum, ", end="")
    print(f"accuracy {server['accuracy']:.4f}")
    print(
        f"two passes:   {together['rate']:.2f} gradients/s = {together['rate'] / sum(rates):.0%} of the sum, ", end=""
    )
    print(f"accuracy {together['accuracy']:.4f}")
    print(json.dumps({"staleness": server["staleness"], "gradients by worker": server["gradients by worker"]}))


if __name__ == "__main__":
    main()
