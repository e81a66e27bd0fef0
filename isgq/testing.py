"""The laws of codecs as a kit: one call checks a codec of your own, of one tensor or of both factors.

::

    from isgq.testing import check_codec

    def test_my_codec():
        check_codec("my_codec:levels=3")

Every law is a function named after what it demands; :data:`LAWS` lists them. Statistical laws compare with what the
samples' own standard errors allow, from fixed keys: a codec that passes once passes always.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

import isgq.codecs  # noqa: F401  (registers the codecs)
from isgq.core.codec import PairCodec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import Key, uniform
from isgq.core.payload import Factors, PairPayload, Payload
from isgq.core.registry import AnyCodec, codec, spec_of
from isgq.wire import pack, unpack

Case = tuple[Tensor, ...]
"""What is sent at once: ``(x,)`` for a codec of one tensor, ``(x, d)`` for a pair codec."""

_PROJECTIONS = 32
_ROUNDING = 1e-5  # relative error that float32 arithmetic may add to a mean


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers, the same for the same seed: float32 of that shape."""
    return torch.special.ndtri(uniform(seed, "testing", shape).double() + 0.5).float()


def linear_contract(x: Tensor, d: Tensor) -> Tensor:
    """Weight gradient of a linear layer: x ``[..., i]`` and d ``[..., o]`` to ``[o, i]``."""
    return d.reshape(-1, d.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def embedding_contract(x: Tensor, d: Tensor) -> Tensor:
    """Weight gradient of an embedding of 11 rows: indices x ``[...]`` and d ``[..., o]`` to ``[11, o]``."""
    return d.new_zeros(11, d.shape[-1]).index_add(0, x.reshape(-1), d.reshape(-1, d.shape[-1]))


def _contract(x: Tensor, d: Tensor) -> Tensor:
    return (linear_contract if x.is_floating_point() else embedding_contract)(x, d)


def tensor_cases() -> dict[str, Tensor]:
    """Tensors that a codec must carry: shapes, contents, memory layouts and dtypes that have broken codecs before."""
    shapes = [(), (1,), (0,), (3, 0), (7,), (5, 7), (1, 257), (2, 3, 5), (3, 2, 3, 3)]
    cases = {f"shape {shape}": normal(1, *shape) for shape in shapes}
    x = normal(2, 6, 14)
    return cases | {
        "zero": torch.zeros(5, 7),
        "a zero row": x * (torch.arange(6) != 2).unsqueeze(1),
        "constant": torch.full((5, 7), -0.3),
        "zero but for one": torch.zeros(5, 7).index_fill(1, torch.tensor([3]), 2.0),
        "half zeros": x.relu(),
        "large": x * 1e30,
        "small": x * 1e-30,
        "one outlier": torch.cat([x.reshape(-1), torch.tensor([1e6])]),
        "transposed": x.T,
        "strided": normal(3, 6, 28)[:, ::2],
        "expanded": normal(3, 6, 1).expand(6, 5),
        "expanded scalar": torch.tensor(0.7).expand(4, 3),
        "channels_last": normal(3, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "requires grad": normal(3, 4, 4).requires_grad_(),
        "float16": x.half(),
        "float16 near its largest": (x.sign() * 65504).half(),
        "bfloat16": x.bfloat16(),
        "float64": x.double(),
    }


def pair_cases() -> dict[str, Case]:
    """Factors that a pair codec must carry, ``(x, d)``."""
    x, d = normal(4, 6, 14).relu(), normal(5, 6, 5)
    return {
        "plain": (x, d),
        "signed x": (normal(6, 6, 14), d),
        "one of all": (normal(1, 1, 1), normal(2, 1, 1)),
        "no rows": (x[:0], d[:0]),
        "three dimensions": (normal(1, 2, 3, 7), normal(2, 2, 3, 5)),
        "zero": (x * 0, d * 0),
        "zero x": (x * 0, d),
        "zero d": (x, d * 0),
        "constant": (torch.full_like(x, 0.3), torch.full_like(d, -0.1)),
        "large": (x * 1e15, d * 1e15),
        "small": (x * 1e-15, d * 1e-15),
        "transposed": (normal(1, 14, 6).T, normal(2, 5, 6).T),
        "expanded": (x, torch.tensor(0.1).expand(6, 5)),
        "float16": (x.half(), d.half()),
        "bfloat16": (x.bfloat16(), d.bfloat16()),
        "float64": (x.double(), d.double()),
        "mixed dtypes": (x, d.bfloat16()),
        "indices": (torch.tensor([[3, 0, 10], [3, 3, 1]]), normal(2, 2, 3, 5)),
    }


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


@dataclass(frozen=True)
class Subject:
    """A codec under test: both kinds behind one face.

    Attributes:
        codec: the codec.
        samples: keys that a mean is taken over.
        z: standard errors that a mean may be off.
        seed: seed of the keys.
        device: where the tensors live.
    """

    codec: AnyCodec
    samples: int
    z: float
    seed: int
    device: torch.device
    spec: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", spec_of(self.codec))

    @property
    def is_pair(self) -> bool:
        """Whether it takes both factors."""
        return isinstance(self.codec, PairCodec)

    @cached_property
    def cases(self) -> Mapping[str, Case]:
        """All cases of its kind, on the device."""
        named = pair_cases() if self.is_pair else {name: (x,) for name, x in tensor_cases().items()}
        return {name: tuple(_moved(t, self.device) for t in case) for name, case in named.items()}

    def key(self, step: int = 0) -> Key:
        """A key of the run."""
        return Key("testing.weight", self.seed, step)

    def encode(self, case: Case, step: int = 0) -> Payload | PairPayload:
        """Encode on a codec object that has seen nothing before."""
        fresh = codec(self.spec)
        if isinstance(fresh, PairCodec):
            return fresh.encode_pair(Factors(*case), _contract, self.key(step))
        return fresh.encode(case[0], self.key(step))

    def decode(self, payload: Payload | PairPayload) -> Case:
        """Decode on a codec object that has seen nothing before."""
        fresh = codec(self.spec)
        if isinstance(fresh, PairCodec):
            assert isinstance(payload, PairPayload), f"encode_pair gave a {type(payload).__name__}"
            factors = fresh.decode_pair(payload)
            return factors.x, factors.d
        assert isinstance(payload, Payload), f"encode gave a {type(payload).__name__}"
        return (fresh.decode(payload),)

    def target(self, case: Case) -> Tensor:
        """What unbiasedness is about, flat in float64: the tensor, or the gradient."""
        value = _contract(*(t.float() if t.is_floating_point() else t for t in case)) if self.is_pair else case[0]
        return value.detach().double().reshape(-1)

    def errors(self, case: Case, samples: int) -> Tensor:
        """Decoded minus true target for several keys: float64 ``[samples, n]``."""
        true = self.target(case)
        return torch.stack([self.target(self.decode(self.encode(case, step))) - true for step in range(samples)])

    def statistical_cases(self) -> Iterator[tuple[str, Case]]:
        """Cases that means are taken of: small, so that many samples cost little."""
        x = normal(7, 6, 16)
        cases: dict[str, Case] = {"normal": (x,), "half zeros": (x.relu(),), "heavy tails": (x**3,)}
        if self.is_pair:
            cases = {"plain": (x.relu(), normal(8, 6, 5)), "indices": (torch.arange(6), normal(8, 6, 5))}
        for name, case in cases.items():
            yield name, tuple(t.to(self.device) for t in case)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, with its strides; ``.to`` alone would fill up those of 0."""
    if tensor.device == device or device.type == "cpu":
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    base = tensor.detach()[tuple(slice(1) if stride == 0 and size else slice(None) for size, stride in sizes)]
    return base.to(device).expand(tensor.shape).requires_grad_(tensor.requires_grad)


def _parts(payload: Payload | PairPayload) -> tuple[Payload, ...]:
    return (payload.x, payload.d) if isinstance(payload, PairPayload) else (payload,)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


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
    """The spec string builds the same codec, and payloads carry its name."""
    assert spec_of(codec(s.spec)) == s.spec, f"spec {s.spec!r} builds {spec_of(codec(s.spec))!r}"
    payload = s.encode(next(iter(s.cases.values())))
    assert payload.codec == s.codec.name, f"payload says codec {payload.codec!r}, must be {s.codec.name!r}"
    return None


def keeps_shape_and_dtype(s: Subject) -> str | None:
    """Payload and decoded tensor have the shape and dtype of what was sent; decoded numbers are finite."""
    for name, case in s.cases.items():
        payload = s.encode(case)
        for sent, part, got in zip(case, _parts(payload), s.decode(payload), strict=True):
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


def zero_stays_zero(s: Subject) -> str | None:
    """A tensor of zeros decodes to exact zeros."""
    for sent, got in zip(s.cases["zero"], s.decode(s.encode(s.cases["zero"])), strict=True):
        assert torch.count_nonzero(got) == 0, f"a zero tensor of shape {tuple(sent.shape)} decodes to {got}"
    return None


def symbols_fit_their_alphabet(s: Subject) -> str | None:
    """Every symbol is in ``[0, alphabet)``."""
    for name, case in s.cases.items():
        for part in _parts(s.encode(case)):
            for stream, symbols in part.symbols.items():
                inside = ((symbols.values >= 0) & (symbols.values < symbols.alphabet)).all()
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
        if isinstance(sender, PairCodec):
            pair = sender.encode_pair(Factors(*case), _contract, s.key())
            factors = sender.decode_pair(pair)
            own, fresh = (factors.x, factors.d), s.decode(pair)
        else:
            payload = sender.encode(case[0], s.key())
            own, fresh = (sender.decode(payload),), s.decode(payload)
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
    """NaN and infinities raise NonFiniteError, wherever they stand."""
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
    """A payload of another codec, or with its contents missing, raises CodecError."""
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
    for name, case in s.statistical_cases():
        errors = s.errors(case, 8)
        lossless = errors.abs().max() <= _ROUNDING * s.target(case).abs().max()
        assert lossless or not all(torch.equal(errors[0], e) for e in errors[1:]), (
            f"{name}: all keys give the same error"
        )
    return None


def mean_is_the_truth(s: Subject) -> str | None:
    """An unbiased codec: the mean over keys is within z standard errors, along fixed random directions."""
    if not s.codec.unbiased:
        return "not unbiased"
    for name, case in s.statistical_cases():
        true = s.target(case)
        signs = uniform(0, "testing.signs", (true.numel(), _PROJECTIONS)).sign().double().to(s.device)
        directions = torch.cat([signs, true.unsqueeze(1), torch.ones_like(true).unsqueeze(1)], 1)
        along = s.errors(case, s.samples) @ directions
        allowed = s.z * along.std(0) / math.sqrt(s.samples) + _ROUNDING * (directions.abs() * true.abs().max()).sum(0)
        excess = (along.mean(0).abs() / allowed.clamp(min=1e-300)).max()
        assert excess <= 1, f"{name}: the mean over {s.samples} keys is off by {excess:.2f} times what chance allows"
    return None


def variance_is_as_stated(s: Subject) -> str | None:
    """An unbiased codec with a method ``variance(x)``: the mean squared error over keys is its sum."""
    variance = getattr(s.codec, "variance", None)
    if variance is None or s.is_pair or not s.codec.unbiased:
        return "no variance of an unbiased codec"
    for name, case in s.statistical_cases():
        stated = variance(case[0])
        assert stated.shape == case[0].shape, f"{name}: variance(x) has shape {tuple(stated.shape)}, not that of x"
        measured = s.errors(case, s.samples).square().sum(1)
        total, allowed = stated.double().sum(), s.z * measured.std() / math.sqrt(s.samples)
        off = (measured.mean() - total).abs()
        assert off <= allowed + 1e-4 * total, f"{name}: squared error is {measured.mean():.5g}, stated {total:.5g}"
    return None


def contraction_is_as_stated(s: Subject) -> str | None:
    """A codec with a method ``contraction(x)``: ``E ||x - decoded||^2 <= (1 - delta) ||x||^2`` for its delta."""
    contraction = getattr(s.codec, "contraction", None)
    if contraction is None or s.is_pair:
        return "no contraction"
    for name, case in s.statistical_cases():
        measured = s.errors(case, s.samples).square().sum(1)
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
