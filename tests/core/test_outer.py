"""Few outer products: the same bits with kernels and without, wherever they are written."""

import pytest
import torch

from isgq.core.kernels import disabled
from isgq.core.outer import outer_sum
from isgq.core.parallel import PART
from isgq.core.payload import LowRank


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize(("outputs", "columns"), [(1, 1), (5, 33), (300, 700), (3, PART + 7), (0, 4), (4, 0)])
def test_sums_are_the_same_bits_however_they_are_made(count: int, outputs: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(count)
    product = LowRank(
        torch.randn(count, outputs, generator=generator), torch.randn(count, columns + 1, generator=generator)
    )
    found, out = product.weight(), torch.full((outputs, columns), 7.0)
    assert product.weight(out).data_ptr() == out.data_ptr()
    with disabled():
        assert torch.equal(product.weight(), found)
    assert torch.equal(out, found)
    room = torch.full((outputs * columns + 3,), 7.0)
    product.weight(room[1:-2])
    assert torch.equal(room[1:-2].view(outputs, columns), found)
    assert room[[0, -2, -1]].tolist() == [7.0] * 3
    exact = product.left.double().T @ product.right[:, :-1].double()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_multiplied_as_matrices(dtype: torch.dtype) -> None:
    left, right = torch.randn(3, 8).to(dtype), torch.randn(3, 9).to(dtype)
    assert torch.equal(outer_sum(left, right), torch.mm(left.T, right))


def test_what_is_not_finite_stays_so() -> None:
    left, right = torch.tensor([[1.0, float("inf")], [1.0, 0.0]]), torch.tensor([[0.0, float("nan")], [2.0, 1.0]])
    for found in (outer_sum(left, right), LowRank(left, right).weight()):
        assert not found[1].isfinite().any()
