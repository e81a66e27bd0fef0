"""Vectors as bytes: no more of them than the model says, and hardly more than the symbols' own entropy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import isgq
import models
from isgq.codecs.rotation import decompose
from isgq.codecs.rotation_code import DEAD_ZONE, decode_symbols, digits_for, encode_symbols, quantize
from isgq.core.keys import Key, uniform
from isgq.layers.capture import Capture, find_units


@pytest.fixture(scope="module")
def gradients():
    """Singular vectors of two layers' gradients after 20 steps on real digits, in units of their root mean square."""
    dataset = data.load("mnist5k")
    model = models.build("fc:hidden=1000-300-100", classes=10, in_shape=(1, 28, 28), seed=0)
    units, _ = find_units(model, skip=lambda name: False)
    caught = {}
    capture = Capture(units, lambda unit, factors: caught.update({unit.name: factors}), lambda: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(torch.split(dataset.train_x, 64)[:20], torch.split(dataset.train_y, 64)[:20], strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    capture.close()
    vectors = []
    for unit in units[:2]:
        atoms = decompose(caught[unit.name], unit.contract, Key("entropy"))
        vectors.append([side[:].numpy() * math.sqrt(side.size) for side in (atoms.left, atoms.right)])
    return vectors


def model_bits(symbols, dither, e):
    """Of symbols in steps of e scales of a Laplace distribution."""
    zone, u = (DEAD_ZONE, 0.0) if dither is None else (0.0, dither)
    below, above = np.exp(-(0.5 + zone + u) * e) / 2, np.exp(-(0.5 + zone - u) * e) / 2
    further = np.log2(-np.expm1(-e)) - (np.abs(symbols) - 1) * e * math.log2(math.e)
    sign = np.where(symbols < 0, np.log2(below), np.log2(above))
    return -np.where(symbols == 0, np.log2(1 - below - above), sign + further).sum()


def entropy_bits(symbols):
    """Empirical, of order zero."""
    _, counts = np.unique(symbols, return_counts=True)
    return -(counts * np.log2(counts / counts.sum())).sum()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dithered", [True, False])
@pytest.mark.parametrize("step", [0.7, 1.0, 1.5])
def test_bytes_are_near_both_entropies(gradients, layer, dithered, step):
    """Payloads above 10 kB: within 0.1 % of the model's entropy and 5 % of the vectors' own."""
    sides = gradients[layer]
    entries = np.concatenate([side.reshape(-1) for side in sides])
    dither = uniform(7, "entropy", (entries.size,)).double().numpy() if dithered else None
    group, steps = np.zeros(entries.size, dtype=np.int64), np.array([step])
    symbols, digits = quantize(entries / step, dither), digits_for(np.abs(entries).max() / step + 1)
    code = encode_symbols(symbols, dither, group, steps, digits)
    assert len(code) > 10_000
    assert np.array_equal(decode_symbols(code, dither, group, steps, digits), symbols)
    assert 8 * len(code) == pytest.approx(model_bits(symbols, dither, step * math.sqrt(2)), rel=0.001)
    split = sides[0].size
    columns = [*symbols[:split].reshape(sides[0].shape), *symbols[split:].reshape(sides[1].shape)]
    assert 8 * len(code) < 1.05 * sum(map(entropy_bits, columns))


def test_whole_messages_keep_it(gradients):
    """Of a gradient as the codec plans it, head and frame included."""
    left, right = (torch.from_numpy(side).float() for side in gradients[0])
    payload = isgq.codec("rotated:nmse=0.03").encode_pair(
        isgq.Factors(right[:, :-1], left), lambda x, d: d.T @ x, Key("w", seed=1)
    )
    assert isgq.wire.pack(payload).numel() < 1.01 * payload.d.tensors["code"].numel()
