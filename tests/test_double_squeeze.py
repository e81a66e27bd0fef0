"""DoubleSqueeze on a quadratic, with simulated workers: the theorem's inequality, the linear speed-up, the control.

f(x) = 1/2 x' diag(h) x in d = 50 dimensions; every worker sees the gradient with noise of variance sigma^2. The codecs
and their memories are the real ones; a loop stands in for the exchange.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from isgq.codecs import codec
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec
from isgq.core.keys import Key

DIMENSION, GAMMA, SMOOTHNESS = 50, 0.05, 1.0
CURVATURE = torch.linspace(0.1, SMOOTHNESS, DIMENSION, dtype=torch.float64)


@dataclass
class Trace:
    """Squared norms by step: of the true gradient, and of what is left out."""

    gradients: list[float]
    left_out: list[float]
    start: float


def built(spec: str) -> Codec:
    made = codec(spec)
    assert isinstance(made, Codec)
    return made


def send(encoder: Codec, x: Tensor, step: int, rank: int) -> Tensor:
    return encoder.decode(encoder.encode(x.float(), Key("x", 0, step, rank))).double()


def double_squeeze(spec: str, workers: int, steps: int, sigma: float) -> Trace:
    generator = torch.Generator().manual_seed(workers)
    x = torch.ones(DIMENSION, dtype=torch.float64)
    trace = Trace([], [], float((CURVATURE * x * x).sum() / 2))
    codecs = [built(spec) for _ in range(workers)]
    server = built(spec)
    for step in range(steps):
        memories = [memory_of(each) for each in (server, *codecs)]
        held = [m.state_dict().get("x", torch.zeros(DIMENSION)) if m else torch.zeros(DIMENSION) for m in memories]
        omega = held[0].double() + sum((each.double() for each in held[1:]), torch.zeros(DIMENSION)) / workers
        gradient = CURVATURE * x
        trace.gradients.append(float(gradient.square().sum()))
        trace.left_out.append(float(omega.square().sum()))
        noise = torch.randn(workers, DIMENSION, generator=generator, dtype=torch.float64) * sigma / DIMENSION**0.5
        sent = [send(each, gradient + noise[rank], step, rank) for rank, each in enumerate(codecs)]
        x = x - GAMMA * send(server, torch.stack(sent).mean(0), step, workers)
    return trace


@pytest.mark.parametrize("spec", ["error_feedback(one_bit)", "error_feedback(top_k:k=0.1)"])
def test_the_theorem_s_inequality(spec: str) -> None:
    """(g/2 - L g^2/2) sum |grad|^2 <= f(x_0) - f* + L^2 g^3/2 sum |Omega|^2 + L g^2 sigma^2 T / (2 n)."""
    workers, steps, sigma = 4, 400, 1.0
    trace = double_squeeze(spec, workers, steps, sigma)
    left = (GAMMA / 2 - SMOOTHNESS * GAMMA**2 / 2) * sum(trace.gradients)
    omega = SMOOTHNESS**2 * GAMMA**3 / 2 * sum(trace.left_out)
    assert left <= trace.start + omega + SMOOTHNESS * GAMMA**2 * sigma**2 * steps / (2 * workers)
    assert left >= 0.1 * (trace.start + omega)  # the bound says something


def test_more_workers_are_linearly_better() -> None:
    """sigma / sqrt(n T) leads the rate, so the squared gradient at a constant step falls as 1/n."""
    tails = []
    for workers in (1, 2, 4, 8, 16):
        gradients = double_squeeze("error_feedback(top_k:k=0.1)", workers, 300, 3.0).gradients
        tails.append(sum(gradients[150:]) / 150)
    for fewer, more in itertools.pairwise(tails):
        assert 1.4 < fewer / more < 2.9
    assert 10 < tails[0] / tails[-1] < 25


def test_top_k_without_memory_fails() -> None:
    remembers = double_squeeze("error_feedback(top_k:k=0.1)", 8, 400, 1.0).gradients
    forgets = double_squeeze("top_k:k=0.1", 8, 400, 1.0).gradients
    assert sum(forgets[200:]) > 5 * sum(remembers[200:])
