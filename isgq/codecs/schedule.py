"""Options that change with the step: ``"top_k:k=0.25->0.001@500"`` goes from 0.25 to 0.001 over 500 steps.

Warm-up as in deep gradient compression (Lin et al., ICLR 2018): geometric between positive values, linear otherwise;
constant afterwards. Integers are rounded. The payload carries the step, so that a receiver uses the same options.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from isgq.core.codec import Codec, PairCodec, PlansTogether, learned_by, pair_digests
from isgq.core.errors import CodecError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors, LowRank, PairPayload, Payload
from isgq.core.registry import AnyCodec, codec, register_codec, schedule_value, split_spec

_STEP = "step"
_LATE = 1 << 40  # after the end of every schedule


@dataclass(frozen=True)
class _Schedule:
    """What both kinds share.

    Attributes:
        spec: the codec's spec with at least one scheduled option.
    """

    spec: str
    name: ClassVar[str]

    @property
    def unbiased(self) -> bool:
        """Whether the codec is, at the start and at the end."""
        return _at(self.spec, 0).unbiased and _at(self.spec, _LATE).unbiased


@register_codec("scheduled")
@dataclass(frozen=True)
class Scheduled(_Schedule):
    """A direct codec whose options follow a schedule; ``isgq.codec`` makes it of any spec with ``->`` in an option."""

    def __post_init__(self) -> None:
        for step in (0, _LATE):
            if not isinstance(self.at(step), Codec):
                raise OptionError(f"only codecs of one tensor can be scheduled so, {self.spec!r} is none")

    def at(self, step: int) -> Codec:
        """The codec of a step."""
        return cast(Codec, _at(self.spec, step))

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress with the options of ``key.step``."""
        return _stamp(self.at(key.step).encode(x, key), key.step)

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild with the options of the sender's step.

        Raises:
            CodecError: the payload carries no step.
        """
        step, plain = _read(self.spec, payload)
        return self.at(step).decode(plain)


@dataclass(frozen=True)
class _Begun:
    """What the codec of a step has prepared."""

    step: int
    prepared: Any


@register_codec("scheduled_pair")
@dataclass(frozen=True)
class ScheduledPair(_Schedule):
    """The same for a codec of pairs, which learns nothing; the step goes with d."""

    def __post_init__(self) -> None:
        for step in (0, _LATE):
            if not isinstance(self.at(step), PairCodec):
                raise OptionError(f"only codecs of pairs can be scheduled so, {self.spec!r} is none")
            if learned_by(self.at(step)) is not None:
                raise OptionError(f"{self.spec!r} learns from step to step, which a schedule would break off")

    def at(self, step: int) -> PairCodec:
        """The codec of a step."""
        return cast(PairCodec, _at(self.spec, step))

    def digests(self, key: Key) -> tuple[int, int]:
        """Those of the codec of the key's step."""
        return pair_digests(self.at(key.step), key)

    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Compress with the options of ``key.step``."""
        return _stamp_pair(self.at(key.step).encode_pair(factors, contract, key), key.step)

    def decode_pair(self, payload: PairPayload) -> Factors | LowRank:
        """Rebuild with the options of the sender's step.

        Raises:
            CodecError: the payload carries no step.
        """
        step, plain = _read(self.spec, payload.d)
        return self.at(step).decode_pair(replace(payload, d=plain))

    @property
    def together(self) -> bool:
        """Whether the layers share, at the start."""
        first = self.at(0)
        return isinstance(first, PlansTogether) and first.together

    def prepare(self, factors: Factors, contract: Contract, key: Key) -> _Begun | PairPayload:
        """See :class:`isgq.core.codec.PlansTogether`."""
        own = self.at(key.step)
        assert isinstance(own, PlansTogether)
        prepared = own.prepare(factors, contract, key)
        return _stamp_pair(prepared, key.step) if isinstance(prepared, PairPayload) else _Begun(key.step, prepared)

    def encode_together(
        self, prepared: Sequence[_Begun], overhead: int, say: Callable[[str], None]
    ) -> list[PairPayload]:
        """See :class:`isgq.core.codec.PlansTogether`."""
        step = prepared[0].step
        own = self.at(step)
        assert isinstance(own, PlansTogether)
        payloads = own.encode_together([each.prepared for each in prepared], overhead, say)
        return [_stamp_pair(payload, step) for payload in payloads]


def _stamp(payload: Payload, step: int) -> Payload:
    device = next((t.device for t in payload.tensors.values()), None)
    device = next((s.values.device for s in payload.symbols.values()), device)
    return replace(payload, tensors={**payload.tensors, _STEP: torch.tensor([step], dtype=torch.int64, device=device)})


def _stamp_pair(payload: PairPayload, step: int) -> PairPayload:
    return replace(payload, d=_stamp(payload.d, step))


def _read(spec: str, payload: Payload) -> tuple[int, Payload]:
    """The step of a payload, and the payload as its codec made it; CodecError without one."""  # noqa: DOC501
    step = int(payload.require_tensor(_STEP, 1, torch.int64))
    if step < 0:
        raise CodecError(f"payload of {spec!r} is of step {step}")
    return step, replace(payload, tensors={n: t for n, t in payload.tensors.items() if n != _STEP})


@functools.lru_cache(maxsize=4096)
def _at(spec: str, step: int) -> AnyCodec:
    name, inner, options = split_spec(spec)
    fixed = []
    for option in options:
        field, _, text = option.partition("=")
        if "->" in field:
            raise OptionError(f"option {option.strip()!r} of {spec!r} has no name: write option=start->end@steps")
        fixed.append(f"{field}={schedule_value(text, step)}")
    return codec(name + (f"({inner})" if inner is not None else "") + (":" + ",".join(fixed) if fixed else ""))
