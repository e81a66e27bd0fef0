"""A common subspace: what is applied and what is remembered make up the gradients, on replicas that stay equal."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isgq
from isgq.bandwidth import predict
from isgq.codecs.subspace import Subspace, first_basis, orthonormal
from isgq.core.errors import InstrumentError, OptionError
from isgq.exchange import Loopback, Pending, TorchExchange
from isgq.launch import launch
from tests.test_aggregate import fingerprint, gather_objects, identities, left_out, network, step_once
from tests.test_faults import outcome

SPEC = "subspace:rank=2"
MODES = {"two_pass": {}, "server": {"aggregate": "server"}, "plain means": {"down": "dense"}}


def several() -> nn.Module:
    """A convolution, a table, vectors, and a branch that only some ranks use."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "table": nn.Embedding(12, 36),
        "conv": nn.Conv2d(1, 6, 3),
        "norm": nn.LayerNorm(96),
        "left": nn.Linear(96, 20),
        "right": nn.Linear(96, 20),
        "head": nn.Linear(20, 4),
    })
    return model


def backward(model: nn.Module, step: int, uses_left: bool) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    parts: Any = model
    tokens = torch.randint(12, (5,), generator=generator)
    h = parts["norm"](parts["conv"](parts["table"](tokens).view(5, 1, 6, 6)).flatten(1))
    h = parts["left"](h) if uses_left else parts["right"](h)
    F.cross_entropy(parts["head"](h.relu()), torch.randint(4, (5,), generator=generator)).backward()


def branches(steps: int, swap: bool = False) -> dict[str, Any]:
    """Rank 0 uses the left branch, the others the right, or in turn; two backward passes a step."""
    model, lr = several(), 0.05
    with isgq.instrument(model, "subspace:rank=2,step=1.5") as session:
        mine, applied = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()], 0.0
        for step in range(steps):
            left = (dist.get_rank() == 0) != (swap and step % 2 == 1)
            model.zero_grad()
            with session.no_sync():
                backward(model, 2 * step, left)
            local = [0 if p.grad is None else p.grad.double() for p in model.parameters()]
            del local
            twin = several()
            twin.load_state_dict(model.state_dict())
            for part in (2 * step, 2 * step + 1):
                backward(twin, part, left)
            for total, p in zip(mine, twin.parameters(), strict=True):
                if p.grad is not None:
                    total += p.grad.double()
            backward(model, 2 * step + 1, left)
            applied = applied + torch.cat([
                p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None
            ])
            with torch.no_grad():
                for p in model.parameters():
                    p -= lr * p.grad  # type: ignore[operator]
        flat = torch.cat([total.reshape(-1) for total in mine])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        rest = flat - left_out(model, session)
        assert isinstance(applied, Tensor)
        return {
            "error": float((applied - rest).norm() / flat.norm()),
            "same": len(set(gather_objects(fingerprint(model)))),
            "memory": sorted(session.state_dict()["memory"]["up"]),
        }


class Damaging(TorchExchange):
    """What one rank gets of another in a certain transfer from each to each is damaged."""

    left = 0

    def all_to_all(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Pending[list[Tensor]]:
        pending = super().all_to_all(messages, lengths)
        self.left -= 1
        return Pending(lambda: self._damaged(pending.wait())) if self.left == 0 else pending

    def _damaged(self, parts: list[Tensor]) -> list[Tensor]:
        parts[0][-1] ^= 1
        return parts


TRANSFERS = {"messages": 2, "replies": 3, "later messages": 5}
"""Of a step, after which all ranks agree once more; lengths travel ahead of each round's messages."""
HARMED = 1


def damaged(transfer: int) -> dict[str, Any]:
    exchange, model = Damaging(dist.new_group(timeout=timedelta(seconds=5))), network()
    with isgq.instrument(model, SPEC, exchange=exchange) as session:
        step_once(model, 0)
        before = session.state_dict()["memory"]
        exchange.left = transfer if dist.get_rank() == HARMED else 0
        said = outcome(lambda: step_once(model, 1))
        after = session.state_dict()["memory"]
        for where, memory in before.items():
            assert memory.keys() == after[where].keys()
            assert all(torch.equal(memory[name], after[where][name]) for name in memory)
        step_once(model, 1)
        return {"said": said, "same": len(set(gather_objects(fingerprint(model)))) == 1}


def train(steps: int) -> dict[str, Any]:
    report: dict[str, Any] = {"branches": branches(8)}
    torch.set_default_dtype(torch.float64)
    report["branches in double"] = branches(4, swap=True)
    torch.set_default_dtype(torch.float32)
    report["damaged"] = {name: damaged(transfer) for name, transfer in TRANSFERS.items()}
    for name, options in MODES.items():
        model = network()
        with isgq.instrument(model, SPEC, **options) as session:
            worst, follows = identities(model, session, steps)
            middle = session.state_dict(), {n: t.clone() for n, t in model.state_dict().items()}
            for step in range(steps, steps + 4):
                before = session.traffic.sent, session.traffic.received
                step_once(model, step)
            traffic = session.traffic
            moved = (traffic.sent - before[0], traffic.received - before[1])
            predicted = predict(session._choice.aggregate, session.messages(), dist.get_world_size(), dist.get_rank())
            ledger = traffic.setup + sum(traffic.by_parameter.values()) + traffic.overhead == traffic.sent
        with isgq.instrument(twin := network(), SPEC, **options) as again:
            twin.load_state_dict(middle[1])
            again.load_state_dict(middle[0])
            for step in range(steps, steps + 4):
                step_once(twin, step)
        report[name] = {
            "identities": (worst, follows),
            "same": len(set(gather_objects(fingerprint(model)))) == 1,
            "resumed": fingerprint(twin) == fingerprint(model),
            "moved": moved,
            "predicted": (predicted.sent, predicted.received, predicted.rounds),
            "ledger": ledger,
        }
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return launch(train, 3, args=(12,), timeout=60)


@pytest.mark.parametrize("mode", MODES)
def test_applied_and_remembered_make_up_the_gradients(reports: list[dict[str, Any]], mode: str) -> None:
    for report in reports:
        worst, follows = report[mode]["identities"]
        assert worst < 1e-6
        assert follows < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_equal_and_go_on_bit_for_bit(reports: list[dict[str, Any]], mode: str) -> None:
    for report in reports:
        assert report[mode]["same"]
        assert report[mode]["resumed"]
        assert report[mode]["ledger"]


def test_bytes_are_those_predicted_from_two_rounds_of_messages(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        server, passes = report["server"], report["two_pass"]
        assert server["predicted"][2] == 8
        if rank:  # what the server hears differs from what it says
            assert server["moved"] == server["predicted"][:2]
        for moved, predicted in zip(passes["moved"], passes["predicted"][:2], strict=True):
            assert moved == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize("name", ["branches", "branches in double"])
def test_branches_that_other_ranks_use_and_passes_that_accumulate(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        case = report[name]
        assert case["error"] < 1e-5
        assert case["same"] == 1
        assert {"conv.weight", "table.weight", "norm.bias", "head.bias"} <= set(case["memory"])


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_one_rank_cannot_read_refuses_the_step_on_all(reports: list[dict[str, Any]], transfer: str) -> None:
    for report in reports:
        case = report["damaged"][transfer]
        assert case["said"].startswith(f"PeerError: rank {HARMED}, step 1: ")
        assert case["said"] == reports[0]["damaged"][transfer]["said"]
        assert case["same"]


def test_with_fine_steps_it_is_powersgd() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(30, 20, bias=False), nn.Linear(30, 20, bias=False)
    basis, memory = first_basis("weight", 0, 3, 30), torch.zeros(20, 30)
    with isgq.instrument(model, "subspace:rank=3,step=0.0001", exchange=Loopback()):
        for step in range(4):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
            plain.load_state_dict(model.state_dict())
            for net in (model, plain):
                net.zero_grad()
                net(x).exp().mean().backward()
            assert plain.weight.grad is not None
            assert model.weight.grad is not None
            matrix = plain.weight.grad + memory
            left = orthonormal(basis @ matrix.T)
            right = left @ matrix
            basis, memory = orthonormal(right), matrix - left.T @ right
            torch.testing.assert_close(
                model.weight.grad, left.T @ right, rtol=1e-3, atol=1e-4 * float(right.abs().max())
            )


def test_what_would_not_become_smaller_is_sent_as_it_is() -> None:
    codec = Subspace(rank=4)
    assert codec.directions((300, 784)) == 4
    assert codec.directions((32, 1, 5, 5)) == 4
    assert codec.directions((2, 784)) == 0
    assert codec.directions((6, 6)) == 0
    assert codec.directions((300,)) == codec.directions(()) == codec.directions((0, 5)) == 0


def test_dependent_rows_get_a_whole_basis() -> None:
    rows = torch.zeros(3, 7)
    rows[1] = 2.0
    basis = orthonormal(rows)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3))
    assert float((rows - rows @ basis.T @ basis).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("spec", "options", "what"),
    [
        ("subspace:rank=0", {}, "rank=0"),
        ("subspace:step=5", {}, "step=5"),
        (SPEC, {"dense": "qsgd"}, "leave dense="),
        (SPEC, {"scope": "model"}, "leave dense="),
        (SPEC, {"aggregate": "async"}, "synchronous"),
        (SPEC, {"memory": "none"}, "memory="),
        (SPEC, {"aggregate": "ring"}, "must be one of"),
        (SPEC, {"down": "error_feedback(sign)"}, "memory of its own"),
        (f"error_feedback({SPEC})", {}, "error_feedback takes"),
    ],
)
def test_options_that_do_not_fit_are_named(spec: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        isgq.instrument(network(), spec, **options)


def test_only_sessions_take_it() -> None:
    with pytest.raises(OptionError, match="for sessions"):
        isgq.ddp.comm_hook(SPEC)
    with pytest.raises(OptionError, match="ranks of a session"):
        isgq.choose_codecs(SPEC, None)


def test_no_gradient_of_it_travels_whole() -> None:
    with (
        isgq.instrument(network(), SPEC) as session,
        pytest.raises(InstrumentError, match="cannot travel"),
    ):
        session.doubt("0.weight", "it drifts")
