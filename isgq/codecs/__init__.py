"""The compressors, each a registered dataclass; importing this package registers them all."""

from isgq.codecs import (
    casts,
    dithered,
    eus,
    exact,
    int8,
    lloyd_max,
    nested,
    one_bit,
    pair,
    qcs,
    qsgd,
    sign,
    sparse,
    terngrad,
)

__all__ = [
    "casts",
    "dithered",
    "eus",
    "exact",
    "int8",
    "lloyd_max",
    "nested",
    "one_bit",
    "pair",
    "qcs",
    "qsgd",
    "sign",
    "sparse",
    "terngrad",
]
