"""The two protocols of compression.

A *direct* codec (:class:`Codec`) maps one tensor to a payload; a *pair* codec (:class:`PairCodec`) sees both factors
of a gradient. Codecs are pure: no communication, no hidden state; the key is the only source of randomness.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from isgq.core.keys import Key
from isgq.core.payload import Contract, Factors, LowRank, PairPayload, Payload


@runtime_checkable
class Codec(Protocol):
    """Compresses one tensor.

    Attributes:
        name: its name in the registry; stands in its payloads.
        unbiased: whether the mean of ``decode(encode(x, key))`` over keys is x; the law tests read it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def unbiased(self) -> bool: ...  # noqa: D102

    def encode(self, x: Tensor, key: Key) -> Payload:
        """Compress a floating-point tensor of any shape; NonFiniteError on NaN or Inf."""
        ...

    def decode(self, payload: Payload) -> Tensor:
        """Rebuild the tensor: the payload's shape and dtype, on the device of its symbols."""
        ...


@runtime_checkable
class PairCodec(Protocol):
    """Compresses the two factors of a gradient together.

    Attributes:
        name: its name in the registry; stands in its payloads.
        unbiased: whether the mean over keys of the reconstructed *gradient* is the gradient.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def unbiased(self) -> bool: ...  # noqa: D102

    def encode_pair(self, factors: Factors, contract: Contract, key: Key) -> PairPayload:
        """Compress both factors; NonFiniteError on NaN or Inf. Integer x (indices) is sent without loss."""
        ...

    def decode_pair(self, payload: PairPayload) -> Factors | LowRank:
        """Rebuild both factors, or the gradient as a sum of outer products, on the device of the payload's contents."""
        ...


@runtime_checkable
class PlansTogether(Protocol):
    """A codec of pairs that shares out the bytes of a step among all of a model's layers.

    Attributes:
        together: whether it does, by its options; otherwise ``encode_pair`` serves.
    """

    @property
    def together(self) -> bool: ...  # noqa: D102

    def prepare(self, factors: Factors, contract: Contract, key: Key) -> Any:
        """What :meth:`encode_together` needs of a pair; or its payload, where nothing is to be shared out.

        NonFiniteError on NaN or Inf.
        """
        ...

    def encode_together(
        self, prepared: Sequence[Any], overhead: int, say: Callable[[str], None]
    ) -> Sequence[PairPayload]:
        """Compress all pairs.

        Args:
            prepared: what :meth:`prepare` has made of each.
            overhead: bytes that are sent besides the records, in the same step.
            say: takes what the user should know, the same words for the same thing.
        """
        ...


@runtime_checkable
class OwnDigests(Protocol):
    """A codec of pairs whose payloads have other digests than those of the keys' children ``"x"`` and ``"d"``."""

    def digests(self, key: Key) -> tuple[int, int]:
        """Digests of x and d (or zero), for a pair encoded with this key."""
        ...


class Stateful(Protocol):
    """What follows the fate of steps: it changes only with those that are applied."""

    def commit(self) -> None:
        """The step was applied."""
        ...

    def rollback(self) -> None:
        """The step was not applied."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace it; an empty state is that of the beginning."""
        ...


@runtime_checkable
class Learns(Protocol):
    """A codec that learns from what it decodes, the same on every rank that decodes the same messages.

    Attributes:
        common: what has been learned; None where, by its options, nothing is.
    """

    @property
    def common(self) -> Stateful | None: ...  # noqa: D102


def learned_by(codec: object) -> Stateful | None:
    """What a codec has learned and other ranks must have, too, if there is any."""
    return codec.common if isinstance(codec, Learns) else None


@functools.cache  # such a question to a protocol takes as long as the digests
def _has_own_digests(kind: type) -> bool:
    return issubclass(kind, OwnDigests)


def pair_digests(codec: PairCodec, key: Key) -> tuple[int, int]:
    """What a receiver takes the digests of a pair for, so that they need not be sent."""
    if _has_own_digests(type(codec)):
        return cast(OwnDigests, codec).digests(key)
    return key.child("x").digest, key.child("d").digest
