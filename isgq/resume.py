"""Which saved state a rank continues from, and what becomes of memories when the number of ranks is another.

Everything that compression has left out is Omega = d + (1/n) sum_i d_i: the servers' memories d and the mean of the
workers' memories d_i (DoubleSqueeze, Tang et al. 2019, section 4). A resumed session loses nothing if its Omega is the
same: each of its workers gets the mean of all workers' memories, each of its servers the rows of its new shard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isgq.choice import check_option
from isgq.core.errors import MismatchError
from isgq.records import DirectCarrier
from isgq.rows import scatter

ResizePolicy = Literal["error", "sum", "reset"]
State = Mapping[str, Any]
Shards = Mapping[str, Sequence[DirectCarrier]]


def pick(states: Sequence[State], expected: Mapping[str, Any], rank: int, ranks: int, resize: ResizePolicy) -> State:
    """The state that a rank continues from.

    Args:
        states: one, or all ranks' in rank order.
        expected: what must be as saved.
        rank: this rank.
        ranks: how many there are.
        resize: see :meth:`isgq.Session.load_state_dict`.

    Raises:
        MismatchError: none fits.
        OptionError: unknown policy.
    """
    check_option("resize", resize, get_args(ResizePolicy))
    if not states:
        raise MismatchError("there is no state to continue from")
    for name, value in expected.items():
        if states[0][name] != value:
            raise MismatchError(f"the state was saved with {name} = {states[0][name]}, this session has {value}")
    saved = states[0]["world_size"]
    if len(states) > 1 and [state["rank"] for state in states] != list(range(saved)):
        raise MismatchError(f"{len(states)} states of {saved} ranks: give one, or all of them in rank order")
    if saved != ranks:
        if resize == "error":
            raise MismatchError(
                f"the state was saved by {saved} ranks, these are {ranks}: give load_state_dict all ranks' states and "
                "resize='sum' to share the memories out, or resize='reset' to drop them"
            )
        if len(states) != saved and resize == "sum":
            raise MismatchError(f"resize='sum' needs the states of all {saved} ranks, got {len(states)}")
        return states[0]
    own = states[rank] if len(states) > 1 else states[0]
    if own["rank"] != rank:
        raise MismatchError(
            f"the state was saved with rank = {own['rank']}, this session has {rank}: every rank has memories of its "
            "own, so save and load each rank's state"
        )
    return own


def resized(
    states: Sequence[State], shards: Callable[[int], Shards], rank: int, ranks: int, resize: ResizePolicy
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """The memories of a rank of a session with another number of ranks.

    Args:
        states: all ranks', in rank order.
        shards: the carriers that have memory on workers (``"up"``) and servers (``"down"``), for a number of ranks.
        rank: this rank.
        ranks: how many there are.
        resize: ``"sum"`` or ``"reset"``.

    Returns:
        Memories as in a state, and one sentence for the user.
    """
    saved = states[0]["world_size"]
    came = f"resumed with {ranks} ranks what {saved} had saved"
    if resize == "reset":
        return {}, f"{came}: all memories are dropped"
    before, now = shards(saved), shards(ranks)
    memories: dict[str, dict[str, Tensor]] = {}
    norm = 0.0
    for where, parts in (("up", saved), ("down", 1)):
        total: dict[str, dict[str, Tensor]] = {}
        for state in states:
            for kind, gradients in _spread(state["memory"].get(where, {}), before[where]).items():
                held = total.setdefault(kind, {})
                for name, gradient in gradients.items():
                    held[name] = held[name] + gradient if name in held else gradient
        norm += sum(float((tensor / parts).square().sum()) for held in total.values() for tensor in held.values())
        mine = [carrier for carrier in now[where] if where == "up" or carrier.server == rank]
        memories[where] = {
            carrier.name + kind: _gather(carrier, held) / parts
            for kind, held in total.items()
            for carrier in mine
            if any(rows.name in held for rows in carrier.rows)
        }
    memories["common"] = dict(states[0]["memory"].get("common", {}))
    return memories, f"{came}: memories of norm {norm**0.5:.3g} are shared out anew"


def _spread(memory: Mapping[str, Tensor], carriers: Sequence[DirectCarrier]) -> dict[str, dict[str, Tensor]]:
    """Memories by carrier as whole gradients: kind (what follows the carrier's name) -> parameter -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for carrier in carriers:
        for kind in ("", "/u", "/v"):
            if carrier.name + kind in memory:
                scatter(carrier.rows, memory[carrier.name + kind].reshape(-1), found.setdefault(kind, {}))
    return found


def _gather(carrier: DirectCarrier, gradients: Mapping[str, Tensor]) -> Tensor:
    """A carrier's memory from whole gradients; zeros where there is none."""
    parts = [
        rows.of(gradients[rows.name]).reshape(-1) if rows.name in gradients else torch.zeros(rows.numel)
        for rows in carrier.rows
    ]
    return torch.cat(parts).reshape(carrier.shape)
