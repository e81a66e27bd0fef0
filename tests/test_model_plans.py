"""What the planner chooses by itself for each model: factors where they are few bytes, else what is fewer.

Only choices by a factor of two or more are asserted.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
import models
from isgq.planner import Plan

VOCABULARY = 500
TRANSFORMER, LSTM = "transformer_lm:width=32", "lstm_lm:width=32"
TRANSFORMERS_DENSE = ["blocks.0.attention.1.out.weight", "blocks.1.dense.3.weight"]
LSTMS_DENSE = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("inputs", "hidden")]


def images(spec: str, batch: int, *in_shape: int) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return models.build(spec, classes=10, in_shape=in_shape), torch.rand(batch, *in_shape, generator=generator)


def texts(spec: str, batch: int, steps: int) -> tuple[nn.Module, Tensor]:
    model = models.build(spec, classes=VOCABULARY, in_shape=(steps,))
    return model, torch.randint(VOCABULARY, (batch, steps), generator=torch.Generator().manual_seed(0))


def plan_of(model: nn.Module, x: Tensor, codec: str = "isgq", dense: str | None = None) -> Plan:
    with isgq.instrument(model, codec, dense=dense) as session:
        output = model(x)
        logits = output[0].flatten(0, 1) if isinstance(output, tuple) else output
        F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]).backward()
    return session.plan


def check(plan: Plan, factors: list[str], other: list[str], route: str = "dense") -> None:
    assert {name: plan.route(name) for name in factors} == dict.fromkeys(factors, "factors")
    assert {name: plan.route(name) for name in other} == dict.fromkeys(other, route)
    for line in plan.lines:
        if line.factor_bytes:
            assert (line.route == "factors") == (line.factor_bytes < line.dense_bytes)
            assert "fewer bytes" in line.reason or f"factors cost {line.factor_bytes:,} bytes" in line.reason


@pytest.mark.parametrize(
    ("spec", "shape", "factors", "dense"),
    [
        ("fc", (16, 1, 28, 28), ["1.weight", "3.weight", "5.weight"], []),
        ("lenet", (16, 1, 28, 28), ["3.weight", "7.weight", "9.weight"], ["0.weight"]),
        ("cifarnet", (16, 3, 32, 32), ["5.weight", "10.weight", "12.weight", "14.weight"], ["1.weight"]),
        (
            "resnet18:width=16",
            (16, 3, 32, 32),
            ["8.body.3.weight", "9.body.0.weight", "10.body.3.weight", "13.weight"],
            ["0.weight", "3.body.0.weight", "4.body.3.weight", "5.shortcut.0.weight"],
        ),
    ],
)
def test_convolutions_over_large_maps_go_dense(
    spec: str, shape: tuple[int, ...], factors: list[str], dense: list[str]
) -> None:
    check(plan_of(*images(spec, *shape)), factors, dense)


def test_alexnets_dense_layers_are_worth_their_factors_and_its_first_convolution_is_not() -> None:
    """At its real size, with a small batch; a larger one makes the convolution's factors dearer still."""
    check(
        plan_of(*images("alexnet", 6, 3, 224, 224)), ["8.weight", "17.weight", "20.weight", "22.weight"], ["0.weight"]
    )


@pytest.mark.parametrize(("spec", "long"), [(TRANSFORMER, TRANSFORMERS_DENSE), (LSTM, LSTMS_DENSE)])
def test_language_models_send_factors_of_short_texts_and_gradients_of_long_ones(spec: str, long: list[str]) -> None:
    check(plan_of(*texts(spec, 1, 8)), ["embedding.weight", "head.weight", *long], [])
    check(plan_of(*texts(spec, 16, 64)), [], long)
    check(plan_of(*texts(spec, 16, 64), dense="top_k:k=0.01"), [], long, "direct")


@pytest.mark.parametrize(("spec", "long"), [(TRANSFORMER, TRANSFORMERS_DENSE), (LSTM, LSTMS_DENSE)])
def test_rotated_factors_do_not_grow_with_the_text(spec: str, long: list[str]) -> None:
    check(plan_of(*texts(spec, 16, 64), codec="rotated"), ["embedding.weight", "head.weight", *long], [])


@pytest.mark.parametrize("spec", [TRANSFORMER, LSTM])
def test_a_tied_table_goes_dense_and_says_why(spec: str) -> None:
    plan = plan_of(*texts(f"{spec},tied=true", 1, 8))
    [line] = [line for line in plan.lines if line.name == "embedding.weight"]
    assert (line.route, line.reason) == ("dense", "tied: used by 2 modules")
    assert line.dense_bytes == 4 * 32 * VOCABULARY
