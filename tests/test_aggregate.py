"""One pass, two passes and a server: the same mean, DoubleSqueeze's identities, bytes, and going on after a stop."""

import functools
import itertools
from collections.abc import Mapping
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
from isgq.core.codec import Codec
from isgq.core.errors import MismatchError, OptionError
from isgq.launch import launch
from isgq.rows import Rows
from isgq.sharding import assign, cut, fill
from tests.session_cases import STEPS

WORLD = 3


def takes_no_option(name: str) -> bool:
    try:
        return isinstance(isgq.codec(name), Codec)
    except (isgq.IsgqError, TypeError):
        return False


MODES = ("two_pass", "server")
CODECS = (
    {"codec": "dense"},
    {"codec": "top_k:k=0.1", "down": "one_bit"},
    {"codec": "one_bit", "down": "top_k:k=0.2", "scope": "model"},
    {"codec": "qsgd:levels=4", "down": "qsgd:levels=4"},
    {"codec": "dithered:levels=2,bucket=row", "down": "sign", "routes": "factors"},
    {"codec": "minimum_variance:levels=2", "routes": "factors"},
    {"codec": "error_feedback(rtop_k:r=0.2,k=0.1)", "down": "dense", "memory": "worker"},
    {"codec": "top_k:k=0.1", "down": "top_k:k=0.1", "memory": "none"},
    {"codec": "momentum_correction(top_k:k=0.1)", "down": "int8"},
)


EVERY = {name: name for name in codec_names() if takes_no_option(name)}
"""Direct codecs by name, with memory both ways. A memory stays bounded only if a codec's error is smaller than what it
is given, which some have by default and some with other options."""
EVERY |= {"eus": "eus:m=0.7", "nested_dithered": "nested_dithered:levels=7", "qcs": "qcs:mode=mmse"}
REAL = ("one_bit", "top_k:k=0.01")
"""Codecs of the same test on FC 784-300-100-10 and digits."""
EVERY |= {"random_k": "random_k:k=0.1,scale=false"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 3, bias=False))


@functools.cache
def images() -> data.Dataset:
    return data.load("mnist5k", seed=0)


def batch(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """This rank's: noise for the small network, digits for the real one."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear):
        return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)
    digits = images()
    rows = torch.randint(len(digits.train_y), (8,), generator=generator)
    return digits.train_x[rows], digits.train_y[rows]


def gather_objects(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def gradient(model: nn.Module, step: int) -> Tensor:
    """The mean over ranks of the plain gradients, flat."""
    x, y = batch(model, step)
    parts = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    flat = torch.cat([part.reshape(-1) for part in parts]).double()
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


def left_out(model: nn.Module, session: isgq.Session) -> Tensor:
    """Omega = servers' memories + mean of the workers' memories, flat."""
    workers = dist.get_world_size()
    state = session.state_dict()["memory"]
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for where, carriers in session._shards(workers).items():
        for carrier in carriers:
            if carrier.name in state.get(where, {}):
                held = torch.split(state[where][carrier.name].reshape(-1).double(), [r.numel for r in carrier.rows])
                for rows, part in zip(carrier.rows, held, strict=True):
                    target = rows.of(total[rows.name])
                    target += part.reshape(target.shape) / (workers if where == "up" else 1)
    omega = torch.cat([tensor.reshape(-1) for tensor in total.values()])
    dist.all_reduce(omega)
    return omega


def step_once(model: nn.Module, step: int, lr: float = 0.1) -> Tensor:
    """One training step; what was applied, flat."""
    x, y = batch(model, step)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    applied = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad  # type: ignore[operator]
    return applied


def fingerprint(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def identities(model: nn.Module, session: isgq.Session, steps: int, lr: float = 0.1) -> tuple[float, float]:
    """How far DoubleSqueeze's two identities are off over so many steps, relative.

    c_t = mean gradient + Omega_(t-1) - Omega_t, at worst; and x_t - lr Omega_(t-1) = plain SGD's iterate, at the end.
    """

    def at() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()

    worst, before = 0.0, torch.zeros(1)
    start = follows = at()
    for step in range(steps):
        plain = gradient(model, step)
        follows = follows - lr * plain
        applied = step_once(model, step, lr)
        after = left_out(model, session)
        error = (applied - (plain + before - after)).norm() / (plain.norm() + before.norm())
        worst, before = max(worst, float(error)), after
    return worst, float((at() - lr * before - follows).norm() / (follows - start).norm())


def every_codec(steps: int) -> dict[str, tuple[float, float]]:
    report = {}
    for name, inner in EVERY.items():
        spec, model = f"error_feedback({inner})", network()
        how: dict[str, Any] = {"aggregate": "two_pass", "down": isgq.codec(spec), "scope": "model"}
        with isgq.instrument(model, isgq.codec(spec), **how) as session:
            report[name] = identities(model, session, steps)
    for spec in REAL:
        model = models.build("fc", classes=10, in_shape=(1, 28, 28), seed=0)
        with isgq.instrument(model, spec, aggregate="two_pass", down=spec) as session:
            report[f"fc, {spec}"] = identities(model, session, min(steps, 10))
    return report


@pytest.fixture(scope="module")
def off() -> dict[str, tuple[float, float]]:
    return launch(every_codec, 2, args=(STEPS,), timeout=60)[0]


@pytest.mark.parametrize("name", [*EVERY, *(f"fc, {spec}" for spec in REAL)])
def test_the_identities_of_double_squeeze(off: dict[str, tuple[float, float]], name: str) -> None:
    of_steps, of_iterates = off[name]
    assert of_steps < 1e-6
    assert of_iterates < 1e-5


def train_all(steps: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for mode in MODES:
        for index, options in enumerate(CODECS):
            model = network()
            with isgq.instrument(model, aggregate=mode, **options) as session:  # type: ignore[arg-type]
                worst, _ = identities(model, session, steps)
                middle = (session.state_dict(), {k: v.clone() for k, v in model.state_dict().items()})
                for step in range(steps, steps + 4):
                    step_once(model, step)
            twin = network()
            twin.load_state_dict(middle[1])
            with isgq.instrument(twin, aggregate=mode, **options) as again:  # type: ignore[arg-type]
                again.load_state_dict(middle[0])
                for step in range(steps, steps + 4):
                    step_once(twin, step)
            prints = gather_objects(fingerprint(model))
            traffic = session.traffic
            ledger = traffic.setup + sum(traffic.by_parameter.values()) + traffic.overhead
            report[f"{mode}-{index}"] = {
                "same": len(set(prints)) == 1,
                "resumed": fingerprint(twin) == fingerprint(model),
                "identity": worst,
                "ledger": (traffic.sent, ledger),
                "overhead": traffic.overhead,
                "names": set(traffic.by_parameter),
            }
    return report


@pytest.fixture(scope="module")
def reports() -> list[Mapping[str, Any]]:
    return launch(train_all, WORLD, args=(8,), timeout=60)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", range(len(CODECS)))
def test_replicas_are_equal_and_go_on_bit_for_bit(reports: list[Mapping[str, Any]], mode: str, index: int) -> None:
    for report in reports:
        case = report[f"{mode}-{index}"]
        assert case["same"]
        assert case["resumed"]
        assert case["ledger"][0] == case["ledger"][1]
        assert case["overhead"] > 0


REMEMBERS = [i for i, options in enumerate(CODECS) if i in {0, 1, 2}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", REMEMBERS)
def test_what_is_applied_is_the_mean_and_the_change_of_memories(
    reports: list[Mapping[str, Any]], mode: str, index: int
) -> None:
    """c_t = mean gradient + Omega_(t-1) - Omega_t (DoubleSqueeze, section 4)."""
    for report in reports:
        assert report[f"{mode}-{index}"]["identity"] < 1e-6


def test_every_row_is_served_once_and_the_shards_are_level() -> None:
    shapes = {"a": (300, 784), "b": (300,), "c": (100, 300), "scalar": (), "none": (0, 5), "d": (10, 100)}
    wholes = [Rows.whole(name, shape) for name, shape in shapes.items()]
    total = sum(rows.numel for rows in wholes)
    for loads in ([0], [0] * 4, [0] * 8, [200_000, 0, 1_000]):
        seen: dict[str, list[tuple[int, int]]] = {}
        sums = list(loads)
        for server, rows in cut(wholes, fill(loads, total)):
            seen.setdefault(rows.name, []).append((rows.start, rows.stop))
            sums[server] += rows.numel
        for rows in wholes:
            edges = [0, *(stop for _, stop in seen[rows.name])]
            assert seen[rows.name] == list(itertools.pairwise(edges))
            assert edges[-1] == rows.stop
        level = (sum(loads) + total) / len(loads)
        assert max(sums) <= max(level + 784, *loads)
    assert assign([5, 1, 4, 2], 2) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"down": "sign"}, "servers send"),
        ({"aggregate": "ring"}, "gather, two_pass, server"),
        ({"aggregate": "two_pass", "memory": "server"}, "both, worker, none"),
        ({"aggregate": "two_pass", "down": "naive"}, "pairs of factors"),
        ({"aggregate": "two_pass", "down": "zip"}, "unknown codec"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        isgq.instrument(network(), **options)


def test_a_process_alone_is_its_own_server() -> None:
    model = network()
    with isgq.instrument(model, "top_k:k=0.1", aggregate="two_pass", down="one_bit") as session:
        F.cross_entropy(model(torch.randn(5, 6)), torch.zeros(5, dtype=torch.long)).backward()
        assert session.traffic.received == 0
        state = session.state_dict()
    assert set(state["memory"]) == {"up", "down"}
    with isgq.instrument(model, "top_k:k=0.1", aggregate="two_pass", down="one_bit") as session:
        with pytest.raises(MismatchError, match="every rank has memories"):
            session.load_state_dict(state | {"rank": 1})
        with pytest.raises(MismatchError, match="resize='sum'"):
            session.load_state_dict(state | {"world_size": 2})
