"""Any direct codec as a communication hook of DistributedDataParallel.

    model = DistributedDataParallel(module)
    model.register_comm_hook(None, isgq.ddp.comm_hook("error_feedback(top_k:k=0.01)", model))

The hook works on gloo and NCCL, with any number of buckets and after DDP has rebuilt them: memory and randomness are
addressed by parameter, not by bucket. It blocks in the hook itself and never in a future's callback, which is what
makes other hooks deadlock on gloo as soon as there are two buckets.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isgq.aggregate import AggregateName
from isgq.averager import Averager
from isgq.choice import Choice, choose_direct
from isgq.codecs.roles import MemoryPolicy
from isgq.core.registry import AnyCodec
from isgq.exchange import Exchange, TorchExchange

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]  # type: ignore[name-defined]


class HookState:
    """What a hook remembers; reachable as ``hook.state``.

    Attributes:
        exchange: counts the bytes (``sent``, ``received``); None before the first step.
        step: backward passes completed so far.
    """

    def __init__(self, choice: Choice, model: nn.Module | None, seed: int, exchange: Exchange | None) -> None:
        self.exchange, self.step = exchange, 0
        self._choice, self._seed = choice, seed
        self._averager: Averager | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        if model is not None:
            inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            self._parameters = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._parameters.items()}

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name; without a model, a number in the order of first sight (the same on every rank)."""
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    @property
    def averager(self) -> Averager:
        """Made late: the process group exists by the time DDP runs."""
        if self._averager is None:
            self.exchange = self.exchange or TorchExchange()
            self._averager = Averager(self._choice, self._seed, self.exchange, self._parameters)
        return self._averager

    def reduce(self, bucket: dist.GradBucket) -> Tensor:  # type: ignore[name-defined]
        """Average one bucket over all ranks, in place."""
        named = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = {self.name_of(parameter): gradient for parameter, gradient in named}
        means = self.averager(gradients, self.step)
        for name, gradient in gradients.items():
            gradient.copy_(means[name])
        if bucket.is_last():
            self.step += 1
            self.averager.commit()
        buffer: Tensor = bucket.buffer()
        return buffer

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step, codecs and memories by parameter name."""
        return {"step": self.step, **self.averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken on this rank.

        Raises:
            MismatchError: the state is of another codec, seed, rank or number of ranks.
        """
        self.averager.load_state_dict(state)
        self.step = int(state["step"])


def comm_hook(
    spec: str | AnyCodec,
    model: nn.Module | None = None,
    *,
    aggregate: AggregateName = "gather",
    down: str | AnyCodec | None = None,
    memory: MemoryPolicy = "both",
    seed: int = 0,
    exchange: Exchange | None = None,
) -> Hook:
    """A hook for ``DistributedDataParallel.register_comm_hook(None, hook)``.

    Args:
        spec: any direct codec, e.g. ``"qsgd:levels=4"``.
        model: the DDP model or its module, so that memory is kept under the parameters' names (needed to resume).
        aggregate: as for :func:`isgq.instrument`.
        down: as for :func:`isgq.instrument`.
        memory: as for :func:`isgq.instrument`.
        seed: of the codecs' randomness; the same on every rank.
        exchange: the transport; the default group where None.

    Returns:
        The hook; its attribute ``state`` is a :class:`HookState`.

    Raises:
        OptionError: unknown codec or option, or a codec for pairs of factors.
    """
    choice = choose_direct(spec, "a DDP hook sees gradients only", "tensor", aggregate, down, memory)
    state = HookState(choice, model, seed, exchange)

    # The annotations are what DDP accepts, and must be objects, not strings.
    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(state.reduce(bucket))
        return future

    hook.state = state  # type: ignore[attr-defined]
    return hook
