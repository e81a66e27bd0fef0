"""Capture: right pairs, no trace after close, nothing joined that does not belong together."""

import pytest
import torch
from torch import nn

from isgq.core.errors import CodecError
from isgq.core.payload import Factors
from isgq.layers import Capture, find_units
from isgq.layers.capture import merge


def test_pairs_of_two_calls_do_not_mix() -> None:
    layer, pairs = nn.Linear(2, 1, bias=False), []
    units, _ = find_units(layer, lambda name: False)
    capture = Capture(units, lambda unit, pair: pairs.append(pair), lambda: None)
    first, second = layer(torch.ones(1, 2)), layer(torch.full((1, 2), 5.0))
    first.sum().backward()
    (3 * second.sum()).backward()
    assert [(p.x[0, 0].item(), p.d.item()) for p in pairs] == [(1, 1), (5, 3)]
    capture.close()
    layer(torch.ones(1, 2)).sum().backward()
    assert len(pairs) == 2
    assert not layer._forward_hooks


def test_a_graph_from_before_close_is_silent() -> None:
    layer, pairs = nn.Linear(2, 1), []
    units, _ = find_units(layer, lambda name: False)
    capture = Capture(units, lambda unit, pair: pairs.append(pair), lambda: None)
    out = layer(torch.ones(1, 2))
    capture.close()
    out.sum().backward()
    assert not pairs


def test_merge_puts_samples_side_by_side_and_refuses_other_sizes() -> None:
    a, b = Factors(torch.ones(2, 3), torch.ones(2, 1)), Factors(torch.zeros(4, 3), torch.zeros(4, 1))
    assert merge([a, b]).x.shape == (6, 3)
    with pytest.raises(CodecError, match="different sizes"):
        merge([a, Factors(torch.ones(2, 5), torch.ones(2, 1))])


def test_reasons_name_what_is_dense() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    units, reasons = find_units(model, lambda name: name == "1.bias")
    assert not units
    assert reasons["0.weight"].startswith("tied")
    assert reasons["1.bias"] == "skipped by the caller"
    assert "LayerNorm" in reasons["1.weight"]
