"""What the planner chooses by itself for each model: factors where they are few bytes, else what is fewer.

Only choices by a factor of two or more are asserted.
"""

from typing import Any

import pytest

from analysis.plans import Config, plan_of, summary
from isgq.planner import Plan

TRANSFORMER, LSTM = "transformer_lm:width=32", "lstm_lm:width=32"
SHORT: dict[str, Any] = {"batch": 1, "steps": 8, "vocabulary": 500}
LONG: dict[str, Any] = {"batch": 16, "steps": 64, "vocabulary": 500}
OF_BODY = {
    TRANSFORMER: ["blocks.0.attention.1.out.weight", "blocks.1.dense.3.weight"],
    LSTM: [f"layers.{i}.{part}.weight" for i in range(2) for part in ("inputs", "hidden")],
}


def check(plan: Plan, factors: list[str], other: list[str], route: str = "dense") -> None:
    assert {name: plan.route(name) for name in factors} == dict.fromkeys(factors, "factors")
    assert {line.name: line.route for line in plan.lines if line.name in other} == dict.fromkeys(other, route)
    for line in plan.lines:
        if line.factor_bytes:
            assert (line.route == "factors") == (line.factor_bytes < line.dense_bytes)
            assert "fewer bytes" in line.reason or f"factors cost {line.factor_bytes:,} bytes" in line.reason


@pytest.mark.parametrize(
    ("spec", "batch", "factors", "dense"),
    [
        ("fc", 16, ["1.weight", "3.weight", "5.weight"], []),
        ("lenet", 16, ["3.weight", "7.weight", "9.weight"], ["0.weight"]),
        ("cifarnet", 16, ["5.weight", "10.weight", "12.weight", "14.weight"], ["1.weight"]),
        (
            "resnet18:width=16",
            16,
            ["8.body.3.weight", "9.body.0.weight", "10.body.3.weight", "13.weight"],
            ["0.weight", "3.body.0.weight", "4.body.3.weight", "5.shortcut.0.weight"],
        ),
        ("alexnet", 1, ["8.weight", "17.weight", "20.weight", "22.weight"], []),
    ],
)
def test_convolutions_over_large_maps_go_dense(spec: str, batch: int, factors: list[str], dense: list[str]) -> None:
    check(plan_of(Config(batch=batch), spec), factors, dense)


@pytest.mark.parametrize("spec", [TRANSFORMER, LSTM])
def test_language_models_send_factors_of_short_texts_and_gradients_of_long_ones(spec: str) -> None:
    check(plan_of(Config(**SHORT), spec), ["embedding.weight", "head.weight", *OF_BODY[spec]], [])
    check(plan_of(Config(**LONG), spec), [], OF_BODY[spec])
    check(plan_of(Config(**LONG, dense="top_k:k=0.01"), spec), [], OF_BODY[spec], "direct")


@pytest.mark.parametrize("spec", [TRANSFORMER, LSTM])
def test_rotated_factors_do_not_grow_with_the_text(spec: str) -> None:
    plan = plan_of(Config(**LONG, codec="rotated"), spec)
    check(plan, ["embedding.weight", "head.weight", *OF_BODY[spec]], [])
    assert "0 of which have factors that are more" in summary(plan)


@pytest.mark.parametrize("spec", [TRANSFORMER, LSTM])
def test_a_tied_table_goes_dense_and_says_why(spec: str) -> None:
    plan = plan_of(Config(**SHORT), f"{spec},tied=true")
    [line] = [line for line in plan.lines if line.name == "embedding.weight"]
    assert (line.route, line.reason) == ("dense", "tied: used by 2 modules")
    assert line.dense_bytes == 4 * 32 * SHORT["vocabulary"]
