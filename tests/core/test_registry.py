"""Spec strings: what they build, that they come back, and that every error says what is allowed."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from isgq.codecs import codec, codec_class, codec_names, register_alias, register_codec, spec_of
from isgq.codecs.roles import choose_codecs
from isgq.core import registry
from isgq.core.codec import Codec
from isgq.core.errors import OptionError


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))


class Identity:
    """Enough of a codec to be one."""

    unbiased: ClassVar[bool] = True

    def encode(self, x, key):
        raise NotImplementedError

    def decode(self, payload):
        raise NotImplementedError


def register_samples():
    @register_codec("sample")
    @dataclass(frozen=True)
    class Sample(Identity):
        count: int = 1
        share: float = 0.5
        loud: bool = False
        word: Literal["row", "tensor"] = "row"
        size: int | Literal["row", "tensor"] = "row"
        limit: float | None = None

    @register_codec("wrapper")
    @dataclass(frozen=True)
    class Wrapper(Identity):
        first: Codec
        second: Codec
        factor: float = 1.0

    return Sample, Wrapper


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("sample", {}),
        ("sample:", {}),
        ("sample:count=3", {"count": 3}),
        (" sample : count = 3 , loud = yes ", {"count": 3, "loud": True}),
        ("sample:loud=0,share=1e-3", {"loud": False, "share": 1e-3}),
        ("sample:word=tensor,size=tensor", {"word": "tensor", "size": "tensor"}),
        ("sample:size=512", {"size": 512}),
        ("sample:limit=2.5", {"limit": 2.5}),
        ("sample:limit=none", {"limit": None}),
    ],
)
def test_options_are_read_by_their_annotation(spec, values):
    sample, _ = register_samples()
    assert codec(spec) == sample(**values)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("smaple", ["smaple", "sample", "dithered", "exact", "isgq"]),
        ("smaple:count=1->2@3", ["smaple", "sample", "isgq"]),
        ("isgq:levels=2", ["isgq", "separate(dithered:levels=1,bucket=row)", "no options"]),
        ("sample:cuont=1", ["cuont", "count", "share", "loud", "word", "size", "limit"]),
        ("sample:count", ["count", "option=value"]),
        ("sample:count=1,count=2", ["count", "twice"]),
        ("sample:count=many", ["count", "many", "an integer"]),
        ("sample:share=half", ["share", "half", "a number"]),
        ("sample:loud=maybe", ["loud", "maybe", "true or false"]),
        ("sample:word=rows", ["word", "rows", "'row'", "'tensor'"]),
        ("sample:size=rows", ["size", "rows", "an integer", "'row'", "'tensor'"]),
        ("sample:limit=no", ["limit", "no", "a number", "none"]),
        ("sample(sample)", ["no inner codec", "(sample)"]),
        ("wrapper", ["wrapper", "needs an inner codec"]),
        ("wrapper(sample;sample;sample)", ["2 inner codec"]),
        ("wrapper(sample", ["unclosed"]),
        ("wrapper(sample)x", ["after ')'", "x"]),
        ("wrapper(sample):first=sample", ["first", "factor"]),
        ("wrapper(smaple)", ["smaple"]),
        ("dithered:levels=0", ["levels", "0", "1 .. 4095"]),
        ("dithered:mode=one_bit,levels=2", ["levels", "2", "1 .. 1", "one_bit"]),
        ("dithered:bucket=0", ["bucket", "0", "'row'", "'tensor'"]),
        ("dithered:mode=full", ["mode", "full", "'subtractive'", "'half'", "'one_bit'"]),
        ("lloyd_max:levels=257", ["levels", "257", "1 .. 256"]),
        ("lloyd_max:model=laplace", ["model", "laplace", "'half_normal'", "'empirical'"]),
        ("naive:d_model=laplace", ["d_model", "laplace", "'normal'"]),
        ("minimum_variance:iterations=0", ["iterations", "0", "1 .. 100"]),
        ("separate(naive)", ["separate", "codecs of one tensor"]),
    ],
)
def test_errors_list_what_is_allowed(spec, words):
    register_samples()
    with pytest.raises(OptionError) as error:
        codec(spec)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"
    assert "dense" not in str(error.value)  # that is a session's word


def test_a_session_lists_the_plain_gradient_too():
    with pytest.raises(OptionError, match=r"unknown codec 'dnese'; known: .*bf16, dense, dithered, .* isgq, "):
        choose_codecs("dnese", None)


@pytest.mark.parametrize(
    "spec",
    [
        "sample",
        "sample:count=-4,size=7,limit=0.1",
        "wrapper(sample:count=2):factor=0.25",
        "wrapper(sample:count=2;wrapper(sample;dithered:levels=3):factor=2.0)",
        "dithered:levels=4,bucket=128,sparse=no,mode=half",
        "separate(dithered:levels=4;lloyd_max)",
        "minimum_variance_unbiased:levels=4,x_model=empirical",
    ],
)
def test_spec_comes_back(spec):
    register_samples()
    built = codec(spec)
    assert codec(spec_of(built)) == built
    assert spec_of(codec(spec_of(built))) == spec_of(built)


def test_one_inner_codec_serves_for_all():
    sample, wrapper = register_samples()
    assert codec("wrapper(sample:count=2)") == wrapper(sample(2), sample(2))
    assert codec("wrapper(sample:count=2;sample)") == wrapper(sample(2), sample())


def test_object_is_its_own_spec():
    sample, _ = register_samples()
    built = sample(3)
    assert codec(built) is built


def test_decorator_names_the_class():
    sample, _ = register_samples()
    assert sample.name == sample().name == "sample"
    assert codec_class("sample") is sample
    assert "sample" in codec_names()
    assert codec_names() == sorted(codec_names())


def test_name_is_taken():
    register_samples()
    with pytest.raises(OptionError, match=r"'sample' is already registered by .*Sample"):
        register_samples()


@pytest.mark.parametrize("name", ["", "Upper", "with-dash", "with space", "2nd", "größe", "a" * 32])
def test_name_is_malformed(name):
    with pytest.raises(OptionError, match="lower-case ASCII identifier"):
        register_codec(name)(dataclass(type("Any", (), {})))


def test_class_is_no_dataclass():
    with pytest.raises(OptionError, match="must be a dataclass"):
        register_codec("plain")(Identity)


def test_alias_stands_for_a_spec():
    sample, _ = register_samples()
    register_alias("nickname", "sample:count=9")
    assert codec("nickname") == sample(9)
    with pytest.raises(OptionError, match="already registered"):
        register_alias("sample", "dithered")
