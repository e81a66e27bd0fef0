"""Nested dithering: plain dithering with fewer bits wherever the side information is good enough."""

import pytest
import torch

from isgq.codecs.dithered import Dithered
from isgq.codecs.nested import NestedDithered, decode_in_order
from isgq.core.errors import CodecError
from isgq.core.keys import Key
from tests.codecs.inputs import normal

KEY = Key("w", step=2)


def plain(levels: int) -> Dithered:
    return Dithered(levels=levels, bucket="tensor", sparse=False)


@pytest.mark.parametrize(("levels", "ratio"), [(3, 3), (5, 3), (8, 5), (40, 9)])
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_equals_plain_dithering_where_the_side_information_is_near(levels: int, ratio: int, noise: float) -> None:
    x = normal(20_000)
    step = float(x.abs().max()) / levels
    side = x + noise * step * normal(20_000, seed=1)
    made = NestedDithered(levels, ratio)
    payload = made.encode(x, KEY)
    assert payload.symbols["q"].alphabet == ratio
    got = made.decode_with(payload, side)
    want = plain(levels).decode(plain(levels).encode(x, KEY))
    near = (want - side).abs() < ratio * step / 2 * (1 - 1e-5)
    assert torch.equal(got[near], want[near])
    assert bool(near.any())
    turns = (got - want) / (ratio * step)  # elsewhere it is off by whole turns, here few
    assert bool(((turns - turns.round()).abs() < 1e-3).all())
    if noise == 3.0 and ratio == 3:
        assert bool((turns.round() != 0).any())


@pytest.mark.parametrize("levels", [1, 3])
def test_with_the_full_ratio_no_side_information_is_needed(levels: int) -> None:
    x = normal(30, 40)
    made = NestedDithered(levels, 2 * levels + 1)
    assert made.unbiased
    payload = made.encode(x, KEY)
    want = plain(levels).decode(plain(levels).encode(x, KEY))
    assert torch.equal(made.decode(payload), want)
    assert torch.equal(made.decode_with(payload, 100 * normal(30, 40, seed=1)), want)


def test_without_side_information_small_elements_are_right() -> None:
    x = normal(5000)
    made = NestedDithered(3, 3)
    assert not made.unbiased
    step = float(x.abs().max()) / 3
    got, want = made.decode(made.encode(x, KEY)), plain(3).decode(plain(3).encode(x, KEY))
    near = want.abs() < 1.5 * step * (1 - 1e-5)
    assert torch.equal(got[near], want[near])
    assert not torch.equal(got, want)


def test_ranks_decoded_in_order_have_the_error_of_plain_dithering() -> None:
    common = normal(50_000)
    tensors = [common + 0.2 * normal(50_000, seed=rank) for rank in range(1, 9)]
    codecs = [plain(3) if rank < 4 else NestedDithered(3, 3) for rank in range(8)]
    messages = [(c, c.encode(x, Key("w", rank=r))) for r, (c, x) in enumerate(zip(codecs, tensors, strict=True))]
    decoded = decode_in_order(messages)
    for x, y in zip(tensors, decoded, strict=True):
        variance = (float(x.abs().max()) / 3) ** 2 / 12
        assert float((y - x).square().mean()) == pytest.approx(variance, rel=0.05)


def test_the_first_message_must_stand_by_itself() -> None:
    x = normal(100)
    alone, full = NestedDithered(3, 3), NestedDithered(3, 7)
    with pytest.raises(CodecError, match="first message"):
        decode_in_order([(alone, alone.encode(x, KEY))])
    assert len(decode_in_order([(full, full.encode(x, KEY)), (alone, alone.encode(x, KEY))])) == 2
    assert decode_in_order([]) == []


def test_side_information_must_have_the_tensors_shape() -> None:
    made = NestedDithered()
    with pytest.raises(CodecError, match="side information"):
        made.decode_with(made.encode(normal(4, 5), KEY), normal(20))
