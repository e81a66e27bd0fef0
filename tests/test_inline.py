"""Messages that travel with the headers: the same gradients and errors, one transfer a step where they fit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
from isgq.bandwidth import predict
from isgq.core.errors import MismatchError, OptionError, PeerNonFiniteError
from isgq.exchange import Pending, TorchExchange
from isgq.launch import launch
from isgq.wire.header import header_size

RANKS, STEPS, BAD = 3, 5, 3
SPECS = ("exact", "isgq", "rotated")
NOTHING_FITS, SOME_FIT, ALL_FIT = 40, 1200, 1 << 16


class Noted(TorchExchange):
    """Notes the sizes of all that is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _gather(self, message: Tensor) -> Pending[list[Tensor]]:
        if message.numel():
            self.sizes.append(message.numel())
        return super()._gather(message)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def train(spec: str, **options: Any) -> list[Any]:
    """Gradients, what was gathered and what the model of bytes says, for each step; a refused one is left out."""
    model, exchange, found = network(), Noted(), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    with isgq.instrument(model, spec, routes="factors", exchange=exchange, log=lambda _: None, **options) as session:
        for step in range(STEPS):
            rows = 4 + 8 * (dist.get_rank() == 1)  # messages of different lengths
            x, y = torch.randn(rows, 20, generator=generator), torch.randint(5, (rows,), generator=generator)
            model.zero_grad()
            exchange.sizes.clear()
            before, room = exchange.sent, session.messages().inline if step else 0
            if step == BAD and dist.get_rank() == 2:
                x[0, 0] = torch.nan
            try:
                F.cross_entropy(model(x), y).backward()
            except PeerNonFiniteError as error:
                found.append(str(error))
                continue
            longest = max(_lengths(session.messages().up[0]))
            moved = predict("gather", session.messages(), RANKS, dist.get_rank())
            sizes = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append((sizes, list(exchange.sizes), exchange.sent - before, longest, moved.rounds, room))
    return found


def _lengths(mine: int) -> list[int]:
    every = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(every, torch.tensor([mine]))
    return [int(each) for each in every]


def _all(spec: str) -> dict[Any, Any]:
    sizes: Sequence[int] = (NOTHING_FITS, SOME_FIT, ALL_FIT)
    found: dict[Any, Any] = {size: train(spec, inline_bytes=size) for size in (0, *sizes)}
    found["auto"] = train(spec, inline_bytes="auto")
    found["ahead"] = train(spec, inline_bytes=ALL_FIT, bucket_cap_mb=1e-3)
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_and_errors_are_the_same_and_transfers_fewer(spec: str) -> None:
    head = header_size(4)
    for found in launch(_all, RANKS, args=(spec,)):
        plain = found.pop(0)
        for given, steps in found.items():
            for number, (step, same) in enumerate(zip(steps, plain, strict=True)):
                if number == BAD:
                    assert step == same
                    assert "rank 2" in step
                    continue
                torch.testing.assert_close(step[0], same[0], rtol=0, atol=0)
                if given == "ahead" or not number:
                    continue
                _, sizes, sent, longest, rounds, room = step
                if given == "auto":  # as the messages of the step before: the first describe themselves
                    assert longest <= room < (2 if number == 1 else 1.1) * longest + 64
                inline = room if given == "auto" else given
                rest = [longest - inline] if longest > inline else []
                assert sizes == [head + inline, *rest]
                assert sent == head + max(inline, longest)
                if given != SOME_FIT:
                    assert rounds == len(sizes)


def _disagree() -> str:
    with pytest.raises(MismatchError) as caught:
        isgq.instrument(network(), inline_bytes=100 * dist.get_rank())
    return str(caught.value)


def test_ranks_that_do_not_agree_on_it_are_told() -> None:
    for words in launch(_disagree, 2):
        assert "inline_bytes" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inline_bytes": -1}, "whole number"),
        ({"inline_bytes": 1.5}, "whole number"),
        ({"inline_bytes": "yes"}, "whole number"),
        ({"inline_bytes": 1 << 30}, "whole number"),
        ({"inline_bytes": 100, "aggregate": "two_pass"}, "'two_pass'"),
        ({"inline_bytes": 100, "codec": "subspace"}, "'two_pass'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        isgq.instrument(network(), **options)
