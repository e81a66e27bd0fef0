"""Session: replicas stay equal, nothing is left behind, the ledger is right, and a saved session goes on as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import data
import isgq
import models
from isgq.codecs import codec_names
from isgq.core.errors import InstrumentError, IsgqError, MismatchError, OptionError
from isgq.exchange import Loopback, Pending, TorchExchange
from isgq.launch import launch
from tests.session_cases import STEPS


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def usable(name: str) -> str | None:
    """The codec's name if it works without options on factors or gradients."""
    try:
        isgq.choose_codecs(name, None)
    except (IsgqError, TypeError):  # it needs an option
        return None
    return name


CODECS = [name for name in codec_names() if usable(name)] + ["error_feedback(top_k:k=0.1)", "dense"]


class Counting:
    """Counts at the door, by itself, what is handed over."""

    def __init__(self, exchange: Any) -> None:
        self.exchange, self.handed = exchange, 0
        self.rank, self.world_size = exchange.rank, exchange.world_size

    @property
    def sent(self) -> int:
        return int(self.exchange.sent)

    @property
    def received(self) -> int:
        return int(self.exchange.received)

    def all_gather(self, message: Tensor, lengths: Any = None) -> Pending[list[Tensor]]:
        alone = isinstance(self.exchange, Loopback)
        longest = max(lengths) if lengths is not None else message.numel()
        self.handed += message.numel() if alone else longest + (8 if lengths is None else 0)
        return self.exchange.all_gather(message, lengths)  # type: ignore[no-any-return]

    def all_reduce_mean(self, x: Tensor) -> Pending[Tensor]:
        self.handed += x.numel() * x.element_size()
        return self.exchange.all_reduce_mean(x)  # type: ignore[no-any-return]

    def broadcast(self, x: Tensor, source: int = 0) -> Pending[Tensor]:
        alone = isinstance(self.exchange, Loopback)
        self.handed += x.numel() * x.element_size() if self.rank == source and not alone else 0
        return self.exchange.broadcast(x, source)  # type: ignore[no-any-return]


def batch(step: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(3, (rows,), generator=generator)


def train(model: nn.Module, steps: range, each: Callable[[], None] = lambda: None) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        x, y = batch(step, rank)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        each()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * (p.grad if p.grad is not None else 0)


def fingerprint(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).view(torch.int32)


def equal_everywhere(bits: Tensor) -> bool:
    every = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(every, bits)
    return all(torch.equal(bits, other) for other in every)


Case = tuple[str, dict[str, Any], int]
"""Codec, options of the session, and steps."""

CASES: dict[str, Case] = {spec: (spec, {}, STEPS) for spec in CODECS}
CASES |= {f"{spec} of the model": (spec, {"scope": "model"}, STEPS) for spec in ("fp16", "top_k:k=4", "qsgd")}
CASES["isgq, the rest as one"] = ("isgq", {"scope": "model", "dense": "error_feedback(top_k:k=0.1)"}, STEPS)


def replicas(cases: dict[str, Case]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name, (spec, options, steps) in cases.items():
        torch.manual_seed(dist.get_rank())  # the ranks begin with different weights
        model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))
        door = Counting(TorchExchange())
        seen: list[bytes] = []
        try:
            with isgq.instrument(model, spec, exchange=door, routes="factors", **options) as session:

                def look(model: nn.Module = model, seen: list[bytes] = seen) -> None:
                    seen.append(b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None))

                train(model, range(steps), look)
                traffic = session.traffic
                ledger = (traffic.sent, traffic.setup + sum(traffic.by_parameter.values()) + traffic.overhead)
            same = equal_everywhere(fingerprint(list(model.parameters())))
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, seen)
            unequal = [step for step, bits in enumerate(zip(*every, strict=True)) if len(set(bits)) > 1]
            report[name] = (len(seen), unequal, same, (*ledger, door.handed), traffic.overhead)
        except IsgqError as error:
            report[name] = f"{type(error).__name__}: {error}"
    return report


@pytest.fixture(scope="module")
def two_replicas() -> list[dict[str, Any]]:
    return launch(replicas, 2, args=(CASES,), timeout=30)


@pytest.mark.parametrize("name", CASES)
def test_replicas_hold_the_same_bits_and_the_ledger_what_went_out(
    two_replicas: list[dict[str, Any]], name: str
) -> None:
    for report in two_replicas:
        assert not isinstance(report[name], str), report[name]
        steps, unequal, same, sums, overhead = report[name]
        assert steps == CASES[name][2]
        assert unequal == []
        assert same
        assert len(set(sums)) == 1
        assert overhead >= 0


def traces(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    found = {f"{n}{h}": len(getattr(m, h)) for n, m in model.named_modules() for h in hooks}
    found |= {f"{n}.dict": sorted(vars(m)) for n, m in model.named_modules()}
    for name, p in model.named_parameters():
        found[name] = (len(p._backward_hooks or ()), len(getattr(p, "_post_accumulate_grad_hooks", None) or ()))
        found[f"{name}.dict"] = sorted(vars(p))
    return found


@pytest.mark.parametrize("broken", [False, True])
def test_close_leaves_nothing(broken: bool) -> None:
    model = make()
    before, keys = traces(model), list(model.state_dict())
    session = isgq.instrument(model, "exact")
    assert list(model.state_dict()) == keys
    train(model, range(2))
    hidden = model[0](batch(0, 0)[0])
    out = model[2](hidden)
    if broken:

        def burst(grad: Tensor) -> None:
            raise LookupError

        hidden.register_hook(burst)
        with pytest.raises(LookupError):
            out.sum().backward()
    session.close()
    session.close()
    assert traces(model) == before
    if not broken:
        out.sum().backward()  # the graph of before the end: hooks of a closed session do nothing
    assert session.step == 2
    with pytest.raises(InstrumentError, match="closed"):
        session.synchronize()
    isgq.instrument(model).close()


def test_a_broken_backward_can_be_repeated_on_its_graph() -> None:
    model, twin = make(), make()
    x, calls = batch(0, 0)[0], []

    def burst_once(grad: Tensor) -> None:
        calls.append(grad)
        if len(calls) == 1:
            raise LookupError

    with isgq.instrument(model, "exact") as session:
        hidden = model[0](x)
        value = model[2](model[1](hidden)).square().sum()
        hidden.register_hook(burst_once)
        with pytest.raises(LookupError):
            value.backward(retain_graph=True)
        model.zero_grad()
        value.backward()
        assert session.step == 1
    twin(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)


def test_only_one_session_at_a_time() -> None:
    model = make()
    whole = nn.Sequential(model)
    with isgq.instrument(model):
        for other in (model, whole, model[0]):
            with pytest.raises(InstrumentError, match="instrumented already"):
                isgq.instrument(other)
    isgq.instrument(model[0]).close()


def test_wrapped_and_untrainable_models_are_refused() -> None:
    with pytest.raises(InstrumentError, match=r"model\.module"):
        isgq.instrument(nn.DataParallel(make()))
    with pytest.raises(InstrumentError, match="no trainable"):
        isgq.instrument(nn.ReLU())


def one_step(spec: str, model: nn.Module, **options: Any) -> tuple[isgq.Session, list[Tensor]]:
    with isgq.instrument(model, spec, **options) as session:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).to(next(model.parameters()).dtype))
        loss.float().square().mean().backward()
    return session, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_codec_of_single_elements_gives_the_same_for_each_tensor_and_for_the_model() -> None:
    each, by_tensor = one_step("fp16", make())
    whole, by_model = one_step("fp16", make(), scope="model")
    assert all(torch.equal(a, b) for a, b in zip(by_tensor, by_model, strict=True))
    assert list(whole.traffic.by_parameter) == ["model/torch.float32/cpu"]
    assert len(each.traffic.by_parameter) == 4
    assert whole.traffic.sent < each.traffic.sent


def test_top_k_of_the_model_keeps_the_largest_of_all_tensors_and_has_one_header() -> None:
    exact, gradients = one_step("dense", make())
    each, by_tensor = one_step("top_k:k=4", make())
    whole, by_model = one_step("top_k:k=16", make(), scope="model")  # four tensors: as many entries
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    kept = torch.zeros_like(flat).scatter(0, largest := flat.abs().topk(16).indices, flat[largest])
    assert torch.equal(torch.cat([gradient.reshape(-1) for gradient in by_model]), kept)
    assert sum(int(gradient.count_nonzero()) for gradient in by_tensor) == 15  # the last bias has three
    assert whole.traffic.sent < each.traffic.sent < exact.traffic.sent


def test_the_model_is_one_vector_for_each_dtype() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).bfloat16())  # type: ignore[no-any-return]

    _, expected = one_step("dense", Mixed())
    session, got = one_step("bf16", Mixed(), scope="model")
    sizes = session.traffic.by_parameter
    assert list(sizes) == ["model/torch.float32/cpu", "model/torch.bfloat16/cpu"]
    assert [p.dtype for p in got] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(torch.equal(a, b.bfloat16().to(b.dtype)) for a, b in zip(got, expected, strict=True))
    for dtype, entries in (("float32", 54), ("bfloat16", 21)):
        assert 2 * entries < sizes[f"model/torch.{dtype}/cpu"] < 2 * entries + 64


@pytest.mark.parametrize("option", [{"routes": "both"}, {"sync": "never"}, {"scope": "layer"}, {"codec": "zip"}])
def test_unknown_options_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(option.values()))):
        isgq.instrument(make(), **option)


@pytest.mark.parametrize("skip", ["nothing here", ["0.weight", "9.weight"], {"weight"}])
def test_what_is_skipped_must_be_there(skip: Any) -> None:
    with pytest.raises(
        OptionError, match=r"no parameter of the model is meant; there are 0\.weight, 0\.bias, 2\.weight"
    ):
        isgq.instrument(make(), skip=skip)
    isgq.instrument(make(), skip="").close()  # a pattern that means all


def test_a_thawed_parameter_is_refused() -> None:
    model = make()
    model[0].requires_grad_(False)
    with isgq.instrument(model, "exact"):
        model[0].requires_grad_(True)
        with pytest.raises(IsgqError) as caught:
            train(model, range(1))
        assert isinstance(caught.value.__cause__, InstrumentError)


@pytest.mark.parametrize("spec", ["dithered:levels=2", "lloyd_max", "error_feedback(top_k:k=0.1)"])
def test_a_saved_session_goes_on_bit_for_bit(spec: str) -> None:
    one, two = make(), make()
    with isgq.instrument(one, spec, seed=5) as session:
        train(one, range(7))
        state = session.state_dict()
        two.load_state_dict(one.state_dict())
        train(one, range(7, 14))
    with isgq.instrument(two, spec, seed=5) as session:
        session.load_state_dict(state)
        train(two, range(7, 14))
    assert torch.equal(fingerprint(list(one.parameters())), fingerprint(list(two.parameters())))


@pytest.mark.parametrize("change", [{"seed": 1}, {"codec": "sign"}, {"rank": 3}])
def test_a_state_of_another_session_is_refused(change: dict[str, Any]) -> None:
    with isgq.instrument(make(), "exact") as session, pytest.raises(MismatchError, match=next(iter(change))):
        session.load_state_dict(session.state_dict() | change)


def bytes_per_step(workers: int, images: Tensor, labels: Tensor, steps: int = 16) -> tuple[float, int]:
    """What worker 0 of ``workers`` sends each step, and its dense weights' bytes; 128 samples in all."""
    model = models.build("fc:hidden=1000-300-100", classes=10, in_shape=(1, 28, 28), seed=0)
    rows, optimizer = 128 // workers, torch.optim.SGD(model.parameters(), lr=0.05)
    with isgq.instrument(model, "dithered:levels=1,bucket=row") as session:
        for step in range(steps):
            if step == steps // 2:
                before = session.traffic.sent
            some = slice(step * rows, (step + 1) * rows)
            optimizer.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            optimizer.step()
        sent = (session.traffic.sent - before) / (steps - steps // 2)
    return sent, sum(4 * p.numel() for name, p in model.named_parameters() if name.endswith("weight"))


def test_bytes_of_a_worker_fall_with_the_number_of_workers_and_far_below_dense() -> None:
    digits = data.load("mnist5k")
    sent = {workers: bytes_per_step(workers, digits.train_x - 0.13, digits.train_y) for workers in (1, 2, 4, 8)}
    for workers, (each, _) in sent.items():
        assert each * workers == pytest.approx(sent[1][0], rel=0.05)
    each, dense = sent[8]
    assert dense / each >= 350
