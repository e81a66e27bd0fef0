"""Which codecs a session uses for what, from the words that a user gives."""

import functools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from isgq.aggregate import AggregateName, InlineBytes
from isgq.auto import Auto
from isgq.codecs.feedback import memory_of
from isgq.codecs.roles import MemoryPolicy, choose_codecs, direct_codec, remember
from isgq.codecs.subspace import Subspace
from isgq.core.codec import Codec, PairCodec, learned_by
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
        max_staleness: of an asynchronous server; None for no bound.
        auto: what to choose from in the first step, instead of pair and direct; or None.
        subspace: in which the ranks make the mean in rounds, with the other codecs; None for one round without.
        inline_bytes: of a message in one pass that travel with the header.
    """

    pair: PairCodec | None
    direct: Codec | None
    down: Codec
    scope: Scope
    aggregate: AggregateName
    max_staleness: int | None = None
    auto: Auto | None = None
    subspace: Subspace | None = None
    inline_bytes: InlineBytes = 0

    def shards(self, ranks: int) -> int:
        """How many servers the gradients of a session are cut for."""
        return ranks if self.aggregate == "two_pass" and self.subspace is None else 1

    @property
    def agreed(self) -> dict[str, str]:
        """What all ranks must have in common."""
        return {**self.settings, "inline_bytes": str(self.inline_bytes)}

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """The same, as far as a state depends on it."""
        codecs: list[AnyCodec | Subspace | None] = [self.pair, self.subspace or self.direct]
        specs = (spec_of(c) if c is not None else "dense" for c in codecs)
        named = " + ".join(specs) if self.auto is None else self.auto.spec
        settings = {"codec": named, "scope": self.scope, "aggregate": self.aggregate}
        if self.aggregate != "gather":
            settings["down"] = spec_of(self.down)
        if self.max_staleness is not None:
            settings["max_staleness"] = str(self.max_staleness)
        return settings

    @functools.cached_property
    def spec(self) -> str:
        """The same as one string."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among the allowed ones.

    Raises:
        OptionError: it is not.
    """
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def predicate(skip: str | Collection[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    """Tells by name which parameters are meant: by a regular expression, a collection of names, or a predicate."""
    if isinstance(skip, str):
        pattern = re.compile(skip)
        return lambda name: pattern.search(name) is not None
    if callable(skip):
        return skip
    names = set(skip)
    return lambda name: name in names


def choose(
    spec: str | AnyCodec,
    dense: str | AnyCodec | None,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
    max_staleness: int | None = None,
) -> Choice:
    """Check and complete what :func:`isgq.instrument` was given.

    Raises:
        OptionError: an unknown word, a codec in a place where it does not fit, or ``down`` without a second pass.
    """
    if isinstance(spec, str) and Auto.asked(spec):
        if dense is not None or aggregate != "gather" or scope != "tensor":
            raise OptionError("auto chooses what each gradient takes in one pass: leave dense=, aggregate= and scope=")
        return replace(_complete(None, None, scope, aggregate, down, memory), auto=Auto.parse(spec))
    if max_staleness is not None and aggregate != "async":
        raise OptionError(f"max_staleness={max_staleness} is for aggregate='async': nothing is stale otherwise")
    built = codec(spec, also=["dense"]) if spec != "dense" else spec
    if isinstance(built, Subspace):
        return _in_subspace(built, dense, scope, aggregate, down, memory)
    pair, direct = choose_codecs(built, dense)
    if pair is not None and learned_by(pair) is not None and aggregate != "gather":
        raise OptionError(
            f"{spec_of(pair)} learns from what all ranks decode, with aggregate={aggregate!r} they do not: use 'gather'"
        )
    return replace(_complete(pair, direct, scope, aggregate, down, memory), max_staleness=max_staleness)


def _in_subspace(
    subspace: Subspace,
    dense: str | AnyCodec | None,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
) -> Choice:
    """The choice for a common subspace, which implies two passes and brings its own codecs and memory.

    Raises:
        OptionError: a word or codec that does not fit.
    """
    check_option("aggregate", aggregate, get_args(AggregateName))
    if dense is not None or scope != "tensor" or aggregate == "async" or memory != "both":
        raise OptionError(
            f"{spec_of(subspace)} compresses all gradients, one by one, with its own memory, on synchronous ranks: "
            "leave dense=, scope= and memory= out, and aggregate='async'"
        )
    below = subspace.projections if down is None else direct_codec(down, "down")
    if memory_of(below) is not None:
        raise OptionError(f"down={spec_of(below)}: a subspace has a memory of its own, give a codec without")
    passes: AggregateName = "two_pass" if aggregate == "gather" else aggregate
    return Choice(None, subspace.projections, below, scope, passes, subspace=subspace)


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
    if aggregate == "async":
        raise OptionError("aggregate='async' is for sessions: isgq.instrument(model, aggregate='async')")
    if not isinstance(built, Codec):
        raise OptionError(f"{what}, so it needs a codec of one tensor; {spec_of(built)} is for sessions")
    return _complete(None, built, scope, aggregate, down, memory)


def _complete(
    pair: PairCodec | None,
    direct: Codec | None,
    scope: Scope,
    aggregate: AggregateName,
    down: str | AnyCodec | None,
    memory: MemoryPolicy,
) -> Choice:
    check_option("scope", scope, get_args(Scope))
    check_option("aggregate", aggregate, get_args(AggregateName))
    check_option("memory", memory, get_args(MemoryPolicy))
    below = direct_codec(down, "down")
    if aggregate == "gather":
        if down is not None:
            raise OptionError("down= compresses what servers send: choose aggregate='two_pass', 'server' or 'async'")
        return Choice(pair, direct, below, scope, aggregate)
    if aggregate == "async":
        if memory_of(below) is not None:
            raise OptionError(
                "an asynchronous server needs no memory: what a reply leaves out is in the next difference"
            )
        memory = "worker" if memory == "both" else memory
    above, below = remember(direct if direct is not None else direct_codec(None, "dense"), below, memory)
    return Choice(pair, above, below, scope, aggregate)
