"""Options that change with the step: ``"top_k:k=0.25->0.001@500"`` goes from 0.25 to 0.001 over 500 steps.

Warm-up as in deep gradient compression (Lin et al., ICLR 2018): geometric between positive values, linear otherwise;
constant afterwards. Integers are rounded. The payload carries the step, so that a receiver uses the same options.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from isgq.core.codec import Codec
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Payload
from isgq.core.registry import codec, register_codec, schedule_value, split_spec

_STEP = "step"


@register_codec("scheduled")
@dataclass(frozen=True)
class Scheduled:
    """A direct codec whose options follow a schedule; ``isgq.codec`` makes it of any spec with ``->`` in an option.

    Attributes:
        spec: the codec's spec with at least one scheduled option.
    """

    spec: str
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for step in (0, 1 << 40):
            if not isinstance(self.at(step), Codec):
                raise OptionError(f"only codecs of one tensor can be scheduled, {self.spec!r} is none")

    @property
    def unbiased(self) -> bool:
        """Whether the codec is, at the start and at the end."""
        return self.at(0).unbiased and self.at(1 << 40).unbiased

    def at(self, step: int) -> Codec:
        """The codec of a step."""
        return _at(self.spec, step)

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress with the options of ``key.step``."""
        payload = self.at(key.step).encode(x, key)
        step = torch.tensor([key.step], dtype=torch.int64, device=x.device)
        return replace(payload, tensors={**payload.tensors, _STEP: step})

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild with the options of the sender's step.

        Raises:
            CodecError: the payload carries no step.
        """
        step = int(payload.require_tensor(_STEP, 1, torch.int64))
        if step < 0:
            raise CodecError(f"payload of {self.spec!r} is of step {step}")
        return self.at(step).decode(replace(payload, tensors={n: t for n, t in payload.tensors.items() if n != _STEP}))


@functools.lru_cache(maxsize=4096)
def _at(spec: str, step: int) -> Codec:
    name, inner, options = split_spec(spec)
    fixed = []
    for option in options:
        field, _, text = option.partition("=")
        if "->" in field:
            raise OptionError(f"option {option.strip()!r} of {spec!r} has no name: write option=start->end@steps")
        fixed.append(f"{field}={schedule_value(text, step)}")
    built = codec(name + (f"({inner})" if inner is not None else "") + (":" + ",".join(fixed) if fixed else ""))
    if not isinstance(built, Codec):
        raise OptionError(f"only codecs of one tensor can be scheduled, {spec!r} is none")
    return built
