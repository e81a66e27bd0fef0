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

from isgq.aggregate import gather_mean
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec
from isgq.core.errors import MismatchError, OptionError
from isgq.core.registry import AnyCodec, codec, spec_of
from isgq.exchange import Exchange, TorchExchange

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]  # type: ignore[name-defined]


class HookState:
    """What a hook remembers; reachable as ``hook.state``.

    Attributes:
        exchange: counts the bytes (``sent``, ``received``).
        step: backward passes completed so far.
    """

    def __init__(self, codec: Codec, model: nn.Module | None, seed: int, exchange: Exchange | None) -> None:
        self.codec, self._seed = codec, seed
        self.exchange: Exchange | None = exchange
        self.step = 0
        self._names: dict[int, str] = {}
        if model is not None:
            inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            self._names = {id(p): name for name, p in inner.named_parameters()}

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name; without a model, a number in the order of first sight (the same on every rank)."""
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    def reduce(self, bucket: dist.GradBucket) -> Tensor:  # type: ignore[name-defined]
        """Average one bucket over all ranks, in place."""
        if self.exchange is None:  # made late: the group exists by the time DDP runs
            self.exchange = TorchExchange()
        named = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = {self.name_of(parameter): gradient for parameter, gradient in named}
        means = gather_mean(self.exchange, self.codec, gradients, seed=self._seed, step=self.step)
        for name, gradient in gradients.items():
            gradient.copy_(means[name])
        if bucket.is_last():
            self.step += 1
            memory = memory_of(self.codec)
            if memory is not None:
                memory.commit()
        buffer: Tensor = bucket.buffer()
        return buffer

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step, codec and memory by parameter name."""
        memory = memory_of(self.codec)
        return {
            "step": self.step,
            "codec": spec_of(self.codec),
            "memory": memory.state_dict() if memory is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken on this rank.

        Raises:
            MismatchError: the state is of another codec.
        """
        if state["codec"] != spec_of(self.codec):
            raise MismatchError(f"the state was saved with codec {state['codec']}, this hook has {spec_of(self.codec)}")
        self.step = int(state["step"])
        memory = memory_of(self.codec)
        if memory is not None:
            memory.load_state_dict(state["memory"])


def comm_hook(
    spec: str | AnyCodec, model: nn.Module | None = None, *, seed: int = 0, exchange: Exchange | None = None
) -> Hook:
    """A hook for ``DistributedDataParallel.register_comm_hook(None, hook)``.

    Args:
        spec: any direct codec, e.g. ``"qsgd:levels=4"``.
        model: the DDP model or its module, so that memory is kept under the parameters' names (needed to resume).
        seed: of the codec's randomness; the same on every rank.
        exchange: the transport; the default group where None.

    Returns:
        The hook; its attribute ``state`` is a :class:`HookState`.

    Raises:
        OptionError: unknown codec, or one for pairs of factors.
    """
    built = codec(spec)
    if not isinstance(built, Codec):
        raise OptionError(
            f"a DDP hook sees gradients only, so it needs a codec of one tensor; {spec_of(built)} is for pairs"
        )
    state = HookState(built, model, seed, exchange)

    # The annotations are what DDP accepts, and must be objects, not strings.
    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(state.reduce(bucket))
        return future

    hook.state = state  # type: ignore[attr-defined]
    return hook
