"""Float32 masters for a model in half precision, in the synchronous modes.

    optimizer = isgq.MasterWeights(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1))

A learning rate times a compressed gradient is often less than half a unit in the last place of a bfloat16 weight, and
an update that is rounded away is lost: no memory of the compression knows of it. (An asynchronous server and its
workers keep masters by themselves.)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_K = TypeVar("_K")


def masters(parameters: Mapping[_K, nn.Parameter]) -> dict[_K, Tensor]:
    """Copies in at least float32."""
    return {k: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for k, p in parameters.items()}


class MasterWeights:
    """An optimizer that steps float32 copies of parameters and writes them back, rounded.

    Args:
        parameters: of the model; those in float32 or more have masters, too, which costs memory but nothing else.
        make: makes the optimizer of the masters.

    Attributes:
        optimizer: the optimizer made, for its learning rates and state.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = list(parameters)
        self._masters = [
            nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True))
            for p in self._parameters
        ]
        self.optimizer = make(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with the parameters' gradients, and round them into the parameters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad.to(master.dtype) if parameter.grad is not None else None
        self.optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for each in (*self._parameters, *self._masters):
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The masters and the optimizer's state; no copies, as with torch's optimizers."""
        return {"masters": [m.detach() for m in self._masters], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for parameter, master, saved in zip(self._parameters, self._masters, state["masters"], strict=True):
            master.copy_(saved)
            parameter.copy_(master)
        self.optimizer.load_state_dict(state["optimizer"])
