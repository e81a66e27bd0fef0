"""Quantized compressive sampling against dense matrices, and the bound of its error."""

import math

import pytest
import torch

from isgq.codecs import hadamard, qcs
from isgq.codecs.qcs import QCS, gamma
from isgq.core.errors import OptionError
from isgq.core.keys import Key, uniform
from tests.codecs.inputs import normal

KEY = Key("w", step=4)
ORDERS = (1, 2, 4, 64, 12, 24, 96, 100, 144, 192, 200, 288, 320, 384)


def signs_of(first: int, last: int, n: int) -> torch.Tensor:
    """Random signs of blocks of n elements: ``[last - first, n]``."""
    signs = torch.ones(last - first, n)
    qcs._flip_signs(signs.view(-1), KEY.digest, first * n)
    return signs


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices_are_orthogonal(order: int) -> None:
    matrix = hadamard.multiply(torch.eye(order))
    assert torch.equal(matrix.abs(), torch.ones(order, order))
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))
    assert torch.equal(hadamard.multiply(torch.eye(order), transposed=True), matrix.T)
    x = normal(order, 3)
    assert torch.allclose(hadamard.multiply(x), matrix @ x, atol=1e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_first_rows_repeat_those_of_a_smaller_matrix(order: int) -> None:
    matrix = hadamard.multiply(torch.eye(order))
    for rows in {1, 2, 5, 13, order // 2, order - 1, order} - {0}:
        if rows <= order:
            period = hadamard.smallest_period(order, rows)
            small = hadamard.multiply(torch.eye(period))
            assert torch.equal(matrix[:rows], small[:rows].repeat(1, order // period))


@pytest.mark.parametrize("order", [0, -4, 3, 6, 28, 36, 60, 52, 50])
def test_unknown_orders_are_refused(order: int) -> None:
    with pytest.raises(OptionError, match="12, 20, 100 or 144"):
        hadamard.factors(order)


@pytest.mark.parametrize(
    ("block", "rows", "levels"), [(64, 16, 1), (64, 64, 3), (96, 13, 2), (100, 1, 1), (32, 5, 127)]
)
@pytest.mark.parametrize("mode", ["unbiased", "mmse"])
def test_equals_the_dense_definition(block: int, rows: int, levels: int, mode: str) -> None:
    made = QCS(block, rows, levels, mode)
    x = normal(70 * block - 7)
    payload = made.encode(x, KEY)
    signs = signs_of(0, 70, block)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    v = torch.cat([x, torch.zeros(7)]).view(70, block)
    h = hadamard.multiply(torch.eye(block))[:rows] / math.sqrt(rows)
    z = (signs * v) @ h.T
    step = z.abs().amax(1) / levels
    assert torch.allclose(payload.tensors["scale"], step, rtol=1e-4)
    u = uniform(KEY.digest, "dither", z.shape)
    q = payload.symbols["q"].values.view(70, rows).float() - levels
    assert float((q - (z / step[:, None] + u).round().clamp(-levels, levels)).abs().mean()) < 1e-3
    alpha = 1 if mode == "unbiased" else 1 / (1 + gamma(block, rows, levels))
    want = alpha * signs * ((q - u) * step[:, None] @ h)
    assert torch.allclose(made.decode(payload), want.view(-1)[:-7], atol=1e-4 * float(want.abs().max()))


VECTORS = {
    "normal": normal(64),
    "peaky": normal(64, seed=1) ** 3,
    "constant": torch.ones(64),
    "single": torch.eye(64)[3],
    "two": torch.eye(64)[0] + torch.eye(64)[63],
}


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize(("rows", "levels"), [(1, 1), (2, 1), (4, 2), (16, 1), (16, 4), (64, 1)])
def test_the_error_is_within_gamma(vector: str, rows: int, levels: int) -> None:
    v = VECTORS[vector]
    blocks = 8000
    bound = gamma(64, rows, levels)
    x = v.expand(blocks, 64)
    for mode, limit in (("unbiased", bound), ("mmse", bound / (1 + bound))):
        made = QCS(64, rows, levels, mode)
        error = (made.decode(made.encode(x, KEY)) - x).double().square().sum(1) / v.double().square().sum()
        slack = 4.5 * float(error.std()) / blocks**0.5
        assert float(error.mean()) <= limit + slack
        if rows == 1 and mode == "unbiased":
            assert float(error.mean()) == pytest.approx(bound, abs=slack)


def test_fine_levels_leave_the_projections_error() -> None:
    v = normal(64)
    made = QCS(64, 16, levels=127)
    error = made.decode(made.encode(v.expand(20_000, 64), KEY)) - v
    assert float(error.square().sum(1).mean() / v.square().sum()) == pytest.approx(64 / 16 - 1, rel=0.02)


@pytest.mark.parametrize(
    ("numel", "symbols"), [(0, 0), (1, 1), (10, 4), (100, 32), (512, 128), (513, 256), (5120, 1280)]
)
def test_small_tensors_take_small_blocks(numel: int, symbols: int) -> None:
    payload = QCS(block=512, rows=128).encode(normal(numel), KEY)
    assert payload.symbols["q"].values.numel() == symbols


def test_blocks_draw_independent_signs() -> None:
    signs = signs_of(0, 2000, 64)
    correlation = signs.T @ signs / 2000 - torch.eye(64)
    assert float(correlation.abs().max()) < 5 / 2000**0.5
    assert torch.equal(signs[64:96], signs_of(64, 96, 64))
