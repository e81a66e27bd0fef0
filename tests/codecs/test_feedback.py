"""Memory: nothing is lost, nothing hides, and a refused step leaves no trace."""

import pytest
import torch
from torch import Tensor

import isgq
from isgq.codecs.feedback import ErrorFeedback, MomentumCorrection
from isgq.core.errors import CodecError, OptionError

INNER = [
    "top_k:k=0.1",
    "random_k:k=0.1,scale=false",
    "rtop_k:r=0.3,k=0.1",
    "one_bit",
    "sign",
    "qsgd",
    "terngrad",
    "int8",
    "bf16",
]


def gradient(step: int, size: tuple[int, ...] = (20, 30)) -> Tensor:
    return isgq.core.keys.uniform(step, "test", size)


@pytest.mark.parametrize("inner", INNER)
def test_input_plus_memory_is_output_plus_new_memory(inner: str) -> None:
    codec = isgq.codec(f"error_feedback({inner})")
    assert isinstance(codec, ErrorFeedback)
    sent, given = torch.zeros(20, 30), torch.zeros(20, 30)
    for step in range(5):
        key = isgq.Key("w", step=step)
        before = codec.memory.read("w", given)
        out = codec.decode(codec.encode(gradient(step), key))
        after = codec.memory.read("w", given)
        assert torch.equal((gradient(step) + before) - out, after)
        sent, given = sent + out, given + gradient(step)
    torch.testing.assert_close(sent + codec.memory.read("w", given), given, rtol=1e-5, atol=1e-5)


def test_decay_and_reset_forget() -> None:
    forgetful = isgq.codec("error_feedback(top_k:k=1):decay=0")
    plain = isgq.codec("top_k:k=1")
    for step in range(3):
        key = isgq.Key("w", step=step)
        assert torch.equal(
            forgetful.decode(forgetful.encode(gradient(step), key)), plain.decode(plain.encode(gradient(step), key))
        )
    resetting = isgq.codec("error_feedback(top_k:k=1):reset=2")
    for step in range(3):
        out = resetting.decode(resetting.encode(gradient(step), isgq.Key("w", step=step)))
    assert torch.equal(out, plain.decode(plain.encode(gradient(2), isgq.Key("w", step=2))))


def test_state_is_by_name_and_continues_bit_for_bit() -> None:
    spec = "error_feedback(qsgd:levels=2)"
    one = isgq.codec(spec)
    for step in range(3):
        for name in ("a", "b"):
            one.encode(gradient(step + ord(name)), isgq.Key(name, step=step))
    assert set(one.state_dict()) == {"a", "b"}
    two = isgq.codec(spec)
    two.load_state_dict(one.state_dict())
    for step in range(3, 6):
        key = isgq.Key("a", step=step)
        assert torch.equal(one.decode(one.encode(gradient(step), key)), two.decode(two.encode(gradient(step), key)))


@pytest.mark.parametrize("spec", ["error_feedback(top_k:k=0.1)", "momentum_correction(top_k:k=0.1)"])
def test_a_refused_step_is_taken_back(spec: str) -> None:
    codec = isgq.codec(spec)
    codec.encode(gradient(0), isgq.Key("w", step=0))
    codec.commit()
    before = {name: tensor.clone() for name, tensor in codec.state_dict().items()}
    codec.encode(gradient(1), isgq.Key("w", step=1))
    codec.encode(gradient(2), isgq.Key("v", step=1))
    codec.rollback()
    after = codec.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("spec", ["momentum_correction(exact):masking=false", "momentum_correction(top_k:k=0.1)"])
def test_momentum_correction_is_momentum_when_everything_is_sent(spec: str) -> None:
    codec = isgq.codec(spec)
    assert isinstance(codec, MomentumCorrection)
    velocity = torch.zeros(20, 30)
    for step in range(4):
        velocity = 0.9 * velocity + gradient(step)
        payload = codec.encode_by(isgq.codec("exact"), gradient(step), isgq.Key("w", step=step))
        torch.testing.assert_close(isgq.codec("exact").decode(payload), velocity)


def test_masking_stops_the_momentum_of_sent_coordinates() -> None:
    codec = isgq.codec("momentum_correction(top_k:k=0.1)")
    assert isinstance(codec, MomentumCorrection)
    sent = codec.decode(codec.encode(gradient(0), isgq.Key("w")))
    assert (codec.memory.tensors["w/u"][sent != 0] == 0).all()
    assert (codec.memory.tensors["w/v"][sent != 0] == 0).all()


def test_shapes_are_checked_and_memory_does_not_nest() -> None:
    codec = isgq.codec("error_feedback(top_k:k=0.1)")
    codec.encode(gradient(0), isgq.Key("w"))
    with pytest.raises(CodecError, match="shape"):
        codec.encode(gradient(0, (5, 5)), isgq.Key("w"))
    with pytest.raises(OptionError, match="without memory"):
        isgq.codec("error_feedback(error_feedback(top_k))")
    with pytest.raises(OptionError, match="decay"):
        isgq.codec("error_feedback(top_k):decay=2")
