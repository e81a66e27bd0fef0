"""Messages say what is new: digests and forms that both sides know are left out, and what does not fit is an error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isgq
from isgq.aggregate import Step
from isgq.core.errors import CodecError, WireError
from isgq.core.keys import Key
from isgq.core.payload import Factors, Payload
from isgq.correspondence import Correspondence
from isgq.exchange import Loopback, Pending
from isgq.launch import launch
from isgq.layers.capture import find_units
from isgq.records import Carrier, DirectCarrier, FactorCarrier, Record
from isgq.rows import Rows
from isgq.windows import Window
from isgq.wire import Template, pack_message
from isgq.wire.format import Kind
from tests.wire.records import assert_same


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 10))


def carriers(spec: str) -> list[Carrier]:
    pair, direct = isgq.choose_codecs(spec, None)
    units, _ = find_units(network(), lambda name: False)
    if pair is not None:
        windows = {name: Window(name, p) for name, p in network().named_parameters()}
        return [FactorCarrier(pair, unit, windows) for unit in units]
    assert direct is not None
    return [DirectCarrier(direct, unit.name, [Rows.whole(unit.name, unit.weight.shape)]) for unit in units]


def step_of(carriers: Sequence[Carrier], number: int, seed: int = 0) -> Step:
    return Step(number, 0, seed, [], [], carriers, {})


def encode(all_: Sequence[Carrier], keys: Sequence[Key], rows: int = 16) -> list[Record]:
    records: list[Record] = []
    for carrier, key in zip(all_, keys, strict=True):
        generator = torch.Generator().manual_seed(key.digest % 1000)
        if isinstance(carrier, FactorCarrier):
            outputs, inputs = carrier.unit.weight.shape
            parts = torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)
            records.append(carrier.codec.encode_pair(Factors(*parts), carrier.unit.contract, key))
        else:
            records.append(carrier.encode({carrier.name: torch.randn(carrier.rows[0].shape, generator=generator)}, key))
    return records


SPECS = ("isgq", "rotated", "minimum_variance:levels=2", "qsgd:levels=4", "nested_dithered", "random_k:k=0.1")
SHARED = "random_k:k=0.1,shared=true,common=true"  # whose digests are those of rank 0


@pytest.mark.parametrize("spec", [*SPECS, SHARED])
def test_later_messages_say_what_is_new(spec: str) -> None:
    """Both sides read all; no digest travels that the receiver can make; forms once."""
    all_, here, there = carriers(spec), Correspondence(), Correspondence()
    last: list[Record] = []
    for number in range(3):
        keys = step_of(all_, number).keys(all_, 1)
        records = encode(all_, keys)
        message, sizes = here.write(all_, records, keys)
        digests = [carrier.digests(key) for carrier, key in zip(all_, keys, strict=True)]
        assert torch.equal(message, pack_message(records, digests=digests, template=Template.of(last))[0])
        kind = Kind.MESSAGE if spec == SHARED else Kind.IMPLIED
        assert int(message[0]) == 0xC0 + kind if number else int(message[3]) == kind
        if number and spec == "isgq":  # nothing but contents, and forms of one byte
            assert len(message) == 5 + sum(sizes)
        for before, after in zip(records, there.read(message, all_, keys), strict=True):
            assert_same(after, before)
        here.commit()
        there.commit()
        last = records


def test_its_own_message_a_rank_reads_only_if_it_is_another() -> None:
    all_, here = carriers("isgq"), Correspondence()
    for number in range(2):
        keys = step_of(all_, number).keys(all_, 1)
        records = encode(all_, keys)
        message, _ = here.write(all_, records, keys)
        came = message.clone()
        assert here.read(came, all_, keys) is records
        for before, after in zip(records, here.read(came, all_, keys), strict=True):  # asked again, it reads
            assert after is not before
            assert_same(after, before)
        message, _ = here.write(all_, records, keys)
        came[-1] ^= 1
        with pytest.raises(WireError, match="checksum"):
            here.read(came, all_, keys)
        here.commit()


@pytest.mark.parametrize("spec", ["isgq", "rotated", "fp16", SHARED])
@pytest.mark.parametrize("change", [{"step": 8}, {"rank": 2}, {"seed": 1}, {"name": "other"}])
def test_a_message_of_another_step_rank_seed_or_tensor_is_an_error(spec: str, change: dict[str, Any]) -> None:
    all_ = carriers(spec)
    keys = step_of(all_, 7).keys(all_, 1)
    message, _ = Correspondence().write(all_, encode(all_, keys), keys)
    wrong = [keys[0], replace(keys[1], **change)]
    with pytest.raises(WireError, match="those of another step, rank or seed"):
        Correspondence().read(message, all_, wrong)


def test_a_message_for_other_gradients_is_an_error() -> None:
    all_ = carriers("isgq")
    keys = step_of(all_, 0).keys(all_, 0)
    message, _ = Correspondence().write(all_, encode(all_, keys), keys)
    with pytest.raises(WireError):
        Correspondence().read(message, all_[:1], keys[:1])
    with pytest.raises(CodecError, match="came for 0 gradients"):
        Correspondence().read(message, [], [])
    with pytest.raises(CodecError, match="no message came for 2 gradients"):
        Correspondence().read(message[:0], all_, keys)
    assert Correspondence().read(message[:0], [], []) == []


def test_a_refused_step_teaches_nothing_and_a_half_learned_one_is_noticed() -> None:
    all_, here, there = carriers("isgq"), Correspondence(), Correspondence()
    for number, outcome in enumerate((Correspondence.rollback, Correspondence.commit, Correspondence.forget)):
        keys = step_of(all_, number).keys(all_, 0)
        message, _ = here.write(all_, encode(all_, keys), keys)
        there.read(message, all_, keys)
        outcome(here)
        outcome(there)
    keys = step_of(all_, 3).keys(all_, 0)
    for number in (3, 4):
        keys = step_of(all_, number).keys(all_, 0)
        message, _ = here.write(all_, encode(all_, keys), keys)
        here.commit()
    with pytest.raises(WireError, match="another template"):
        there.read(message, all_, keys)


def test_other_batches_and_plain_gradients_describe_themselves() -> None:
    """A last, short batch, a missing tensor, and a plain gradient in the place of a pair, and back."""
    all_, here, there = carriers("isgq"), Correspondence(), Correspondence()
    for number, (rows, plain, sent) in enumerate([
        (16, 0, 2),
        (5, 0, 2),
        (16, 1, 2),
        (16, 0, 1),
        (16, 2, 2),
        (16, 0, 2),
    ]):
        keys = step_of(all_, number).keys(all_, 0)[-sent:]
        records = encode(all_[-sent:], keys, rows)
        for i, carrier in enumerate(all_[-sent:][:plain]):
            flat = torch.randn(sum(each.numel for each in carrier.rows))
            records[i] = Payload("exact", (flat.numel(),), flat.dtype, {}, {"values": flat})
        message, _ = here.write(all_[-sent:], records, keys)
        for before, after in zip(records, there.read(message, all_[-sent:], keys), strict=True):
            assert_same(after, before)
        here.commit()
        there.commit()


class Replay(Loopback):
    """Gives the second to last message of each length in the place of the last one, when told to."""

    replaying = False

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[int, Tensor] = {}

    def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        is_frame = message[:2].tolist() == [73, 81] or int(message[0]) >= 0xC0
        given = self.old.get(message.numel(), message) if self.replaying and is_frame else message
        self.old[message.numel()] = message
        return Pending(lambda: [given])


def test_a_session_refuses_a_message_of_an_earlier_step() -> None:
    model, exchange = network(), Replay()
    with isgq.instrument(model, "fp16", exchange=exchange) as session:
        step(model)
        step(model)
        exchange.replaying = True
        with pytest.raises(WireError, match="another step"):
            step(model)
        assert session.step == 2


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(16, 60)).square().sum().backward()


MODES: dict[str, dict[str, Any]] = {
    "gather": {"codec": "isgq", "routes": "factors"},
    "two_pass": {"codec": "isgq", "routes": "factors", "aggregate": "two_pass", "down": "qsgd"},
    "async": {"codec": "isgq", "routes": "factors", "aggregate": "async", "down": "qsgd"},
}


def run(steps: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name, options in MODES.items():
        model, seen = network(), []
        with isgq.instrument(model, **options) as session:
            if session.serves:
                service = session.serve(torch.optim.SGD(model.parameters(), lr=1e-3))
                report[name] = dict(service.by_worker)
                continue
            for _ in range(steps):
                step(model)
                seen.append((sum(session.messages().up), sum(session.messages().down)))
        report[name] = seen
    return report


def test_sessions_send_small_messages_both_ways() -> None:
    """In the second step at the latest, neither names nor layouts nor digests travel: 60 bytes less, and 20 down."""
    for rank, report in enumerate(launch(run, 2, args=(4,), timeout=60)):
        for name, seen in report.items():
            if name == "async" and rank == 0:
                assert seen == {1: 4}
                continue
            ups, downs = zip(*seen, strict=True)
            assert max(ups[1:]) < ups[0] - 60 + 20, name  # contents vary
            assert name == "gather" or max(downs[1:]) < downs[0] - 20 + 10, name
