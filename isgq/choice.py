"""Which codecs a session uses for what, from the words that a user gives."""

from dataclasses import dataclass
from typing import Literal, get_args

from isgq.aggregate import AggregateName
from isgq.codecs.roles import MemoryPolicy, choose_codecs, direct_codec, remember
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import OptionError
from isgq.core.registry import AnyCodec, codec, spec_of

Scope = Literal["tensor", "model"]


@dataclass(frozen=True)
class Choice:
    """The codecs of a session.

    Attributes:
        pair: of factors, or None.
        direct: of gradients, or None for a plain all-reduce.
        down: of averages; without effect in one pass.
        scope: whether gradients are compressed one by one or as one vector.
        aggregate: how the ranks' records become a mean.
    """

    pair: PairCodec | None
    direct: Codec | None
    down: Codec
    scope: Scope
    aggregate: AggregateName

    @property
    def settings(self) -> dict[str, str]:
        """What all ranks must have in common."""
        codecs = (spec_of(c) if c is not None else "dense" for c in (self.pair, self.direct))
        settings = {"codec": " + ".join(codecs), "scope": self.scope, "aggregate": self.aggregate}
        return settings if self.aggregate == "gather" else settings | {"down": spec_of(self.down)}

    @property
    def spec(self) -> str:
        """The same as one string."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def choose(
    spec: str | AnyCodec,
    dense: str | AnyCodec | None,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
) -> Choice:
    """Check and complete what :func:`isgq.instrument` was given.

    Raises:
        OptionError: an unknown word, a codec in a place where it does not fit, or ``down`` without a second pass.
    """
    pair, direct = choose_codecs(spec, dense)
    return _complete(pair, direct, scope, aggregate, down, memory)


def choose_direct(
    spec: str | AnyCodec,
    what: str,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
) -> Choice:
    """The same where there are no factors.

    Args:
        spec: a codec of one tensor.
        what: why there are no factors, for the error.
        scope: as for :func:`isgq.instrument`.
        aggregate: as for :func:`isgq.instrument`.
        down: as for :func:`isgq.instrument`.
        memory: as for :func:`isgq.instrument`.

    Raises:
        OptionError: as for :func:`choose`, or a codec of pairs.
    """
    built = codec(spec)
    if not isinstance(built, Codec):
        raise OptionError(f"{what}, so it needs a codec of one tensor; {spec_of(built)} is for pairs of factors")
    return _complete(None, built, scope, aggregate, down, memory)


def _complete(
    pair: PairCodec | None,
    direct: Codec | None,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
) -> Choice:
    for name, value, allowed in (
        ("scope", scope, get_args(Scope)),
        ("aggregate", aggregate, get_args(AggregateName)),
        ("memory", memory, get_args(MemoryPolicy)),
    ):
        if value not in allowed:
            raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    below = direct_codec(down, "down")
    if aggregate == "gather":
        if down is not None:
            raise OptionError("down= compresses the averages of two passes: choose aggregate='two_pass' or 'server'")
        return Choice(pair, direct, below, scope, aggregate)
    above, below = remember(direct if direct is not None else direct_codec(None, "dense"), below, memory)
    return Choice(pair, above, below, scope, aggregate)
