"""Closed forms of the gradient's error against Monte Carlo with the codec itself."""

import pytest
import torch

from isgq.codecs.dithered import Dithered
from isgq.codecs.variance import entrywise_variance, global_scale_variance, product_variance
from isgq.core.errors import CodecError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.testing import normal

ROWS, INPUTS, OUTPUTS = 16, 40, 24
DRAWS, BATCH = 20_000, 4000
KEY = Key("fc.weight", seed=5)


def realistic():
    """A layer after a ReLU: half of x and a third of d are exact zeros, rows differ in size."""
    x = normal(1, ROWS, INPUTS).relu()
    d = normal(2, ROWS, OUTPUTS) * normal(3, ROWS, 1).exp() / ROWS
    return Factors(x, d * (normal(4, ROWS, OUTPUTS) > -0.43))


def draws(c, factor, key):
    """Decoded copies ``[BATCH, rows, features]``, by one call: other elements of a stream are other draws."""
    stacked = factor.repeat(BATCH, 1)
    bucket = c.bucket if c.bucket == "row" else factor.numel()
    copies = Dithered(c.levels, bucket, c.sparse, c.mode)
    return copies.decode(copies.encode(stacked, key)).view(BATCH, *factor.shape)


def monte_carlo(c, factors):
    """Mean, mean squared error and entrywise variance of the rebuilt gradient over the draws."""
    gradient = (factors.d.T @ factors.x).double()
    total, squares = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for step in range(DRAWS // BATCH):
        x, d = (
            draws(c, f, Key("fc.weight", step=step).child(part)) for f, part in ((factors.x, "x"), (factors.d, "d"))
        )
        error = torch.bmm(d.transpose(1, 2), x).double() - gradient
        total += error.sum(0)
        squares += error.square().sum(0)
    return total / DRAWS, squares.sum() / DRAWS, squares / DRAWS


VARIANTS = [
    Dithered(1, "row", True),
    Dithered(2, "row", True),
    Dithered(4, "row", False),
    Dithered(1, "tensor", True),
    Dithered(2, "tensor", False),
    Dithered(1, "row", True, "half"),
    Dithered(4, "tensor", True, "half"),
    Dithered(1, "row", True, "one_bit"),
]


@pytest.mark.parametrize("c", VARIANTS, ids=str)
def test_monte_carlo(c):
    factors = realistic()
    vx, vd = c.variance(factors.x), c.variance(factors.d)
    expected = product_variance(factors, vx, vd)
    entries = entrywise_variance(factors, vx, vd)
    mean_error, mse, variances = monte_carlo(c, factors)
    assert abs(mse / expected - 1) < 0.01
    assert abs(entries.sum() / expected - 1) < 1e-10
    assert torch.corrcoef(torch.stack([variances.reshape(-1), entries.reshape(-1)]))[0, 1] > 0.999
    # The mean of the errors is as large as chance makes it: MSE / draws, give or take.
    assert mean_error.square().sum() < 1.4 * expected / DRAWS
    assert (mean_error.abs() < 5 * (entries / DRAWS).sqrt() + 1e-7).all()


def test_global_scale_formula():
    factors = realistic()
    for levels in (1, 3):
        c = Dithered(levels, "tensor", sparse=False)
        steps = (float(f.abs().max()) / levels for f in (factors.x, factors.d))
        expected = product_variance(factors, c.variance(factors.x), c.variance(factors.d))
        assert abs(global_scale_variance(factors, *steps) / expected - 1) < 1e-6


def test_brute_force_enumeration():
    """All sign patterns of two-point noise +-sqrt(v): the mean squared error is exact."""
    x, d = normal(5, 2, 2).double(), normal(6, 2, 2).double()
    vx, vd = normal(7, 2, 2).double() ** 2, normal(8, 2, 2).double() ** 2
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 8).view(-1, 2, 2, 2)
    x_hat, d_hat = x + signs[:, 0] * vx.sqrt(), d + signs[:, 1] * vd.sqrt()
    error = d_hat.transpose(1, 2) @ x_hat - d.T @ x
    factors = Factors(x, d)
    assert torch.allclose(error.square().sum((1, 2)).mean(), product_variance(factors, vx, vd))
    assert torch.allclose(error.square().mean(0), entrywise_variance(factors, vx, vd))


def test_mean_of_workers():
    """Independent noise: the error of the mean over P workers is the mean of their errors over P."""
    c, factors, workers = Dithered(1), realistic(), 4
    gradient = (factors.d.T @ factors.x).double()
    x, d = (draws(c, f, KEY.child(part)) for f, part in ((factors.x, "x"), (factors.d, "d")))
    means = torch.bmm(d.transpose(1, 2), x).double().view(-1, workers, OUTPUTS, INPUTS).mean(1)
    measured = (means - gradient).square().sum((1, 2)).mean()
    expected = product_variance(factors, c.variance(factors.x), c.variance(factors.d)) / workers
    assert abs(measured / expected - 1) < 0.03


def test_rows_beat_one_scale_where_rows_differ():
    factors = realistic()
    error = {
        bucket: product_variance(factors, *(Dithered(1, bucket).variance(f) for f in (factors.x, factors.d)))
        for bucket in ("row", "tensor")
    }
    assert error["row"] < 0.3 * error["tensor"]


def test_leading_dimensions_are_rows():
    x, d = normal(1, 4, 4, 7), normal(2, 4, 4, 5)
    flat = Factors(x.reshape(16, 7), d.reshape(16, 5))
    vx, vd = x.square(), d.abs()
    expected = product_variance(flat, vx.reshape(16, 7), vd.reshape(16, 5))
    assert torch.equal(product_variance(Factors(x, d), vx, vd), expected)
    assert torch.allclose(entrywise_variance(Factors(x, d), vx, vd).sum(), expected)
    assert torch.allclose(global_scale_variance(Factors(x, d), 0.1, 0.2), global_scale_variance(flat, 0.1, 0.2))


def test_no_rows():
    empty = Factors(torch.zeros(0, 3), torch.zeros(0, 2))
    assert product_variance(empty, empty.x, empty.d) == 0
    assert entrywise_variance(empty, empty.x, empty.d).shape == (2, 3)


def test_variance_of_another_shape():
    factors = realistic()
    with pytest.raises(CodecError, match="vd has shape"):
        product_variance(factors, factors.x, factors.x)
