"""The compressors, each a registered dataclass; importing this package registers them all.

So it is the place to take the registry's functions from.
"""

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
from isgq.core.registry import (
    AnyCodec,
    codec,
    codec_class,
    codec_names,
    register_alias,
    register_codec,
    spec_of,
    split_spec,
)

register_alias("isgq", "separate(dithered:levels=1,bucket=row)")  # the recommended default

__all__ = [
    "AnyCodec",
    "balanced",
    "casts",
    "codec",
    "codec_class",
    "codec_names",
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
    "register_alias",
    "register_codec",
    "rotated",
    "schedule",
    "sign",
    "sparse",
    "spec_of",
    "split_spec",
    "subspace",
    "terngrad",
]
