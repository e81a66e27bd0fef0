"""Memory of what compression has left out: error feedback and momentum correction.

State lives here and nowhere else: one tensor per parameter *name* (never per bucket or position), on this rank only, in
gradient units, so that a changing learning rate needs no correction. A step that the ranks refuse is taken back by
:meth:`rollback`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from isgq.core.codec import Codec
from isgq.core.errors import CodecError, OptionError
from isgq.core.extremes import check_finite
from isgq.core.keys import Key
from isgq.core.payload import Payload
from isgq.core.registry import register_codec


@dataclass
class Memory:
    """Named tensors with one step of undo.

    Attributes:
        tensors: current state by name.
        previous: state at the last commit of those names that were written since.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    previous: dict[str, Tensor | None] = field(default_factory=dict)

    def read(self, name: str, like: Tensor) -> Tensor:
        """State of a name as float32 in the shape of ``like``; zeros if there is none.

        Raises:
            CodecError: it has another shape.
        """
        held = self.tensors.get(name)
        if held is None:
            return torch.zeros_like(like, dtype=torch.float32, memory_format=torch.contiguous_format)
        if held.shape != like.shape:
            raise CodecError(f"memory of {name!r} has shape {tuple(held.shape)}, the gradient {tuple(like.shape)}")
        return held

    def write(self, name: str, value: Tensor) -> None:
        """Replace the state of a name."""
        self.previous.setdefault(name, self.tensors.get(name))
        self.tensors[name] = value

    def commit(self) -> None:
        """What was written cannot be undone any more."""
        self.previous.clear()

    def rollback(self) -> None:
        """Undo the writes since the last commit."""
        for name, value in self.previous.items():
            if value is None:
                self.tensors.pop(name, None)
            else:
                self.tensors[name] = value
        self.previous.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace everything."""
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}
        self.previous.clear()


class Remembering(ABC):
    """What the stateful codecs share: decoding and state handling."""

    codec: Codec
    memory: Memory

    @property
    def unbiased(self) -> bool:
        """False: what is left out comes later."""
        return False

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress x and what is remembered for ``key.name``, and remember the rest.

        Raises:
            NonFiniteError: x holds NaN or Inf.
        """
        return self.encode_by(self.codec, x, key)

    @abstractmethod
    def encode_by(self, codec: Codec, x: Tensor, key: Key) -> Payload:
        """The same with another inner codec, which then also decodes it."""

    def decode(self, payload: Payload) -> Tensor:
        """As the inner codec."""
        return self.codec.decode(payload)

    def commit(self) -> None:
        """The step was applied: nothing of it can be taken back any more."""
        self.memory.commit()

    def rollback(self) -> None:
        """Take back what was encoded since the last commit, because its step was not applied."""
        self.memory.rollback()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's memory by name."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace this rank's memory."""
        self.memory.load_state_dict(state)


@register_codec("error_feedback")
@dataclass(frozen=True, eq=False)
class ErrorFeedback(Remembering):
    """Adds to each tensor what compression has left out of the earlier ones (Seide et al. 2014; Stich et al. 2018).

    v = g + decay * m;  send c = Q[v];  m <- v - c. With ``decay=1`` nothing is ever lost: g + m_old = c + m_new.

    Attributes:
        codec: the compressor Q, any direct codec.
        decay: factor of the memory, in [0, 1]; smaller forgets faster.
        reset: clear the memory every so many steps; 0 never.
    """

    codec: Codec
    decay: float = 1.0
    reset: int = 0
    memory: Memory = field(default_factory=Memory, init=False, repr=False)
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise OptionError(f"decay={self.decay} of error_feedback must be in [0, 1]")
        if self.reset < 0:
            raise OptionError(f"reset={self.reset} of error_feedback must be a number of steps, or 0 for never")
        _check_inner("error_feedback", self.codec)

    def encode_by(self, codec: Codec, x: Tensor, key: Key) -> Payload:
        """See :class:`Remembering`."""
        check_finite(x, f"the gradient of {key.name!r}")
        value = x.detach().to(torch.float32)
        if not (self.reset and key.step % self.reset == 0):
            value = value + self.decay * self.memory.read(key.name, x)
        payload = codec.encode(value.to(x.dtype), key)
        self.memory.write(key.name, value - codec.decode(payload).to(torch.float32))
        return payload


@register_codec("momentum_correction")
@dataclass(frozen=True, eq=False)
class MomentumCorrection(Remembering):
    """Momentum before compression, with masking (deep gradient compression, Lin et al., ICLR 2018, section 3).

    u <- momentum * u + g;  v <- v + u;  send c = Q[v];  v <- v - c;  and with masking u <- 0 where c is not 0.
    The optimizer must then have no momentum of its own.

    Attributes:
        codec: the compressor Q, any direct codec.
        momentum: factor of u, in [0, 1).
        masking: clear the momentum of coordinates that have just been sent, so that stale momentum does not pull twice.
    """

    codec: Codec
    momentum: float = 0.9
    masking: bool = True
    memory: Memory = field(default_factory=Memory, init=False, repr=False)
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise OptionError(f"momentum={self.momentum} of momentum_correction must be in [0, 1)")
        _check_inner("momentum_correction", self.codec)

    def encode_by(self, codec: Codec, x: Tensor, key: Key) -> Payload:
        """See :class:`Remembering`."""
        check_finite(x, f"the gradient of {key.name!r}")
        u = self.momentum * self.memory.read(f"{key.name}/u", x) + x.detach().to(torch.float32)
        v = self.memory.read(f"{key.name}/v", x) + u
        payload = codec.encode(v.to(x.dtype), key)
        sent = codec.decode(payload).to(torch.float32)
        masks = self.masking and codec is self.codec  # where another sends everything, no momentum grows stale
        self.memory.write(f"{key.name}/u", u.masked_fill(sent != 0, 0) if masks else u)
        self.memory.write(f"{key.name}/v", v - sent)
        return payload


def memory_of(codec: Any) -> Remembering | None:
    """The codec, if it has memory."""
    return codec if isinstance(codec, Remembering) else None


def _check_inner(name: str, codec: Codec) -> None:
    if not isinstance(codec, Codec) or isinstance(codec, Remembering):
        raise OptionError(f"{name} takes a codec of one tensor without memory, got {codec!r}")
