"""One-bit SGD, scaled signs and half precision against definitions written out in a loop."""

import pytest
import torch

from isgq.codecs.casts import BF16, FP16
from isgq.codecs.one_bit import OneBit
from isgq.codecs.sign import Sign
from isgq.core.keys import Key
from tests.codecs.inputs import normal

KEY = Key("w")


ROWS = {
    "normal": normal(6, 50),
    "positive": normal(6, 50).abs(),
    "negative": -normal(6, 50).abs(),
    "zeros count as positive": normal(6, 50) * (normal(6, 50, seed=1) > 0),
    "far from one": normal(6, 50) * torch.logspace(-15, 15, 6)[:, None],
}


@pytest.mark.parametrize("name", ROWS)
def test_one_bit_sends_the_mean_of_either_side(name: str) -> None:
    x = ROWS[name]
    y = OneBit().decode(OneBit().encode(x, KEY))
    for row, decoded in zip(x, y, strict=True):
        for side in (row >= 0, row < 0):
            if side.any():
                assert decoded[side].tolist() == pytest.approx(
                    [float(row[side].double().mean())] * int(side.sum()), rel=1e-5
                )


def test_bits_select_elements_not_integers() -> None:
    # Negating a uint8 mask bit by bit gives 254 and 255 instead of 1 and 0, and values hundreds of times too large.
    x = normal(4, 1000)
    payload = OneBit().encode(x, KEY)
    assert set(payload.symbols["q"].values.tolist()) == {0, 1}
    y = OneBit().decode(payload)
    assert float(y.abs().max()) < 1.0
    assert torch.equal(y < 0, x < 0)
    assert float(y.mean(1).sub(x.mean(1)).abs().max()) < 1e-6


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("scale", ["l1", "l2"])
def test_sign_keeps_the_sign_and_one_norm(name: str, scale: str) -> None:
    x = ROWS[name]
    made = Sign(scale=scale, bucket="row")
    y = made.decode(made.encode(x, KEY))
    assert torch.equal(y >= 0, x >= 0)
    order = 1 if scale == "l1" else 2
    norms = (torch.linalg.vector_norm(t.double(), order, dim=1) for t in (x, y))
    assert torch.allclose(*norms, rtol=1e-5)


def test_the_l1_scale_is_the_best_one() -> None:
    x = normal(1, 300) ** 3
    errors = [1 - Sign(scale=scale).contraction(x) for scale in ("l1", "l2")]
    assert errors[0] < errors[1]
    y = Sign().decode(Sign().encode(x, KEY))
    for factor in (0.99, 1.01):
        assert float((factor * y - x).norm()) > float((y - x).norm())


def test_sums_over_many_elements_are_accurate() -> None:
    x = torch.full((1 << 22,), 0.1)
    for made in (OneBit(), Sign(), Sign(scale="l2")):
        assert float(made.decode(made.encode(x, KEY))[0]) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("size", [1e-40, 1e-20, 1e-6, 1.0, 1e4, 1e5, 1e20, 3e38])
def test_fp16_neither_overflows_nor_vanishes(size: float) -> None:
    x = normal(1000).clamp(-1, 1) * size
    y = FP16().decode(FP16().encode(x, KEY))
    tolerance = 2.0**-11 if size > 1e-30 else 2.0**-8  # subnormal in float32 already
    assert float((y.double() - x.double()).norm()) <= tolerance * float(x.double().norm())


def test_casts_lose_nothing_of_their_own_dtype() -> None:
    for made, dtype in ((FP16(), torch.float16), (BF16(), torch.bfloat16)):
        x = normal(1000).to(dtype)
        assert torch.equal(made.decode(made.encode(x, KEY)), x)
        assert made.encode(x, KEY).tensors["half"].dtype == dtype


def test_bf16_rounds_down_to_its_largest_number_rather_than_to_infinity() -> None:
    x = torch.tensor([torch.finfo(torch.float32).max, -1.0])
    assert BF16().decode(BF16().encode(x, KEY)).tolist() == [torch.finfo(torch.bfloat16).max, -1.0]
