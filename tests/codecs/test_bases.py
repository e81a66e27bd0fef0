"""Learned bases: unbiased with the stated variance whatever was learned, fewer bits, and the same on all ranks."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import isgq
import models
from isgq.codecs.bases import EVERY
from isgq.codecs.rotated import Rotated, spectrum_of
from isgq.codecs.rotation import decompose
from isgq.codecs.rotation_sides import Side, energy_codes, standard, step_table
from isgq.core.errors import CodecError, OptionError, WireError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.exchange import Loopback
from isgq.launch import launch
from isgq.testing import linear_contract, normal
from isgq.wire import pack_message, unpack_message

OUTPUTS, INPUTS, BATCH = 24, 40, 16
MIXING = normal(8, INPUTS, INPUTS) @ torch.diag(0.8 ** torch.arange(INPUTS)) @ normal(9, INPUTS, INPUTS)
MIXING_D = normal(10, OUTPUTS, OUTPUTS) @ torch.diag(0.8 ** torch.arange(OUTPUTS))


def factors(step):
    """Most of both sides lies in few directions, the same in all steps."""
    return Factors(normal(100 + step, BATCH, INPUTS) @ MIXING, normal(5000 + step, BATCH, OUTPUTS) @ MIXING_D.T)


def true_gradient(pair):
    x = torch.cat([pair.x, torch.ones(len(pair.x), 1)], 1)
    return pair.d.double().T @ x.double()


def step_of(codec, step, ranks=2):
    """One applied step: everyone's payload, decoded."""
    payloads = [
        codec.encode_pair(factors(2 * step + r), linear_contract, Key("w", step=step, rank=r)) for r in range(ranks)
    ]
    products = [codec.decode_pair(payload) for payload in payloads]
    codec.common.commit()
    return payloads, products


@pytest.fixture(scope="module")
def learned():
    """A codec after a hundred steps, and the bytes and relative errors of each."""
    codec, sizes, errors = Rotated(atoms=3, step=2.0, bases="learned"), [], []
    for step in range(100):
        payloads, products = step_of(codec, step)
        sizes.append(sum(payload.d.tensors["code"].numel() for payload in payloads))
        for r, product in enumerate(products):
            true = true_gradient(factors(2 * step + r))
            errors.append(
                float((product.left.double().T @ product.right.double() - true).square().sum() / true.square().sum())
            )
    return codec, torch.tensor(sizes).double(), torch.tensor(errors)


def test_the_same_atoms_and_step_take_fewer_bits(learned):
    _, sizes, errors = learned
    assert sizes[-25:].mean() < 0.75 * sizes[:5].mean()
    assert errors[-50:].mean() < 1.1 * errors[:10].mean()


def test_mean_and_variance_are_as_stated(learned):
    codec, _, _ = learned
    pair, samples = factors(999), 1500
    atoms = decompose(pair, linear_contract, Key("w"))
    known = codec.known("w", atoms)
    assert known.left.energy is not None
    assert known.right.energy is not None
    [plan], _ = codec.plans([spectrum_of(atoms, known)])
    errors = []
    for step in range(samples):
        product = codec.decode_pair(codec.encode_atoms(atoms, plan, torch.float32, Key("w", step=step)))
        errors.append((product.left.double().T @ product.right.double() - true_gradient(pair)).flatten())
    codec.common.rollback()
    error = torch.stack(errors)
    squared = error.square().sum(1)
    noise = float(squared.std() / squared.mean() / samples**0.5)
    assert abs(float(squared.mean()) / plan.variance - 1) < 3 * noise + 1e-3
    assert float(error.mean(0).square().sum()) < 1.3 * plan.variance / samples


def test_steps_minimise_noise_for_the_bits():
    """No other allocation that takes as many bits has less noise."""
    energies = torch.logspace(1, -2, 30).double().numpy()
    codes = energy_codes(energies / energies.mean())
    side = Side(30, codes)
    own = step_table()[:1] * 0 + 2.0  # any reference step
    code = int(abs(step_table() - own).argmin())
    noises = side.noise_of(torch.tensor([code]).numpy())[0]
    shares = 1024 * 2.0 ** (-codes / 8)
    slopes = 2 * noises * (noises + shares) / shares  # noise that a further nat takes away
    assert slopes.max() / slopes.min() == pytest.approx(1, rel=1e-6)
    assert standard(30).noise_of(torch.tensor([code]).numpy())[0] == pytest.approx(step_table()[code] ** 2 / 12)


def test_ranks_that_decode_the_same_learn_the_same():
    codecs = [Rotated(nmse=1.0, bases="learned") for _ in range(2)]
    for step in range(EVERY + 5):
        keys = [Key("w", step=step, rank=r) for r in range(2)]
        payloads = [c.encode_pair(factors(2 * step + r), linear_contract, keys[r]) for r, c in enumerate(codecs)]
        messages = [
            pack_message([p], digests=[c.digests(k)])[0] for p, c, k in zip(payloads, codecs, keys, strict=True)
        ]
        for codec in codecs:
            for message, key in zip(messages, keys, strict=True):
                [record] = unpack_message(message, digests=[codec.digests(key)])
                codec.decode_pair(record)
            codec.common.commit()
    first, second = (codec.common.state_dict() for codec in codecs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(name.endswith("codes") for name in first)


def test_a_rank_that_has_learned_something_else_refuses_the_message(learned):
    codec, key = learned[0], Key("w", step=1000)
    payload, other = codec.encode_pair(factors(0), linear_contract, key), Rotated(atoms=3, bases="learned")
    message, _ = pack_message([payload], digests=[codec.digests(key)])
    with pytest.raises(WireError):
        unpack_message(message, digests=[other.digests(key)])
    with pytest.raises(CodecError, match="not known here"):
        other.decode_pair(payload)
    with pytest.raises(CodecError, match="bases=learned"):
        Rotated(atoms=3).decode_pair(payload)


def test_what_was_not_applied_is_not_learned(learned):
    codec = learned[0]
    before = codec.common.state_dict()
    codec.decode_pair(codec.encode_pair(factors(0), linear_contract, Key("w", step=1000)))
    codec.common.rollback()
    codec.common.commit()
    after = codec.common.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "steps")


def test_a_gradient_of_another_shape_is_refused(learned):
    with pytest.raises(CodecError, match="was 24 x 41"):
        learned[0].encode_pair(Factors(normal(1, 4, 5), normal(2, 4, 24)), linear_contract, Key("w"))


def trained(steps, state=None, spec="rotated:ratio=20,bases=learned"):
    """Parameters after each step, and the session's state after half of them."""
    model, halfway, parameters = models.build("fc:hidden=32-32", classes=10, in_shape=(1, 8, 8), seed=0), None, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with isgq.instrument(model, spec, exchange=Loopback(), routes="factors") as session:
        if state is not None:
            model.load_state_dict(state["model"])
            session.load_state_dict(state["session"])
        for step in range(0 if state is None else steps // 2, steps):
            x, y = normal(step, 16, 1, 8, 8), torch.arange(16) % 10
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == steps // 2 - 1:
                halfway = {
                    "session": session.state_dict(),
                    "model": {n: p.clone() for n, p in model.state_dict().items()},
                }
            parameters.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return parameters, halfway


def test_a_session_goes_on_where_it_was_saved_bit_for_bit():
    whole, halfway = trained(24)
    rest, _ = trained(24, halfway)
    assert all(torch.equal(a, b) for a, b in zip(whole[-len(rest) :], rest, strict=True))
    assert any(not torch.equal(a, b) for a, b in pairwise(rest))


def train_on_ranks():
    """Thirty steps of a rank, whose replica is compared with the others' in each; what the replica is then."""
    model = models.build("fc:hidden=32-32", classes=10, in_shape=(1, 8, 8), seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    spec = "rotated:atoms=2,bases=learned"
    with isgq.instrument(model, spec, routes="factors", check_replicas=1):
        for step in range(EVERY + 5):
            x, y = normal(2 * step + dist.get_rank(), 16, 1, 8, 8), torch.arange(16) % 10
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return sum(p.detach().double().sum().item() for p in model.parameters())


def test_replicas_on_real_ranks_stay_the_same():
    first, second = launch(train_on_ranks, 2, timeout=60)
    assert first == second


@pytest.mark.parametrize("aggregate", ["two_pass", "server", "async"])
def test_only_where_all_ranks_decode_all_messages(aggregate):
    model = models.build("fc:hidden=8", classes=10, in_shape=(1, 4, 4), seed=0)
    with pytest.raises(OptionError, match="learns from what all ranks decode"):
        isgq.instrument(model, "rotated:bases=learned", aggregate=aggregate, exchange=Loopback())


@pytest.mark.parametrize("spec", ["rotated:bases=other", "rotated:mode=mmse,nmse=0.1,bases=learned"])
def test_bad_options(spec):
    with pytest.raises(OptionError, match="bases"):
        isgq.codec(spec)
