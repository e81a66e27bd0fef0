"""Payloads to try the wire with, and what it means that two of them are the same."""

import torch
from torch import Tensor

from isgq.core.keys import random_int32
from isgq.core.payload import PairPayload, Payload, Symbols
from isgq.wire.layout import DTYPES, Record, parts_of

ALPHABETS = (1, 2, 3, 4, 5, 6, 7, 9, 16, 17, 27, 33, 81, 200, 255, 256, 257, 1000, 4096, 4097, 10_000, 65536)
ALPHABETS += (1 << 31, (1 << 31) + 1, 1 << 40, 1 << 62)


def integers(count: int, limit: int, role: str = "x") -> Tensor:
    """Reproducible integers in ``[0, limit)``: int64 ``[count]``."""
    low, high = (random_int32(5, f"{role}.{half}", count).to(torch.int64) & 0x7FFFFFFF for half in ("low", "high"))
    return (low | high << 31) % limit


def symbols(count: int, alphabet: int, role: str = "x") -> Symbols:
    """Equally likely symbols, the largest of them among them."""
    values = integers(count, alphabet, role)
    values[-1:] = alphabet - 1
    return Symbols(values, alphabet)


def skewed(count: int, alphabet: int, zeros: int, role: str = "x") -> Symbols:
    """Symbols of which ``zeros`` in 1000 are zero, the others equally likely."""
    values = integers(count, alphabet, role)
    values[integers(count, 1000, role + ".zero") < zeros] = 0
    return Symbols(values, alphabet)


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(left: Record, right: Record) -> None:
    """The same record, bit for bit, NaN included."""
    assert isinstance(left, PairPayload) is isinstance(right, PairPayload)
    assert left.codec == right.codec
    for a, b in zip(parts_of(left), parts_of(right), strict=True):
        assert (a.codec, tuple(a.shape), a.dtype, a.digest) == (b.codec, tuple(b.shape), b.dtype, b.digest)
        assert list(a.symbols) == list(b.symbols)
        assert list(a.tensors) == list(b.tensors)
        for name in a.symbols:
            assert a.symbols[name].alphabet == b.symbols[name].alphabet
            assert a.symbols[name].values.dtype == b.symbols[name].values.dtype
            assert torch.equal(a.symbols[name].values, b.symbols[name].values)
        for name in a.tensors:
            assert (a.tensors[name].shape, a.tensors[name].dtype) == (b.tensors[name].shape, b.tensors[name].dtype)
            assert bits_of(a.tensors[name]) == bits_of(b.tensors[name])


def ternary(count: int = 6) -> Payload:
    """The example of the documentation."""
    values = torch.arange(count).remainder(3)
    scale = {"scale": torch.tensor([0.5])}
    return Payload("dithered", (2, count // 2), torch.float32, {"q": Symbols(values, 3)}, scale, 0x0123456789ABCDEF)


def every_dtype() -> Payload:
    tensors = {}
    for dtype in DTYPES:
        raw = integers(5 * dtype.itemsize, 2 if dtype is torch.bool else 256, str(dtype)).to(torch.uint8)
        tensors[str(dtype).removeprefix("torch.")] = raw.view(dtype)
    tensors["nan"] = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(3, 0, 2, dtype=torch.float16)
    return Payload("exact", (), torch.bfloat16, {}, tensors)


def pair(x_digest: int = 11, d_digest: int = 12) -> PairPayload:
    x = Payload("dithered", (4, 9), torch.float32, {"q": skewed(36, 3, 700)}, {"scale": torch.ones(4)}, x_digest)
    d = Payload("dithered", (4, 5), torch.float32, {"q": skewed(20, 5, 500)}, {"scale": torch.ones(4)}, d_digest)
    return PairPayload("separate", x, d)


def low_rank(rows: int, columns: int, rank: int, role: str) -> Payload:
    """Like two atoms of a factorised gradient, with a digest."""
    streams = {"a": skewed(rows * rank, 5, 600, role + "a"), "b": skewed(columns * rank, 5, 600, role + "b")}
    scales = torch.linspace(1, 2, rank, dtype=torch.float16)
    return Payload("rotated", (rows, columns), torch.float32, streams, {"s": scales}, 1 + len(role))


def sparse() -> Payload:
    streams = {"index": symbols(30, 100_000), "sign": symbols(30, 2)}
    return Payload("top_k", (1000, 1 << 20), torch.float16, streams, {"values": torch.arange(30.0)}, 0)


def examples() -> dict[str, Record]:
    """Small records, each of another kind."""
    return {
        "ternary": ternary(),
        "dtypes": every_dtype(),
        "pair": pair(),
        "shared_digest": pair(7, 7),
        "half_digest": pair(0, 7),
        "sparse": sparse(),
        "empty": Payload("dithered", (0, 3), torch.float64, {"q": symbols(0, 3)}, {"scale": torch.empty(0)}, 9),
        "scalar": Payload("dithered", (), torch.float16, {"q": symbols(1, 3)}, {"scale": torch.tensor(1.0)}, 9),
        "constant": Payload("sign", (100, 100), torch.float32, {"q": symbols(10_000, 1)}, {}, 1 << 63),
        "zeros": Payload("sign", (400, 100), torch.float32, {"q": Symbols(torch.zeros(40_000), 3)}, {}, 2),
        "skewed": Payload("qsgd", (900,), torch.float32, {"q": skewed(900, 17, 800)}, {}, 3),
        "wide": Payload("exact", (7,), torch.int64, {"values": symbols(7, 1 << 40)}, {}, 0),
        "bare": Payload("nothing", (2, 2), torch.bool, {}, {}, 0),
    }
