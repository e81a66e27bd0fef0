"""What codecs of factors take for one layer, beside its own passes: ``python -m benchmarks.layer [SPEC ...]``.

Milliseconds of processor time of all threads, the least of some repetitions: *passes* is forward and backward of a
linear layer, *encode* factors to bytes, *decode* bytes to the gradient. X is of standardized images, D of a network's
first steps.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from isgq import codec
from isgq.core.codec import PairCodec
from isgq.core.errors import OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.layers.capture import Capture, Unit, find_units
from isgq.wire import pack_message, unpack_message

SPECS = ("isgq", "rotated", "rotated:ratio=800", "rotated:bases=learned,ratio=800")
_T = TypeVar("_T")


def captured(
    name: str, inputs: int, outputs: int, batch: int, steps: int
) -> tuple[Unit, Factors, Callable[[], Tensor]]:
    """The first layer of a small network, its factors after so many steps, and its forward pass in the last of them."""
    images = data.load(name).standardized()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, images.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    units, _ = find_units(model, lambda name: name.startswith("2"))
    caught: list[Factors] = []
    capture = Capture(units, lambda unit, factors: caught.append(factors), lambda: None)
    flat = images.train_x.flatten(1)[:, :inputs]
    for step in range(steps):
        chosen = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        F.cross_entropy(model(flat[chosen]), images.train_y[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    capture.close()
    layer, x = model[0], flat[chosen].clone().requires_grad_()
    return units[0], caught[-1], lambda: layer(x)


def least(work: Callable[[], _T], repeats: int) -> tuple[float, _T]:
    """Milliseconds of processor time, and what came of it."""
    best, result = float("inf"), work()
    for _ in range(repeats):
        begun = time.process_time()
        result = work()
        best = min(best, 1e3 * (time.process_time() - begun))
    return best, result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__.split("\n")[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=list(SPECS))
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--outputs", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    unit, factors, forward = captured(options.data, options.inputs, options.outputs, options.batch, steps=30)
    ones = torch.ones_like(factors.d)
    passes, _ = least(lambda: forward().backward(ones), options.repeats)  # type: ignore[no-untyped-call]
    print(f"{options.inputs} x {options.outputs}, batch {options.batch}, {torch.get_num_threads()} threads\n")
    print("| codec | passes ms | encode ms | decode ms | bytes | over passes |\n|---|---|---|---|---|---|")
    for spec in options.specs:
        coder = codec(spec)
        if not isinstance(coder, PairCodec):
            parser.error(str(OptionError(f"{spec} is no codec of factors")))

        def write(coder: PairCodec = coder) -> Tensor:
            return pack_message([coder.encode_pair(factors, unit.contract, Key(unit.name))])[0]

        encode, message = least(write, options.repeats)

        def rebuild(coder: PairCodec = coder, message: Tensor = message) -> Tensor:
            [record] = unpack_message(message)
            return unit.flat_gradient(coder.decode_pair(record))  # type: ignore[arg-type]

        decode, _ = least(rebuild, options.repeats)
        cells = f"{passes:.2f}", f"{encode:.2f}", f"{decode:.2f}", f"{message.numel():,}"
        print(f"| `{spec}` | {' | '.join(cells)} | {(encode + decode) / passes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
