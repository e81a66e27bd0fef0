"""Lloyd-Max points against the tables of Max (1960), against quadrature, and on data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from isgq.codecs.lloyd_max import LloydMax, empirical_points, model_points, nearest
from isgq.core.errors import CodecError
from isgq.core.keys import Key
from isgq.core.payload import Symbols
from isgq.testing import normal

KEY = Key("w")
MODELS = ["normal", "half_normal", "uniform", "empirical", "auto"]

# Max 1960, table I: positive points and mean squared error for a standard normal law.
TABLE = {
    1: ([0.0], 1.0),
    2: ([0.7980], 0.3634),
    3: ([0.0, 1.224], 0.1902),
    4: ([0.4528, 1.510], 0.1175),
    5: ([0.0, 0.7646, 1.724], 0.07994),
    6: ([0.3177, 1.0, 1.894], 0.05798),
    8: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    16: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


def distortion(points, law):
    """Mean squared distance to the nearest point, by quadrature cell by cell."""
    points = np.array(points)
    ends = [max(law.support()[0], -12), *(points[1:] + points[:-1]) / 2, 12]
    return sum(
        integrate.quad(lambda t, p=p: (t - p) ** 2 * law.pdf(t), a, b, epsabs=1e-13)[0]
        for p, a, b in zip(points, ends[:-1], ends[1:], strict=True)
    )


@pytest.mark.parametrize("levels", TABLE)
def test_table_of_max(levels):
    positive, error = TABLE[levels]
    points = model_points("normal", levels)
    # The table is of 1960: its last digit is off by up to one or two.
    assert np.allclose(points[levels // 2 :], positive, atol=1e-3)
    assert abs(distortion(points, stats.norm) - error) < 2e-5 + 1e-3 * error


@pytest.mark.parametrize("levels", [1, 2, 4, 8, 128])
def test_half_normal_is_half_of_normal(levels):
    assert np.allclose(model_points("half_normal", levels), model_points("normal", 2 * levels)[levels:], atol=1e-10)


@pytest.mark.parametrize("model", ["normal", "half_normal"])
@pytest.mark.parametrize("levels", [1, 2, 3, 7, 31, 256])
def test_points_are_the_means_of_their_cells(model, levels):
    law = {"normal": stats.norm, "half_normal": stats.halfnorm}[model]
    points = np.array(model_points(model, levels))
    ends = [law.support()[0], *(points[1:] + points[:-1]) / 2, np.inf]
    assert (np.diff(points) > 0).all()
    for i in {0, levels // 2, levels - 1}:
        a, b = ends[i], ends[i + 1]
        mass = integrate.quad(law.pdf, a, b, epsabs=1e-14)[0]
        mean = integrate.quad(lambda t: t * law.pdf(t), a, b, epsabs=1e-14)[0] / mass
        assert abs(points[i] - mean) < 1e-7


@pytest.mark.parametrize(("levels", "error"), [(2, 0.3634), (4, 0.1175), (8, 0.03454)])
@pytest.mark.parametrize("model", ["normal", "auto", "empirical"])
def test_error_on_normal_numbers(levels, error, model):
    x = normal(1, 400, 500) * 37
    c = LloydMax(levels, model)
    measured = (c.decode(c.encode(x, KEY)) - x).square().sum() / x.square().sum()
    assert abs(measured / error - 1) < 0.01


@pytest.mark.parametrize(("levels", "twice"), [(1, 0.3634), (2, 0.1175), (4, 0.03454)])
@pytest.mark.parametrize("model", ["half_normal", "auto"])
def test_error_after_a_relu(levels, twice, model):
    """The magnitudes of normal numbers, zeros besides: the error of twice the levels."""
    x = normal(1, 400, 500).relu() * 0.01
    c = LloydMax(levels, model)
    y = c.decode(c.encode(x, KEY))
    assert abs((y - x).square().sum() / x.square().sum() / twice - 1) < 0.02
    assert ((y == 0) == (x == 0)).all()


def test_uniform_on_uniform_numbers():
    x = torch.linspace(-3, 5, 10_001)
    c = LloydMax(4, "uniform", sparse=False)
    assert torch.allclose(c.encode(x, KEY).tensors["codebook"], torch.tensor([-2.0, 0.0, 2.0, 4.0]))
    assert abs((c.decode(c.encode(x, KEY)) - x).square().mean() / (2**2 / 12) - 1) < 1e-3


@pytest.mark.parametrize("levels", [1, 2, 3, 16, 17, 200])
def test_nearest_is_nearest(levels):
    x, points = normal(1, 300), normal(2, levels).sort().values
    codes = nearest(x, points).long()
    assert torch.equal((x - points[codes]).abs(), (x[:, None] - points).abs().amin(1))


@pytest.mark.parametrize("seed", range(5))
def test_empirical_is_a_fixed_point(seed):
    x = normal(seed, 500) ** 3
    points = empirical_points(x, 5)
    codes = nearest(x, points)
    means = torch.stack([x[codes == i].double().mean() for i in range(5)])
    assert torch.allclose(points.double(), means, atol=1e-5)


def test_empirical_finds_clusters():
    centers = torch.tensor([-5.0, 1.0, 2.0, 30.0])
    x = (centers + 0.001 * normal(1, 50, 4)).reshape(-1)
    assert torch.allclose(empirical_points(x, 4), centers, atol=1e-3)


@pytest.mark.parametrize("content", [normal(1, 300), normal(1, 300) ** 5, normal(1, 300).relu(), torch.arange(300.0)])
@pytest.mark.parametrize("levels", [1, 2, 7])
@pytest.mark.parametrize("sparse", [True, False])
def test_empirical_never_adds_energy(content, levels, sparse):
    c = LloydMax(levels, "empirical", sparse)
    error = c.decode(c.encode(content, KEY)) - content
    assert error.square().sum() <= content.square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("model", ["uniform", "empirical"])
def test_constant_is_exact(model):
    x = torch.full((4, 5), -1.7)
    c = LloydMax(3, model)
    assert torch.allclose(c.decode(c.encode(x, KEY)), x)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("levels", [1, 2, 255, 256])
@pytest.mark.parametrize("sparse", [True, False])
def test_extremes_stay_finite(model, levels, sparse):
    c = LloydMax(levels, model, sparse)
    for x in (
        normal(1, 40) * 1e38,
        torch.tensor([3.4e38, -3.4e38, 0]),
        torch.tensor([1e-45, 0]),
        torch.full((9,), 6.5e4).half(),
    ):
        y = c.decode(c.encode(x, KEY))
        assert torch.isfinite(y).all()
        assert not sparse or (y[x == 0] == 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_scales_with_the_tensor(model):
    x, c = normal(3, 30, 7), LloydMax(3, model)
    assert torch.allclose(c.decode(c.encode(x * 64, KEY)), c.decode(c.encode(x, KEY)) * 64, rtol=1e-5)


def test_auto_asks_for_the_sign():
    x = normal(4, 500)
    for tensor, model in ((x, "normal"), (x.abs(), "half_normal"), (x.relu(), "half_normal"), (-x.abs(), "normal")):
        same = (LloydMax(4, m).encode(tensor, KEY).tensors["codebook"] for m in ("auto", model))
        assert torch.equal(*same)


@pytest.mark.parametrize(("sparse", "size"), [(True, 5), (False, 4)])
def test_codebook_is_the_whole_decoder(sparse, size):
    payload = LloydMax(4, sparse=sparse).encode(normal(1, 30), KEY)
    book = payload.tensors["codebook"]
    assert book.shape == (size,)
    assert payload.symbols["codes"].alphabet == size
    assert torch.equal(LloydMax(4, sparse=sparse).decode(payload), book[payload.symbols["codes"].values.long()])


def test_refuses_what_does_not_fit():
    c = LloydMax(2)
    payload = c.encode(normal(1, 10), KEY)
    codes = payload.symbols["codes"]
    for bad in (
        {"symbols": {"codes": Symbols(codes.values[1:], 3)}},
        {"symbols": {"codes": Symbols(codes.values, 4)}},
        {"tensors": {"codebook": torch.zeros(4)}},
        {"tensors": {"codebook": torch.zeros(3).double()}},
        {"codec": "exact"},
    ):
        with pytest.raises(CodecError):
            c.decode(replace(payload, **bad))
