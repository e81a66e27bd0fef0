"""The format does not change unnoticed: frames committed under ``golden/``.

``python -m tests.wire.test_golden`` writes them anew. Zstandard may compress better in another version, so its frames
are only read.
"""

from pathlib import Path

import pytest

from isgq.wire import Template, pack, pack_message, unpack, unpack_message
from tests.fuzz_wire import tensor_of
from tests.wire.records import assert_same, examples, low_rank, pair, ternary

FOLDER = Path(__file__).parent / "golden"
EXAMPLES = examples()
PAYLOADS = [(name, "packed") for name in EXAMPLES if name != "zeros"]
PAYLOADS += [("zeros", "ans"), ("skewed", "ans"), ("pair", "ans"), ("skewed", "zstd")]

MANY = [low_rank(12, 30, 2, "first"), pair(), low_rank(30, 10, 2, "second"), ternary()]
DIGESTS = [MANY[0].digest, (11, 12), MANY[2].digest, ternary().digest]
TEMPLATE = Template.of([*MANY[:2], low_rank(30, 10, 3, "other")])


def frames() -> dict[str, bytes]:
    """File name and bytes of every golden frame."""
    out = {f"{name}.{coder}": pack(EXAMPLES[name], coder=coder) for name, coder in PAYLOADS}
    out["message"] = pack_message(MANY)[0]
    out["message.template"] = pack_message(MANY, digests=DIGESTS, template=TEMPLATE)[0]
    return {f"{name}.bin": bytes(data.numpy()) for name, data in out.items()}


@pytest.mark.parametrize("name", frames())
def test_frames_are_the_golden_ones(name: str) -> None:
    if "zstd" not in name:
        assert frames()[name] == (FOLDER / name).read_bytes()


@pytest.mark.parametrize(("name", "coder"), PAYLOADS)
def test_golden_payloads_are_read(name: str, coder: str) -> None:
    assert_same(unpack(tensor_of((FOLDER / f"{name}.{coder}.bin").read_bytes())), EXAMPLES[name])


def test_golden_messages_are_read() -> None:
    plain = unpack_message(tensor_of((FOLDER / "message.bin").read_bytes()))
    short = tensor_of((FOLDER / "message.template.bin").read_bytes())
    for read in (plain, unpack_message(short, digests=DIGESTS, template=TEMPLATE)):
        for before, after in zip(MANY, read, strict=True):
            assert_same(after, before)


def test_no_golden_frame_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(frames())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, frame in frames().items():
        (FOLDER / file_name).write_bytes(frame)
