"""Bytes and errors of codecs of factors on one gradient: ``python -m benchmarks.factors [SPEC ...]``.

The gradient is that of a network after some steps (:mod:`analysis.gradients`), all layers in one message without a
template. The error is the squared one of all weights over their squared norm, mean over keys.
"""

import argparse

import torch

import data
from analysis.gradients import capture_gradients, weight_numel
from isgq.codecs import codec
from isgq.core.codec import PairCodec
from isgq.core.keys import Key
from isgq.core.payload import LowRank
from isgq.wire import pack_message

SPECS = (
    "isgq",
    "separate(dithered:levels=2)",
    "separate(dithered:levels=4)",
    "separate(dithered:levels=4,bucket=tensor)",
    "balanced:balance=false,step=0.5",
    "balanced:balance=false,step=1",
    "balanced:balance=false",
    "balanced:step=0.5",
    "balanced:step=1",
    "balanced",
    "balanced:step=3",
    "balanced:balance=false,samples=0.25",
    "balanced:samples=0.5",
    "balanced:samples=0.25",
    "balanced:samples=0.1",
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.factors", description=__doc__.split("\n")[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=list(SPECS))
    parser.add_argument("--model", default="fc:hidden=300-100")
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--standardize", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="of training before (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--keys", type=int, default=8)
    options = parser.parse_args()
    dataset = data.load(options.data)
    dataset = dataset.standardized() if options.standardize else dataset
    batch = options.batch
    layers = capture_gradients(options.model, dataset, steps=options.steps, batch=batch, last_batch=batch)
    energy = sum(float(layer.gradient.double().square().sum()) for layer in layers)
    print("| codec | bytes | bits a weight | compression | error |\n|---|---|---|---|---|")
    for spec in options.specs:
        coder = codec(spec)
        if not isinstance(coder, PairCodec):
            parser.error(f"{spec} is no codec of factors")
        sizes, errors = [], []
        for seed in range(options.keys):
            keys = [Key(layer.name, seed) for layer in layers]
            sent = [coder.encode_pair(y.factors, y.contract, key) for y, key in zip(layers, keys, strict=True)]
            sizes.append(pack_message(sent)[0].numel())
            error = 0.0
            for layer, payload in zip(layers, sent, strict=True):
                back = coder.decode_pair(payload)
                rebuilt = back.weight() if isinstance(back, LowRank) else layer.contract(back.x, back.d)
                error += float((rebuilt.reshape(-1) - layer.gradient.reshape(-1)).double().square().sum())
            errors.append(error / energy)
        size, error = (float(torch.tensor(values, dtype=torch.float64).mean()) for values in (sizes, errors))
        bits = 8 * size / weight_numel(layers)
        print(f"| `{spec}` | {size:,.0f} | {bits:.3f} | x{32 / bits:.0f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    main()
