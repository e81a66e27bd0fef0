"""Federated rounds: every rank trains on its own for some steps, then the *change* of the model is averaged.

    rounds = isgq.Federated(model, "error_feedback(top_k:k=0.01)")
    for x, y in loader:
        loss_fn(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
        if local_steps_done:
            rounds.average()

Feedback works on the model's change, under the parameters' names; bytes are spent once a round.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isgq.averager import Averager
from isgq.choice import choose_direct
from isgq.core.errors import MismatchError
from isgq.core.registry import AnyCodec
from isgq.exchange import Exchange, Loopback, TorchExchange


class Federated:
    """Averages model changes over all ranks; making one is a collective call (rank 0's parameters go to all).

    Args:
        model: the model; only its trainable parameters are averaged, buffers stay local.
        spec: any direct codec; with a biased one use ``error_feedback``.
        exchange: the transport; by default torch.distributed if it is initialised, else a loopback.
        seed: of the codec's randomness; the same on every rank.

    Attributes:
        round: rounds so far.
        exchange: counts the bytes (``sent``, ``received``).

    Raises:
        OptionError: unknown codec, or one for pairs of factors.
    """

    def __init__(
        self, model: nn.Module, spec: str | AnyCodec, *, exchange: Exchange | None = None, seed: int = 0
    ) -> None:
        choice = choose_direct(spec, "a model's change has no factors", "tensor", "gather", None, "none")
        self.exchange = exchange or (TorchExchange() if dist.is_initialized() else Loopback())
        self.round = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averager = Averager(choice, seed, self.exchange, self._parameters)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self.exchange.broadcast(tensor.detach()).wait()
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}

    def average(self) -> None:
        """End a round: every rank's model becomes the last common one plus the mean of all compressed changes.

        Raises:
            PeerError: some rank cannot take part (NaN in its change, say); the same error on every rank.
        """
        changes = {name: p.detach() - self._start[name] for name, p in self._parameters.items()}
        means = self._averager(changes, self.round)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._start[name] += means[name]
                parameter.copy_(self._start[name])
        self.round += 1
        self._averager.commit()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: round, codec, the last common model, and memory by parameter name."""
        return {"round": self.round, "start": dict(self._start), **self._averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken on this rank.

        Raises:
            MismatchError: the state is of another codec, seed, rank, number of ranks or model.
        """
        if set(state["start"]) != set(self._start):
            raise MismatchError(f"the state was saved for another model, with {', '.join(state['start'])}")
        self._averager.load_state_dict(state)
        self.round = int(state["round"])
        self._start = {name: tensor.clone() for name, tensor in state["start"].items()}
