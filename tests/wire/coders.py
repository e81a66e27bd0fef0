"""Bits a symbol and speed of the coders, as in docs/wire-format.md: ``python -m tests.wire.coders [--speed]``."""

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from isgq.core.payload import Payload, Symbols
from isgq.wire import pack, unpack
from isgq.wire.bits import packed_size
from isgq.wire.entropy import encode_stream
from tests.wire.records import skewed

SIZES = ((100, 3, 800), (100, 5, 600), (1000, 5, 600), (1000, 17, 800))
SIZES += tuple((1_000_000, alphabet, zeros) for alphabet in (3, 5, 17) for zeros in (0, 500, 800, 950))
SIZES += ((1_000_000, 256, 0), (1_000_000, 256, 800), (1_000_000, 10_000, 800))
SPEEDS = ((3, 500), (3, 950), (5, 500), (16, 0), (256, 0))
HEAD = "| symbols | alphabet | zeros | entropy | packed | zstd | ANS | auto |\n|---|---|---|---|---|---|---|---|"


def size_row(count: int, alphabet: int, zeros: int) -> str:
    """Bits a symbol, tables included."""
    stream = skewed(count, alphabet, zeros)
    shares = np.bincount(stream.values.numpy(), minlength=alphabet) / count
    entropy = -float(np.sum(shares[shares > 0] * np.log2(shares[shares > 0])))
    coded = [len(encode_stream(stream, coder)[1]) * 8 / count for coder in ("zstd", "ans")]
    packed = packed_size(count, alphabet) * 8 / count
    ans = f"{coded[1]:.3f}" if alphabet <= 4096 else ""
    chosen = encode_stream(stream)[0].name.lower().replace("_", " ").replace("ans", "ANS")
    share = float((stream.values == 0).float().mean())
    return (
        f"| {count:,} | {alphabet:,} | {share:.2f} | {entropy:.3f} | {packed:.3f} | {coded[0]:.3f} | {ans} | {chosen} |"
    )


def seconds(function: Callable[[], object], trials: int = 15) -> float:
    """The fastest of several trials."""
    function()
    best = math.inf
    for _ in range(trials):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def speed_row(alphabet: int, zeros: int, count: int = 1 << 20) -> str:
    """Millions of symbols a second of whole frames, written and read."""
    stream = skewed(count, alphabet, zeros)
    payload = Payload("x", (count,), torch.float32, {"q": Symbols(stream.values, alphabet)})
    cells = []
    for coder in ("packed", "zstd", "ans"):
        data = pack(payload, coder=coder)
        write, read = seconds(lambda c=coder: pack(payload, coder=c)), seconds(lambda d=data: unpack(d))
        cells.append(f"{count / write / 1e6:.0f} / {count / read / 1e6:.0f}")
    return f"| {alphabet} | {zeros / 1000:.2f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", action="store_true", help="measure speed too, on one core")
    arguments = parser.parse_args()
    print(HEAD)
    for case in SIZES:
        print(size_row(*case))
    if arguments.speed:
        torch.set_num_threads(1)
        print("\n| alphabet | zeros | packed | zstd | ANS |\n|---|---|---|---|---|")
        for pair in SPEEDS:
            print(speed_row(*pair))
