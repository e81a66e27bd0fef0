"""The laws: functions named after what they demand.

Each takes a :class:`Subject`, raises AssertionError where it is broken and returns why it does not apply, or None.
"""

import dataclasses
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from isgq.codecs import codec, spec_of
from isgq.core.codec import PairCodec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import uniform
from isgq.core.payload import Factors, LowRank, PairPayload, Payload, Symbols
from isgq.testing.cases import contract
from isgq.testing.subject import Subject, open_with, tensors_of
from isgq.wire import pack, unpack

_PROJECTIONS = 32
_ROUNDING = 1e-5  # relative error that float32 arithmetic may add to a mean


def _parts(payload: Payload | PairPayload) -> tuple[Payload, ...]:
    return (payload.x, payload.d) if isinstance(payload, PairPayload) else (payload,)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _same_symbols(a: Symbols, b: Symbols) -> bool:
    return a.alphabet == b.alphabet and _same(a.values, b.values)


def _same_payload(a: Payload | PairPayload, b: Payload | PairPayload) -> bool:
    if isinstance(a, PairPayload) or isinstance(b, PairPayload):
        return a.codec == b.codec and all(_same_payload(p, q) for p, q in zip(_parts(a), _parts(b), strict=True))
    return (
        (a.codec, a.shape, a.dtype, a.digest) == (b.codec, b.shape, b.dtype, b.digest)
        and (a.symbols.keys(), a.tensors.keys()) == (b.symbols.keys(), b.tensors.keys())
        and all(
            s.alphabet == b.symbols[n].alphabet and _same(s.values, b.symbols[n].values) for n, s in a.symbols.items()
        )
        and all(_same(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    )


def spec_names_the_codec(s: Subject) -> str | None:
    """The spec string builds the same codec, and payloads carry its name, or that of a codec inside."""
    assert spec_of(codec(s.spec)) == s.spec, f"spec {s.spec!r} builds {spec_of(codec(s.spec))!r}"
    payload = s.encode(next(iter(s.cases.values())))
    assert payload.codec in re.split(r"\W+", s.spec), (
        f"payload says codec {payload.codec!r}, which is none of {s.spec!r}"
    )
    return None


def keeps_shape_and_dtype(s: Subject) -> str | None:
    """Payload and decoded tensor have the shape and dtype of what was sent; decoded numbers are finite."""
    for name, case in s.cases.items():
        payload = s.encode(case)
        opened = s.open(payload)
        if isinstance(opened, LowRank):
            _check_product(opened, case, name)
            continue
        for sent, part, got in zip(case, _parts(payload), tensors_of(opened), strict=True):
            expected = (tuple(sent.shape), sent.dtype)
            assert (part.shape, part.dtype) == expected, (
                f"{name}: payload has {part.shape}, {part.dtype}, not {expected}"
            )
            assert (tuple(got.shape), got.dtype) == expected, f"{name}: got {got.shape}, {got.dtype}, not {expected}"
            assert got.device.type == sent.device.type, f"{name}: decoded on {got.device}, sent from {sent.device}"
            assert not got.requires_grad, f"{name}: the decoded tensor is attached to the sender's graph"
            assert not got.is_floating_point() or torch.isfinite(got).all(), f"{name}: decoded numbers are not finite"
            assert sent.is_floating_point() or _same(sent, got), f"{name}: indices must arrive without loss"
    return None


def _check_product(product: LowRank, case: tuple[Tensor, ...], name: str) -> None:
    """The gradient as a sum of outer products: as wide as the gradient and a column for the bias, and finite."""
    outputs, columns = case[1].shape[-1], case[0].shape[-1]
    for side, sent, width in ((product.left, case[1], outputs), (product.right, case[0], columns + 1)):
        assert side.shape == (len(product.left), width), f"{name}: got {side.shape} for {width} entries a row"
        assert side.device.type == sent.device.type, f"{name}: decoded on {side.device}, sent from {sent.device}"
        assert not side.requires_grad, f"{name}: what was decoded is attached to the sender's graph"
        assert torch.isfinite(side).all(), f"{name}: decoded numbers are not finite"


def zero_stays_zero(s: Subject) -> str | None:
    """A tensor of zeros decodes to exact zeros."""
    for got in s.decode(s.encode(s.cases["zero"])):
        assert torch.count_nonzero(got) == 0, f"a zero tensor decodes to {got}"
    return None


def symbols_fit_their_alphabet(s: Subject) -> str | None:
    """Every symbol is in ``[0, alphabet)``."""
    for name, case in s.cases.items():
        for part in _parts(s.encode(case)):
            for stream, symbols in part.symbols.items():
                values = symbols.values.long()  # uint8 cannot be compared with 256
                inside = ((values >= 0) & (values < symbols.alphabet)).all()
                assert inside, f"{name}: symbols {stream!r} leave their alphabet of {symbols.alphabet}"
    return None


def key_determines_the_payload(s: Subject) -> str | None:
    """The same tensor and key give the same payload, and a payload decodes to the same tensor each time."""
    for name, case in s.cases.items():
        payload = s.encode(case)
        assert _same_payload(payload, s.encode(case)), f"{name}: two payloads for one key"
        pairs = zip(s.decode(payload), s.decode(payload), strict=True)
        assert all(_same(a, b) for a, b in pairs), f"{name}: two tensors for one payload"
    return None


def sender_keeps_nothing(s: Subject) -> str | None:
    """The sender's own object decodes as a receiver's fresh one does."""
    for name, case in s.cases.items():
        sender = codec(s.spec)
        payload: Payload | PairPayload
        if isinstance(sender, PairCodec):
            payload = sender.encode_pair(Factors(*case), contract, s.key())
        else:
            payload = sender.encode(case[0], s.key())
        fresh, own = s.decode(payload), tensors_of(open_with(sender, payload))
        assert all(map(_same, own, fresh)), f"{name}: a fresh codec object decodes to another tensor"
    return None


def wire_keeps_the_payload(s: Subject) -> str | None:
    """Unpacking the packed payload gives it back, and so the same tensor."""
    for name, case in s.cases.items():
        payload = s.encode(case)
        received = unpack(pack(payload), device=s.device)
        assert _same_payload(payload, received), f"{name}: the payload changes on the wire"
        same = all(map(_same, s.decode(payload), s.decode(received)))
        assert same, f"{name}: the payload decodes to another tensor after the wire"
    return None


def input_stays_as_it_was(s: Subject) -> str | None:
    """Encoding does not write to its input, and neither payload nor decoded tensor shares memory with it."""
    for name, case in s.cases.items():
        sent = tuple(t.detach().clone() for t in case)
        payload = s.encode(sent)
        assert all(map(_same, sent, (t.detach() for t in case))), f"{name}: encoding changes its input"
        first = s.decode(payload)
        for tensor in (*sent, *(t.clone() for t in first)):
            tensor.zero_()
        assert all(map(_same, first, s.decode(payload))), f"{name}: the payload shares memory with its input"
    return None


def refuses_non_finite(s: Subject) -> str | None:
    """NaN and infinities raise NonFiniteError, wherever they stand."""  # noqa: DOC501
    cases = ("plain", "float16") if s.is_pair else ("shape (5, 7)", "shape ()", "bfloat16")
    for name, value in ((name, value) for name in cases for value in (math.nan, math.inf, -math.inf)):
        for at in range(len(s.cases[name])):
            case = [t.clone() for t in s.cases[name]]
            case[at].view(-1)[-1] = value
            try:
                s.encode(tuple(case))
            except NonFiniteError:
                continue
            raise AssertionError(f"{name}: {value} in tensor {at} is encoded without a NonFiniteError")
    return None


def refuses_foreign_payloads(s: Subject) -> str | None:
    """A payload of another codec, or with its contents missing, raises CodecError."""  # noqa: DOC501
    payload = s.encode(s.cases["plain" if s.is_pair else "shape (5, 7)"])
    foreign: list[Payload | PairPayload] = [dataclasses.replace(payload, codec="another")]
    if isinstance(payload, PairPayload):
        foreign += [
            dataclasses.replace(payload, x=_emptied(payload.x)),
            dataclasses.replace(payload, d=_emptied(payload.d)),
        ]
    else:
        foreign.append(_emptied(payload))
    for bad in foreign:
        try:
            s.decode(bad)
        except CodecError:
            continue
        raise AssertionError(f"decoding raises no CodecError for {bad}")
    return None


def _emptied(payload: Payload) -> Payload:
    return dataclasses.replace(payload, symbols={}, tensors={})


def keys_differ(s: Subject) -> str | None:
    """An unbiased codec with loss is random: other keys give other numbers."""
    if not s.codec.unbiased:
        return "not unbiased"
    for name, case in s.statistical_cases.items():
        errors = s.errors[name]
        lossless = errors.abs().max() <= _ROUNDING * s.target(case).abs().max()
        assert lossless or not all(torch.equal(errors[0], e) for e in errors[1:]), (
            f"{name}: all keys give the same error"
        )
    return None


def mean_is_the_truth(s: Subject) -> str | None:
    """An unbiased codec: the mean over keys is right, for each element and along fixed random directions.

    The directions find an error that is spread over many elements. What chance allows is Bernstein's inequality,
    ``z sigma / sqrt(S) + z^2 range / (3 S)``: its second term is for elements that are rarely sent.
    """
    if not s.codec.unbiased:
        return "not unbiased"
    for name, case in s.statistical_cases.items():
        errors, true = s.errors[name], s.target(case)
        signs = uniform(0, "testing.signs", (true.numel(), _PROJECTIONS)).sign().double().to(s.device)
        directions = torch.cat([signs, true.unsqueeze(1), torch.ones_like(true).unsqueeze(1)], 1)
        for along, size in ((errors, 1.0), (errors @ directions, directions.abs().sum(0))):
            chance = s.z * along.std(0) / math.sqrt(s.samples) + s.z**2 * along.abs().max() / (3 * s.samples)
            excess = (along.mean(0).abs() / (chance + _ROUNDING * true.abs().max() * size)).max()
            assert excess <= 1, (
                f"{name}: the mean over {s.samples} keys is off by {excess:.2f} times what chance allows"
            )
    return None


def variance_is_as_stated(s: Subject) -> str | None:
    """An unbiased codec with a method ``variance(x)``: the mean squared error over keys is its sum."""
    variance = getattr(s.codec, "variance", None)
    if variance is None or s.is_pair or not s.codec.unbiased:
        return "no variance of an unbiased codec"
    for name, case in s.statistical_cases.items():
        stated = variance(case[0])
        assert stated.shape == case[0].shape, f"{name}: variance(x) has shape {tuple(stated.shape)}, not that of x"
        measured = s.errors[name].square().sum(1)
        total, allowed = stated.double().sum(), s.z * measured.std() / math.sqrt(s.samples)
        off = (measured.mean() - total).abs()
        assert off <= allowed + 1e-4 * total, f"{name}: squared error is {measured.mean():.5g}, stated {total:.5g}"
    return None


def contraction_is_as_stated(s: Subject) -> str | None:
    """A codec with a method ``contraction(x)``: ``E ||x - decoded||^2 <= (1 - delta) ||x||^2`` for its delta."""
    contraction = getattr(s.codec, "contraction", None)
    if contraction is None or s.is_pair:
        return "no contraction"
    for name, case in s.statistical_cases.items():
        measured = s.errors[name].square().sum(1)
        squared = s.target(case).square().sum()
        bound = (1 - float(contraction(case[0]))) * squared + s.z * measured.std() / math.sqrt(s.samples)
        assert measured.mean() <= bound + _ROUNDING * squared, f"{name}: {measured.mean():.5g} exceeds {bound:.5g}"
    return None


LAWS: tuple[Callable[[Subject], str | None], ...] = (
    spec_names_the_codec,
    keeps_shape_and_dtype,
    zero_stays_zero,
    symbols_fit_their_alphabet,
    key_determines_the_payload,
    sender_keeps_nothing,
    wire_keeps_the_payload,
    input_stays_as_it_was,
    refuses_non_finite,
    refuses_foreign_payloads,
    keys_differ,
    mean_is_the_truth,
    variance_is_as_stated,
    contraction_is_as_stated,
)
"""All laws; each raises AssertionError where it is broken and returns why it does not apply, or None."""
