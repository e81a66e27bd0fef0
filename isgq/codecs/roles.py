"""Which of a session's codecs is for factors and which for gradients."""

from typing import Literal

from isgq.codecs.dithered import Dithered
from isgq.codecs.exact import Exact
from isgq.codecs.feedback import ErrorFeedback, memory_of
from isgq.codecs.lloyd_max import LloydMax
from isgq.codecs.pair import Separate
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import OptionError
from isgq.core.registry import AnyCodec, codec, spec_of

MemoryPolicy = Literal["both", "worker", "none"]
"""Where what compression leaves out is remembered: on workers and servers, on workers alone, nowhere."""

_ON_FACTORS = (Exact, Dithered, LloydMax)
"""Direct codecs that ISGQ applies to each factor; given alone they mean that. Write separate(...) for any other."""


def choose_codecs(spec: str | AnyCodec, dense: str | AnyCodec | None) -> tuple[PairCodec | None, Codec | None]:
    """The codec of factors and the codec of gradients, either None where plain gradients travel.

    Args:
        spec: the session's codec, or ``"dense"``.
        dense: the session's codec for parameters without factors, or None.

    Raises:
        OptionError: two codecs for gradients, a pair codec as ``dense``, or one that only sessions know how to use.
    """
    direct = direct_codec(dense, "dense") if dense is not None else None
    if spec == "dense":
        return None, direct
    built = codec(spec, also=["dense"])
    if isinstance(built, PairCodec):
        return built, direct
    if isinstance(built, _ON_FACTORS):
        return Separate(built, built), direct
    if not isinstance(built, Codec):
        raise OptionError(f"{spec_of(built)} is for the ranks of a session together: isgq.instrument(model, ...)")
    if direct is not None:
        raise OptionError(
            f"{spec_of(built)} compresses gradients, and so does dense={spec_of(direct)}: give one of them, "
            f"or separate({spec_of(built)}) to use it on factors"
        )
    return None, built


def remember(up: Codec, down: Codec, policy: MemoryPolicy) -> tuple[Codec, Codec]:
    """Give the codecs of two passes the memory of DoubleSqueeze.

    Memory is put around biased codecs alone: what an unbiased one leaves out averages out, and its noise, which may be
    larger than the gradient, would add up in a memory. ``error_feedback(...)`` is for who wants it all the same.

    Args:
        up: of the workers.
        down: of the servers.
        policy: whose codec gets a memory.
    """
    return (
        up if policy == "none" else _with_memory(up),
        down if policy != "both" else _with_memory(down),
    )


def _with_memory(built: Codec) -> Codec:
    return built if built.unbiased or memory_of(built) is not None else ErrorFeedback(built)


def direct_codec(spec: str | AnyCodec | None, role: str) -> Codec:
    """A codec of one tensor; ``exact`` for None and ``"dense"``.

    Args:
        spec: the codec.
        role: what it is for, to say in the error.

    Raises:
        OptionError: it is for pairs of factors.
    """
    if spec is None or spec == "dense":
        return Exact()
    built = codec(spec)
    if not isinstance(built, Codec):
        raise OptionError(f"{role}={spec_of(built)} is for pairs of factors or for sessions; use a codec of one tensor")
    return built
