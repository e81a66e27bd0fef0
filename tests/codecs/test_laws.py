"""The law kit over every registered codec, and proof that it notices what it is there for."""

from dataclasses import dataclass, fields, replace
from itertools import count
from typing import ClassVar

import pytest
import torch

from isgq.codecs import codec, codec_names, register_codec
from isgq.codecs.dithered import Dithered
from isgq.codecs.pair import Separate
from isgq.core import registry
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors, Payload
from isgq.testing import LAWS, Subject, check_codec, laws


def by_default():
    """Names that are specs by themselves; wrappers need an inner codec, and a subspace all ranks."""
    for name in codec_names():
        try:
            built = codec(name)
        except (OptionError, TypeError):
            continue
        if isinstance(built, (Codec, PairCodec)):
            yield name


# Options whose code differs from the default's.
SPECS = [
    "dithered:levels=4,bucket=tensor,sparse=false",
    "dithered:levels=300,bucket=5",
    "dithered:mode=half,levels=2",
    "dithered:mode=one_bit,bucket=tensor",
    "lloyd_max:levels=1,model=normal",
    "lloyd_max:levels=256,model=half_normal,sparse=false",
    "lloyd_max:levels=4,model=uniform",
    "lloyd_max:levels=3,model=empirical",
    "separate(exact)",
    "separate(dithered)",
    "separate(lloyd_max;dithered:levels=2)",
    "naive:levels=4,x_model=empirical",
    "minimum_variance:levels=3,sparse=false",
    "minimum_variance_unbiased:levels=1",
    "isgq",
    "balanced:balance=false,step=0.3",
    "balanced:step=0.5,samples=0.5",
    "rotated:atoms=3",
    "rotated:nmse=0.2",
    "rotated:mode=mmse,nmse=0.1",
    "ecsq:step=0.01,bucket=tensor",
    "ecsq:step=8,bucket=7",
    "ecsq:step=0.5,dither=false",
    "error_feedback(top_k:k=0.1)",
    "momentum_correction(qsgd)",
    "top_k:k=0.25->0.1@50",
    "rotated:ratio=2->4@50",
    "naive:levels=4->2@50",
]


@pytest.mark.parametrize("spec", [*by_default(), *SPECS])
def test_laws(spec):
    report = check_codec(spec, samples=200)  # the means of each codec have tests of their own, and finer ones
    assert set(report.passed) | set(report.skipped) == {law.__name__ for law in LAWS}
    assert len(report.passed) >= 10


def test_every_codec_but_wrappers_is_checked():
    assert set(codec_names()) - set(by_default()) <= {
        "separate",
        "error_feedback",
        "momentum_correction",
        "scheduled",
        "scheduled_pair",
        "subspace",
    }


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("spec", [*by_default(), *SPECS])
def test_laws_on_the_gpu(spec):
    check_codec(spec, device="cuda", samples=100)


@dataclass(frozen=True)
class Lawful:
    """A codec that obeys, to be broken in one way at a time."""

    name: ClassVar[str] = "dithered"
    unbiased: ClassVar[bool] = True
    inner: ClassVar[Dithered] = Dithered(levels=2)

    def encode(self, x, key):
        return replace(self.inner.encode(x, key), codec=self.name)

    def decode(self, payload):
        if payload.codec != self.name:
            raise CodecError("another codec's payload")
        return self.inner.decode(replace(payload, codec="dithered"))

    def variance(self, x):
        return self.inner.variance(x)


class NamesAnother(Lawful):
    def encode(self, x, key):
        return self.inner.encode(x, key)


class AlwaysFloat32(Lawful):
    def decode(self, payload):
        return super().decode(payload).float()


class FlattensItsShape(Lawful):
    def decode(self, payload):
        return super().decode(payload).reshape(-1)


class NeverZero(Lawful):
    def decode(self, payload):
        return super().decode(payload) + 1e-3


class LeavesItsAlphabet(Lawful):
    def encode(self, x, key):
        payload = super().encode(x, key)
        payload.symbols["levels"].values.fill_(200)
        return payload


class RollsDice(Lawful):
    dice: ClassVar[count] = count()

    def encode(self, x, key):
        return super().encode(x, replace(key, step=next(self.dice)))


class RemembersTheTensor(Lawful):
    def encode(self, x, key):
        object.__setattr__(self, "seen", x.detach().clone())
        return super().encode(x, key)

    def decode(self, payload):
        decoded = super().decode(payload)
        return getattr(self, "seen", decoded).clone()


@dataclass(frozen=True)
class Smuggling(Payload):
    secret: float = 1.0


class SmugglesAnAttribute(Lawful):
    def encode(self, x, key):
        p = super().encode(x, key)
        return Smuggling(p.codec, p.shape, p.dtype, p.symbols, p.tensors, p.digest, secret=2.0)

    def decode(self, payload):
        plain = Payload(*(getattr(payload, f.name) for f in fields(Payload)))
        return super().decode(plain) * getattr(payload, "secret", 1.0)


class WritesToItsInput(Lawful):
    def encode(self, x, key):
        payload = super().encode(x, key)
        x.detach().reshape(-1)[:1].add_(1)
        return payload


class SharesMemory(Lawful):
    def encode(self, x, key):
        return Payload(self.name, tuple(x.shape), x.dtype, tensors={"values": x.detach().reshape(-1)})

    def decode(self, payload):
        return payload.tensors["values"].reshape(payload.shape).clone()


class SwallowsNan(Lawful):
    def encode(self, x, key):
        return super().encode(x.detach().nan_to_num(), key)


class TakesAnything(Lawful):
    def decode(self, payload):
        return super().decode(replace(payload, codec=self.name))


class OneKeyForAll(Lawful):
    def encode(self, x, key):
        return super().encode(x, Key("constant"))


class ShrinksABit(Lawful):
    def decode(self, payload):
        return super().decode(payload) * 0.95


class MovesOneElement(Lawful):
    def decode(self, payload):
        decoded = super().decode(payload)
        if decoded.dim() and decoded.numel():
            decoded.view(-1)[-1] *= 1.5
        return decoded


class UnderstatesItsVariance(Lawful):
    def variance(self, x):
        return 0.9 * super().variance(x)


class OverstatesItsContraction(Lawful):
    def contraction(self, x):
        return 0.99


BROKEN = {
    NamesAnother: laws.spec_names_the_codec,
    AlwaysFloat32: laws.keeps_shape_and_dtype,
    FlattensItsShape: laws.keeps_shape_and_dtype,
    NeverZero: laws.zero_stays_zero,
    LeavesItsAlphabet: laws.symbols_fit_their_alphabet,
    RollsDice: laws.key_determines_the_payload,
    RemembersTheTensor: laws.sender_keeps_nothing,
    SmugglesAnAttribute: laws.wire_keeps_the_payload,
    WritesToItsInput: laws.input_stays_as_it_was,
    SharesMemory: laws.input_stays_as_it_was,
    SwallowsNan: laws.refuses_non_finite,
    TakesAnything: laws.refuses_foreign_payloads,
    OneKeyForAll: laws.keys_differ,
    ShrinksABit: laws.mean_is_the_truth,
    MovesOneElement: laws.mean_is_the_truth,
    UnderstatesItsVariance: laws.variance_is_as_stated,
    OverstatesItsContraction: laws.contraction_is_as_stated,
}


@pytest.fixture
def registered(monkeypatch):
    """Registers a class for the time of a test."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    return lambda cls: register_codec("under_test")(dataclass(frozen=True)(type(cls.__name__, (cls,), {})))


def test_the_unbroken_codec_passes(registered):
    assert len(check_codec(registered(Lawful)()).passed) == len(LAWS) - 1


@pytest.mark.parametrize(("cls", "law"), BROKEN.items(), ids=lambda value: value.__name__)
def test_a_broken_law_is_noticed(registered, cls, law):
    broken = registered(cls)()
    with pytest.raises(AssertionError):
        law(Subject(broken, samples=400, z=6.0, seed=0, device=torch.device("cpu")))


def test_the_message_names_codec_and_law(registered):
    with pytest.raises(AssertionError, match="under_test breaks the law zero_stays_zero"):
        check_codec(registered(NeverZero)())


def test_every_law_can_be_broken():
    assert set(BROKEN.values()) == set(LAWS)


def test_a_crash_names_the_law(registered):
    class Crashes(Lawful):
        def decode(self, payload):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        check_codec(registered(Crashes)())
    assert "while checking the law keeps_shape_and_dtype of under_test" in error.value.__notes__[0]


def test_a_pair_codec_can_break_laws(registered):
    class Halves(Separate):
        def decode_pair(self, payload):
            factors = super().decode_pair(payload)
            return Factors(factors.x, factors.d * 0.5)

    with pytest.raises(AssertionError, match="mean_is_the_truth"):
        check_codec(registered(Halves)(Dithered(), Dithered()))
