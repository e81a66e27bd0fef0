"""Speed of the direct codecs alone, as a table in Markdown: ``python -m benchmarks.speed [SPEC ...] [--repeats N]``.

The input is that of :mod:`benchmarks.codecs`: a weight gradient of 10**7 float32 elements, 40 MB. Rates are bytes of
the input a second (1 GB is 10**9 bytes), by the fastest of the repetitions: *wall* by the clock, *CPU* by the processor
time of all threads, which other processes lengthen less. A plain copy and a cast to bfloat16 are timed for comparison.
With one thread (``OMP_NUM_THREADS=1``) the CPU time is the time that an idle core takes; with more, threads that wait
for one another count too.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import data
from analysis.methods import SPECS
from benchmarks.codecs import FULL, capture_inputs
from isgq.codecs import codec
from isgq.core.codec import PairCodec
from isgq.core.keys import Key
from isgq.wire import pack, unpack

DIRECT = tuple(spec for spec in SPECS if not isinstance(codec(spec), PairCodec))
STAGES = ("encode", "pack", "unpack", "decode")


def timed(work: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
    """Result, seconds by the clock, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work(*args)
    return result, time.perf_counter() - wall, time.process_time() - cpu


def row(name: str, size: int, stages: list[list[tuple[float, float]]], sent: int) -> str:
    """One line: milliseconds of each stage (CPU), then GB/s of the first two together and of the last two."""
    best = [(min(w for w, _ in stage), min(c for _, c in stage)) for stage in stages]
    cells = [f"{1e3 * cpu:.1f}" for _, cpu in best]
    for pair in (best[:2], best[2:]):
        cells += [f"{size / 1e9 / sum(t[i] for t in pair):.2f}" if pair else "" for i in (1, 0)]
    return f"| {name} | {' | '.join(cells)} | {sent:,} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description="Speed of the direct codecs")
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=list(DIRECT))
    parser.add_argument("--repeats", type=int, default=5, help="of which the fastest counts (default: %(default)s)")
    options = parser.parse_args()
    layer = capture_inputs(data.load("fashion").standardized(), FULL).direct
    x = layer.gradient
    size = 4 * x.numel()
    print(f"{x.numel():,} elements, {torch.get_num_threads()} threads\n")
    stages_ms = " | ".join(f"{stage} ms" for stage in STAGES)
    print(f"| codec | {stages_ms} | send GB/s CPU | wall | receive GB/s CPU | wall | bytes |")
    print("|---" * 10 + "|")
    target, half = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    for name, out in (("copy", target), ("cast to bfloat16", half)):
        times = [timed(out.copy_, x)[1:] for _ in range(1 + options.repeats)][1:]
        cpu, wall = min(c for _, c in times), min(w for w, _ in times)
        print(f"| *{name}* | {1e3 * cpu:.1f} | | | | {size / cpu / 1e9:.2f} | {size / wall / 1e9:.2f} | | | |")
    for spec in options.specs:
        coder = codec(spec)
        if isinstance(coder, PairCodec):
            parser.error(f"{spec} is no direct codec")
        stages: list[list[tuple[float, float]]] = [[] for _ in STAGES]
        sent = 0
        for step in range(1 + options.repeats):
            result: Any = (x, Key(layer.name, step=step))
            works: tuple[Callable[..., Any], ...] = (coder.encode, pack, unpack, coder.decode)
            for stage, work in zip(stages, works, strict=True):
                result, wall, cpu = timed(work, *(result if isinstance(result, tuple) else (result,)))
                stage.append((wall, cpu))
                sent = result.numel() if work is pack else sent
        print(row(f"`{spec}`", size, [stage[1:] for stage in stages], sent), flush=True)


if __name__ == "__main__":
    main()
