"""Options that change with the step."""

import pytest
import torch

import isgq
from isgq.codecs import spec_of
from isgq.codecs.schedule import Scheduled, ScheduledPair
from isgq.core.errors import OptionError
from isgq.core.payload import LowRank


def test_geometric_between_fractions_and_constant_afterwards() -> None:
    codec = isgq.codec("top_k:k=0.25->0.0025@100")
    assert isinstance(codec, Scheduled)
    assert [spec_of(codec.at(step)).split("k=")[1].split(",")[0] for step in (0, 100, 10**6)] == [
        "0.25",
        "0.0025",
        "0.0025",
    ]
    middle = float(spec_of(codec.at(50)).split("k=")[1].split(",")[0])
    assert middle == pytest.approx(0.025)


def test_integers_stay_integers() -> None:
    codec = isgq.codec("qsgd:levels=100->1@10")
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    errors = []
    for step in (0, 5, 10):
        payload = isgq.wire.unpack(isgq.wire.pack(codec.encode(x, isgq.Key("w", step=step))))
        errors.append(float((isgq.codec(spec_of(codec)).decode(payload) - x).norm()))
    assert errors == sorted(errors)
    assert errors[0] < 0.2 * errors[2]


def test_inside_error_feedback() -> None:
    codec = isgq.codec("error_feedback(top_k:k=0.5->0.01@10)")
    x = torch.ones(1000)
    counts = [int((codec.decode(codec.encode(x, isgq.Key("w", step=s))) != 0).sum()) for s in (0, 10)]
    assert counts == [500, 10]


def test_codecs_of_pairs_follow_schedules_too() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = isgq.Factors(torch.randn(16, 60, generator=generator), torch.randn(16, 40, generator=generator))
    codec = isgq.codec("rotated:ratio=4->40@10")
    assert isinstance(codec, ScheduledPair)
    assert codec.together
    sizes, errors = [], []
    for step in (0, 5, 10, 1000):
        key = isgq.Key("w", step=step)
        prepared = [codec.prepare(factors, contract, key)]
        for payload in (codec.encode_pair(factors, contract, key), *codec.encode_together(prepared, 0, pytest.fail)):
            packed = isgq.wire.pack(payload)
            decoded = codec.decode_pair(isgq.wire.unpack(packed))
            assert isinstance(decoded, LowRank)
        sizes.append(packed.numel())
        errors.append(float((decoded.weight() - contract(factors.x, factors.d)).norm()))
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]
    assert sizes[3] == pytest.approx(sizes[2], rel=0.2)
    assert errors[0] < errors[1] < errors[2]


def test_what_learns_cannot_be_scheduled() -> None:
    with pytest.raises(OptionError, match="learns from step to step"):
        isgq.codec("rotated:ratio=4->40@10,bases=learned")


def contract(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return d.T @ x


@pytest.mark.parametrize("spec", ["top_k:k=0.5->0.1", "top_k:k=0.5->@5", "top_k:k=a->b@5", "top_k:k=0.5->0.1@0"])
def test_malformed_schedules_are_refused(spec: str) -> None:
    with pytest.raises(OptionError, match="schedule"):
        isgq.codec(spec)
