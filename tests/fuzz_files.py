"""Damages checkpoints, IDX files, codec strings and settings at random and watches how they are taken:
``python -m tests.fuzz_files checkpoint --mutations 10000 --seed 0``.

Whatever comes in, the outcome is the one error that the reader promises, or a value that is as it has to be. Anything
else fails, and so does running out of an address space that is hardly larger than the process at its start.
"""

import argparse
import collections
import dataclasses
import gzip
import io
import math
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.dataset import DataError
from data.idx import read_idx
from isgq.codecs import codec, codec_names, spec_of
from isgq.core.errors import OptionError
from models import ModelError
from tests.data.files import digits, idx, idx_folder
from tests.fuzz_wire import SPARE_MEMORY, Frame, limit_memory, mutate
from train import check
from training.checkpoint import CheckpointError, read
from training.config import Config

Outcomes = Iterator[str]


def checkpoint_bytes() -> bytes:
    """A small checkpoint of two workers."""
    memory = {"road": {"step": 3, "memory": {"up": {"0.weight": torch.arange(30.0)}}}, "task": {}}
    content = {
        "settings": {"codec": "isgq", "lr": 0.1},
        "epoch": 2,
        "workers": [memory | {"spent": torch.zeros(4)}] * 2,
        "model": {"0.weight": torch.ones(5, 6), "0.bias": torch.ones(5)},
        "optimizer": torch.optim.SGD([torch.ones(3)], lr=0.1).state_dict(),
    }
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def with_record(archive: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The same archive with a record changed and its checksum put right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w") as new:
        for record in old.namelist():
            content = old.read(record)
            new.writestr(record, change(content) if record == name else content)
    return file.getvalue()


def checkpoints(rng: random.Random, folder: Path) -> Outcomes:
    """Half of the mutants keep their checksums: refused, or read as what was written."""
    whole = checkpoint_bytes()
    path, written = folder / "run.pt", torch.load(io.BytesIO(whole), weights_only=True)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        records = archive.namelist()
    for right in iter(lambda: rng.random() < 0.5, None):
        if right:
            mutant = with_record(whole, rng.choice(records), lambda content: mutate(content, rng, [Frame(whole)]))
        else:
            mutant = mutate(whole, rng, [Frame(whole)])
        path.write_bytes(mutant)
        try:
            content = read(path)
        except CheckpointError:
            yield f"checksum {'right' if right else 'wrong'}, refused"
            continue
        assert right or same(content, written), "damage went unnoticed"
        yield "checksum right, of the right form" if right else "damage beside the content"


def idx_files(rng: random.Random, folder: Path) -> Outcomes:
    """Plain, compressed, and compressed after the damage."""
    plain, path = idx(digits(6, 0)[0]), folder / "file"
    packed = gzip.compress(plain, mtime=0)
    while True:
        kind = rng.choice(("plain", "packed", "inside"))
        mutant = mutate(packed if kind == "packed" else plain, rng, [Frame(plain), Frame(packed)])
        path.write_bytes(gzip.compress(mutant) if kind == "inside" else mutant)
        try:
            values = read_idx(path, 3)
        except DataError:
            yield f"{kind}, refused"
            continue
        assert values.dtype == np.uint8
        assert values.ndim == 3
        assert values.size
        yield f"{kind}, read"


EXAMPLES = (
    "isgq",
    "dithered:levels=2,bucket=row",
    "error_feedback(top_k:k=0.25->0.001@500)",
    "error_feedback(rtop_k:r=0.01,k=0.001):decay=0.5,reset=10",
    "momentum_correction(qsgd:levels=4):momentum=0.9,masking=false",
    "rotated:ratio=100,bases=learned",
    "nested",
    "lloyd_max:levels=4",
)
PIECES = (*"():,;=->@.0123456789eE+-", "nan", "inf", "none", "true", "levels=", "1e999", "\0", "é", "((((", "9" * 40)


def codec_strings(rng: random.Random, folder: Path) -> Outcomes:
    """Spec strings with letters lost, added, and pieces of others: refused, or built and written back alike."""
    names = [*EXAMPLES, *codec_names()]
    while True:
        text = rng.choice(names)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            at, span = rng.randrange(len(text) + 1), rng.randrange(4)
            text = text[:at] + rng.choice((*PIECES, *names)) * rng.randrange(3) + text[at + span :]
        try:
            built = codec(text)
        except OptionError:
            yield "refused"
            continue
        spec = spec_of(built)
        assert spec_of(codec(spec)) == spec, f"{text!r} is {spec!r}, and that is {spec_of(codec(spec))!r}"
        yield "built"


INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**200)
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e-3, 0.5, 1.0, 1e308)
TEXTS = (
    "",
    ":",
    "fc:hidden=",
    "fc:hidden=0",
    "fc:hidden=-3",
    "fc:hidden=4-3",
    "fc:depth=2",
    "lenet",
    "lstm_lm:width=x",
)
ODD: dict[str, tuple[Any, ...]] = {
    "workers": ((), *((number,) for number in INTEGERS)),
    "codecs": ((), *((name,) for name in (*EXAMPLES, "dense", "", "nope"))),
    "dense": (None, "", "dense", "isgq", "qsgd"),
    "aggregate": ("gather", "two_pass", "server", "async"),
    "down": (None, "", "one_bit", "isgq"),
    "model": TEXTS,
    "data": ("", "idx:", "idx:/nowhere", "sotu:x", "cifar10:/dev/null", "ptb:\0"),
    **dict.fromkeys(("max_staleness", "local_steps", "sequence", "total_batch"), (None, *INTEGERS)),
    **dict.fromkeys(("batch_per_worker", "epoch_steps", "telemetry"), (None, *INTEGERS)),
    **dict.fromkeys(("epochs", "seed"), INTEGERS),
    **dict.fromkeys(("lr", "momentum", "timeout"), NUMBERS),
    "clip": (None, *NUMBERS),
    "resume": (False, True),
    "standardize": (False, True),
}


def configs(rng: random.Random, folder: Path) -> Outcomes:
    """Settings of ``train.py`` with one to three odd values: refused before anything starts, or runs that can."""
    idx_folder(folder / "digits", counts=(40, 10))
    good = Config(workers=(2,), model="fc:hidden=4", data=f"idx:{folder / 'digits'}", total_batch=8, out=folder / "out")
    while True:
        odd = {name: rng.choice(ODD[name]) for name in rng.sample([*ODD], rng.choice((1, 1, 2, 3)))}
        try:
            runs = check(dataclasses.replace(good, **odd))
        except (OptionError, DataError, ModelError, CheckpointError):
            yield "refused"
            continue
        assert all(run.batch >= 1 and run.workers >= 1 for run in runs), odd
        assert runs, odd
        yield "accepted"


TARGETS = {"checkpoint": checkpoints, "idx": idx_files, "codec": codec_strings, "config": configs}


def run(target: str, folder: Path, mutations: int, seed: int) -> collections.Counter[str]:
    """Outcomes of so many mutants.

    Raises:
        AssertionError: damage went unnoticed; any other error is one that the reader does not promise.
    """
    outcomes = TARGETS[target](random.Random(seed), folder)
    return collections.Counter(next(outcomes) for _ in range(mutations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.target, Path(folder), 20, arguments.seed + 1)  # whatever is loaded on first use
        limit_memory(SPARE_MEMORY)
        outcomes = run(arguments.target, Path(folder), arguments.mutations, arguments.seed)
    for outcome, number in sorted(outcomes.items()):
        print(f"{number:8d}  {outcome}")
    print(
        f"{arguments.mutations} mutants of {arguments.target}, seed {arguments.seed}: none crashed or went unnoticed, "
        f"no {SPARE_MEMORY >> 20} MiB of memory taken; {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
