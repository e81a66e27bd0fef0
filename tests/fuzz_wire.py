"""Damages frames at random and watches how they are read: ``python -m tests.fuzz_wire --mutations 100000 --seed 0``.

Half of the mutants keep their checksum, so each must be refused; in the others it is put right, so that what lies
behind it is tried. Those may turn out as another valid frame. Then everything decoded must be as a payload has to be,
must survive another round trip, and, where the coder of a stream leaves no choice (packed symbols, ANS with the given
table), writing it again must give the very bytes read: no two spellings of the same thing.

Anything but a WireError or a valid payload fails, and so does running out of an address space that is hardly larger
than the process at its start: a forged length must not be believed.
"""

import argparse
import collections
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from isgq.core.errors import WireError
from isgq.core.payload import Payload, Symbols, symbol_dtype
from isgq.wire import Template, entropy, pack, pack_message, unpack, unpack_message
from isgq.wire.ans import ans_encode, frequencies
from isgq.wire.bits import pack_symbols, packed_size, whole_digits
from isgq.wire.entropy import Coder
from isgq.wire.format import Kind, checksum, checksum_at, read_frame
from isgq.wire.layout import Record, parts_of
from isgq.wire.record import Digests
from tests.wire.records import assert_same, examples, low_rank, pair, skewed, ternary

SPARE_MEMORY = 256 << 20


@dataclass(frozen=True)
class Frame:
    """A frame and what is needed to read it."""

    data: bytes
    digests: Digests | None = None
    template: Template | None = None

    def read(self) -> list[Record]:
        data = tensor_of(self.data)
        if len(self.data) > 3 and self.data[3] == Kind.PAYLOAD and self.digests is None and self.template is None:
            return [unpack(data)]
        return unpack_message(data, digests=self.digests, template=self.template)

    def with_checksum(self) -> "Frame":
        """The same with the checksum put right."""
        if not self.data or len(self.data) < checksum_at(self.data) + 4:
            return self
        crc = checksum(memoryview(self.data), self.template or Template(), self.digests).to_bytes(4, "little")
        at = checksum_at(self.data)
        return Frame(self.data[:at] + crc + self.data[at + 4 :], self.digests, self.template)


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def corpus() -> list[Frame]:
    """Frames of every kind, coder and dtype."""
    frames = [pack(record, coder=coder) for record in examples().values() for coder in ("packed", "zstd", "ans")]
    with mock.patch.object(entropy, "LARGE", 1):  # so that ANS codes bytes
        frames += [pack(record, coder="ans") for record in examples().values()]
    records = [low_rank(12, 30, 2, "first"), pair(), low_rank(30, 10, 2, "second"), ternary()]
    template = Template.of([*records[:2], low_rank(30, 10, 3, "other")])
    messages = [Frame(bytes(pack_message(chosen)[0].numpy())) for chosen in (records, [], list(examples().values()))]
    digests = [tuple(part.digest for part in (*parts_of(record), *parts_of(record))[:2]) for record in records]
    whole = Template.of(records)  # so that the frame is a short one
    for own, known in ((digests, None), (digests, template), ([1, 2, 3, 4], template), (digests, whole)):
        messages.append(Frame(bytes(pack_message(records, digests=own, template=known)[0].numpy()), own, known))
    return [Frame(bytes(frame.numpy())) for frame in frames] + messages


def mutate(data: bytes, rng: random.Random, others: list[Frame]) -> bytes:
    """One to three random changes: bits, bytes, lengths, cuts, insertions, copies."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, span = rng.randrange(len(out) + 1), rng.randrange(1, 12)
        match rng.randrange(8):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + span]
            case 4:
                out[at:at] = rng.randbytes(span)
            case 5:  # the largest, an over-long and a moderately large integer
                out[at : at + span] = rng.choice((
                    b"\xff" * 8 + b"\x7f",
                    b"\x80\x00",
                    b"\xff\xff\xff\x7f",
                    b"\x00" * span,
                ))
            case 6:
                other = rng.choice(others).data
                start = rng.randrange(len(other))
                out[at : at + span] = other[start : start + span]
            case 7:
                out += rng.randbytes(span)
    return bytes(out)


def judge(mutant: Frame) -> str:
    """Read a mutant whose checksum is right: ``"refused"`` or, if it is a valid frame, ``"valid"``.

    Raises:
        AssertionError: what came out is no valid payload, or has two spellings.
    """
    try:
        records = mutant.read()
    except WireError:
        return "refused"
    data = tensor_of(mutant.data)
    kind, fields = read_frame(data, mutant.digests, mutant.template or Template())
    for record, field in zip(records, fields, strict=True):
        for payload, part in zip(parts_of(record), field.parts, strict=True):
            for each in part.streams:
                body = bytes(data[each.stream.body].numpy())
                check_stream(payload.symbols[each.name], each.stream.coder, body)
    again, _ = pack_message(records)
    for before, after in zip(records, unpack_message(again), strict=True):
        assert_same(before, after)
    packed = all(s.stream.coder is Coder.PACKED for f in fields for p in f.parts for s in p.streams)
    if packed and mutant.digests is None:
        again = pack(records[0], coder="packed") if kind is Kind.PAYLOAD else pack_message(records, coder="packed")[0]
        assert bytes(again.numpy()) == mutant.data, "two spellings of the same frame"
    return "valid"


def check_stream(symbols: Symbols, coder: Coder, body: bytes) -> None:
    """Symbols are as they have to be, and ANS writes them alike."""
    values = symbols.values
    assert values.dtype == symbol_dtype(symbols.alphabet)
    assert not values.numel() or 0 <= int(values.min()) <= int(values.max()) < symbols.alphabet
    if coder in {Coder.ANS_COARSE, Coder.ANS_FINE}:
        codes = tensor_of(body[: packed_size(symbols.alphabet, 1 << coder.weight_bits)]).numpy()
        if coder is Coder.ANS_COARSE:
            codes = torch.cat([tensor_of(bytes(codes)) & 15, tensor_of(bytes(codes)) >> 4])[: symbols.alphabet].numpy()
        assert body[(symbols.alphabet * coder.weight_bits + 7) // 8 :] == ans_encode(
            values.numpy(), frequencies(codes, coder.weight_bits)
        ), "two spellings of the same ANS stream"
    elif coder is Coder.ANS_BYTES:
        whole = pack_symbols(values, symbols.alphabet, whole_digits).numpy()
        model = frequencies(tensor_of(body[:256]).numpy(), coder.weight_bits)
        assert body[256:] == ans_encode(whole, model), "two spellings of the same ANS stream"


def run(mutations: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Outcome and bytes of every mutant: ``"unchanged"``, ``"refused"`` or ``"valid"``.

    Raises:
        AssertionError: damage went unnoticed.
    """
    rng = random.Random(seed)
    frames = corpus()
    for index in range(mutations):
        frame = rng.choice(frames)
        mutant = Frame(mutate(frame.data, rng, frames), frame.digests, frame.template)
        if mutant.data == frame.data:
            yield "unchanged", mutant.data
        elif index % 2:
            yield f"checksum right, {judge(mutant.with_checksum())}", mutant.data
        else:
            try:
                mutant.read()
            except WireError:
                yield "checksum wrong, refused", mutant.data
            else:
                raise AssertionError("damage went unnoticed")


def limit_memory(spare: int) -> None:
    """Let the process grow by so many bytes and no more."""
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + spare, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pack(ternary(), coder="ans")  # whatever is loaded on first use
    pack(Payload("warm", (9000,), torch.float32, {"q": skewed(9000, 3, 900)}), coder="zstd")
    limit_memory(SPARE_MEMORY)
    outcomes: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    for outcome, _ in run(arguments.mutations, arguments.seed):
        outcomes[outcome] += 1
    for outcome, number in sorted(outcomes.items()):
        print(f"{number:8d}  {outcome}")
    print(
        f"{arguments.mutations} mutants, seed {arguments.seed}: no crash, no damage unnoticed, "
        f"no {SPARE_MEMORY >> 20} MiB of memory taken; {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
