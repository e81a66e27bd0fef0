"""Bytes of one pass and of two: the model of them equals the ledger, and two passes do not grow with the workers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isgq
from isgq.bandwidth import Link, Messages, predict
from isgq.launch import launch

CASES: dict[str, dict[str, Any]] = {
    "gather": {"codec": "fp16"},
    "plain": {"codec": "dense"},
    "two_pass": {"codec": "fp16", "aggregate": "two_pass", "down": "bf16"},
    "two_pass, plain down": {"codec": "bf16", "aggregate": "two_pass"},
    "server": {"codec": "bf16", "aggregate": "server", "down": "fp16"},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def run(steps: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name, options in CASES.items():
        model = network()
        with isgq.instrument(model, memory="none", **options) as session:
            before = (0, 0)
            for _ in range(steps):
                before = (session.traffic.sent, session.traffic.received)
                model.zero_grad()
                F.cross_entropy(model(torch.randn(4, 60)), torch.zeros(4, dtype=torch.long)).backward()
            traffic = session.traffic
            counted = (traffic.sent - before[0], traffic.received - before[1])
            report[name] = (counted, session.messages())
    return report


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_prediction_is_what_the_ledger_counts(workers: int) -> None:
    reports = launch(run, workers, args=(2,), timeout=60)
    payload = {"up": 2 * sum(p.numel() for p in network().parameters())}
    for rank, report in enumerate(reports):
        for name, options in CASES.items():
            (sent, received), messages = report[name]
            assert isinstance(messages, Messages)
            aggregate = options.get("aggregate", "gather")
            bytes_ = predict(aggregate, messages, workers, rank)
            assert (bytes_.sent, bytes_.received) == (sent, received), name
        (sent, received), _ = report["two_pass"]
        bound = 2 * (workers - 1) / workers * payload["up"]  # a payload up and one down
        assert sent == pytest.approx(bound, rel=0.03)
        assert received == pytest.approx(bound, rel=0.03)
        (_, gathered), _ = report["gather"]
        assert gathered == pytest.approx((workers - 1) * payload["up"], rel=0.03)


def test_a_slow_link_takes_as_long_as_its_bytes() -> None:
    link = Link(bytes_per_second=1e6, latency=0.001)
    messages = Messages(up=(1000, 1000), down=(500, 500), dense=0, parameters=6)
    bytes_ = predict("two_pass", messages, 2, 0)
    assert link.seconds(bytes_) == pytest.approx(max(bytes_.sent, bytes_.received) / 1e6 + bytes_.rounds * 0.001)
    for mode in ("gather", "two_pass", "server"):
        assert predict(mode, Messages((1000,), (500,), 0, 6), 1, 0).received == 0  # type: ignore[arg-type]
