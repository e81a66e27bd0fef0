"""The codec ``auto``: a session that chooses a way for each gradient by predicted time, within a limit of error.

    auto(isgq;rotated;qsgd:levels=4):link=100Mbit/s+1ms,error=0.25

In parentheses the codecs to choose from, besides plain gradients. In the first step every rank measures every codec on
its gradients (:mod:`isgq.probe`); the ranks share what they found, so that all decide alike (:mod:`isgq.costs`). When
a rank's batches become much larger or smaller, it asks for a new plan in its header, and all ranks plan again.

Errors must add up over gradients. Those of a codec that shares bytes among all gradients it is used for depend on which
these are (``rotated`` with ``share=model``); ``share=layer`` leaves the sharing to the choice among several ``nmse``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isgq.bandwidth import Link
from isgq.codecs.feedback import memory_of
from isgq.codecs.roles import choose_codecs
from isgq.core.codec import learned_by
from isgq.core.errors import OptionError
from isgq.core.registry import AnyCodec, split_outside, split_spec

NAME = "auto"
_ROTATED = ";".join(f"rotated:share=layer,nmse={nmse}" for nmse in (2, 0.7, 0.25))
DEFAULT_WAYS = f"isgq;balanced;balanced:samples=0.25;{_ROTATED};qsgd:levels=4;fp16"
_ERROR = 0.25
_CHANGE = 1.5  # how many times more or fewer elements of factors are another batch size
_PATIENCE = 2  # steps in a row that must be so; doubles with each plan, so that planning stays a vanishing share


@dataclass(frozen=True)
class Auto:
    """What an automatic session chooses from, and for which link.

    Attributes:
        ways: codecs, of factors or of gradients, without memory, by the words that the user gave.
        link: of each worker.
        error: largest expected squared error of the mean over workers, over one worker's squared gradient; larger is
            more aggressive.
        timed: whether measured times of the codecs count. If not, bytes alone decide, which are the same for the same
            seed: so every run makes the same plan.
    """

    ways: Mapping[str, AnyCodec]
    link: Link
    error: float = _ERROR
    timed: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.error < math.inf:
            raise OptionError(f"error={self.error} of auto must be positive")
        for name, way in self.ways.items():
            if memory_of(way) is not None or learned_by(way) is not None:
                raise OptionError(
                    f"auto chooses by the error of one step, which a memory makes up for later: it cannot take "
                    f"{name}; name the codec itself, or give auto an unbiased one"
                )

    @staticmethod
    def asked(spec: object) -> bool:
        """Whether a session's codec is this."""
        return isinstance(spec, str) and split_spec(spec)[0] == NAME

    @staticmethod
    def parse(spec: str) -> "Auto":
        """Read the spec in the module's docstring.

        Raises:
            OptionError: malformed, no link, or a codec that does not fit.
        """
        _, inner, options = split_spec(spec)
        given = dict(option.partition("=")[::2] for option in options)
        if unknown := sorted(set(given) - {"link", "error", "timed"}):
            raise OptionError(f"auto has no option {unknown[0]!r}; write option=value with: link, error, timed")
        if (timed := given.get("timed", "true")) not in {"true", "false"}:
            raise OptionError(f"option timed={timed!r} of auto must be true or false")
        if "link" not in given:
            raise OptionError("auto needs to know the link between workers: auto:link=100Mbit/s+1ms")
        try:
            error = float(given.get("error", _ERROR))
        except ValueError:
            raise OptionError(f"option error={given['error']!r} of auto must be a number") from None
        ways: dict[str, AnyCodec] = {}
        for name in split_outside(DEFAULT_WAYS if inner is None else inner, ";"):
            ways |= {name.strip(): codec for codec in choose_codecs(name.strip(), None) if codec is not None}
        return Auto(ways, Link.parse(given["link"]), error, timed == "true")

    @property
    def spec(self) -> str:
        """The same as one string, with every option."""
        return f"auto({';'.join(self.ways)}):link={self.link},error={self.error:g},timed={str(self.timed).lower()}"


@dataclass
class Sizes:
    """Notices that this rank's batches are not those that the plan was made for.

    Attributes:
        planned: elements of all captured factors when the plan was made; 0 for not yet.
        patience: steps in a row that must differ.
    """

    planned: int = 0
    patience: int = _PATIENCE
    _others: int = field(default=0, repr=False)

    def plan(self, size: int) -> None:
        """A plan is made, on every rank."""
        self.patience *= 2 if self.planned else 1
        self.planned, self._others = size, 0

    def asks(self, size: int) -> bool:
        """Whether a new plan is due after a step with factors of so many elements; 0 says nothing."""
        self.planned = self.planned or size
        if size:
            same = self.planned / _CHANGE <= size <= self.planned * _CHANGE
            self._others = 0 if same else self._others + 1
        return self._others >= self.patience
