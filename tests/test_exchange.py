"""Exchange: what arrives, what is counted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from isgq.core.errors import ExchangeError
from isgq.exchange import Loopback, Pending, TorchExchange
from isgq.launch import launch


def talk() -> dict[str, Any]:
    exchange = TorchExchange()
    rank = exchange.rank
    mine = torch.full((rank,), rank, dtype=torch.uint8)
    report: dict[str, Any] = {"lengths unknown": [m.tolist() for m in exchange.all_gather(mine).wait()]}
    report["sent, padded"] = exchange.sent
    report["lengths known"] = [m.tolist() for m in exchange.all_gather(mine, [0, 1, 2]).wait()]
    report["all empty"] = [m.tolist() for m in exchange.all_gather(mine[:0], [0, 0, 0]).wait()]
    report["half"] = exchange.all_reduce_mean(torch.full((2,), 60000.0, dtype=torch.float16)).wait().tolist()
    strided = torch.full((3, 2), float(rank)).t()
    report["strided"] = exchange.broadcast(strided).wait().unique().tolist()
    report["counts"] = (exchange.sent, exchange.received)
    dist.barrier()
    return report


def test_three_ranks() -> None:
    for rank, report in enumerate(launch(talk, 3, timeout=20)):
        assert report["lengths unknown"] == report["lengths known"] == [[], [1], [2, 2]]
        assert report["sent, padded"] == 8 + 2
        assert report["all empty"] == [[], [], []]
        assert report["half"] == pytest.approx([60000.0] * 2, rel=1e-2)
        assert report["strided"] == [0.0]
        assert report["counts"] == (8 + 2 + 2 + 4 + (24 if rank == 0 else 0), 2 * (8 + 2 + 2) + 4 + (24 if rank else 0))


def test_loopback_counts_and_returns() -> None:
    exchange, message = Loopback(), torch.arange(5, dtype=torch.uint8)
    assert exchange.all_gather(message).wait()[0] is message
    assert exchange.all_reduce_mean(torch.ones(2)).wait().tolist() == [1, 1]
    assert (exchange.sent, exchange.received) == (13, 0)


def test_pending_finishes_once() -> None:
    calls: list[int] = []
    pending = Pending(lambda: calls.append(1))
    pending.wait()
    pending.wait()
    assert calls == [1]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(ExchangeError, match="init_process_group"):
        TorchExchange()
