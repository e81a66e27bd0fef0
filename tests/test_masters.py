"""Masters: small updates of a half-precision model are not lost, and the state goes on bit for bit."""

import copy

import torch
from torch import nn

import isgq


def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def step(model: nn.Linear, seed: int) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model(x).float().sub(3).square().mean().backward()


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2).bfloat16()


def test_updates_below_half_a_unit_add_up() -> None:
    model = network()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = isgq.MasterWeights(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=1e-3))
    for _ in range(100):
        model.weight.grad = torch.full_like(model.weight, 1.0)
        optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.full((2, 4), 0.9), atol=4e-3, rtol=0)
    plain = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        plain -= 1e-3
    assert plain.item() == 1.0  # what masters are for


def test_with_a_session_and_over_a_stop() -> None:
    one, two = network(), network()
    with isgq.instrument(one, "error_feedback(sign)") as session:
        optimizer = isgq.MasterWeights(one.parameters(), make)
        for seed in range(5):
            step(one, seed)
            optimizer.step()
            optimizer.zero_grad()
        saved, held = copy.deepcopy(optimizer.state_dict()), session.state_dict()
        for seed in range(5, 9):
            step(one, seed)
            optimizer.step()
            optimizer.zero_grad()
    with isgq.instrument(two, "error_feedback(sign)") as session:
        optimizer = isgq.MasterWeights(two.parameters(), make)
        optimizer.load_state_dict(saved)
        session.load_state_dict(held)
        for seed in range(5, 9):
            step(two, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert two.weight.dtype == torch.bfloat16
    assert torch.equal(one.weight, two.weight)
