"""Which of a session's codecs is for factors and which for gradients."""

from isgq.codecs.dithered import Dithered
from isgq.codecs.exact import Exact
from isgq.codecs.lloyd_max import LloydMax
from isgq.codecs.pair import Separate
from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import OptionError
from isgq.core.registry import AnyCodec, codec, spec_of

_ON_FACTORS = (Exact, Dithered, LloydMax)
"""Direct codecs that ISGQ applies to each factor; given alone they mean that. Write separate(...) for any other."""


def choose_codecs(spec: str | AnyCodec, dense: str | AnyCodec | None) -> tuple[PairCodec | None, Codec | None]:
    """The codec of factors and the codec of gradients, either None where plain gradients travel.

    Args:
        spec: the session's codec, or ``"dense"``.
        dense: the session's codec for parameters without factors, or None.

    Raises:
        OptionError: two codecs for gradients, or a pair codec as ``dense``.
    """
    direct = codec(dense) if dense is not None else None
    if direct is not None and not isinstance(direct, Codec):
        raise OptionError(f"dense={spec_of(direct)} is for pairs of factors; use a codec of one tensor")
    if spec == "dense":
        return None, direct
    built = codec(spec)
    if isinstance(built, PairCodec):
        return built, direct
    if isinstance(built, _ON_FACTORS):
        return Separate(built, built), direct
    if direct is not None:
        raise OptionError(
            f"{spec_of(built)} compresses gradients, and so does dense={spec_of(direct)}: give one of them, "
            f"or separate({spec_of(built)}) to use it on factors"
        )
    return None, built
