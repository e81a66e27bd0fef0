"""contract is bilinear and is autograd's weight gradient, for every layer case."""

import pytest
import torch
from torch import Tensor, nn

import isgq
from isgq.core.errors import InstrumentError
from isgq.core.keys import uniform
from isgq.core.payload import Factors
from isgq.layers import find_units
from isgq.layers.capture import Capture, Unit
from tests.session_cases import LAYERS, Turn


def caught(name: str) -> tuple[nn.Module, list[tuple[Unit, Factors]]]:
    case = LAYERS[name]
    torch.manual_seed(0)
    model = case.build().double()
    units, _ = find_units(model, lambda name: False)
    pairs: list[tuple[Unit, Factors]] = []
    capture = Capture(units, lambda unit, factors: pairs.append((unit, factors)), lambda: None)
    case.step(model, Turn(0, 0, lambda: torch.enable_grad(), model))  # type: ignore[arg-type, return-value]
    capture.close()
    return model, pairs


@pytest.mark.parametrize("name", LAYERS)
def test_contract_is_autograds_gradient_and_bilinear(name: str) -> None:
    _, pairs = caught(name)
    assert pairs
    for unit, pair in pairs:
        assert unit.weight.grad is not None
        parts: list[Tensor] = [unit.weight.grad.reshape(-1)]
        if unit.bias is not None:
            assert unit.bias.grad is not None
            parts.append(unit.bias.grad)
        torch.testing.assert_close(unit.flat_gradient(pair), torch.cat(parts))
        other = torch.randn(pair.d.shape, generator=torch.Generator().manual_seed(1), dtype=pair.d.dtype)
        torch.testing.assert_close(
            unit.contract(pair.x, 2 * pair.d + other), 2 * unit.contract(pair.x, pair.d) + unit.contract(pair.x, other)
        )
        if pair.x.is_floating_point():
            shifted = torch.randn(pair.x.shape, generator=torch.Generator().manual_seed(2), dtype=pair.x.dtype)
            torch.testing.assert_close(
                unit.contract(3 * pair.x + shifted, pair.d),
                3 * unit.contract(pair.x, pair.d) + unit.contract(shifted, pair.d),
            )


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_outputs_agree_with_the_gradient_and_with_no_other(name: str) -> None:
    _, pairs = caught(name)
    for unit, pair in pairs:
        gradient = unit.weight.grad
        assert gradient is not None
        mix = uniform(1, "mix", (gradient.shape[unit.adapter.outputs],))
        torch.testing.assert_close(*unit.mixed(pair, gradient, mix))
        for place in (0, -1):
            other = gradient.clone()
            other[(place,) * other.dim()] += 1.0
            made, given = unit.mixed(pair, other, mix)
            assert float((made - given).norm()) > 1e-3


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_at_once_and_told_what_to_do(
    table: type[nn.Embedding] | type[nn.EmbeddingBag],
) -> None:
    model = nn.ModuleDict({"table": table(4, 3, sparse=True), "head": nn.Linear(3, 2)})
    for codec in ("isgq", "dense", "top_k"):
        with pytest.raises(
            InstrumentError, match=rf"table is {table.__name__}\(sparse=True\).* set its sparse to False"
        ):
            isgq.instrument(model, codec)
    model["table"].requires_grad_(False)
    isgq.instrument(model).close()  # a frozen table has no gradient
    model["table"].requires_grad_(True).sparse = False
    isgq.instrument(model).close()
