"""Pair codecs: optimal points against dense linear algebra, on captured and on degenerate signals."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.grad import conv2d_weight

from isgq.codecs import codec
from isgq.codecs.dithered import Dithered
from isgq.codecs.lloyd_max import LloydMax
from isgq.codecs.pair import MinimumVariance, MinimumVarianceUnbiased, Naive, Separate, fit_points
from isgq.core.codec import PairCodec
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.testing import embedding_contract, linear_contract, normal

KEY = Key("w", seed=1)
FITTED = [MinimumVariance, MinimumVarianceUnbiased]


def conv_contract(x, d):
    return conv2d_weight(x, (5, 3, 3, 3), d, padding=1)


LAYERS = {
    "linear": (linear_contract, Factors(normal(1, 32, 20).relu(), normal(2, 32, 12) ** 3)),
    "linear, signed x": (linear_contract, Factors(normal(1, 32, 20), normal(2, 32, 12))),
    "sequence": (linear_contract, Factors(normal(1, 4, 8, 20).relu(), normal(2, 4, 8, 12))),
    "conv": (conv_contract, Factors(normal(3, 4, 3, 6, 6).relu(), normal(4, 4, 5, 6, 6))),
    "embedding": (embedding_contract, Factors(torch.arange(60).view(4, 15) % 11, normal(5, 4, 15, 12))),
}


def rebuild(c, factors, contract):
    decoded = c.decode_pair(c.encode_pair(factors, contract, KEY))
    return contract(decoded.x, decoded.d).double()


def error(c, factors, contract):
    return float((rebuild(c, factors, contract) - contract(factors.x, factors.d).double()).square().sum())


def sum_error(c, factors, contract):
    true = contract(factors.x, factors.d).double()
    return float((rebuild(c, factors, contract) - true).sum().abs() / true.abs().sum())


@pytest.fixture(scope="module")
def signals():
    """(x, d) of the three layers of a network on digits, at several moments of its training."""
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images, captured = images.float() / 16, {}
    weights = [normal(i, b, a) * (2 / a) ** 0.5 for i, (a, b) in enumerate(pairwise([64, 256, 128, 10]))]
    for step in range(101):
        batch = (torch.arange(128) * 7 + step * 128) % len(images)
        x = [images[batch]]
        for w in weights:
            x.append((x[-1] @ w.T).relu())
        logits = x[2] @ weights[2].T
        d = [(logits.softmax(1) - torch.nn.functional.one_hot(labels[batch], 10)) / len(batch)]
        for i in (2, 1):
            d.insert(0, (d[0] @ weights[i]) * (x[i] > 0))
        layers = [Factors(*factors) for factors in zip(x, d, strict=False)]
        if step in {0, 20, 100}:
            captured |= {(step, i): factors for i, factors in enumerate(layers)}
        weights = [w - 0.3 * linear_contract(f.x, f.d) for w, f in zip(weights, layers, strict=True)]
    return captured


@pytest.mark.parametrize("levels", [2, 4])
def test_order_on_captured_signals(signals, levels):
    """MSE: mv <= mvu <= naive, in every layer and at every moment; mvu's error sums to nothing."""
    assert len(signals) == 9
    for at, factors in signals.items():
        mv, mvu, naive = (
            error(c, factors, linear_contract)
            for c in (MinimumVariance(levels, iterations=2), MinimumVarianceUnbiased(levels), Naive(levels))
        )
        assert mv <= mvu * (1 + 1e-6), at
        assert mvu <= naive, at
        assert sum_error(MinimumVarianceUnbiased(levels), factors, linear_contract) < 2e-6, at


def test_alternations_hardly_help(signals):
    for factors in signals.values():
        once, often = (error(MinimumVariance(2, iterations=n), factors, linear_contract) for n in (1, 5))
        assert often <= once * (1 + 1e-6)
        assert often > 0.9 * once


def test_gain_over_naive_is_large_late_in_training(signals):
    """Late gradients are far from the model's law: fitting more than halves the error."""
    for layer in range(3):
        factors = signals[100, layer]
        assert error(MinimumVariance(2), factors, linear_contract) < 0.7 * error(Naive(2), factors, linear_contract)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("sparse", [True, False])
def test_order_on_every_layer(layer, levels, sparse):
    contract, factors = LAYERS[layer]
    naive = error(Naive(levels, sparse=sparse), factors, contract)
    mv = error(MinimumVariance(levels, sparse=sparse, iterations=2), factors, contract)
    mvu = error(MinimumVarianceUnbiased(levels, sparse=sparse), factors, contract)
    assert mv <= naive * (1 + 1e-6)
    assert mv <= mvu * (1 + 1e-6)
    assert sum_error(MinimumVarianceUnbiased(levels, sparse=sparse), factors, contract) < 2e-6


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "embedding"])
@pytest.mark.parametrize("sparse", [True, False])
def test_points_solve_the_dense_problem(layer, sparse):
    """The last fit is that of x: compare with numpy's least squares on explicit columns."""
    contract, factors = LAYERS[layer]
    c = MinimumVariance(3, sparse=sparse)
    payload = c.encode_pair(factors, contract, KEY)
    d_hat, codes = c.decode_pair(payload).d, payload.x.symbols["codes"].values.view(factors.x.shape)
    columns = [contract((codes == i + sparse).float(), d_hat).reshape(-1).double().numpy() for i in range(3)]
    gradient = contract(factors.x, factors.d).reshape(-1).double().numpy()
    expected = np.linalg.lstsq(np.stack(columns, 1), gradient, rcond=None)[0]
    assert np.allclose(payload.x.tensors["codebook"][int(sparse) :].numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_constrained_points_solve_the_lagrange_system(seed):
    parts, gradient = normal(seed, 4, 100) + 0.3, normal(seed + 50, 100)
    p, g = parts.double().numpy(), gradient.double().numpy()
    f = p.sum(1)
    system = np.block([[p @ p.T, f[:, None]], [f[None], np.zeros((1, 1))]])
    expected = np.linalg.solve(system, np.append(p @ g, g.sum()))[:4]
    got = fit_points(parts, gradient, torch.zeros(4), keeps_sum=True)
    assert np.allclose(got.numpy(), expected, atol=1e-10)
    assert abs(float(got @ torch.from_numpy(f)) - g.sum()) < 1e-10 * np.abs(g).sum()


def test_points_of_empty_cells_stay():
    parts = torch.stack([normal(1, 50), torch.zeros(50), normal(2, 50)])
    for keeps_sum in (False, True):
        got = fit_points(parts, normal(3, 50), torch.tensor([7.0, 8.0, 9.0]), keeps_sum=keeps_sum)
        assert got[1] == 8.0
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("keeps_sum", [False, True])
def test_dependent_parts(keeps_sum):
    """Two equal parts: the system is singular, the fit is as good as with one of them."""
    part, gradient = normal(1, 50) + 1, normal(2, 50)
    twice = fit_points(torch.stack([part, part]), gradient, torch.zeros(2), keeps_sum=keeps_sum)
    once = fit_points(part[None], gradient, torch.zeros(1), keeps_sum=keeps_sum)
    assert torch.allclose(twice.sum(), once[0])


def test_sum_out_of_reach_is_no_constraint():
    """All parts sum to zero, the gradient does not: nothing explodes, the fit is the plain one."""
    parts = torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])
    gradient = torch.tensor([3.0, -1.0, 5.0, 5.0])
    plain, kept = (fit_points(parts, gradient, torch.zeros(2), keeps_sum=k) for k in (False, True))
    assert torch.allclose(kept, plain)
    assert torch.allclose(plain, torch.tensor([2.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("cls", [Naive, *FITTED])
def test_degenerate_factors(cls):
    x, d = normal(1, 6, 5).relu(), normal(2, 6, 4)
    for factors in (
        Factors(x * 0, d),
        Factors(x, d * 0),
        Factors(torch.ones_like(x), d),
        Factors(x[:1], d[:1]),
        Factors(x[:0], d[:0]),
        Factors(x.half() * 1e4, d.half() * 1e-6),
        Factors(x * 1e18, d * 1e18),
    ):
        for levels in (1, 2, 16):
            decoded = cls(levels).decode_pair(cls(levels).encode_pair(factors, linear_contract, KEY))
            assert torch.isfinite(decoded.x).all()
            assert torch.isfinite(decoded.d).all()


@pytest.mark.parametrize("cls", [Naive, *FITTED])
def test_codes_are_those_of_lloyd_max(cls):
    contract, factors = LAYERS["linear"]
    payload = cls(3).encode_pair(factors, contract, KEY)
    for part, tensor, model in ((payload.x, factors.x, "auto"), (payload.d, factors.d, "normal")):
        plain = LloydMax(3, model).encode(tensor, KEY)
        assert part.codec == plain.codec
        assert torch.equal(part.symbols["codes"].values, plain.symbols["codes"].values)


@pytest.mark.parametrize("cls", [Naive, *FITTED])
def test_indices_arrive_without_loss(cls):
    contract, factors = LAYERS["embedding"]
    payload = cls().encode_pair(factors, contract, KEY)
    assert torch.equal(cls().decode_pair(payload).x, factors.x)
    assert payload.x.symbols["values"].alphabet == 11


def test_nothing_enters_the_graph():
    """A contract that records gradients, as one made of a module's own operations does, costs no memory."""
    contract, factors = LAYERS["linear"]
    factors = Factors(factors.x.clone().requires_grad_(), factors.d.clone().requires_grad_())
    payload = MinimumVariance().encode_pair(factors, contract, KEY)
    assert not payload.x.tensors["codebook"].requires_grad


def test_separate_is_two_codecs():
    contract, factors = LAYERS["linear"]
    c = Separate(Dithered(levels=3), LloydMax(4))
    payload = c.encode_pair(factors, contract, KEY)
    decoded = c.decode_pair(payload)
    assert torch.equal(decoded.x, c.x.decode(c.x.encode(factors.x, KEY.child("x"))))
    assert torch.equal(decoded.d, c.d.decode(c.d.encode(factors.d, KEY.child("d"))))
    assert (payload.codec, payload.x.codec, payload.d.codec) == ("separate", "dithered", "lloyd_max")
    assert isinstance(c, PairCodec)


def test_separate_draws_independent_numbers():
    x = normal(1, 100, 50)
    decoded = codec("separate(dithered)").decode_pair(
        codec("separate(dithered)").encode_pair(Factors(x, x), linear_contract, KEY)
    )
    errors = torch.stack([(decoded.x - x).reshape(-1), (decoded.d - x).reshape(-1)])
    assert abs(torch.corrcoef(errors)[0, 1]) < 5 / 5000**0.5


@pytest.mark.parametrize(("x", "d", "unbiased"), [("exact", "dithered", True), ("lloyd_max", "dithered", False)])
def test_separate_is_unbiased_if_both_are(x, d, unbiased):
    assert Separate(codec(x), codec(d)).unbiased is unbiased


def test_separate_refuses_pair_codecs():
    with pytest.raises(OptionError, match="codecs of one tensor"):
        Separate(Naive(), Dithered())


@pytest.mark.parametrize("spec", ["separate(dithered)", "naive", "minimum_variance"])
def test_refuses_what_does_not_fit(spec):
    contract, factors = LAYERS["linear"]
    c = codec(spec)
    payload = c.encode_pair(factors, contract, KEY)
    for bad in (
        replace(payload, codec="other"),
        replace(payload, x=replace(payload.x, shape=(3, 3))),
        replace(payload, d=replace(payload.d, tensors={})),
        replace(payload, d=replace(payload.d, codec="exact")),
    ):
        with pytest.raises(CodecError):
            c.decode_pair(bad)
