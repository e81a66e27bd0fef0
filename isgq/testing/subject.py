"""The codec under test, of either kind, behind one face."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

import isgq.codecs  # noqa: F401  (registers the codecs)
from isgq.codecs import AnyCodec, codec, spec_of
from isgq.core.codec import PairCodec
from isgq.core.keys import Key
from isgq.core.payload import Factors, LowRank, PairPayload, Payload
from isgq.testing.cases import Case, contract, pair_cases, statistical_cases, tensor_cases


@dataclass(frozen=True)
class Subject:
    """A codec with all that the laws ask of it.

    Attributes:
        codec: the codec.
        samples: keys that a mean is taken over.
        z: standard errors that a mean may be off.
        seed: seed of the keys.
        device: where the tensors live.
    """

    codec: AnyCodec
    samples: int
    z: float
    seed: int
    device: torch.device
    spec: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", spec_of(self.codec))

    @property
    def is_pair(self) -> bool:
        """Whether it takes both factors."""
        return isinstance(self.codec, PairCodec)

    @cached_property
    def cases(self) -> Mapping[str, Case]:
        """All cases of its kind, on the device."""
        return self._on_device(pair_cases() if self.is_pair else tensor_cases())

    @cached_property
    def statistical_cases(self) -> Mapping[str, Case]:
        """The cases that means are taken of, on the device."""
        return self._on_device(statistical_cases(self.is_pair))

    def _on_device(self, cases: Mapping[str, Case]) -> dict[str, Case]:
        return {name: tuple(_moved(t, self.device) for t in case) for name, case in cases.items()}

    def key(self, step: int = 0) -> Key:
        """A key of the run."""
        return Key("testing.weight", self.seed, step)

    def encode(self, case: Case, step: int = 0) -> Payload | PairPayload:
        """Encode on a codec object that has seen nothing before."""
        fresh = codec(self.spec)
        if isinstance(fresh, PairCodec):
            return fresh.encode_pair(Factors(*case), contract, self.key(step))
        return fresh.encode(case[0], self.key(step))

    def open(self, payload: Payload | PairPayload) -> Tensor | Factors | LowRank:
        """Decode on a codec object that has seen nothing before."""
        return open_with(codec(self.spec), payload)

    def decode(self, payload: Payload | PairPayload) -> Case:
        """What :meth:`open` gives, as a tuple: that of x first."""
        return tensors_of(self.open(payload))

    def rebuild(self, payload: Payload | PairPayload) -> Tensor:
        """The decoded tensor, or the weight's gradient that the decoded factors make up: flat in float64."""
        opened = self.open(payload)
        if isinstance(opened, LowRank):
            return LowRank(opened.left.double(), opened.right.double()).weight().reshape(-1)
        return self.target(tensors_of(opened))

    def target(self, case: Case) -> Tensor:
        """What unbiasedness is about, flat in float64: the tensor, or the gradient."""
        value = contract(*(t.float() if t.is_floating_point() else t for t in case)) if self.is_pair else case[0]
        return value.detach().double().reshape(-1)

    @cached_property
    def errors(self) -> Mapping[str, Tensor]:
        """Decoded minus true target of each statistical case for several keys: float64 ``[samples, n]``."""
        return {
            name: torch.stack([self._error(case, step) for step in range(self.samples)])
            for name, case in self.statistical_cases.items()
        }

    def _error(self, case: Case, step: int) -> Tensor:
        return self.rebuild(self.encode(case, step)) - self.target(case)


def open_with(receiver: AnyCodec, payload: Payload | PairPayload) -> Tensor | Factors | LowRank:
    """Decode with a codec of either kind."""
    if isinstance(receiver, PairCodec):
        assert isinstance(payload, PairPayload), f"encode_pair gave a {type(payload).__name__}"
        return receiver.decode_pair(payload)
    assert isinstance(payload, Payload), f"encode gave a {type(payload).__name__}"
    return receiver.decode(payload)


def tensors_of(opened: Tensor | Factors | LowRank) -> Case:
    """The tensors of what was decoded, that of x first."""
    if isinstance(opened, Factors):
        return opened.x, opened.d
    return (opened.right, opened.left) if isinstance(opened, LowRank) else (opened,)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, with its strides; ``.to`` alone would fill up those of 0."""
    if tensor.device == device or device.type == "cpu":
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    base = tensor.detach()[tuple(slice(1) if stride == 0 and size else slice(None) for size, stride in sizes)]
    return base.to(device).expand(tensor.shape).requires_grad_(tensor.requires_grad)
