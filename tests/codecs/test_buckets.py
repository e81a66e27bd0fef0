"""How tensors are cut: every element once, in the bucket that arithmetic says, whatever the sizes."""

import pytest
import torch

from isgq.codecs.buckets import Bucket, Buckets, check_bucket
from isgq.core import parallel
from isgq.core.errors import OptionError

CPU = torch.device("cpu")
CUTS = [
    (0, 1),
    (0, 5),
    (1, 1),
    (1, 9),
    (7, 7),
    (7, 3),
    (24, 8),
    (25, 8),
    (23, 8),
    (100, 33),
    (100, 16),
    (64, 64),
    (9, 1),
]


@pytest.mark.parametrize(("numel", "size"), CUTS)
@pytest.mark.parametrize("limit", [1, 8, 16, 1000])
def test_pieces_cover_each_element_once(numel: int, size: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PIECE", limit)
    cut = Buckets(numel, size)
    flat = torch.arange(numel)
    seen = 0
    for block, elements, buckets in cut.blocks(flat):
        assert elements.start == seen
        assert 0 < elements.stop - elements.start <= max(limit, 1)
        expected = flat[elements] // size
        assert torch.equal(expected.view_as(block), torch.arange(buckets.start, buckets.stop)[:, None].expand_as(block))
        assert torch.equal(block.reshape(-1), flat[elements])
        seen = elements.stop
    assert seen == numel


@pytest.mark.parametrize(("numel", "size"), CUTS)
def test_reductions_are_those_of_the_chunks(numel: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PIECE", 8)
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    cut, chunks = Buckets(numel, size), [c for c in flat.split(size) if c.numel()]
    assert cut.count == len(chunks)
    assert cut.absmax(flat).tolist() == [float(c.abs().max()) for c in chunks]
    assert cut.sizes(CPU).tolist() == [c.numel() for c in chunks]
    assert cut.mean_abs(flat, cut.absmax(flat)).tolist() == pytest.approx(
        [float(c.abs().mean()) for c in chunks], rel=1e-5
    )
    assert cut.l2(flat, cut.absmax(flat)).tolist() == pytest.approx([float(c.norm()) for c in chunks], rel=1e-5)
    assert bool((cut.l2(flat, cut.absmax(flat)) >= cut.absmax(flat)).all())
    assert cut.spread(cut.absmax(flat)).tolist() == [float(c.abs().max()) for c in chunks for _ in c]


@pytest.mark.parametrize(
    ("shape", "bucket", "size"),
    [
        ((6, 4), "tensor", 24),
        ((6, 4), "row", 4),
        ((6, 2, 2), "row", 4),
        ((6,), "row", 6),
        ((), "row", 1),
        ((0, 4), "row", 1),
        ((6, 4), 512, 512),
    ],
)
def test_words_mean_what_they_say(shape: tuple[int, ...], bucket: Bucket, size: int) -> None:
    assert Buckets.of(shape, bucket).size == size


@pytest.mark.parametrize("bucket", [0, -1, "rows", "", 1.5])
def test_what_is_no_bucket_is_refused(bucket: Bucket) -> None:
    with pytest.raises(OptionError, match="'tensor', 'row' or a number"):
        check_bucket(bucket)
