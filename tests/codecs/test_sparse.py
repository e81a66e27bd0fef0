"""top_k, random_k and rtop_k: the selection, its exact laws, and what stands on the wire."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isgq.codecs import codec, spec_of
from isgq.codecs.sparse import RandomK, RTopK, TopK, largest, random_subset, rtop_k
from isgq.core.codec import Codec
from isgq.core.errors import CodecError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.wire import pack, unpack
from tests.codecs.inputs import SHAPES, normal

CPU = torch.device("cpu")
KEY = Key("layer.weight", seed=1, step=2)


def decoded(spec: str | Codec, x: Tensor, key: Key = KEY) -> Tensor:
    built = codec(spec) if isinstance(spec, str) else spec
    assert isinstance(built, Codec)
    return built.decode(built.encode(x, key))


# -- selection


def oracle_largest(scores: Tensor, count: int) -> Tensor:
    """A stable sort: among equals the earlier."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


LARGE = 1 << 18
VECTORS = {
    "normal": lambda: normal(LARGE).abs(),
    "rounded, so mostly ties": lambda: (normal(LARGE) * 2).round().abs(),
    "constant": lambda: torch.ones(LARGE),
    "zero": lambda: torch.zeros(LARGE),
    "large only where no sample is taken": lambda: (torch.arange(LARGE) % 4 == 1).float() * normal(LARGE).abs(),
    "large only where a sample is taken": lambda: (torch.arange(LARGE) % 4 == 0).float() * normal(LARGE).abs(),
    "increasing": lambda: torch.arange(LARGE).float(),
    "decreasing": lambda: -torch.arange(LARGE).float(),
    "integers": lambda: torch.randint(-(2**31), 2**31 - 1, (LARGE,), generator=torch.Generator().manual_seed(0)).int(),
    "short": lambda: (normal(100) * 2).round().abs(),
    "one": lambda: torch.ones(1),
}


@pytest.mark.parametrize("name", VECTORS)
def test_largest_is_a_stable_sort(name: str) -> None:
    scores = VECTORS[name]()
    for share in (0, 1e-5, 0.001, 0.01, 0.24, 0.26, 0.9, 1):
        count = math.ceil(share * scores.numel())
        assert torch.equal(largest(scores, count), oracle_largest(scores, count))


def test_random_subsets_are_uniform() -> None:
    """All C(6, 3) = 20 sets, equally often: chi-squared with 19 degrees of freedom (99.99 % point: 51)."""
    counts = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    draws = 4000
    for step in range(draws):
        counts[tuple(random_subset(6, 3, Key("w", step=step).digest, CPU).tolist())] += 1
    expected = draws / len(counts)
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 51


def test_random_subset_of_many() -> None:
    drawn = torch.zeros(LARGE)
    for step in range(20):
        subset = random_subset(LARGE, LARGE // 100, Key("w", step=step).digest, CPU)
        assert subset.numel() == LARGE // 100
        assert bool((subset.diff() > 0).all())
        drawn[subset] += 1
    per_block = drawn.view(64, -1).sum(1)
    expected = 20 * (LARGE // 100) / 64
    assert float(((per_block - expected) ** 2 / expected).sum()) < 120  # 63 degrees of freedom: 99.99 % point 113


# -- rTop-k's laws (Barnes et al. 2020)


@pytest.mark.parametrize(("r", "k"), [(2, 2), (5, 2), (8, 3), (12, 5), (12, 12)])
def test_contraction_law_is_exact(r: int, k: int) -> None:
    """Averaged over all subsets of the r largest, which the draws are uniform over (see above)."""
    w = normal(12, seed=3).double()
    top = oracle_largest(w.abs(), r)
    errors = []
    for subset in itertools.combinations(top.tolist(), k):
        q = torch.zeros_like(w)
        q[list(subset)] = w[list(subset)]
        errors.append(float((w - q).square().sum()))
    law = float(w.square().sum() - k / r * w[top].square().sum())
    assert math.fsum(errors) / len(errors) == pytest.approx(law, rel=1e-12)
    assert law <= (1 - k / 12) * float(w.square().sum()) + 1e-12
    for step in range(20):
        drawn = rtop_k(w.float(), r, k, Key("w", step=step).digest)
        assert drawn.numel() == k
        assert bool(torch.isin(drawn, top).all())


@pytest.mark.parametrize("r", [10, 50, 200, 1000])
def test_mean_error_of_the_codec_follows_the_law(r: int) -> None:
    w = normal(1000, seed=4)
    errors = [float((w - decoded(RTopK(r=r, k=10), w, Key("w", step=s))).square().sum()) for s in range(200)]
    mean = math.fsum(errors) / len(errors)
    spread = math.sqrt(sum((e - mean) ** 2 for e in errors) / len(errors) / (len(errors) - 1))
    law = float(w.square().sum() - 10 / r * w[oracle_largest(w.abs(), r)].square().sum())
    assert abs(mean - law) <= 4.5 * spread + 1e-4


def test_union_of_supports() -> None:
    w, r, k, n = normal(1000, seed=5), 80, 20, 6
    sizes = []
    for step in range(100):
        keys = [Key("w", step=step, rank=rank) for rank in range(n)]
        sizes.append(int(torch.stack([decoded(RTopK(r=r, k=k), w, key) for key in keys]).ne(0).any(0).sum()))
    assert sum(sizes) / len(sizes) == pytest.approx(r * (1 - (1 - k / r) ** n), abs=1.5)
    assert {int(decoded(RTopK(r=k, k=k), w, key).ne(0).sum()) for key in keys} == {k}


def test_r_above_k_loses_on_one_worker_and_wins_on_many() -> None:
    w, r, k, n = normal(1000, seed=6), 160, 20, 8
    top = decoded(TopK(k=k), w)
    one, many = [], []
    for step in range(60):
        rebuilt = [decoded(RTopK(r=r, k=k, debias=True), w, Key("w", step=step, rank=rank)) for rank in range(n)]
        one.append(float((w - decoded(RTopK(r=r, k=k), w, Key("w", step=step))).square().sum()))
        many.append(float((w - torch.stack(rebuilt).mean(0)).square().sum()))
    best = w[oracle_largest(w.abs(), r)].square().sum()
    law = float(w.square().sum() - best + (r / k - 1) / n * best)
    assert sum(many) / len(many) == pytest.approx(law, rel=0.05)
    assert min(one) > float((w - top).square().sum())
    wins = float(w.square().sum() - best + (r / k - 1) / 32 * best)
    assert wins < float((w - top).square().sum())  # by the same law, from 32 workers on
    rebuilt = [decoded(RTopK(r=r, k=k, debias=True), w, Key("w", rank=rank)) for rank in range(64)]
    assert float((w - torch.stack(rebuilt).mean(0)).square().sum()) < float((w - top).square().sum())


def test_top_k_and_random_k_are_the_limits_of_rtop_k() -> None:
    x = normal(37, 11)
    for limit, same in (("rtop_k:r=9,k=9", "top_k:k=9"), ("rtop_k:r=1.0,k=9", "random_k:k=9,scale=false")):
        a, b = codec(limit), codec(same)
        assert isinstance(a, Codec)
        assert isinstance(b, Codec)
        assert torch.equal(pack(a.encode(x, KEY)), pack(replace(b.encode(x, KEY), codec="rtop_k")))
        assert torch.equal(decoded(a, x), decoded(b, x))


# -- how many, which, and on what


def test_fractions_and_counts() -> None:
    x = normal(1000)
    for option, kept in (("0.01", 10), ("0.0001", 1), ("1", 1), ("1.0", 1000), ("7", 7), ("5000", 1000), ("0.5", 500)):
        for name in ("top_k", "random_k", "rtop_k:r=1.0,k"):
            spec = f"{name}={option}" if ":" in name else f"{name}:k={option}"
            assert int(decoded(spec, x).ne(0).sum()) == kept


def test_top_k_keeps_the_largest() -> None:
    x = normal(9, 13)
    q = decoded("top_k:k=20", x).flatten()
    positions = oracle_largest(x.flatten().abs(), 20)
    assert torch.equal(q.nonzero().squeeze(1), positions)
    assert torch.equal(q[positions], x.flatten()[positions])


def test_ties_and_fewer_entries_than_k() -> None:
    assert decoded("top_k:k=2", torch.tensor([1.0, -1.0, 1.0, -1.0])).tolist() == [1.0, -1.0, 0.0, 0.0]
    sparse = torch.zeros(100)
    sparse[[7, 50]] = torch.tensor([2.0, -3.0])
    built = TopK(k=10)
    payload = built.encode(sparse, KEY)
    assert torch.equal(built.decode(payload), sparse)
    assert payload.tensors["values"].numel() == 2  # zeros are not sent


SPECS = [
    "top_k:k=0.1",
    "top_k:k=3,values=float16",
    "random_k:k=0.1",
    "random_k:k=3,scale=false",
    "random_k:k=0.1,shared=true",
    "random_k:k=0.1,shared=true,common=true,values=float16",
    "rtop_k:r=0.4,k=0.1",
    "rtop_k:r=30,k=3,debias=true,values=float16",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_any_tensor(spec: str, name: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    x = SHAPES[name].double().clamp(-limit, limit).to(dtype)
    built = codec(spec)
    assert isinstance(built, Codec)
    payload = built.encode(x, KEY)
    y = codec(spec_of(built)).decode(unpack(pack(payload)))  # type: ignore[union-attr,arg-type]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert bool(torch.isfinite(y).all())
    assert torch.equal(y, built.decode(payload))
    assert not y[x == 0].any()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_refused(spec: str, bad: float) -> None:
    x = normal(20)
    x[7] = bad
    with pytest.raises(NonFiniteError, match=r"layer\.weight"):
        codec(spec).encode(x, KEY)  # type: ignore[union-attr]


def test_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(NonFiniteError):
        TopK().encode(torch.tensor([1e300], dtype=torch.float64), KEY)


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-7, 1.0, 1e7, 3e38])
def test_float16_values_keep_eleven_bits_at_any_size(size: float) -> None:
    x = torch.tensor([1.0, 0.3, -0.001, 1e-6]) * size
    y = decoded("top_k:k=4,values=float16", x)
    assert bool(((y - x).abs() <= 2.0**-11 * x.abs() + 1e-43).all())


# -- mean


@pytest.mark.parametrize("spec", ["random_k:k=5", "random_k:k=5,shared=true", "rtop_k:r=1.0,k=5,debias=true"])
def test_unbiased_codecs_have_the_mean_and_variance_of_the_law(spec: str) -> None:
    """E ||q - x||**2 = (d / k - 1) ||x||**2 for the scaled ones."""
    built = codec(spec)
    assert built.unbiased
    x, draws = normal(20, seed=8), 1500
    q = torch.stack([decoded(built, x, Key("w", step=s)) for s in range(draws)])  # type: ignore[arg-type]
    deviation = x.abs() * math.sqrt((20 / 5 - 1) / draws)
    assert bool(((q.mean(0) - x).abs() <= 4.5 * deviation).all())
    error = (q - x).square().sum(1)
    assert abs(float(error.mean() - 3 * x.square().sum())) <= 4.5 * float(error.std()) / math.sqrt(draws) + 1e-4


BIASED = ["top_k", "random_k:scale=false", "random_k:values=float16", "rtop_k", "rtop_k:debias=true", "rtop_k:r=1.0"]


@pytest.mark.parametrize("spec", BIASED)
def test_the_others_do_not_claim_to_be_unbiased(spec: str) -> None:
    assert not codec(spec).unbiased


# -- shared positions


def test_shared_positions_are_not_sent() -> None:
    x = normal(1000)
    built = RandomK(k=100, shared=True)
    payload = built.encode(x, KEY)
    assert not payload.symbols
    assert payload.tensors["values"].numel() == 100
    assert pack(payload).numel() < 400 + 80
    assert torch.equal(RandomK(k=100, shared=True).decode(payload), decoded("random_k:k=100", x))


def test_common_positions_are_the_same_on_every_rank_and_change_with_the_step() -> None:
    x = normal(1000)

    def support(rank: int, step: int, *, common: bool) -> list[int]:
        key = Key("w", step=step, rank=rank)
        return decoded(RandomK(k=10, shared=True, common=common), x, key).nonzero().flatten().tolist()

    assert support(0, 0, common=True) == support(5, 0, common=True)
    assert support(0, 0, common=True) != support(0, 1, common=True)
    assert support(0, 0, common=False) != support(5, 0, common=False)


# -- errors

OPTIONS = [
    "top_k:k=0",
    "top_k:k=0.0",
    "top_k:k=-1",
    "top_k:k=1.5",
    "top_k:k=nan",
    "top_k:values=int8",
    "random_k:k=0",
    "random_k:common=true",
    "rtop_k:k=0",
    "rtop_k:r=0.0",
    "rtop_k:r=0.01,k=0.02",
    "rtop_k:r=5,k=6",
]


@pytest.mark.parametrize("spec", OPTIONS)
def test_options_outside_their_range(spec: str) -> None:
    with pytest.raises(OptionError):
        codec(spec)


@pytest.mark.parametrize("make", [lambda: TopK(k=True), lambda: TopK(values="int8"), lambda: RTopK(values="")])
def test_options_outside_their_range_in_python(make: object) -> None:
    with pytest.raises(OptionError):
        make()  # type: ignore[operator]


def test_r_as_a_share_never_falls_below_k() -> None:
    x = normal(20)
    assert torch.equal(decoded("rtop_k:r=0.1,k=10,debias=true", x), decoded("top_k:k=10", x))


def test_malformed_payloads_are_refused() -> None:
    x = normal(100)
    top, half, shared = TopK(k=9), TopK(k=9, values="float16"), RandomK(k=9, shared=True)
    payload = top.encode(x, KEY)
    values = payload.tensors["values"]
    cases: list[tuple[Codec, Payload]] = [
        (top, replace(payload, codec="random_k")),
        (top, replace(payload, tensors={})),
        (top, replace(payload, symbols={})),
        (top, replace(payload, tensors={"values": values[:-1]})),
        (top, replace(payload, tensors={"values": values.double()})),
        (top, replace(payload, shape=(10,))),
        (top, replace(payload, symbols={**payload.symbols, "high": Symbols(torch.ones(3), 2)})),
        (top, half.encode(x, KEY)),
        (half, payload),
        (half, replace(half.encode(x, KEY), tensors={"values": values.half()})),
        (RandomK(k=8, shared=True), shared.encode(x, KEY)),
        (shared, RandomK(k=8).encode(x, KEY)),
    ]
    for built, bad in cases:
        with pytest.raises(CodecError):
            built.decode(bad)
