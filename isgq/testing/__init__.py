"""The laws of codecs as a kit: one call checks a codec of your own, of one tensor or of both factors.

::

    from isgq.testing import check_codec

    def test_my_codec():
        check_codec("my_codec:levels=3")

:data:`LAWS` lists what is demanded. Statistical laws compare with what the samples' own standard errors allow, for
fixed keys: a codec that passes once passes always.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isgq.codecs import AnyCodec, codec
from isgq.testing.cases import embedding_contract, linear_contract, normal
from isgq.testing.laws import LAWS
from isgq.testing.subject import Subject

__all__ = ["LAWS", "Report", "Subject", "check_codec", "embedding_contract", "linear_contract", "normal"]


@dataclass(frozen=True)
class Report:
    """What :func:`check_codec` found.

    Attributes:
        spec: the codec.
        passed: names of the laws that hold.
        skipped: names of those that do not concern the codec, with the reason.
    """

    spec: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str]


def check_codec(
    codec_or_spec: str | AnyCodec,
    *,
    samples: int = 400,
    z: float = 6.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Report:
    """Check a registered codec against all laws.

    Args:
        codec_or_spec: e.g. ``"dithered:levels=4"``, or a codec object.
        samples: keys that means are taken over; more finds smaller deviations.
        z: standard errors that a mean may be off; smaller is stricter.
        seed: of the keys.
        device: where to run.

    Raises:
        AssertionError: a law is broken; the message names it. Any other error of the codec names it in a note.
        OptionError: no such codec.
    """
    subject = Subject(codec(codec_or_spec), samples, z, seed, torch.device(device))
    passed, skipped = [], {}
    for law in LAWS:
        try:
            reason = law(subject)
        except AssertionError as broken:
            raise AssertionError(f"{subject.spec} breaks the law {law.__name__}: {broken}") from broken
        except Exception as error:
            error.add_note(f"while checking the law {law.__name__} of {subject.spec}")
            raise
        if reason is None:
            passed.append(law.__name__)
        else:
            skipped[law.__name__] = reason
    return Report(subject.spec, tuple(passed), skipped)
