"""Pieces by several threads: the same results, in order, and errors come out."""

import threading
from collections.abc import Iterator

import pytest
import torch

from isgq.codecs import codec
from isgq.core import parallel
from isgq.core.keys import Key, uniform
from isgq.core.parallel import map_pieces


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order(threads: int) -> None:
    assert map_pieces(lambda piece: piece * piece, range(100)) == [piece * piece for piece in range(100)]
    assert map_pieces(str, []) == []


def test_threads_share_the_pieces(threads: int) -> None:
    meeting = threading.Barrier(threads, timeout=30)
    names = map_pieces(lambda at: meeting.wait() if at < threads else None, range(100))
    assert sorted(names[:threads]) == list(range(threads))  # all were inside at once
    assert not [thread for thread in threading.enumerate() if thread.name == "isgq-pieces"]


@pytest.mark.parametrize("bad", [0, 50, 99])
def test_an_error_in_any_piece_is_raised(threads: int, bad: int) -> None:
    def work(piece: int) -> None:
        if piece == bad:
            raise KeyError(piece)

    with pytest.raises(KeyError, match=str(bad)):
        map_pieces(work, range(100))


def test_modes_of_the_caller_hold(threads: int) -> None:
    with torch.inference_mode():
        out = torch.zeros(100)
        map_pieces(lambda at: out[at].add_(at), range(100))
        assert out.tolist() == list(range(100))
    assert map_pieces(lambda _: torch.is_inference_mode_enabled(), range(100)) == [False] * 100


@pytest.mark.parametrize(
    "spec", ["dithered", "qsgd", "int8", "sign", "one_bit", "nested_dithered", "lloyd_max", "qcs", "fp16"]
)
def test_a_codec_does_not_depend_on_threads(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = uniform(1, "x", (70, 300))
    before = torch.get_num_threads()
    monkeypatch.setattr(parallel, "PIECE", 600)
    decoded = []
    for count in (1, 3):
        torch.set_num_threads(count)
        decoded.append(codec(spec).decode(codec(spec).encode(x, Key("x"))))
    torch.set_num_threads(before)
    assert torch.equal(*decoded)
