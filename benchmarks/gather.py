"""How long ranks on this machine wait for one another's messages: ``python -m benchmarks.gather [--workers N ...]``.

Milliseconds by the clock, medians over the rounds, in turns: *ring* is gloo's own all-gather, *exchange* what a session
does (:class:`isgq.exchange.TorchExchange`), which sends small messages to all ranks at once.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from isgq.exchange import TorchExchange
from isgq.launch import launch

_WARM = 10


def measure(size: int, rounds: int) -> tuple[float, float]:
    """Milliseconds of either, for messages of so many bytes. A collective call."""
    exchange, workers = TorchExchange(), dist.get_world_size()
    message = torch.zeros(size, dtype=torch.uint8)
    parts = [torch.empty_like(message) for _ in range(workers)]
    ways: tuple[Callable[[], object], ...] = (
        lambda: dist.all_gather(parts, message),
        lambda: exchange.all_gather(message, [size] * workers).wait(),
    )
    taken: tuple[list[float], ...] = ([], [])
    for _ in range(_WARM + rounds):
        for way, times in zip(ways, taken, strict=True):
            begun = time.perf_counter()
            way()
            times.append(1e3 * (time.perf_counter() - begun))
    ring, at_once = (statistics.median(times[_WARM:]) for times in taken)
    return ring, at_once


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gather", description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 12_000, 1_000_000], help="bytes of a message")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args(arguments)
    print("| workers | bytes | ring ms | exchange ms |\n|---|---|---|---|")
    for workers in options.workers:
        for size in options.sizes:
            ring, at_once = launch(measure, workers, args=(size, options.rounds))[0]
            print(f"| {workers} | {size:,} | {ring:.2f} | {at_once:.2f} |", flush=True)


if __name__ == "__main__":
    main()
