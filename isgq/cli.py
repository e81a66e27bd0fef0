"""The command ``isgq``: ``isgq plan --model lenet --data fashion --batch 32 --workers 8 --link 100Mbit/s+1ms``.

``isgq bench`` is :mod:`isgq.bench`, ``isgq doctor`` is in :mod:`isgq.diagnosis`, ``isgq watch`` in :mod:`isgq.watch`.

Models and data by name are those of the packages ``models`` and ``data`` beside this library's source. Your own model
is ``--model package.module:factory --input-shape 3,32,32``, where the factory takes no arguments.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isgq.auto import DEFAULT_WAYS
from isgq.bench import CODECS, bench
from isgq.core.errors import IsgqError, OptionError
from isgq.diagnosis import configure as configure_doctor
from isgq.diagnosis import run as run_doctor
from isgq.forecast import plan
from isgq.watch import configure as configure_watch
from isgq.watch import run as run_watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    Args:
        arguments: of the command line; by default this process'.
    """
    options = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        status: int = options.run(options)
    except (ImportError, ValueError, OSError, IsgqError) as error:
        print(f"isgq {options.command}: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isgq", description="Communication-efficient data-parallel training")
    commands = parser.add_subparsers(dest="command", required=True)
    words = "tell why each parameter travels as it does, check its factors, predict its bytes"
    examine = commands.add_parser("doctor", help=words, description=words)
    configure_doctor(examine)
    examine.set_defaults(run=run_doctor)
    words = "predict a training step of data-parallel workers, and the best way for each gradient"
    predict = commands.add_parser("plan", help=words, description=words)
    predict.set_defaults(run=_plan)
    add = _configure_workload(predict)
    add("--link", required=True, help="of each worker: 100Mbit/s, 1Gbit/s+0.2ms")
    add("--ways", help=f"codecs to choose from (default: {DEFAULT_WAYS})")
    add("--error", type=float, help="largest squared error of the mean gradient, relative (default: 0.25)")
    add("--steps", type=int, default=0, help="of SGD before, because first gradients are not like later ones")
    add("--json", action="store_true", help="print everything that was predicted, of every codec")
    words = "measure steps with codecs on this machine, and the bandwidths below which they are worth it"
    compare = commands.add_parser("bench", help=words, description=words)
    compare.set_defaults(run=_bench)
    add = _configure_workload(compare)
    add("--codecs", nargs="+", default=list(CODECS), help="as for isgq.instrument (default: %(default)s)")
    add("--json", action="store_true", help="print all of it for programs")
    words = "show a run's telemetry as it grows"
    watch = commands.add_parser("watch", help=words, description=words)
    configure_watch(watch)
    watch.set_defaults(run=run_watch)
    return parser


def _configure_workload(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Declare the options of :func:`_workload` and the number of workers; returns what adds further ones."""
    add = parser.add_argument
    add("--model", required=True, help="fc, fc:hidden=300-100, lenet, cifarnet, alexnet, or package.module:factory")
    add("--data", help="mnist5k, fashion, patches, idx:DIR or cifar10:DIR; random numbers if not given")
    add("--input-shape", type=_shape, help="of one random sample, e.g. 3,32,32, or 128 tokens")
    add("--tokens", type=int, help="random inputs are integers below this, for an Embedding")
    add("--classes", type=int, default=10, help="random targets are below this (default: %(default)s)")
    add("--batch", type=int, default=32, help="samples of each worker (default: %(default)s)")
    add("--workers", type=int, default=4, help="(default: %(default)s)")
    return add


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _plan(options: argparse.Namespace) -> int:
    generator = torch.Generator().manual_seed(0)
    model, draw = _workload(options, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(options.steps):
        x, y = draw()
        _loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    forecast = plan(
        model,
        draw(),
        workers=options.workers,
        link=options.link,
        ways=options.ways,
        error=options.error,
        loss=_loss,
    )
    print(json.dumps(forecast.as_dict(), indent=2) if options.json else forecast)
    return 0


def _bench(options: argparse.Namespace) -> int:
    model, draw = _workload(options, torch.Generator().manual_seed(0))
    found = bench(model, draw(), options.codecs, workers=options.workers, loss=_loss)
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the last dimension, which any others come before."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def _workload(options: argparse.Namespace, generator: torch.Generator) -> tuple[nn.Module, Any]:
    """The model, and a function that draws a batch; OptionError where the options do not fit."""  # noqa: DOC501
    if options.batch < 1:
        raise OptionError(f"--batch {options.batch} must be 1 or more")
    if options.data is not None:
        dataset = importlib.import_module("data").load(options.data)
        model = _model(options.model, dataset.classes, dataset.in_shape)

        def draw() -> tuple[Tensor, Tensor]:
            index = torch.randint(len(dataset.train_y), (options.batch,), generator=generator)
            return dataset.train_x[index], dataset.train_y[index]

        return model, draw
    if options.input_shape is None:
        raise OptionError("give --data, or --input-shape for random samples")
    shape = (options.batch, *options.input_shape)
    model = _model(options.model, options.classes, options.input_shape)

    def random() -> tuple[Tensor, Tensor]:
        if options.tokens is None:
            x = torch.randn(shape, generator=generator)
        else:
            x = torch.randint(options.tokens, shape, generator=generator)
        with torch.no_grad():
            outputs = model(x).shape[:-1]
        return x, torch.randint(options.classes, outputs, generator=generator)

    return model, random


def _model(spec: str, classes: int, in_shape: tuple[int, ...]) -> nn.Module:
    """A model of ``models``, or of the user's own factory; OptionError where there is none."""  # noqa: DOC501
    module, colon, factory = spec.partition(":")
    if not colon or "=" in factory:
        built: nn.Module = importlib.import_module("models").build(spec, classes=classes, in_shape=in_shape)
        return built
    try:
        built = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError, TypeError) as error:
        raise OptionError(f"--model {spec} names no importable function without arguments: {error}") from None
    if not isinstance(built, nn.Module):
        raise OptionError(f"--model {spec} made {type(built).__name__}, must make an nn.Module")
    return built


if __name__ == "__main__":
    sys.exit(main())
