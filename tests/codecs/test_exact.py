"""The identity: equal bit for bit, and small for indices."""

from dataclasses import replace

import pytest
import torch

from isgq.codecs.exact import Exact
from isgq.core.errors import CodecError
from isgq.core.keys import Key
from isgq.core.payload import Payload, Symbols
from isgq.wire import pack, unpack

KEY = Key("w")
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]


def through(x):
    return Exact().decode(unpack(pack(Exact().encode(x, KEY))))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (4, 5)])
def test_any_dtype_and_shape(dtype, shape):
    x = torch.arange(20)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    y = through(x)
    assert y.dtype == dtype
    assert torch.equal(x, y)


def test_floats_keep_every_bit():
    x = torch.tensor([0.0, -0.0, 1e-45, -3.4e38, torch.finfo(torch.float32).tiny])
    assert torch.equal(x.view(torch.int32), through(x).view(torch.int32))


@pytest.mark.parametrize("x", [[-1, 5], [0, 2**31], [-(2**63), 2**63 - 1]])
def test_integers_beyond_symbols_travel_raw(x):
    x = torch.tensor(x)
    assert not Exact().encode(x, KEY).symbols
    assert torch.equal(x, through(x))


def test_indices_take_few_bits():
    x = torch.arange(4096) % 16
    payload = Exact().encode(x, KEY)
    assert payload.symbols["values"].alphabet == 16
    assert pack(payload).numel() < 4096 * 4 // 8 + 64


@pytest.mark.parametrize(
    "payload",
    [
        Payload("exact", (3,), torch.float32),
        Payload("exact", (3,), torch.float32, tensors={"values": torch.zeros(2)}),
        Payload("exact", (3,), torch.float32, tensors={"values": torch.zeros(3).half()}),
        Payload("exact", (3,), torch.int64, symbols={"values": Symbols(torch.zeros(2), 1)}),
        Payload("other", (3,), torch.float32, tensors={"values": torch.zeros(3)}),
    ],
)
def test_refuses_what_does_not_fit(payload):
    with pytest.raises(CodecError):
        Exact().decode(payload)


def test_payload_does_not_share_memory():
    x = torch.ones(4)
    payload = Exact().encode(x, KEY)
    y = Exact().decode(payload)
    x.zero_()
    y.zero_()
    assert torch.equal(Exact().decode(replace(payload)), torch.ones(4))
