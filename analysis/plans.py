"""Which way each parameter of each model takes by itself, on random inputs: ``python -m analysis.plans``.

    python -m analysis.plans --models resnet18:width=16 transformer_lm --batch 16 --steps 128 --codec isgq

Factors take bytes for each sample, for each place of a convolution's map and for each token; gradients do not. The
session measures both in its first step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import isgq
import models
from isgq.planner import Plan

_IMAGES = {"fc": (1, 28, 28), "lenet": (1, 28, 28), "alexnet": (3, 224, 224)}  # all others 3 x 32 x 32


@dataclass(frozen=True)
class Config:
    """Print the plan of a session for each model, measured on one step of one worker."""

    models: tuple[str, ...] = ("fc", "lenet", "cifarnet", "resnet18:width=16", "lstm_lm", "transformer_lm")
    """as for train.py"""
    codec: str = "isgq"
    """codec of the factors"""
    dense: str | None = None
    """codec of what has no factors or is fewer bytes without"""
    batch: int = 16
    """samples of the worker in a step"""
    steps: int = 32
    """tokens of a sample, for language models"""
    vocabulary: int = 10_000
    """of language models"""


def inputs(config: Config, spec: str) -> tuple[nn.Module, Tensor]:
    """A new model, and a batch of noise: images of the size that it is usually given, or tokens."""
    generator = torch.Generator().manual_seed(0)
    name = spec.partition(":")[0]
    if name.endswith("_lm"):
        model = models.build(spec, classes=config.vocabulary, in_shape=(config.steps,))
        return model, torch.randint(config.vocabulary, (config.batch, config.steps), generator=generator)
    in_shape = _IMAGES.get(name, (3, 32, 32))
    return models.build(spec, classes=10, in_shape=in_shape), torch.rand(config.batch, *in_shape, generator=generator)


def plan_of(config: Config, spec: str) -> Plan:
    """What the session decides after one step."""
    model, x = inputs(config, spec)
    with isgq.instrument(model, config.codec, dense=config.dense) as session:
        loss(model(x)).backward()  # type: ignore[no-untyped-call]
    return session.plan


def loss(output: Tensor | tuple[Tensor, Any], targets: object = None) -> Tensor:
    """Cross entropy of any classes, for images and texts alike; none are given."""
    del targets
    logits = output[0].flatten(0, 1) if isinstance(output, tuple) else output
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def summary(plan: Plan) -> str:
    """Parameters and bytes by route, in one line."""
    factored = [line for line in plan.lines if line.route == "factors"]
    beside = [line for line in plan.lines if line.factor_bytes and line.route != "factors"]
    of_factored, rest = (sum(line.dense_bytes for line in lines) for lines in (factored, plan.lines))
    return (
        f"{sum(line.factor_bytes for line in factored):,} bytes of factors instead of {of_factored:,} of gradients for "
        f"{len(factored)} weights; {rest - of_factored:,} bytes of gradients for all others, "
        f"{len(beside)} of which have factors that are more"
    )


def main() -> None:
    """Run the command line."""
    config = tyro.cli(Config)
    for spec in config.models:
        plan = plan_of(config, spec)
        print(f"{spec}: {summary(plan)}\n\n{plan}\n")


if __name__ == "__main__":
    main()
