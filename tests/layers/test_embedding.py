"""An embedding's gradient takes the bytes of the tokens in the batch, and is autograd's bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isgq
from isgq.launch import launch

TOKENS = torch.tensor([[3, 1, 3, 3], [0, 5, 1, 3]])  # four of them different
WIDTH = 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding_idx": {"padding_idx": 3},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
    "padding_idx, scale_grad_by_freq": {"padding_idx": 1, "scale_grad_by_freq": True},
    "max_norm": {"max_norm": 1.0},
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits


def gradient(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    output = model(tokens)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * weights).sum().backward()
    [parameter] = model.parameters()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("make", [*(lambda o=o: nn.Embedding(7, WIDTH, **o) for o in OPTIONS.values()), Tied])
def test_the_gradient_is_autograds_bit_for_bit(make: Any) -> None:
    model = make()
    alone = gradient(copy.deepcopy(model))
    assert alone.any()
    with isgq.instrument(model, "exact", routes="factors") as session:
        assert torch.equal(gradient(model), alone)
        assert session.plan.lines[0].route == ("dense" if make is Tied else "factors")


def bytes_of(codec: str, vocabulary: int, tokens: Tensor) -> int:
    model = nn.Embedding(vocabulary, WIDTH)
    with isgq.instrument(model, codec, routes="factors") as session:
        gradient(model, tokens)
    return session.traffic.by_parameter["weight"]


@pytest.mark.parametrize("codec", ["exact", "isgq", "rotated"])
def test_bytes_follow_the_different_tokens_and_not_the_vocabulary(codec: str) -> None:
    few, many = torch.arange(50), torch.arange(400)
    assert bytes_of(codec, 500, few) == bytes_of(codec, 50_000, few)
    assert bytes_of("exact", 500, few.repeat(9)) == bytes_of("exact", 500, few)
    assert 5 < bytes_of(codec, 500, many) / bytes_of(codec, 500, few) < 10  # headers do not grow


def on_a_rank() -> bool:
    """Whether the mean over ranks is exact; all numbers are small integers, so that no order of adding matters."""
    model = nn.Embedding(7, WIDTH, padding_idx=1)
    both = [TOKENS, (TOKENS + 1)[:, :3]]
    expected = torch.zeros(7, WIDTH)
    for tokens in both:
        twin = nn.Embedding(7, WIDTH, padding_idx=1)
        (twin(tokens) * tokens[..., None]).sum().backward()
        assert twin.weight.grad is not None
        expected += twin.weight.grad / len(both)
    with isgq.instrument(model, "exact", routes="factors"):
        tokens = both[dist.get_rank()]
        (model(tokens) * tokens[..., None]).sum().backward()
    assert model.weight.grad is not None
    return torch.equal(model.weight.grad, expected)


def test_the_mean_over_workers_is_exact() -> None:
    assert launch(on_a_rank, 2) == [True, True]
