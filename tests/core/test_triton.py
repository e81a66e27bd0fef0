"""The kernels for GPUs, in Triton: interpreted on the CPU the bits of plain code, compiled without fused rounding."""

import importlib.util
import math
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from isgq.codecs import codec, dithered, grid
from isgq.codecs.buckets import Buckets
from isgq.codecs.nested import NestedDithered
from isgq.core import kernels, parallel
from isgq.core.kernels import disabled
from isgq.core.keys import Key, random_int32, uniform
from isgq.core.payload import Payload, Symbols
from tests.codecs.test_codec_kernels import bits, hard, parts

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

SPECS = [
    *(f"dithered:levels={levels},bucket=row" for levels in (1, 7, 127)),
    *(f"dithered:levels=3,bucket={bucket}" for bucket in (1, 7, 512, "tensor")),
    "dithered:levels=127,sparse=false",
    "dithered:levels=5,mode=half,bucket=100",
    "dithered:mode=one_bit",
    "qsgd:levels=1,bucket=3",
    "qsgd:levels=127,bucket=row",
    "qsgd:levels=4,norm=l2",
    "terngrad:clip=2.5,bucket=row",
    "int8:block=256",
    "int8:block=1,rounding=stochastic",
    "nested_dithered:levels=1,ratio=3",
    "nested_dithered:levels=300,ratio=255,bucket=5",
    "qcs:block=96,rows=17,levels=3,mode=mmse",
]
STATE = (0xFFFFFF00, 0xF1234567, 0x80000000, 1)


def load(name: str) -> ModuleType:
    """A copy of the module, decorated as the environment says now."""
    spec = importlib.util.find_spec("isgq.core.kernels.triton_quantize")
    assert spec is not None
    assert spec.origin is not None
    copy = importlib.util.spec_from_file_location(name, Path(spec.origin))
    assert copy is not None
    assert copy.loader is not None
    module = importlib.util.module_from_spec(copy)
    copy.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return load("interpreted_quantize")


@pytest.fixture
def at_work(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for kernels of the quantizers gets these, and no others; small parts, so that there are many."""
    monkeypatch.setattr(kernels, "_load", lambda module, _: interpreted if module == "quantize" else None)
    monkeypatch.setattr(parallel, "PART", 3000)
    monkeypatch.setattr(dithered, "is_one_part", lambda _: False)  # which is for kernels on the CPU alone


def tensors() -> dict[str, Tensor]:
    """Hard ones that differ for arithmetic on elements, and no larger than the interpreter has patience for."""
    chosen = ("wide", "denormal", "extreme", "nearly extreme", "minus zeros", "halves", "one", "empty", "float16")
    every = hard()
    return {name: every[name] for name in chosen} | {"zero rows": every["zero rows"][:9]}


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("spec", SPECS)
def test_symbols_and_values_are_those_of_plain_code(spec: str) -> None:
    coder = codec(spec)
    for at, (name, x) in enumerate(tensors().items()):
        key = Key(name, seed=at)
        payload = coder.encode(x, key)
        with disabled():
            plain = coder.encode(x, key)
            expected = coder.decode(plain)
        assert parts(payload) == parts(plain), name
        assert bits(coder.decode(payload)) == bits(expected), name


@pytest.mark.usefixtures("at_work")
def test_side_information_serves_alike() -> None:
    coder = NestedDithered(levels=6, ratio=3, bucket=50)
    for name, x in tensors().items():
        payload, side = coder.encode(x, Key(name)), x * 0.9
        decoded = coder.decode_with(payload, side)
        with disabled():
            assert bits(coder.decode_with(payload, side)) == bits(decoded), name


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize(
    "spec", ["dithered:levels=3", "dithered:mode=one_bit", "qsgd:bucket=row", "nested_dithered:bucket=row"]
)
def test_any_scales_that_are_received_give_the_same_values(spec: str) -> None:
    scales = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-127), 1e-38, 3e38, -3.4e38, math.inf, -math.inf, math.nan])
    coder, x = codec(spec), torch.randn(len(scales), 303, generator=torch.Generator().manual_seed(1))
    sent = coder.encode(x, Key("w"))
    each = {name: scales.view(tensor.shape) for name, tensor in sent.tensors.items()}
    payload = Payload(sent.codec, sent.shape, sent.dtype, sent.symbols, each, sent.digest)
    decoded = coder.decode(payload)
    with disabled():
        torch.testing.assert_close(coder.decode(payload), decoded, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("start", [0, 1, 31, (1 << 31) - 5, (1 << 33) + 12345])
@pytest.mark.parametrize("n", [0, 1, 1000, 1024, 5003])
def test_streams_are_the_same_integers(start: int, n: int) -> None:
    for draw, shape in ((random_int32, n), (uniform, (n,))):
        ours = draw(0xFEDCBA9876543210 + n, "role", shape, start=start)
        with disabled():
            assert torch.equal(ours, draw(0xFEDCBA9876543210 + n, "role", shape, start=start))


@pytest.mark.usefixtures("at_work")
def test_random_cuts_round_alike() -> None:
    chance = random.Random(0)
    for _ in range(12):
        n, size, levels = chance.randint(1, 7000), chance.randint(1, 3000), chance.randint(1, 127)
        flat = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2.0 ** chance.randint(-140, 120)
        buckets = Buckets(n, size)
        norm = buckets.absmax(flat) * chance.choice((0.5, 1.0, 3.0))
        results = []
        for plain in (False, True):
            with disabled() if plain else torch.no_grad():
                down = grid.round_nearest(flat, norm, levels, buckets)
                some = grid.round_stochastic(flat, norm, levels, buckets, n)
                results.append([down, some, grid.rebuild(down, norm, levels, buckets)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), (n, size, levels)


def test_elements_find_their_buckets_in_int32(interpreted: ModuleType) -> None:
    chance = random.Random(0)
    most = 1 << 30
    for _ in range(3000):
        size, start, n = (max(1, int(2 ** chance.uniform(0, power))) for power in (34, 34, 30))
        start += chance.choice((0, -(start + n // 2) % size))  # in half of the cases a bucket begins in their midst
        elements, buckets, first, width = interpreted._span(size, start, start + n)
        assert elements == slice(start, start + n)
        assert buckets == slice(start // size, (start + n - 1) // size + 1)
        assert 0 <= first <= most
        assert 1 <= width <= most
        edge = -start % size  # where the next bucket begins
        for i in {0, edge - 1, edge, edge + 1, n // 3, n - 1}:
            if 0 <= i < n:
                assert start // size + (first + i) // width == (start + i) // size


def signature(kernel: Any, values: tuple[Any, ...]) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants of a launch."""
    types, constants = {}, {}
    for parameter, value in zip(kernel.params, values, strict=True):
        if parameter.is_constexpr:
            types[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            types[parameter.name] = parameter.annotation_type or mangle_type(value)
    return types, constants


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_rounds_every_operation(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, compiled = load("compiled_quantize"), {}

    def launch(kernel: Any, n: int, *arguments: Any) -> None:
        source = ASTSource(kernel, *signature(kernel, (*arguments, n, module._BLOCK)))
        target = GPUTarget("cuda", capability, 32)
        compiled[kernel.__name__] = compile(source, target=target, options=module._OPTIONS).asm

    monkeypatch.setattr(module, "_launch", launch)
    flat, out, cut = torch.ones(5), torch.zeros(5, dtype=torch.uint8), (2, 0, 5)
    scales, word = torch.ones(3), out.to(torch.uint32)
    module.words(STATE, word)
    module.uniforms(STATE, flat)
    module.flip_signs(STATE, word)
    for sparse in (False, True):
        module.dither(flat, scales, *cut, STATE, 3, sparse, out)
        module.undither(out, scales, *cut, STATE, 1, 3, sparse, flat)
    module.dither_signs(flat, scales, *cut, STATE, out)
    module.round_stochastic(flat, scales, *cut, STATE, 3, out)
    module.round_nearest(flat, scales, *cut, 3, out)
    module.rescale(out, scales, *cut, 3, 3, flat)
    module.nest(flat, scales, *cut, STATE, 3, 3, out)
    module.unnest(out, scales, scales, *cut, STATE, 3, 3, flat)
    assert len(compiled) == 11
    for name, stages in compiled.items():
        assert not re.search(r"\b(fma|div\.full|div\.approx|rcp|min|max)\.|\.ftz", stages["ptx"]), name
        assert ("div.rn.f32" in stages["ptx"]) == ("div_rn" in stages["ttir"] or "precise_divf" in stages["ttir"]), name


def test_both_devices_have_the_same_kernels(interpreted: ModuleType) -> None:
    from isgq.core.kernels import quantize

    def public(module: ModuleType) -> set[str]:
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        return {name for name in own if not name.startswith("_")}

    parts_of_kernels, on_the_cpu_alone = {"mix", "uniform"}, {"dither_part"}
    assert public(quantize) - parts_of_kernels - on_the_cpu_alone == public(interpreted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS[:-1])
def test_on_a_gpu_they_are_at_work_with_the_same_results(spec: str) -> None:
    assert kernels.compiled("quantize", torch.device("cuda")) is not None
    coder = codec(spec)
    for name, x in hard().items():
        payload = coder.encode(x.cuda(), Key(name))
        with disabled():
            plain = coder.encode(x.cuda(), Key(name))
        symbols = {stream: Symbols(s.values.cpu(), s.alphabet) for stream, s in payload.symbols.items()}
        for stream, s in symbols.items():
            assert torch.equal(s.values, plain.symbols[stream].values.cpu()), name
        sent = {part: tensor.cpu() for part, tensor in payload.tensors.items()}
        received = Payload(payload.codec, payload.shape, payload.dtype, symbols, sent, payload.digest)
        assert bits(coder.decode(payload).cpu()) == bits(coder.decode(received)), name
