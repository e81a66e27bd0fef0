"""Balanced rows: the gradient and its bias are what they were, and the error is shared out as it should be."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
from isgq.codecs.balanced import Balanced
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors, LowRank, PairPayload
from isgq.exchange import Loopback
from isgq.testing import linear_contract, normal
from isgq.wire import pack

KEYS = [Key("w", step=step) for step in range(60)]


def uneven(rows: int = 16) -> Factors:
    """Rows of x and d of very different lengths, as of samples that a model has learned and others."""
    lengths = 4.0 ** torch.linspace(-3, 3, rows)
    return Factors(normal(1, rows, 40) * lengths.flip(0)[:, None] ** 0.3, normal(2, rows, 20) * lengths[:, None])


def rebuilt(codec: Balanced, factors: Factors, key: Key) -> tuple[Tensor, Tensor]:
    found = codec.decode_pair(codec.encode_pair(factors, linear_contract, key))
    assert isinstance(found, LowRank)
    return found.weight(), found.bias()


def error(codec: Balanced, factors: Factors) -> float:
    truth = linear_contract(factors.x, factors.d)
    errors = [(rebuilt(codec, factors, key)[0] - truth).square().sum() / truth.square().sum() for key in KEYS]
    return float(torch.stack(errors).mean())


def size(codec: Balanced, factors: Factors) -> int:
    return pack(codec.encode_pair(factors, linear_contract, KEYS[0])).numel()


@pytest.mark.parametrize("balance", [True, False])
def test_fine_steps_give_gradient_and_bias(balance: bool) -> None:
    factors = uneven()
    weight, bias = rebuilt(Balanced(step=0.01, balance=balance), factors, KEYS[0])
    for found, truth in ((weight, linear_contract(factors.x, factors.d)), (bias, factors.d.sum(0))):
        assert float((found - truth).norm() / truth.norm()) < 0.02


def test_balancing_takes_most_of_the_error_for_no_more_bytes() -> None:
    factors = uneven()
    plain, balanced = Balanced(step=1.0, balance=False), Balanced(step=1.0)
    assert error(balanced, factors) < 0.5 * error(plain, factors)
    assert size(balanced, factors) <= 1.05 * size(plain, factors)


def test_drawn_rows_are_as_many_as_asked_for_and_the_heaviest_are_always_there() -> None:
    factors, codec = uneven(), Balanced(step=0.01, samples=0.25)
    for key in KEYS[:5]:
        payload = codec.encode_pair(factors, linear_contract, key)
        assert payload.x.shape == (4, 41)
        assert payload.d.shape == (4, 20)
        found = codec.decode_pair(payload)
        assert isinstance(found, LowRank)
        last = found.left[-1]
        assert float(F.cosine_similarity(last, factors.d[-1], dim=0)) > 0.99
    assert size(codec, factors) < 0.4 * size(replace(codec, samples=1.0), factors)


def test_the_mean_over_draws_is_the_gradient() -> None:
    factors = Factors(normal(3, 8, 5), normal(4, 8, 3))
    codec, truth = Balanced(step=0.5, samples=0.5), linear_contract(factors.x, factors.d)
    found = torch.stack([rebuilt(codec, factors, Key("w", step=step))[0] for step in range(300)])
    off = (found.mean(0) - truth) / (found.std(0) / len(found) ** 0.5)
    assert float(off.abs().max()) < 5


def test_rows_without_a_gradient_are_not_sent() -> None:
    factors = uneven()
    factors.d[::2] = 0
    assert Balanced().encode_pair(factors, linear_contract, KEYS[0]).x.shape == (8, 41)
    factors.d.zero_()
    weight, bias = rebuilt(Balanced(), factors, KEYS[0])
    assert not weight.any()
    assert not bias.any()


def test_in_a_session_weights_and_biases_of_all_layers_are_right() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3, bias=False))
    x, y = normal(5, 6, 1, 8, 8), torch.arange(6) % 3
    F.cross_entropy(net(x), y).backward()
    truth = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with isgq.instrument(net, "balanced:step=0.01", routes="factors", exchange=Loopback()):
        F.cross_entropy(net(x), y).backward()
    for expected, p in zip(truth, net.parameters(), strict=True):
        assert p.grad is not None
        assert float((p.grad - expected).norm() / expected.norm()) < 0.02


def test_embeddings_send_their_indices_as_they_are() -> None:
    factors = Factors(torch.tensor([3, 1, 1]), normal(6, 3, 4))
    found = Balanced(step=0.01).decode_pair(Balanced(step=0.01).encode_pair(factors, linear_contract, KEYS[0]))
    assert isinstance(found, Factors)
    assert torch.equal(found.x, factors.x)


@pytest.mark.parametrize("options", [{"step": 0.0}, {"step": float("nan")}, {"samples": 0.0}, {"samples": 1.5}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="of balanced must be"):
        Balanced(**options)  # type: ignore[arg-type]


def test_what_is_not_finite_or_no_payload_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        Balanced().encode_pair(Factors(torch.full((2, 3), torch.nan), torch.ones(2, 3)), linear_contract, KEYS[0])
    good = Balanced().encode_pair(uneven(), linear_contract, KEYS[0])
    short = Balanced().encode_pair(uneven(4), linear_contract, KEYS[0])
    for bad in (
        PairPayload("rotated", good.x, good.d),
        PairPayload("balanced", good.x, short.d),
        PairPayload("balanced", replace(good.x, symbols={}), good.d),
    ):
        with pytest.raises(CodecError):
            Balanced().decode_pair(bad)
