"""The compressors, each a registered dataclass; importing this package registers them all."""

from isgq.codecs import (
    balanced,
    casts,
    dithered,
    ecsq,
    eus,
    exact,
    feedback,
    int8,
    lloyd_max,
    nested,
    one_bit,
    pair,
    qcs,
    qsgd,
    rotated,
    schedule,
    sign,
    sparse,
    subspace,
    terngrad,
)
from isgq.core.registry import register_alias

register_alias("isgq", "separate(dithered:levels=1,bucket=row)")  # the recommended default

__all__ = [
    "balanced",
    "casts",
    "dithered",
    "ecsq",
    "eus",
    "exact",
    "feedback",
    "int8",
    "lloyd_max",
    "nested",
    "one_bit",
    "pair",
    "qcs",
    "qsgd",
    "rotated",
    "schedule",
    "sign",
    "sparse",
    "subspace",
    "terngrad",
]
