"""Rotated factors: exact where nothing is left out, unbiased with the stated variance elsewhere, and safe to decode."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

import isgq
from isgq.codecs.rotated import Rotated, spectrum_of
from isgq.codecs.rotation import decompose
from isgq.core.errors import CodecError, NonFiniteError, OptionError, WireError
from isgq.core.keys import Key, random_int32
from isgq.core.payload import Factors, LowRank
from isgq.exchange import Loopback
from isgq.testing import embedding_contract, linear_contract, normal
from isgq.wire import pack, unpack

KEY = Key("w", seed=1)
FINE = Rotated(atoms=100, step=0.001)


def conv_contract(x, d):
    return conv2d_weight(x, (5, 3, 3, 3), d, padding=1)


def low_rank(rows, inputs, outputs, rank):
    """Factors whose gradient, bias included, has this rank."""
    return Factors(normal(1, rows, inputs), normal(2, rows, rank) @ normal(3, rank, outputs))


CASES = {
    "fewer rows than either side": (linear_contract, Factors(normal(1, 8, 20).relu(), normal(2, 8, 12) ** 3)),
    "one row": (linear_contract, Factors(normal(1, 1, 20), normal(2, 1, 12))),
    "more rows than outputs": (linear_contract, Factors(normal(1, 40, 20), normal(2, 40, 12))),
    "more rows than either side": (linear_contract, Factors(normal(1, 40, 6), normal(2, 40, 12))),
    "sequence": (linear_contract, Factors(normal(1, 2, 3, 20), normal(2, 2, 3, 12))),
    "rank of d deficient": (linear_contract, low_rank(8, 20, 12, 2)),
    "equal rows": (linear_contract, Factors(normal(1, 1, 20).expand(8, 20), normal(2, 8, 12))),
    "zero rows among others": (
        linear_contract,
        Factors(normal(1, 8, 20), normal(2, 8, 12) * (torch.arange(8) < 1)[:, None]),
    ),
    "float16": (linear_contract, Factors(normal(1, 8, 20).half(), normal(2, 8, 12).half())),
    "bfloat16": (linear_contract, Factors(normal(1, 8, 20).bfloat16(), normal(2, 8, 12).bfloat16())),
    "conv": (conv_contract, Factors(normal(3, 4, 3, 6, 6).relu(), normal(4, 4, 5, 6, 6))),
}


def whole(factors, contract):
    """Gradient with the bias as its last column, by autograd's formulas: float64 ``[o, p]``."""
    x, d = factors.x.double(), factors.d.double()
    weight = contract(x, d)
    bias = (
        d.transpose(1, -1).reshape(-1, weight.shape[0]).sum(0)
        if weight.dim() > 2
        else d.reshape(-1, d.shape[-1]).sum(0)
    )
    return torch.cat([weight.reshape(weight.shape[0], -1), bias[:, None]], 1)


def rebuilt(payload, codec=FINE):
    product = codec.decode_pair(payload)
    assert isinstance(product, LowRank)
    return product.left.double().T @ product.right.double()


@pytest.mark.parametrize("case", CASES)
def test_all_atoms_and_fine_steps_are_the_gradient(case):
    contract, factors = CASES[case]
    expected = whole(factors, contract)
    payload = FINE.encode_pair(factors, contract, KEY)
    assert torch.linalg.norm(rebuilt(payload) - expected) <= 2e-3 * torch.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES)
def test_atoms_are_singular_triples(case):
    contract, factors = CASES[case]
    expected, atoms = whole(factors, contract), decompose(factors, contract, KEY)
    product = torch.einsum("j,jo,jp->op", atoms.weights, atoms.left[:], atoms.right[:])
    assert torch.linalg.norm(product - expected) <= 1e-6 * torch.linalg.norm(expected)
    singular = torch.linalg.svdvals(expected)[: len(atoms.weights)]
    heavy = singular > 1e-3 * singular[0]
    torch.testing.assert_close(atoms.weights[heavy], singular[heavy], rtol=1e-4, atol=0)
    for side in (atoms.left, atoms.right):
        gram = side[heavy] @ side[heavy].T
        torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-4)


STATED = [
    "rotated:atoms=6,step=2",
    "rotated:atoms=3,step=3.5",
    "rotated:nmse=0.5",
    "rotated:ratio=20",
    "rotated:nmse=1e-3",
]


def factors_of_many_directions():
    return Factors(normal(1, 24, 40) * torch.linspace(1, 2, 24)[:, None], normal(2, 24, 30))


@pytest.mark.parametrize("spec", STATED)
def test_mean_and_variance_are_as_stated(spec):
    codec, factors, samples = isgq.codec(spec), factors_of_many_directions(), 1500
    atoms = decompose(factors, linear_contract, KEY)
    ([plan], _), true = (
        codec.plans([spectrum_of(atoms)], codec.budget([spectrum_of(atoms)])),
        whole(factors, linear_contract),
    )
    assert plan.variance == codec.variance(factors, linear_contract)
    errors = torch.stack([
        rebuilt(codec.encode_atoms(atoms, plan, torch.float32, Key("w", step=step)), codec) - true
        for step in range(samples)
    ]).flatten(1)
    squared = errors.square().sum(1)
    noise = float(squared.std() / squared.mean() / samples**0.5)
    assert noise < 0.004  # the mean is known to 1 % or so
    assert abs(float(squared.mean()) / plan.variance - 1) < 3 * noise + 1e-4
    # an unbiased mean of independent errors has the variance of one, divided by their number
    along = errors @ true.flatten() / torch.linalg.norm(true)
    assert abs(float(along.mean())) < 4 * float(along.std()) / samples**0.5
    assert float(errors.mean(0).square().sum()) < 1.2 * plan.variance / samples


@pytest.mark.parametrize("atoms", [1, 3, 10])
def test_relative_variance_has_a_cap(atoms):
    """(1 + kappa) rank / atoms - 1 + kappa for a number of atoms; the option cap for a ratio, however large."""
    factors = factors_of_many_directions()
    energy = float(whole(factors, linear_contract).square().sum())
    kappa = (1 + 2.0**2 / 12) ** 2 - 1
    rank = min(24, 30)
    bound = (1 + kappa) * rank / atoms + kappa
    assert Rotated(atoms=atoms, step=2.0).variance(factors, linear_contract) <= 1.1 * bound * energy
    for cap in (0.1, 4.0):
        assert Rotated(ratio=1e6, cap=cap).variance(factors, linear_contract) <= 1.001 * cap * energy


@pytest.mark.parametrize("nmse", [0.01, 0.3, 2.0])
def test_relative_error_is_what_was_asked_for(nmse):
    factors = factors_of_many_directions()
    energy = float(whole(factors, linear_contract).square().sum())
    assert Rotated(nmse=nmse).variance(factors, linear_contract) == pytest.approx(nmse * energy, rel=0.01)


@pytest.mark.parametrize("ratio", [20, 60])
def test_bytes_are_what_was_asked_for(ratio):
    factors = Factors(normal(1, 32, 300), normal(2, 32, 200))
    payloads = [Rotated(ratio=ratio).encode_pair(factors, linear_contract, Key("w", step=i)) for i in range(40)]
    mean = sum(p.x.tensors["head"].numel() + p.d.tensors["code"].numel() for p in payloads) / 40 + 5
    assert mean == pytest.approx(4 * 200 * 301 / ratio, rel=0.05)


def test_finer_means_more_bytes_and_less_error():
    factors = factors_of_many_directions()
    true = whole(factors, linear_contract)
    codecs = [Rotated(nmse=nmse) for nmse in (3.0, 0.3, 0.03, 0.003)]
    payloads = [codec.encode_pair(factors, linear_contract, KEY) for codec in codecs]
    sizes = [p.d.tensors["code"].numel() for p in payloads]
    errors = [float((rebuilt(p) - true).square().sum()) for p in payloads]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", ["rotated", "rotated:atoms=2,step=3", "rotated:nmse=0.1"])
def test_the_wire_keeps_it(case, spec):
    contract, factors = CASES[case]
    codec = isgq.codec(spec)
    payload = codec.encode_pair(factors, contract, KEY)
    assert torch.equal(rebuilt(unpack(pack(payload)), isgq.codec(spec)), rebuilt(payload, codec))


@pytest.mark.parametrize("spec", ["rotated", "rotated:mode=mmse,nmse=0.1", "rotated:atoms=2"])
def test_senders_decode_what_receivers_do(spec):
    """Without reading what they have written, unless it was replaced."""
    payload = isgq.codec(spec).encode_pair(factors_of_many_directions(), linear_contract, KEY)
    mine, theirs = (isgq.codec(spec).decode_pair(each) for each in (payload, unpack(pack(payload))))
    assert torch.equal(mine.left, theirs.left)
    assert torch.equal(mine.right, theirs.right)
    empty = replace(
        payload, d=replace(payload.d, tensors={"code": head()}), x=replace(payload.x, tensors={"head": head(0, 0)})
    )
    assert isgq.codec(spec).decode_pair(empty).left.shape == (0, 30)
    nothing = replace(empty, x=replace(empty.x, shape=(0,)), d=replace(empty.d, shape=(0,)))
    assert isgq.codec(spec).decode_pair(nothing).left.shape == (0, 0)


def test_a_payload_is_read_by_a_codec_of_another_mode():
    """Which does not take what the encoder knows of it for its own."""
    payload = Rotated().encode_pair(factors_of_many_directions(), linear_contract, KEY)
    other = Rotated(mode="mmse")
    try:
        theirs = other.decode_pair(unpack(pack(payload)))
    except CodecError:
        with pytest.raises(CodecError):
            other.decode_pair(payload)
    else:
        assert torch.equal(other.decode_pair(payload).left, theirs.left)


def test_nothing_to_send():
    for factors in (
        Factors(torch.zeros(4, 6), torch.zeros(4, 5)),
        Factors(normal(1, 4, 6), torch.zeros(4, 5)),
        Factors(torch.zeros(0, 6), torch.zeros(0, 5)),
        Factors(normal(1, 40, 6), torch.zeros(40, 5)),
    ):
        for codec in (Rotated(), Rotated(atoms=3), Rotated(nmse=0.1)):
            payload = codec.encode_pair(factors, linear_contract, KEY)
            product = codec.decode_pair(unpack(pack(payload)))
            assert product.left.shape == (0, 5)
            assert product.right.shape == (0, 7)
            assert len(pack(payload)) < 70


def test_indices_are_sent_as_they_are():
    factors = Factors(torch.tensor([3, 1, 3]), normal(1, 3, 5))
    decoded = Rotated().decode_pair(Rotated().encode_pair(factors, embedding_contract, KEY))
    assert isinstance(decoded, Factors)
    assert torch.equal(decoded.x, factors.x)


def test_beyond_float32_is_refused():
    factors = Factors(normal(1, 4, 6) * 1e30, normal(2, 4, 5) * 1e30)
    with pytest.raises(NonFiniteError, match="beyond float32"):
        Rotated().encode_pair(factors, linear_contract, KEY)
    many = Factors(normal(1, 50, 6) * 1e20, normal(2, 50, 5) * 1e20)
    with pytest.raises(NonFiniteError, match="beyond float32"):
        Rotated().encode_pair(many, linear_contract, KEY)


@pytest.mark.parametrize(
    ("spec", "norm"),
    [("rotated", 3.399e38), ("rotated:mode=mmse,nmse=0.1", 3.399e38), ("rotated:atoms=1", 3e38)],
)
def test_weights_beyond_what_is_sent_are_refused(spec, norm):
    """A receiver would refuse them: those that bfloat16 cannot hold, and those of light atoms, which are heavier."""
    x, d = normal(1, 4, 6).double(), normal(2, 4, 5).double()
    x = torch.cat([x[:, :-1], x.new_zeros(4, 1)], 1)
    size = float(torch.linalg.matrix_norm(d.T @ torch.cat([x, x.new_ones(4, 1)], 1), 2))
    with pytest.raises(NonFiniteError, match="beyond"):
        isgq.codec(spec).encode_pair(Factors(x.float(), (d * (norm / size)).float()), linear_contract, KEY)


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.5},
        {"nmse": 0.0},
        {"atoms": 0},
        {"step": 4.0},
        {"step": 0.0},
        {"cap": -1.0},
        {"ratio": 9.0, "atoms": 3},
        {"mode": "mmse", "atoms": 3},
    ],
)
def test_options_outside_their_range(options):
    with pytest.raises(OptionError):
        Rotated(**options)


def head(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.fixture
def payload():
    return Rotated(atoms=4).encode_pair(factors_of_many_directions(), linear_contract, KEY)


FORGED = {
    "empty": head(),
    "cut": head(1, 0, 0x80),
    "light without entry": head(1, 0),
    "an entry too many": head(0, 0, *[0x80, 0x3F, 4, 4] * 9),
    "weight 0": head(1, 0, 0, 0, 4, 4),
    "weight negative": head(1, 0, 0x80, 0xBF, 4, 4),
    "weight infinite": head(1, 0, 0x80, 0x7F, 4, 4),
    "weight NaN": head(1, 0, 0xC0, 0x7F, 4, 4),
    "step code too large": head(1, 0, 0x80, 0x3F, 128, 4),
    "65535 atoms": head(0xFF, 0xFF, 0x80, 0x3F, 4, 4),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_heads_are_refused(payload, case):
    forged = replace(payload, x=replace(payload.x, tensors={"head": FORGED[case]}))
    with pytest.raises(CodecError):
        Rotated().decode_pair(forged)


def test_forged_parts_are_refused(payload):
    def with_code(code):
        return replace(payload, d=replace(payload.d, tensors={"code": code}))

    code = payload.d.tensors["code"]
    wrong = [
        with_code(torch.cat([code, code])),
        with_code(torch.cat([code, head(0)])),
        with_code(code.to(torch.int64)),
        with_code(code[None]),
        replace(payload, x=replace(payload.x, shape=(1 << 61,))),
        replace(payload, d=replace(payload.d, shape=(1 << 61,))),
        replace(payload, d=replace(payload.d, shape=(5, 6))),
        replace(payload, d=replace(payload.d, shape=(0,))),
        replace(payload, d=replace(payload.d, codec="exact")),
        replace(payload, codec="naive"),
    ]
    for forged in wrong:
        with pytest.raises(CodecError):
            Rotated().decode_pair(forged)


def test_random_bytes_never_crash(payload):
    """Whatever the bytes: atoms, or an error of this package."""
    for i in range(300):
        length = int(random_int32(i, "length", 1)[0]) % 120
        noise = random_int32(i, "bytes", length).to(torch.uint8)
        part = replace(payload.d, tensors={"code": noise}) if i % 2 else payload.d
        changed = payload.x.tensors["head"].clone()
        changed[i % len(changed)] = int(random_int32(i, "head", 1)[0]) % 256
        forged = replace(payload, x=replace(payload.x, tensors={"head": changed}), d=part)
        try:
            product = Rotated().decode_pair(forged)
        except (CodecError, WireError):
            continue
        assert torch.isfinite(product.left).all()
        assert torch.isfinite(product.right).all()


@pytest.mark.parametrize("layers", ["linear", "conv", "no bias"])
def test_a_session_rebuilds_weights_and_biases(layers):
    torch.manual_seed(0)
    if layers == "conv":
        model = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.Flatten())
        x = normal(1, 4, 2, 11, 11)
    else:
        model = nn.Sequential(
            nn.Linear(10, 12, bias=layers == "linear"), nn.ReLU(), nn.Linear(12, 3, bias=layers == "linear")
        )
        x = normal(1, 4, 10)

    def backward():
        model.zero_grad()
        F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0])).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = backward()
    with isgq.instrument(model, "rotated:atoms=100,step=0.001", exchange=Loopback(), routes="factors") as session:
        backward()
        got = backward()
        assert {line.route for line in session.plan.lines} == {"factors"}
    for name, gradient in got.items():
        assert torch.linalg.norm(gradient - expected[name]) <= 2e-3 * torch.linalg.norm(expected[name]), name


MMSE = [Rotated(mode="mmse", nmse=nmse) for nmse in (0.3, 0.085, 0.01)]


@pytest.mark.parametrize("case", CASES)
def test_least_error_is_about_what_was_asked_for(case):
    contract, factors = CASES[case]
    true = whole(factors, contract)
    for codec in MMSE:
        payload = unpack(pack(codec.encode_pair(factors, contract, KEY)))
        error = float((rebuilt(payload, codec) - true).square().sum() / true.square().sum())
        assert error < 1.6 * codec.nmse  # the vectors here are as short as 6 entries: the model is rough


def test_least_error_takes_fewer_bytes_than_unbiasedness():
    """At the same squared error; and no key matters."""
    factors = Factors(normal(1, 32, 300), normal(2, 32, 200) * torch.linspace(0.1, 2, 32)[:, None])
    true, sizes = whole(factors, linear_contract), {}
    for mode in ("unbiased", "mmse"):
        codec = Rotated(mode=mode, nmse=0.1)
        payload = codec.encode_pair(factors, linear_contract, KEY)
        error = float((rebuilt(payload, codec) - true).square().sum() / true.square().sum())
        assert error == pytest.approx(0.1, rel=0.2)
        sizes[mode] = payload.d.tensors["code"].numel()
    assert sizes["mmse"] < 0.9 * sizes["unbiased"]
    again = codec.encode_pair(factors, linear_contract, Key("w", seed=7, step=9))
    assert torch.equal(again.d.tensors["code"], payload.d.tensors["code"])
    assert payload.d.digest == 0


def test_least_error_never_exceeds_the_gradient():
    factors = factors_of_many_directions()
    true = whole(factors, linear_contract)
    codec = Rotated(mode="mmse", ratio=1e4)
    error = rebuilt(codec.encode_pair(factors, linear_contract, KEY), codec) - true
    assert float(error.square().sum()) <= 1.001 * float(true.square().sum())
