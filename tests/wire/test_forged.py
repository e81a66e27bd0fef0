"""Frames written by hand with a right checksum: every field that lies is refused, by its name, without allocating."""

import subprocess
import sys
import tracemalloc

import pytest
import torch

from isgq.core.errors import WireError
from isgq.core.payload import Payload, Symbols, symbol_dtype
from isgq.wire import Template, pack, pack_message, unpack
from isgq.wire.entropy import EXPANSION
from isgq.wire.reader import Reader, varint
from tests.fuzz_wire import Frame, tensor_of
from tests.wire.records import examples, ternary

HEADER = b"IQ\x01\x01\x00\x00\x00\x00"
MESSAGE = b"IQ\x01\x02\x00\x00\x00\x00"
HUGE = b"\xff" * 8 + b"\x7f"

NAMES = b"\x03\x08dithered\x05scale\x01q"
LAYOUT = b"\x01" + b"\x02\x00\x00\x02" + b"\x01\x01\x00\x01" + b"\x01\x02\x05"
RECORD = (
    b"\x01" + b"\x01" + b"\x02\x03\x01" + b"\xef\xcd\xab\x89\x67\x45\x23\x01" + b"\x00\x00\x00\x3f" + b"\x00\x0f\x13"
)
TERNARY = NAMES + LAYOUT + RECORD


def read(body: bytes, header: bytes = HEADER) -> None:
    Frame(header + body).with_checksum().read()


def swap(old: bytes, new: bytes) -> bytes:
    assert TERNARY.count(old) == 1
    return TERNARY.replace(old, new)


def test_the_frame_that_is_forged_here_is_the_right_one() -> None:
    assert Frame(HEADER + TERNARY).with_checksum().data == bytes(pack(ternary()).numpy())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        # tables
        (HUGE, "name takes 1 bytes"),
        (b"\x80\x00", "longer than need be"),
        (b"\xff" * 9 + b"\x01", "more than 63 bits"),
        (swap(NAMES, b"\x03\x08dithered\x05scale\x00"), "length 0"),
        (swap(NAMES, b"\x03\x08dithered\x40scale\x01q"), "length 64"),
        (swap(b"scale", b"sc le"), "printable ASCII"),
        (swap(b"scale", b"sc\xc3\xa4e"), "printable ASCII"),
        (swap(NAMES, b"\x03\x01q\x05scale\x01q"), "hold one of them twice"),
        (swap(NAMES, b"\x04\x08dithered\x05scale\x01q\x01r"), "name 3 of 4 is never used"),
        (NAMES + HUGE, "head of a layout takes 1 bytes"),
        (NAMES + b"\x02" + LAYOUT[1:] + LAYOUT[1:] + RECORD, "hold one of them twice"),
        (
            NAMES + b"\x02" + LAYOUT[1:] + LAYOUT[1:5].replace(b"\x02", b"\x00", 1) + b"\x00\x00" + RECORD,
            "layout 1 of 2",
        ),
        # the layout
        (swap(LAYOUT, b"\x01\x04" + LAYOUT[2:]), "digests"),
        (swap(LAYOUT, b"\x01\x82" + LAYOUT[2:]), "digests"),
        (swap(LAYOUT, b"\x01\x02\x01" + LAYOUT[3:]), "name 1 .* the first 0 are in use"),
        (swap(LAYOUT, b"\x01\x02\x09" + LAYOUT[3:]), "name 9 .* the table has 3"),
        (swap(LAYOUT, b"\x01\x02\x00\x0a" + LAYOUT[4:]), "dtype 10 .* unknown; known: 0 float32"),
        (swap(LAYOUT, b"\x01\x02\x00\x00\x41" + LAYOUT[5:]), "65 dimensions, allowed are 64"),
        (swap(LAYOUT, LAYOUT[:5] + HUGE + LAYOUT[6:]), "dtype|name|dimensions"),
        (swap(LAYOUT, LAYOUT[:5] + b"\x02\x01\x00\x01\x01\x00\x01" + LAYOUT[9:]), "same name: scale, scale"),
        (swap(LAYOUT, LAYOUT[:9] + b"\x02\x02\x05\x02\x05"), "same name: q, q"),
        (swap(LAYOUT, LAYOUT[:9] + HUGE + LAYOUT[10:]), "reference|alphabet|name"),
        # records
        (NAMES + LAYOUT + b"\x00", "holds 0"),
        (NAMES + LAYOUT + b"\x02" + RECORD[1:] + RECORD[1:], "holds 2"),
        (swap(RECORD, b"\x01\x00" + RECORD[2:]), "template"),
        (swap(RECORD, b"\x01\x02" + RECORD[2:]), "layout 1 .* the table has 1"),
        # sizes
        (swap(b"\x02\x03\x01\xef", HUGE + b"\x03\x01\xef"), r"multiply to at most 2\*\*62"),
        (swap(b"\x02\x03\x01\xef", b"\xff" * 4 + b"\x7f\xff\xff\xff\x0f\x01\xef"), r"q' of \d+ symbols takes"),
        (swap(b"\x02\x03\x01\xef", b"\x02\x03\xff\xff\xff\xff\x0f\xef"), "'scale' takes 17179869180 bytes"),
        (swap(b"\x02\x03\x01\xef", b"\x02\x03\x00\xef"), "."),
        (
            swap(b"\x02\x05", b"\x02\x04").replace(b"\x02\x03\x01\xef", b"\x02\x03\x01\x06\xef"),
            "does not call it dense",
        ),
        # digests
        (swap(b"\xef\xcd\xab\x89\x67\x45\x23\x01", bytes(8)), "zero or equal"),
        # contents
        (swap(b"\x00\x0f\x13", b"\x05\x0f\x13"), "coder 5; known: 0 packed"),
        (swap(b"\x00\x0f\x13", b"\x08\x0f\x13"), "written as 0, not 1"),
        (swap(b"\x00\x0f\x13", b"\x00\xf3\x2b"), "stream 'q' .* byte 243"),
        (swap(b"\x00\x0f\x13", b"\x11\x0f\x13"), "'q' .* Zstandard"),
        (swap(b"\x00\x0f\x13", b"\x12\x0f\x13"), "'q' at byte 56: byte 19 in a packed stream of 3 digits"),
        (swap(b"\x00\x0f\x13", varint(8 << 50 | 2)), "'q' of 6 symbols takes"),
        (TERNARY + b"\x00", "1 more follow"),
    ],
)
def test_fields_that_lie_are_refused(body: bytes, what: str) -> None:
    with pytest.raises(WireError, match=what):
        read(body)


@pytest.mark.parametrize(
    ("head", "digests", "fine"),
    [
        (b"\x01", b"", True),
        (b"\x03", b"\x01" + bytes(7), True),
        (b"\x09", b"\x01" + bytes(7), True),
        (b"\x0b", b"\x01" + bytes(7), True),
        (b"\x13", b"\x01" + bytes(7) + b"\x02" + bytes(7), True),
        (b"\x13", b"\x01" + bytes(7) + b"\x01" + bytes(7), False),
        (b"\x13", b"\x01" + bytes(7) + bytes(8), False),
        (b"\x11", b"\x01" + bytes(7) + b"\x02" + bytes(7), False),
        (b"\x0d", b"\x01" + bytes(7) + b"\x02" + bytes(7), False),
        (b"\x15", b"\x01" + bytes(7) + b"\x02" + bytes(7), False),
        (b"\x05", b"\x01" + bytes(7) + b"\x02" + bytes(7), False),
        (b"\x19", b"\x01" + bytes(7) + b"\x02" + bytes(7), False),
        (b"\x21", b"", False),
    ],
)
def test_digests_of_a_pair_have_one_spelling(head: bytes, digests: bytes, fine: bool) -> None:
    part = b"\x00\x00\x00\x00\x00"
    body = b"\x01\x01p\x01" + head + b"\x00" + part + part + b"\x01\x01" + digests
    if fine:
        read(body)
    else:
        with pytest.raises(WireError, match="digests"):
            read(body)


def test_bools_are_zero_or_one() -> None:
    data = bytes(pack(Payload("x", (1,), torch.bool, {}, {"b": torch.tensor([True])})).numpy())
    Frame(data[:-1] + b"\x00").with_checksum().read()
    with pytest.raises(WireError, match="'b': a bool is 2"):
        Frame(data[:-1] + b"\x02").with_checksum().read()


def test_the_form_of_the_template_has_one_spelling() -> None:
    template = Template.of([ternary()])
    data = bytes(pack_message([ternary()], template=template)[0].numpy())
    assert data[0] == 0xC2
    assert data[5] == 0
    spelled = data[:5] + b"\x01\x02\x03\x01" + data[6:]
    with pytest.raises(WireError, match="writes out the form"):
        Frame(spelled, None, template).with_checksum().read()
    whole = HEADER[:3] + b"\x02" + data[1:5] + b"\x00\x00\x01" + data[5:]
    with pytest.raises(WireError, match="has to be a short one"):
        Frame(whole, None, template).with_checksum().read()


def test_a_short_frame_says_nothing_without_its_template() -> None:
    data = bytes(pack_message([ternary()], template=Template.of([ternary()]))[0].numpy())
    for template in (None, Template()):
        with pytest.raises(WireError, match="pass template="):
            Frame(data, None, template).with_checksum().read()
    for cut in range(1, 5):
        with pytest.raises(WireError, match="its header alone has 5"):
            Frame(data[:cut], None, Template.of([ternary()])).read()


@pytest.mark.parametrize("alphabet", [1, 3])
def test_what_fills_a_stream_up_must_be_zero_and_there(alphabet: int) -> None:
    count = 50 * EXPANSION
    coder = "packed" if alphabet == 1 else "ans"
    data = bytes(
        pack(Payload("x", (count,), torch.float32, {"q": Symbols(torch.zeros(count), alphabet)}), coder=coder).numpy()
    )
    with pytest.raises(WireError, match="fills it up must be zero"):
        Frame(data[:-1] + b"\x01").with_checksum().read()
    with pytest.raises(WireError, match="only 49 are left"):
        Frame(data[:-1]).with_checksum().read()


@pytest.mark.parametrize("coder", ["auto", "packed", "zstd", "ans"])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 300, 1 << 40])
def test_what_a_frame_decodes_into_is_bounded(alphabet: int, coder: str) -> None:
    count = 1_000_000
    payload = Payload("x", (count,), torch.float32, {"q": Symbols(torch.zeros(count), alphabet)})
    data = pack(payload, coder=coder)
    assert count * symbol_dtype(alphabet).itemsize <= EXPANSION * len(data)
    assert torch.equal(unpack(data).symbols["q"].values, payload.symbols["q"].values)


FORGED_LENGTHS = """
import resource, sys
import torch
from isgq.core.errors import WireError
from isgq.wire import pack
from isgq.wire.reader import varint
from tests.fuzz_wire import Frame, limit_memory
from tests.wire.records import examples, sparse

records = [sparse(), examples()["skewed"], examples()["pair"], examples()["zeros"]]
frames = [bytes(pack(r, coder=c).numpy()) for r in records for c in ("packed", "zstd", "ans")]
limit_memory(48 << 20)
tried = refused = 0
for data in frames:
    for at in range(8, min(len(data), 200)):
        for number in (1 << 26, 1 << 31, (1 << 63) - 1):
            for cut in (1, 3):
                tried += 1
                forged = Frame(data[:at] + varint(number) + data[at + cut :]).with_checksum()
                try:
                    forged.read()
                except WireError:
                    refused += 1
print(tried, refused)
"""


def test_forged_lengths_allocate_nothing() -> None:
    """A process that may grow by 48 MiB refuses lengths up to 2**63, and MemoryError is no WireError."""
    out = subprocess.run([sys.executable, "-c", FORGED_LENGTHS], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    tried, refused = map(int, out.stdout.split())
    assert tried > 5000
    assert refused > 0.95 * tried


def test_refusing_takes_no_python_memory_either() -> None:
    bodies = [HUGE, NAMES + HUGE, NAMES + LAYOUT + HUGE + RECORD, swap(LAYOUT, LAYOUT[:9] + HUGE + LAYOUT[10:])]
    frames = [Frame(MESSAGE + body).with_checksum() for body in bodies]
    frames += [Frame(MESSAGE + b"\x00" * 3 + bytes(2000)).with_checksum()]
    tracemalloc.start()
    for frame in frames:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with pytest.raises(WireError):
            frame.read()
        assert tracemalloc.get_traced_memory()[1] - before < EXPANSION * len(frame.data)
    tracemalloc.stop()


def test_many_tiny_records_stay_within_the_bound() -> None:
    """Objects, too, are bounded by the bytes: here a record for every byte."""
    count = 5000
    body = b"\x01\x01x\x01\x00\x00\x00\x00\x00\x00" + varint(count) + b"\x01" * count
    frame = Frame(MESSAGE + body).with_checksum()
    tracemalloc.start()
    records = frame.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(records) == count
    assert peak < EXPANSION * len(frame.data)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 1 << 14, (1 << 14) - 1, 1 << 62, (1 << 63) - 1])
def test_integers_have_one_spelling(value: int) -> None:
    written = varint(value)
    assert Reader(memoryview(written)).varint("it") == value
    assert len(written) == max(1, -(-value.bit_length() // 7))
    longer = written[:-1] + bytes([written[-1] | 0x80, 0])
    with pytest.raises(WireError, match=r"longer than need be|more than 63 bits"):
        Reader(memoryview(longer)).varint("it")
    for size in range(len(written)):
        with pytest.raises(WireError, match="truncated"):
            Reader(memoryview(written[:size])).varint("it")


def test_examples_are_small_enough_to_be_tried_byte_by_byte() -> None:
    assert max(len(pack(record)) for record in examples().values()) < 1500
    assert len(tensor_of(b"")) == 0
