"""Messages that leave during backward: the same gradients, whatever happens until it ends."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isgq
from isgq.codecs import codec_names
from isgq.core.errors import ExchangeError, IsgqError, OptionError, PeerNonFiniteError
from isgq.core.keys import Key, uniform
from isgq.exchange import Loopback
from isgq.launch import launch
from isgq.overlap import Overlapped, buckets_of
from isgq.windows import Window
from tests.session_cases import CASES, Turn, loss

TINY = 1e-6
"""MiB: every layer is a bucket."""


def deep(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())))


def x_of(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def run(model: nn.Module, steps: int = 4, rank: int = 0) -> list[list[Tensor | None]]:
    found = []
    for step in range(steps):
        model.zero_grad()
        loss(model(x_of(step, rank))).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def of_case(name: str, **options: Any) -> list[list[Tensor | None]]:
    torch.manual_seed(0)
    case = CASES[name]
    model, found = case.build().to(torch.float32 if case.tolerance > 1e-6 else torch.float64), []
    with isgq.instrument(model, "exact", routes="factors", **case.options, **options) as session:
        for step in range(3):
            case.zero(model)
            case.step(model, Turn(0, step, session.no_sync, model))
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options.get("sync") != "manual"])
def test_every_use_of_a_model_has_the_same_gradients(name: str) -> None:
    plain, ahead = (of_case(name, log=lambda _: None, bucket_cap_mb=cap) for cap in (None, TINY))
    torch.testing.assert_close(ahead, plain, rtol=0, atol=0)


def test_messages_leave_layer_by_layer_while_backward_goes_on() -> None:
    model, events = deep(), []

    class Door(Loopback):
        def beside(self) -> Loopback:
            return Watched()

    class Watched(Loopback):
        def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Any:
            events.append("sent" if message.numel() else "nothing")
            return super().all_gather(message, lengths)

    with isgq.instrument(model, "isgq", routes="factors", exchange=Door(), bucket_cap_mb=TINY) as session:
        assert isinstance(session._aggregate, Overlapped)
        submit = session._aggregate._submit

        def passed(*_: Any) -> None:
            submit(int).result()  # let the thread keep pace with the backward pass
            events.append("layer")

        for layer in model[::2]:
            layer.register_full_backward_hook(passed)
        run(model, 1)
        events.clear()
        run(model, 1)
    assert events == ["sent", "layer"] * 3 + ["layer"]


def test_buckets_fill_from_the_last_layer_on_and_the_rest_waits_for_the_end() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))  # a MiB each
    with isgq.instrument(model, "isgq", routes="factors", exchange=Loopback()) as session:
        loss(model(torch.randn(2, 512))).backward()
        carriers = session._carriers
    names = [[carrier.name for carrier in bucket] for bucket in buckets_of(carriers, 2)]
    assert names == [["5.weight", "4.weight"], ["3.weight", "2.weight"]]
    assert buckets_of(carriers, 100) == []
    assert [len(bucket) for bucket in buckets_of(carriers, 0.5)] == [1] * 5


def test_records_that_share_their_bytes_wait_for_the_end() -> None:
    for spec, ahead in (("rotated:ratio=4", 0), ("rotated:ratio=4,share=layer", 3), ("isgq", 3)):
        model = deep()
        with isgq.instrument(model, spec, routes="factors", exchange=Loopback()) as session:
            run(model, 1)
            assert len(buckets_of(session._carriers, TINY)) == ahead


def usable(name: str) -> bool:
    try:
        isgq.choose_codecs(name, None)
    except (IsgqError, TypeError):
        return False
    return True


SPECS = [
    *(name for name in codec_names() if usable(name)),
    *("error_feedback(top_k:k=0.1)", "momentum_correction(top_k:k=0.1)", "rotated:nmse=0.5,share=layer", "dense"),
]


def replicas(specs: Sequence[str]) -> list[tuple[bool, bool, int, int]]:
    """For each: whether all is as without overlap, on all ranks, and bytes sent without it and with it."""
    rank, report = dist.get_rank(), []
    for spec in specs:
        found, sent = [], []
        for cap in (None, TINY):
            model = deep()
            with isgq.instrument(model, spec, bucket_cap_mb=cap, log=lambda _: None) as session:
                found.append(run(model, 4, rank))
                traffic = session.traffic
                sent.append(traffic.sent)
                assert traffic.sent == traffic.setup + sum(traffic.by_parameter.values()) + traffic.overhead
        flat = [torch.cat([g.reshape(-1) for step in each for g in step if g is not None]) for each in found]
        every = [torch.empty_like(flat[1]) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat[1])
        same = all(torch.equal(every[0], other) for other in every)
        report.append((torch.equal(*flat), same, *sent))
    return report  # type: ignore[return-value]


def test_all_codecs_give_the_same_bits_on_two_ranks() -> None:
    for report in launch(replicas, 2, args=(SPECS,), timeout=60):
        for spec, (equal, same, plain, ahead) in zip(SPECS, report, strict=True):
            assert equal, spec
            assert same, spec
            assert plain <= ahead < plain + 4 * 2000, spec


# ---- what was sent ahead and does not hold

Spoil = Callable[[nn.Sequential, int], None]


def edited(model: nn.Sequential, step: int) -> None:
    """The last layer's gradient is changed when the first layer's comes, and nothing tells that beforehand."""
    model[0].weight.register_hook(lambda _: model[6].weight.grad.mul_(0.5))
    loss(model(x_of(step))).backward()


def watched(model: nn.Sequential, step: int) -> None:
    def shrink(p: Tensor) -> None:
        p.grad.mul_(0.5)  # type: ignore[union-attr]

    if not step:
        model[6].weight.register_post_accumulate_grad_hook(shrink)
    loss(model(x_of(step))).backward()


def broken(model: nn.Sequential, step: int) -> None:
    """A pass breaks off when three layers have been sent; another follows."""

    def burst(_: Tensor) -> None:
        raise LookupError

    hidden = model[0](x_of(step + 50))
    value = loss(model[1:](hidden))
    hidden.register_hook(burst)
    with pytest.raises(LookupError):
        value.backward()
    model.zero_grad()
    loss(model(x_of(step))).backward()


def half(model: nn.Sequential, step: int) -> None:
    """A layer in the middle is not used."""
    loss(model[:2](x_of(step)), model[4:](x_of(step))).backward()


def accumulated(model: nn.Sequential, step: int) -> None:
    for _ in range(2):
        loss(model(x_of(step))).backward()


@pytest.mark.parametrize("spoil", [edited, watched, broken, half, accumulated])
@pytest.mark.parametrize("spec", ["exact", "isgq", "error_feedback(top_k:k=0.2)", "momentum_correction(sign)"])
def test_what_does_not_hold_is_said_again(spec: str, spoil: Spoil) -> None:
    found = []
    for cap in (None, TINY):
        model, gradients = deep(), []
        with isgq.instrument(model, spec, routes="factors", bucket_cap_mb=cap, log=lambda _: None):
            for step in range(5):
                model.zero_grad()
                spoil(model, step)
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        found.append(gradients)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_scaled_loss_and_an_overflow() -> None:
    found = []
    for cap in (None, TINY):
        model, scaler = deep(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"scaler": scaler, "bucket_cap_mb": cap}
        with isgq.instrument(model, "error_feedback(top_k:k=0.2)", **options):
            for step in range(6):
                optimizer.zero_grad()
                x = x_of(step)
                if step == 3:
                    x[0, 0] = float("inf")
                scaler.scale(loss(model(x))).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append([p.detach().clone() for p in model.parameters()])
        assert scaler.get_scale() == 2.0**9
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def breaks_off(model: nn.Sequential, x: Tensor, last: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """A backward pass that raises when two layers have been sent."""

    def burst(_: Tensor) -> None:
        raise LookupError

    hidden = model[:4](x)
    hidden.register_hook(burst)
    with pytest.raises(LookupError):
        loss(last(model[4:](hidden))).backward()


@pytest.mark.parametrize("spec", ["isgq", "error_feedback(top_k:k=0.2)"])
def test_what_was_wrong_with_a_pass_that_broke_off_is_not_said_of_the_next(spec: str) -> None:
    found = []
    for cap in (None, TINY):
        model = deep()
        with isgq.instrument(model, spec, routes="factors", bucket_cap_mb=cap, log=lambda _: None):
            run(model, 2)
            model.zero_grad()
            breaks_off(model, x_of(9), lambda x: x * float("nan"))
            found.append(run(model, 2))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["error_feedback(top_k:k=0.2)", "momentum_correction(sign)"])
def test_memory_that_is_saved_is_that_of_the_last_step(spec: str) -> None:
    model = deep()
    with isgq.instrument(model, spec, routes="factors", bucket_cap_mb=TINY, log=lambda _: None) as session:
        run(model, 2)
        before = session.state_dict()["memory"]
        model.zero_grad()
        breaks_off(model, x_of(9))
        torch.testing.assert_close(session.state_dict()["memory"], before, rtol=0, atol=0)
        found = run(model, 2)
    again = deep()
    with isgq.instrument(again, spec, routes="factors", log=lambda _: None):
        run(again, 2)
        torch.testing.assert_close(found, run(again, 2), rtol=0, atol=0)


@pytest.mark.parametrize("cap", [None, TINY])
def test_an_interrupted_step_leaves_memory_as_it_was(cap: float | None) -> None:
    class Interrupted(Loopback):
        armed = False

        def all_gather(self, message: Tensor, lengths: Sequence[int] | None = None) -> Any:
            if self.armed:
                raise KeyboardInterrupt
            return super().all_gather(message, lengths)

    model, exchange = deep(), Interrupted()
    spec = "error_feedback(top_k:k=0.2)"
    with isgq.instrument(model, spec, exchange=exchange, bucket_cap_mb=cap, log=lambda _: None) as session:
        run(model, 2)
        before, exchange.armed = session.state_dict()["memory"], True
        with pytest.raises(KeyboardInterrupt):
            run(model, 1)
        assert session.step == 2
        torch.testing.assert_close(session.state_dict()["memory"], before, rtol=0, atol=0)


def test_telemetry_tells_the_same_and_its_alarm_rings() -> None:
    lines, said = [], []
    for cap in (None, TINY):
        model, curves, words = deep(), [], []

        class Board:
            def __init__(self, into: list[Any]) -> None:
                self.into = into

            def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
                self.into.append((global_step, tag, scalar_value))

        with isgq.instrument(model, "isgq", routes="factors", bucket_cap_mb=cap, log=words.append) as session:
            isgq.Telemetry(session, every=1, path=None, alarm=1e-6, board=Board(curves))
            run(model, 6)
        lines.append([each for each in curves if "bytes" not in each[1]])
        said.append([each for each in words if "from now on" in each])
        assert all(value > 0 for _, tag, value in curves if "bytes" in tag)
    assert sorted(lines[0]) == sorted(lines[1])
    assert sorted(said[0]) == sorted(said[1])
    assert len(said[0]) == 4


def test_a_dropped_gradient_is_another_even_where_it_lay() -> None:
    window = Window("w", parameter := nn.Parameter(torch.ones(3)))
    handles = window.watch(lambda: None)
    contents = []
    for _ in range(4):
        parameter.grad = None
        parameter.sum().backward()
        contents.append(window.content)
    assert len(set(contents)) == 4
    for handle in handles:
        handle.remove()


# ---- several ranks


def one_after_another() -> tuple[int, bool]:
    for _ in range(3):
        model = deep()
        with isgq.instrument(model, "isgq", routes="factors", bucket_cap_mb=TINY, log=lambda _: None) as session:
            run(model, 2, dist.get_rank())
            threads = [thread for thread in threading.enumerate() if thread.name == "isgq-overlap"]
        session.close()
        for thread in threads:
            thread.join(10)
    left = [thread for thread in threading.enumerate() if thread.name == "isgq-overlap"]
    return len(left), all(thread.daemon for thread in threads)


def test_sessions_leave_no_thread_which_never_keeps_a_process_from_its_end() -> None:
    assert launch(one_after_another, 2, timeout=30) == [(0, True)] * 2


def uneven() -> list[Any]:
    """Batches of unequal numbers, a layer that one rank does not use, NaN on one rank, delays on all."""
    rank, outcomes = dist.get_rank(), []
    results: list[list[Tensor]] = []
    for cap in (None, TINY):
        model = deep()
        with isgq.instrument(model, "isgq", routes="factors", bucket_cap_mb=cap, log=lambda _: None) as session:
            gradients: list[Tensor] = []
            for step in range(8):
                model.zero_grad()
                delay = float(uniform(Key("delay", 0, step, rank).digest, "s", (1,))[0] + 0.5) * 0.02
                time.sleep(delay if cap else 0)
                x = x_of(step, rank)
                parts = model[:4] if rank == 1 and step % 3 == 2 else model
                if step == 4:
                    with pytest.raises(PeerNonFiniteError, match="rank 1, step 4") as caught:
                        loss(parts(x * (float("nan") if rank == 1 else 1))).backward()
                    outcomes.append(str(caught.value))
                    continue
                loss(parts(x)).backward()
                gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with session.join():
                for step in range(2 + rank):
                    model.zero_grad()
                    loss(model(x_of(90 + step, rank))).backward()
                    gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append(gradients)
    outcomes.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return outcomes


def test_ranks_that_differ_hold_the_same() -> None:
    reports = launch(uneven, 3, timeout=60)
    for report in reports:
        assert report[-1] is True
        assert report == reports[0]


@pytest.mark.parametrize("spec", ["isgq", "auto:link=100Mbit/s"])
def test_a_step_of_nobodys_leaves_nothing_behind(spec: str) -> None:
    model = deep()
    with isgq.instrument(model, spec, bucket_cap_mb=TINY, log=lambda _: None) as session:
        for step in range(3):
            with session.join():
                pass
            loss(model(x_of(step))).backward()
    assert session.step == 3


def loaded() -> tuple[bool, bool]:
    """The pass breaks off on one rank, is not begun on the other, and both go back to an earlier state."""
    model, rank = deep(), dist.get_rank()
    spec = "error_feedback(top_k:k=0.2)"
    with isgq.instrument(model, spec, bucket_cap_mb=TINY, log=lambda _: None) as session:
        run(model, 2, rank)
        state = session.state_dict()
        first = run(model, 2, rank)
        model.zero_grad()
        if rank == 0:
            breaks_off(model, x_of(9))
        session.load_state_dict(state)
        again = run(model, 2, rank)
        return session.step == 4, all(
            torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)
        )


def test_a_state_is_loaded_after_a_pass_that_broke_off() -> None:
    assert launch(loaded, 2, timeout=10) == [(True, True)] * 2


def lost() -> str:
    model = deep()
    with isgq.instrument(model, "isgq", routes="factors", bucket_cap_mb=TINY) as session:
        run(model, 2, dist.get_rank())
        if dist.get_rank() == 1:
            return ""
        begin = time.monotonic()
        with pytest.raises(ExchangeError, match="rank 1 is dead, stuck") as caught:
            run(model, 1, dist.get_rank())
        assert time.monotonic() - begin < 20
        assert session.step == 2
    return str(caught.value)


def test_a_rank_that_leaves_is_an_error_in_time() -> None:
    assert all("collective failed" in text for text in launch(lost, 3, timeout=10)[::2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_cap_mb": 0}, "positive"),
        ({"bucket_cap_mb": float("nan")}, "positive"),
        ({"bucket_cap_mb": 1, "sync": "manual"}, "sync='backward'"),
        ({"bucket_cap_mb": 1, "aggregate": "two_pass"}, "'two_pass'"),
        ({"bucket_cap_mb": 1, "codec": "subspace"}, "'two_pass'"),
    ],
)
def test_what_cannot_overlap_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        isgq.instrument(deep(), **options)
