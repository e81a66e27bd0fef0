"""The codec `rotated` in a session: all layers share one budget of real bytes, and the error stays bounded."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
import models
from isgq.codecs.rotated import Rotated, spectrum_of
from isgq.codecs.rotation import decompose
from isgq.core.codec import PlansTogether
from isgq.core.errors import NonFiniteError, OptionError, PeerNonFiniteError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.exchange import Loopback

MODELS: dict[str, tuple[str, tuple[int, ...]]] = {
    "fc": ("fc:hidden=120-40", (1, 16, 16)),
    "deep": ("fc:hidden=32-32-32", (1, 8, 8)),
    "lenet": ("lenet", (1, 28, 28)),
}


def small(shape: tuple[int, ...] = (1, 8, 8)) -> nn.Module:
    return models.build("fc:hidden=32-32-32", classes=10, in_shape=shape, seed=0)


def descend(model: nn.Module, shape: tuple[int, ...], steps: int, each: Callable[[], None] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, *shape, generator=generator)
    for _ in range(steps):
        y = torch.randint(10, (16,), generator=generator)
        x = centres[y] + torch.randn(16, *shape, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        each()


def sent_by(spec: str, name: str, **options: Any) -> tuple[float, int, list[str]]:
    """Mean of all bytes handed over in each of 50 steps after the first, which plans; parameters; what the log said."""
    text, shape = MODELS[name]
    model, exchange, said = models.build(text, classes=10, in_shape=shape, seed=0), Loopback(), []
    totals: list[int] = []
    log: Callable[[str], None] = said.append
    with isgq.instrument(model, spec, exchange=exchange, routes="factors", log=log, **options):
        descend(model, shape, 51, lambda: totals.append(exchange.sent))
    assert all(bool(p.grad is not None and p.grad.isfinite().all()) for p in model.parameters())
    return (totals[-1] - totals[0]) / 50, sum(p.numel() for p in model.parameters()), said


@pytest.mark.parametrize(("name", "ratio"), [("fc", 20), ("fc", 120), ("deep", 20), ("lenet", 600)])
def test_the_ratio_is_kept_in_real_bytes_with_all_headers(name: str, ratio: float) -> None:
    mean, numel, said = sent_by(f"rotated:ratio={ratio}", name)
    assert mean == pytest.approx(4 * numel / ratio, rel=0.05)
    assert said == []


@pytest.mark.parametrize(("name", "size"), [("fc", 1500), ("deep", 400)])
def test_so_are_bytes_a_step(name: str, size: int) -> None:
    mean, _, said = sent_by(f"rotated:bytes_per_step={size}", name)
    assert mean == pytest.approx(size, rel=0.05)
    assert said == []


def test_a_budget_that_is_too_small_is_exceeded_and_the_log_says_so_once() -> None:
    mean, numel, said = sent_by("rotated:ratio=100000", "deep")
    assert mean > 10 * 4 * numel / 100000
    assert len(said) == 1
    assert "ratio=100000.0 would leave an error of more than cap=8.0 times" in said[0]


def layers(seed: int = 0) -> list[Factors]:
    """Of one backward pass: gradients of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Factors(torch.randn(8, i, generator=generator) * scale, torch.randn(8, o, generator=generator))
        for i, o, scale in ((100, 30, 1.0), (30, 20, 0.1), (20, 5, 5.0))
    ]


def contract(x: Tensor, d: Tensor) -> Tensor:
    return d.T @ x


def matrix(factors: Factors) -> Tensor:
    return contract(torch.cat([factors.x, torch.ones(len(factors.x), 1)], 1), factors.d)


def together(codec: Rotated, seed: int, overhead: int = 0) -> list[Tensor]:
    assert isinstance(codec, PlansTogether)
    prepared = [codec.prepare(f, contract, Key(f"layer{i}", seed)) for i, f in enumerate(layers())]
    made = codec.encode_together(prepared, overhead, pytest.fail)
    decoded = [codec.decode_pair(payload) for payload in made]
    return [product.left.T @ product.right for product in decoded if not isinstance(product, Factors)]


def test_together_they_are_unbiased() -> None:
    """The plan depends on a trial with other random numbers, so the mean over keys is the gradient."""
    true, draws = [matrix(f) for f in layers()], 120
    sums, errors = [torch.zeros_like(g) for g in true], [0.0] * len(true)
    for seed in range(draws):
        for i, g in enumerate(together(Rotated(ratio=20), seed)):
            sums[i] += g
            errors[i] += float((g - true[i]).square().sum()) / draws
    for total, g, error in zip(sums, true, errors, strict=True):
        assert float((total / draws - g).square().sum()) < 1.5 * error / draws


def test_one_slope_for_all_layers_leaves_less_error_than_a_ratio_for_each() -> None:
    spectra = [spectrum_of(decompose(f, contract, Key("layer"))) for f in layers()]
    alone = [Rotated(ratio=20).plans([s], Rotated(ratio=20).budget([s]))[0][0] for s in spectra]
    shared, capped = Rotated(ratio=20).plans(spectra, Rotated(ratio=20).budget(spectra))
    assert not capped
    assert math.fsum(p.bits for p in shared) == pytest.approx(math.fsum(p.bits for p in alone), rel=0.01)
    assert math.fsum(p.variance for p in shared) < 0.7 * math.fsum(p.variance for p in alone)


@pytest.mark.parametrize("nmse", [0.1, 1.0, 4.0])
def test_the_error_is_shared_too(nmse: float) -> None:
    true = [matrix(f) for f in layers()]
    whole = sum(float(g.square().sum()) for g in true)
    errors = [
        sum(float((a - b).square().sum()) for a, b in zip(together(Rotated(nmse=nmse), seed), true, strict=True))
        for seed in range(60)
    ]
    assert sum(errors) / len(errors) / whole == pytest.approx(nmse, rel=0.15)


def test_the_cap_bounds_the_closed_form_whatever_is_asked() -> None:
    spectra = [spectrum_of(decompose(f, contract, Key("layer"))) for f in layers()]
    energy = sum(s.energy for s in spectra)
    for bits, cap in itertools.product((-1e4, 0.0, 100.0), (0.5, 8.0)):
        plans, capped = Rotated(ratio=1e6, cap=cap).plans(spectra, bits)
        assert capped
        assert math.fsum(p.variance for p in plans) == pytest.approx(cap * energy, rel=0.01)
    silent = [spectrum_of(decompose(Factors(f.x * 0, f.d * 0), contract, Key("zero"))) for f in layers()]
    assert [p.variance for p in Rotated(ratio=100).plans(silent, 1e3)[0]] == [0, 0, 0]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("rotated:ratio=3,bytes_per_step=100", "one of ratio, bytes_per_step, nmse and atoms"),
        ("rotated:bytes_per_step=0", "must be 1 or more"),
        ("rotated:bytes_per_step=100,share=layer", "with share=model"),
        ("rotated:share=all", "share='all'"),
    ],
)
def test_options_that_do_not_fit_are_refused(spec: str, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        isgq.codec(spec)


def test_share_layer_and_atoms_are_each_on_its_own() -> None:
    assert not Rotated(share="layer").together
    assert not Rotated(atoms=3).together
    for spec in ("rotated:share=layer,ratio=20", "rotated:atoms=2"):
        assert sent_by(spec, "deep")[0] > 0


class Words(nn.Module):
    """Indices, which are not in the budget, and a layer that is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(50, 40), nn.Linear(40, 60)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.table(tokens).mean(1))
        return result


@pytest.mark.parametrize("aggregate", ["gather", "two_pass"])
def test_indices_share_a_message_with_a_budget(aggregate: str) -> None:
    model = Words()
    down = {} if aggregate == "gather" else {"aggregate": aggregate}
    with isgq.instrument(model, "rotated:bytes_per_step=300", routes="factors", **down) as session:
        for step in range(3):
            model.zero_grad()
            model(torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(step))).square().mean().backward()
        assert [line.route for line in session.plan.lines] == ["factors", "factors"]
        assert session.traffic.by_parameter["out.weight"] < 3 * 300
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_nan_is_an_error_that_names_the_parameter() -> None:
    model = small()
    with isgq.instrument(model, "rotated:ratio=20", routes="factors"):
        descend(model, (1, 8, 8), 2)
        last = list(model.parameters())[-2]
        with torch.no_grad():
            last[0, 0] = math.nan
        with pytest.raises(PeerNonFiniteError) as refusal:
            descend(model, (1, 8, 8), 1)
        assert isinstance(refusal.value.__cause__, NonFiniteError)
