"""Predicted and measured steps on shaped links: ``unshare -n python -m benchmarks.planned --links 10Mbit/s 100Mbit/s``.

Linux, as root: every worker gets a network namespace of its own, whose link to a bridge is shaped in both directions by
``tc tbf``; ``unshare -n`` keeps all of it apart from the machine's own network, and takes it away in the end. The
forecast is made in this process, alone; then plain DistributedDataParallel and a session with the codec ``auto`` train
on all workers. Times are the least of the steps, without optimizer, bytes means of what the first worker's ledger
counts. Ways are chosen by bytes (``timed=false``), so that forecast and session choose alike.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import data
import isgq
import models
from isgq.bandwidth import Link

_WARM = 3  # steps that are not counted: the first plans, or builds DDP's buckets


def main() -> None:
    """Forecast and measure, or be one of the workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="fc:hidden=1000-300-100")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=["10Mbit/s", "100Mbit/s"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank is not None:
        work(options)
        return
    print("| link | | predicted ms | measured ms | predicted bytes sent | measured |\n|---|---|---|---|---|---|")
    for link in options.links:
        model, draw = workload(options, 0)
        forecast = isgq.plan(model, draw(), workers=options.workers, link=link, timed=False)
        with namespaces(options.workers, Link.parse(link)) as inside:
            plain, ours = (measured(options, inside, codec) for codec in ("ddp", forecast.codec))
        for name, seconds, size, (real, bytes_) in (
            ("plain DDP", forecast.ddp, forecast.dense_size, plain),
            ("`auto`", forecast.seconds, forecast.moved.sent, ours),
        ):
            print(
                f"| {link} | {name} | {1e3 * seconds:.0f} | {1e3 * real:.0f} | {size:,} | {bytes_:,.0f} |", flush=True
            )


def workload(options: argparse.Namespace, rank: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """The model, and a function that draws a batch."""
    dataset, generator = data.load("fashion"), torch.Generator().manual_seed(rank)

    def draw() -> tuple[Tensor, Tensor]:
        index = torch.randint(len(dataset.train_y), (options.batch,), generator=generator)
        return dataset.train_x[index], dataset.train_y[index]

    return models.build(options.model, classes=dataset.classes, in_shape=dataset.in_shape), draw


@contextmanager
def namespaces(workers: int, link: Link) -> Iterator[list[list[str]]]:
    """Commands that run something inside each worker's namespace."""
    shape = f"root tbf rate {round(8 * link.bytes_per_second)}bit burst 4kb latency 1s"
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in range(workers)]
    try:
        time.sleep(1.0)  # until they are inside
        run("ip link add bridge type bridge")
        run("ip link set bridge up")
        for rank, holder in enumerate(holders):
            inside = f"nsenter -t {holder.pid} -n"
            run(f"ip link add out{rank} type veth peer name in{rank} netns {holder.pid}")
            run(f"ip link set out{rank} master bridge up")
            run(f"{inside} ip address add 10.7.0.{rank + 1}/24 dev in{rank}")
            run(f"{inside} ip link set in{rank} up")
            run(f"{inside} ip link set lo up")
            run(f"tc qdisc add dev out{rank} {shape}")
            run(f"{inside} tc qdisc add dev in{rank} {shape}")
        yield [["nsenter", "-t", str(holder.pid), "-n"] for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
        subprocess.run(["ip", "link", "delete", "bridge"], check=False)


def run(command: str) -> None:
    """A command that must succeed."""
    subprocess.run(command.split(), check=True)


def measured(options: argparse.Namespace, inside: list[list[str]], codec: str) -> tuple[float, float]:
    """Seconds of a step, and bytes that a worker sends."""
    own = [sys.executable, "-m", "benchmarks.planned", "--model", options.model, "--batch", str(options.batch)]
    own += ["--workers", str(options.workers), "--steps", str(options.steps), "--links", codec]
    common = {**os.environ, "MASTER_ADDR": "10.7.0.1", "MASTER_PORT": "29400", "WORLD_SIZE": str(options.workers)}
    ranks = []
    for rank, prefix in enumerate(inside):
        environment = {**common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": f"in{rank}"}
        command = [*prefix, *own, "--rank", str(rank)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"a worker failed with {codec}")
    seconds, size = said[0].split()
    return float(seconds), float(size)


def work(options: argparse.Namespace) -> None:
    """One worker: steps with the codec in place of a link, then seconds and bytes on the output."""
    dist.init_process_group("gloo")
    model, draw = workload(options, options.rank)
    [codec] = options.links
    plain = codec == "ddp"
    network: nn.Module = DistributedDataParallel(model) if plain else model
    times, sent = [], [0.0]
    with nullcontext() if plain else isgq.instrument(model, codec) as session:
        for _ in range(_WARM + options.steps):
            x, y = draw()
            dist.barrier()
            start = time.perf_counter()
            F.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
            times.append(time.perf_counter() - start)
            network.zero_grad()
            sent.append(session.traffic.sent if session is not None else 0.0)
    size = (sent[-1] - sent[_WARM]) / options.steps
    if plain:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(min(times[_WARM:]), size, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
