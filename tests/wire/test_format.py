"""Frames: what is packed comes back bit for bit, says nothing twice, and damage does not go unnoticed."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isgq.core.errors import CodecError, IsgqError, OptionError, WireError
from isgq.core.payload import PairPayload, Payload, Symbols
from isgq.wire import Template, pack, pack_message, record, unpack, unpack_message
from isgq.wire.format import Kind
from isgq.wire.layout import DTYPES, Record
from isgq.wire.record import Digests
from tests.fuzz_wire import Frame, judge
from tests.wire.records import ALPHABETS, assert_same, bits_of, examples, low_rank, pair, skewed, symbols, ternary

CODERS = ("auto", "packed", "zstd", "ans")
EXAMPLES = examples()


def frame_of(record: Record, coder: str = "auto") -> bytes:
    return bytes(pack(record, coder=coder).numpy())


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_payloads_come_back(name: str, coder: str) -> None:
    data = pack(EXAMPLES[name], coder=coder)
    assert (data.dtype, data.dim()) == (torch.uint8, 1)
    assert_same(unpack(data), EXAMPLES[name])
    assert torch.equal(pack(EXAMPLES[name], coder=coder), data)


@pytest.mark.parametrize("coder", CODERS)
def test_every_alphabet_and_length_comes_back(coder: str) -> None:
    for alphabet in ALPHABETS:
        for count in (0, 1, 2, 13, 4097):
            streams = {"even": symbols(count, alphabet), "skewed": skewed(count, alphabet, 900)}
            payload = Payload("any", (count,), torch.float32, streams, {}, 1)
            assert_same(unpack(pack(payload, coder=coder)), payload)


names = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=63)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
digests = st.sampled_from([0, 1, 2, (1 << 64) - 1])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    limit = 1 if dtype is torch.bool else 255
    raw = draw(st.lists(st.integers(0, limit), min_size=size, max_size=size))
    return torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def streams(draw: st.DrawFn) -> Symbols:
    alphabet = draw(st.sampled_from(ALPHABETS) | st.integers(1, 1 << 62))
    return Symbols(torch.tensor(draw(st.lists(st.integers(0, alphabet - 1), max_size=70)), dtype=torch.int64), alphabet)


payloads = st.builds(
    Payload,
    codec=names,
    shape=shapes | st.just((1 << 40, 3)),
    dtype=st.sampled_from(DTYPES),
    symbols=st.dictionaries(names, streams(), max_size=3),
    tensors=st.dictionaries(names, tensors(), max_size=3),
    digest=digests,
)
records = payloads | st.builds(PairPayload, codec=names, x=payloads, d=payloads)


@settings(max_examples=100, deadline=None)
@given(record=records, coder=st.sampled_from(CODERS))
def test_any_payload_comes_back(record: Record, coder: str) -> None:
    assert_same(unpack(pack(record, coder=coder)), record)


@settings(max_examples=40, deadline=None)
@given(many=st.lists(records, max_size=5), known=st.lists(records, max_size=3), same=st.integers(0, 3))
def test_any_message_comes_back(many: list[Record], known: list[Record], same: int) -> None:
    template = Template.of([*many[:same], *known])
    for given_template in (None, template):
        data, sizes = pack_message(many, template=given_template)
        assert len(sizes) == len(many)
        for before, after in zip(many, unpack_message(data, template=given_template), strict=True):
            assert_same(after, before)


def test_tensors_of_any_stride_and_with_gradient_come_back() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"t": base.T, "step": base[:, ::2], "expanded": torch.tensor(2.0).expand(3), "grad": base.requires_grad_()}
    payload = Payload("exact", (1,), torch.float32, {}, views, 0)
    back = unpack(pack(payload))
    for name, tensor in views.items():
        assert torch.equal(back.tensors[name], tensor)
        assert not back.tensors[name].requires_grad


def test_what_is_unpacked_owns_its_memory() -> None:
    data = pack(ternary(), coder="packed")
    payload = unpack(data)
    data.zero_()
    payload.tensors["scale"] += 1
    payload.symbols["q"].values[0] = 2
    assert float(payload.tensors["scale"]) == 1.5
    assert payload.symbols["q"].values.tolist() == [2, 1, 2, 0, 1, 2]


def test_frames_of_any_stride_are_read() -> None:
    spread = torch.zeros(2 * len(frame_of(ternary())), dtype=torch.uint8)
    spread[::2] = pack(ternary())
    assert_same(unpack(spread[::2]), ternary())


def test_big_endian_hosts_turn_the_bytes_around(monkeypatch: pytest.MonkeyPatch) -> None:
    little = pack(EXAMPLES["sparse"])
    monkeypatch.setattr(record.sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    other = pack(EXAMPLES["sparse"])
    assert len(little) == len(other)
    assert not torch.equal(little, other)
    assert_same(unpack(other), EXAMPLES["sparse"])


# Messages


def four_layers() -> list[Payload]:
    """Two atoms of each layer of an FC network of widths 784, 300, 100, 10."""
    return [low_rank(*size, 2, str(i)) for i, size in enumerate(((300, 784), (100, 300), (10, 100)))]


def test_messages_come_back_in_one_frame() -> None:
    many = [*EXAMPLES.values(), *four_layers()]
    data, sizes = pack_message(many)
    for before, after in zip(many, unpack_message(data), strict=True):
        assert_same(after, before)
    assert sum(sizes) < len(data)
    assert len(data) < sum(len(pack(record)) for record in many)


def test_empty_messages_come_back() -> None:
    data, sizes = pack_message([])
    assert (len(data), sizes) == (11, [])
    assert unpack_message(data) == []


def test_sizes_are_those_of_the_records() -> None:
    """A record added costs its size, and once what is new about it; a record like the first costs its size."""
    one, (first,) = pack_message([ternary()])
    two, (again, other) = pack_message([ternary(), ternary()])
    assert first == again == other
    assert len(two) == len(one) + first
    assert len(pack_message([ternary(), low_rank(4, 5, 1, "x")])[0]) > len(one) + first


def test_implied_digests_are_left_out_and_supplied() -> None:
    many = [ternary(), pair(7, 7), pair(11, 12), EXAMPLES["sparse"], pair(0, 7)]
    full, full_sizes = pack_message(many)
    digests = [ternary().digest, 7, (11, 12), 99, (98, 7)]
    data, sizes = pack_message(many, digests=digests)
    assert len(full) - len(data) == 8 * 5
    assert [a - b for a, b in zip(full_sizes, sizes, strict=True)] == [8, 8, 16, 0, 8]
    back = unpack_message(data, digests=digests)
    for before, after in zip(many, back, strict=True):
        assert_same(after, before)


@pytest.mark.parametrize(
    ("given_digests", "what"),
    [
        (None, "pass digests"),
        ([ternary().digest, (11, 13)], "other digests"),
        ([ternary().digest + 1, (11, 12)], "other digests"),
        ([ternary().digest], "other digests"),
        ([ternary().digest, (11, 12), 4], "other digests"),
    ],
)
def test_wrong_digests_are_refused(given_digests: list[int] | None, what: str) -> None:
    data, _ = pack_message([ternary(), pair(11, 12)], digests=[ternary().digest, (11, 12)])
    assert data[3] == Kind.IMPLIED
    with pytest.raises(WireError, match=what):
        unpack_message(data, digests=given_digests)


@pytest.mark.parametrize(
    ("records", "digests", "what"),
    [
        ([ternary()], [], "1 records, digests for 0"),
        ([ternary(), ternary()], [ternary().digest], "2 records, digests for 1"),
        ([pair(11, 12)], [(11,)], "has 2 parts, 1 digests"),
    ],
)
def test_too_few_digests_are_refused(records: list[Record], digests: Digests, what: str) -> None:
    with pytest.raises(WireError, match=what):
        unpack_message(pack_message(records, digests=digests)[0], digests=digests)


def test_other_digests_than_the_expected_ones_are_sent() -> None:
    """A message says them itself then, but can still be read with the same expectation only."""
    data, _ = pack_message([pair(11, 12), ternary()], digests=[(11, 13), 5])
    assert data[3] == Kind.MESSAGE
    back = unpack_message(data, digests=[(11, 13), 5])
    for before, after in zip([pair(11, 12), ternary()], back, strict=True):
        assert_same(after, before)
    for digests in (None, [(11, 12), 5]):
        with pytest.raises(WireError, match="other digests"):
            unpack_message(data, digests=digests)


def test_a_record_of_one_part_takes_the_first_of_two_digests() -> None:
    [back] = unpack_message(
        pack_message([ternary()], digests=[(ternary().digest, 3)])[0], digests=[(ternary().digest, 3)]
    )
    assert_same(back, ternary())


def test_a_small_message_is_nearly_all_content() -> None:
    """Header and structure of a message of three layers and some hundred bytes are below 5 %."""
    many = four_layers()
    template = Template.of([low_rank(*p.shape, 2, f"other step {i}") for i, p in enumerate(many)])
    digests = [p.digest for p in many]
    data, sizes = pack_message(many, digests=digests, template=template)
    content = sum(len(pack_message([p], digests=[p.digest], template=Template.of([p]))[0]) for p in many)
    structure_each = 5 + 1 + 2 * 2  # frame; form; coder and length of two streams
    content -= structure_each * len(many)
    assert 500 < content < 1000
    assert len(data) - content <= 0.05 * len(data)
    assert len(data) - sum(sizes) == 5
    for before, after in zip(many, unpack_message(data, template=template, digests=digests), strict=True):
        assert_same(after, before)


def test_records_may_differ_from_the_template() -> None:
    template = Template.of([low_rank(12, 30, 2, "a"), pair(), ternary()])
    for many in ([low_rank(12, 30, 3, "a"), pair(), ternary()], [ternary()], [*EXAMPLES.values()], []):
        data, _ = pack_message(many, template=template)
        for before, after in zip(many, unpack_message(data, template=template), strict=True):
            assert_same(after, before)


def test_another_template_is_noticed() -> None:
    many = [ternary(), pair()]
    data, _ = pack_message(many, template=Template.of(many))
    for template in (
        None,
        Template.of([pair(), ternary()]),
        Template.of([ternary(12), pair()]),
        Template.of([ternary()]),
    ):
        with pytest.raises(WireError, match="another template" if template else "pass template="):
            unpack_message(data, template=template)


# What cannot be sent


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (Payload("a b", (), torch.float32), "printable ASCII"),
        (Payload("", (), torch.float32), "printable ASCII"),
        (Payload("x" * 64, (), torch.float32), "1 to 63"),
        (Payload("x", (), torch.float32, {"ä": symbols(1, 3)}), "printable ASCII"),
        (Payload("x", (), torch.complex64), "complex64; can be sent: 0 float32"),
        (Payload("x", (), torch.float32, {}, {"t": torch.ones(1, dtype=torch.complex64)}), "'t' .*complex64"),
        (Payload("x", (-1,), torch.float32), "at least 0"),
        (Payload("x", (1 << 40, 1 << 40), torch.float32), r"at most 2\*\*62"),
        (Payload("x", (1,) * 65, torch.float32), "65 dimensions"),
        (Payload("x", (), torch.float32, digest=1 << 64), "digest"),
        (Payload("x", (), torch.float32, digest=-1), "digest"),
        (
            Payload("x", (), torch.float32, {"q": Symbols(torch.tensor([1, 5, 0], dtype=torch.uint8), 5)}),
            "'q' .* 0 .. 5, allowed are 0 .. 4",
        ),
        (Payload("x", (), torch.float32, {"q": Symbols(torch.tensor([-1], dtype=torch.int16), 1000)}), "-1 .. -1"),
    ],
)
def test_what_cannot_be_sent_is_refused(payload: Payload, what: str) -> None:
    with pytest.raises(CodecError, match=what):
        pack(payload)


def test_unknown_coders_are_refused() -> None:
    with pytest.raises(OptionError, match="'best'"):
        pack(ternary(), coder="best")  # type: ignore[arg-type]


# Damage


@pytest.mark.parametrize(
    "data", [torch.zeros(20), torch.zeros(4, 5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
)
def test_what_is_no_frame_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(WireError):
        unpack(data)


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, 0, "not written by isgq"),
        (2, 2, "version 2, this is version 1"),
        (3, 9, "kind 9; known: 1 payload"),
        (4, 0, "checksum"),
        (20, 255, "checksum"),
    ],
)
def test_the_header_says_what_is_wrong(at: int, value: int, what: str) -> None:
    data = pack(ternary())
    data[at] = value
    with pytest.raises(WireError, match=what):
        unpack(data)


def test_payloads_and_messages_are_not_mixed_up() -> None:
    with pytest.raises(WireError, match="use unpack_message"):
        unpack(pack_message([ternary()])[0])
    with pytest.raises(WireError, match="use unpack"):
        unpack_message(pack(ternary()))


@pytest.mark.parametrize("coder", ["packed", "zstd", "ans"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_truncation_is_refused(name: str, coder: str) -> None:
    data = frame_of(EXAMPLES[name], coder)
    for size in range(len(data)):
        for frame in (Frame(data[:size]), Frame(data[:size]).with_checksum()):
            with pytest.raises(WireError):
                frame.read()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_longer_frame_is_refused(name: str) -> None:
    data = frame_of(EXAMPLES[name])
    for tail in (b"\x00", b"\x01", data):
        for frame in (Frame(data + tail), Frame(data + tail).with_checksum()):
            with pytest.raises(WireError):
                frame.read()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_damaged_byte_is_noticed(name: str) -> None:
    data = frame_of(EXAMPLES[name])
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            with pytest.raises(WireError):
                Frame(damaged).read()


@pytest.mark.parametrize("coder", ["packed", "zstd", "ans"])
@pytest.mark.parametrize("name", ["ternary", "pair", "half_digest", "sparse", "scalar", "empty", "skewed", "wide"])
def test_every_damaged_byte_behind_the_checksum_is_refused_or_another_valid_frame(name: str, coder: str) -> None:
    data = frame_of(EXAMPLES[name], coder)
    outcomes = set()
    for at in range(8, len(data)):
        for flip in (0x01, 0x84):
            damaged = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            outcomes.add(judge(Frame(damaged).with_checksum()))
    assert "refused" in outcomes


def test_all_errors_are_of_the_package() -> None:
    assert issubclass(WireError, IsgqError)
    assert issubclass(WireError, ValueError)


def test_bits_are_compared_as_bits() -> None:
    """The comparison that these tests rest on tells NaNs and zeros apart."""
    patterns = torch.tensor([0x7FC00000, 0x7FC00001, 0, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    assert len({bits_of(pattern) for pattern in patterns}) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("coder", CODERS)
def test_the_device_makes_no_difference(coder: str) -> None:
    for alphabet in (1, 2, 3, 9, 256, 1000, 1 << 40):
        stream = skewed(700_000, alphabet, 600)
        there = Payload("x", (700_000,), torch.float32, {"q": Symbols(stream.values.cuda(), alphabet)}, {}, 1)
        here = Payload("x", (700_000,), torch.float32, {"q": stream}, {}, 1)
        data = pack(there, coder=coder)
        assert data.device.type == "cpu"
        assert torch.equal(data, pack(here, coder=coder))
        back = unpack(data.cuda(), device="cuda")
        assert back.symbols["q"].values.device.type == "cuda"
        assert_same(back, here)
