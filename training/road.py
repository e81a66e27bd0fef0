"""How the workers' models stay one: their gradients are averaged at every step, or their changes after local steps."""

from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from torch import nn

import isgq
from training.config import Config, Run


class Road(Protocol):
    """A context manager; making one is a collective call."""

    def stepped(self, ends_epoch: bool) -> None:
        """Called after every step of the optimizer; at the end of an epoch all workers' models are the same."""
        ...

    def spent(self) -> tuple[int, int, int]:
        """Bytes sent, received, and of the plain gradients of all steps, on this worker, but for the start."""
        ...

    def plan(self) -> str:
        """Which way each parameter takes, as a table."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This worker's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def session_of(model: nn.Module, config: Config, run: Run) -> isgq.Session:
    """The session of a run, observed where that is wanted."""
    session = isgq.instrument(
        model,
        run.codec,
        dense=config.dense,
        aggregate=config.aggregate,
        down=config.down,
        memory=config.memory,
        max_staleness=config.max_staleness,
        routes=config.routes,
        bucket_cap_mb=config.bucket_cap_mb,
        inline_bytes=config.inline_bytes,
        seed=config.seed,
    )
    if config.telemetry is not None:
        isgq.Telemetry(session, config.telemetry, config.out / f"{run.name}.telemetry.jsonl")
    return session


def road_of(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, run: Run) -> Road:
    """The road of a run."""
    if run.local_steps is None:
        return EveryStep(session_of(model, config, run))
    return LocalSteps(model, optimizer, run.codec, run.local_steps, config.seed)


class EveryStep:
    """``p.grad`` is the mean over all workers when backward ends."""

    def __init__(self, session: isgq.Session) -> None:
        self._session = session

    def stepped(self, ends_epoch: bool) -> None:
        """Nothing to do."""

    def spent(self) -> tuple[int, int, int]:
        """See :class:`Road`."""
        traffic = self._session.traffic
        return traffic.sent - traffic.setup, traffic.received, traffic.dense

    def plan(self) -> str:
        """See :class:`Road`."""
        return str(self._session.plan)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Road`."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Road`."""
        self._session.load_state_dict(state)

    def __enter__(self) -> Self:
        self._session.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.__exit__(*exception)


class LocalSteps:
    """Federated rounds; a worker's momentum stays its own.

    Args:
        model: the model.
        optimizer: its optimizer, which differs from worker to worker and so belongs to this state.
        codec: of the models' changes.
        every: steps of a round; an epoch's last round may be shorter.
        seed: of the codec.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, codec: str, every: int, seed: int) -> None:
        self._rounds = isgq.Federated(model, "exact" if codec == "dense" else codec, seed=seed)
        self._optimizer, self._codec, self._every = optimizer, codec, every
        self._start = self._rounds.exchange.sent, self._rounds.exchange.received
        self._gradient = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._local, self._dense = 0, 0

    def stepped(self, ends_epoch: bool) -> None:
        """End the round when it is over."""
        self._local += 1
        self._dense += self._gradient
        if ends_epoch or self._local == self._every:
            self._rounds.average()
            self._local = 0

    def spent(self) -> tuple[int, int, int]:
        """See :class:`Road`."""
        exchange = self._rounds.exchange
        return exchange.sent - self._start[0], exchange.received - self._start[1], self._dense

    def plan(self) -> str:
        """See :class:`Road`."""
        return f"changes of all parameters by {self._codec}, every {self._every} steps"

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Road`."""
        return {"rounds": self._rounds.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Road`."""
        self._rounds.load_state_dict(state["rounds"])
        self._optimizer.load_state_dict(state["optimizer"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to do: the model has no hooks."""
