"""On a GPU: the same random integers, the same symbols, and no detour over the host before the bytes are packed."""

import pytest
import torch

import isgq
from isgq.codecs import codec_names
from isgq.core.keys import random_int32, uniform

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WRAPPERS = {"separate", "error_feedback", "momentum_correction", "scheduled", "scheduled_pair"}


def test_the_counter_hash_is_the_same_on_both_devices() -> None:
    for start in (0, 12345, (1 << 31) - 7):
        on_gpu = random_int32(7, "role", 10_000, "cuda", start=start)
        assert torch.equal(on_gpu.cpu(), random_int32(7, "role", 10_000, start=start))
    assert torch.equal(uniform(7, "role", (100, 50), "cuda").cpu(), uniform(7, "role", (100, 50)))


@pytest.mark.parametrize("name", sorted(set(codec_names()) - WRAPPERS))
def test_a_codec_works_on_its_tensors_device(name: str) -> None:
    codec = isgq.codec(name)
    if not hasattr(codec, "encode"):
        pytest.skip("a pair codec")
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(x.cuda(), isgq.Key("w"))
    assert all(symbols.values.is_cuda for symbols in payload.symbols.values())
    decoded = codec.decode(isgq.wire.unpack(isgq.wire.pack(payload), device="cuda"))
    assert decoded.is_cuda
    torch.testing.assert_close(decoded.cpu(), codec.decode(codec.encode(x, isgq.Key("w"))), rtol=1e-4, atol=1e-5)


def test_a_session_trains_a_model_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3)).cuda()
    with isgq.instrument(model, "exact", routes="factors"):
        x = torch.randn(16, 20, device="cuda")
        model(x).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for ours, theirs in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-6)
