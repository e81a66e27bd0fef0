"""Every error that isgq raises on purpose.

All derive from :class:`IsgqError`, and from the builtin that a caller would expect, so that
``except ValueError`` works without knowing this module. A message names the thing, the value and what is allowed.
"""


class IsgqError(Exception):
    """Base class of all errors of this package."""


class OptionError(IsgqError, ValueError):
    """An unknown name, an unknown option or a value outside its range; the message lists what is allowed."""


class CodecError(IsgqError, ValueError):
    """A tensor or payload that a codec cannot handle (wrong shape, dtype or content)."""


class NonFiniteError(CodecError):
    """NaN or Inf in a tensor that was to be compressed."""


class WireError(IsgqError, ValueError):
    """Bytes that are no valid message: truncated, corrupted, forged, or of another version."""


class ExchangeError(IsgqError, RuntimeError):
    """A collective failed: a rank is missing, timed out or dead."""


class PeerError(IsgqError, RuntimeError):
    """Some rank could not take part in a step; raised on every rank alike, naming rank and parameter."""


class EmptyBatchError(PeerError):
    """Some rank's backward pass saw no samples at all."""


class PeerNonFiniteError(PeerError, NonFiniteError):
    """Some rank found NaN or Inf in what it had to send."""


class MismatchError(IsgqError, RuntimeError):
    """The ranks do not agree on model, codec, seed, step or protocol version."""


class InstrumentError(IsgqError, RuntimeError):
    """The model cannot be instrumented, or a session is used in a way that it does not support."""


class RankError(IsgqError, RuntimeError):
    """A rank of a launched job raised or died; every other rank has been ended."""
