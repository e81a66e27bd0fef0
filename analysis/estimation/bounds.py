"""Upper bounds on ``Tr I_M``, M a message of k bits, and van Trees' lower bound on the risk.

All rest on one identity: the score of a message is ``E[S | m]``, so ``Tr I_M = sum_m p(m) |E[S | m]|^2``, at most
``Tr I_X``. For n nodes that write independent messages the informations add up. For sequential and blackboard protocols
n times the bound of one node holds as well: given the transcript so far a node's next message is one of an
independent sample (sequential), and the likelihood of a transcript factors over the nodes (blackboard).

The theorems are those of Barnes, Han and Ozgur (JMLR 2020) up to the constants, which they leave universal: every
explicit constant here is ours, derived in the docstring that uses it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.estimation.checks import Array, at_least, within
from analysis.estimation.models import Constants
from isgq.core.errors import OptionError

TAIL_CONSTANT = 4.0
"""C of the tail bound in k, ours."""


def entropy(probabilities: Array) -> float:
    """Entropy of a message in nats."""
    p = probabilities[probabilities > 0]
    return max(0.0, float(-(p * np.log(p)).sum()))


def finite_variance(constants: Constants, bits: int) -> float:
    """T1: ``Tr I_M <= 2^k I0``.

    Assumes ``Var <u, S> <= I0`` for every unit vector u, nothing else. Constant 1, ours: for each of the 2^k messages
    ``p(m) |E[S | m]|^2 <= E <u, S>^2`` by Cauchy and Schwarz, u the direction of ``E[S | m]``.
    """
    return 2.0 ** at_least("bits", bits) * constants.variance


def _psi(constants: Constants, p: int) -> float:
    if p not in {1, 2}:
        raise OptionError(f"tails of order p = {p!r} are not known; p must be 1 (sub-exponential) or 2 (sub-Gaussian)")
    return constants.psi1 if p == 1 else constants.psi2


def tails(constants: Constants, bits: int, p: int) -> float:
    """T2: ``Tr I_M <= 4 I0 k^(2/p)``.

    Assumes ``E exp(|<u, S>|^p / I0^(p/2)) <= 2`` for every unit vector u, p = 2 (sub-Gaussian, linear in k) or 1
    (sub-exponential, quadratic in k). The power of k is the paper's; 4 is ours. :func:`message_tails` sums
    ``q log(2 / q)^(2/p)``, concave up to q = 2/e: 2^k such messages sum to at most ``((k + 1) log 2)^(2/p)``. One
    of more than 2/e adds at most 2/e, and the others ``0.265 (2.03 + k log 2)^(2/p)``. Both are below ``4 k^(2/p)``.

    Raises:
        OptionError: p is neither 1 nor 2.
    """
    return float(TAIL_CONSTANT * _psi(constants, p) * at_least("bits", bits) ** (2 / p))


def message_tails(constants: Constants, probabilities: Array, p: int) -> float:
    """T2 before it is simplified: ``Tr I_M <= I0 sum_m p(m) log(2 / p(m))^(2/p)``.

    Assumes the same as :func:`tails`, for messages of known probabilities; no constant is lost. By Jensen
    ``exp(|E[S | m]|^p / I0^(p/2)) <= E[exp(<u, S>^p / I0^(p/2)) | m] <= 2 / p(m)``. For p = 1 only
    ``E exp(<u, S> / c) <= 2`` is used.

    Raises:
        OptionError: p is neither 1 nor 2.
    """
    q = probabilities[probabilities > 0]
    return _psi(constants, p) * float((q * np.log(2 / q) ** (2 / p)).sum())


def message_entropy(constants: Constants, probabilities: Array) -> float:
    """Sharper for sub-Gaussian scores: ``Tr I_M <= 2 rho^2 H(M)``, H in nats.

    Assumes ``E exp(t <u, S>) <= exp(rho^2 t^2 / 2)`` for every unit u and every t. The form and its constant are ours:
    by Donsker and Varadhan ``t |E[S | m]| <= rho^2 t^2 / 2 + log(1 / p(m))`` for all t, so ``|E[S | m]|^2`` is at most
    ``2 rho^2 log(1 / p(m))``. The argmax of 2^k Gaussian coordinates comes close to it.
    """
    nats = entropy(probabilities)
    return 2 * constants.proxy * nats if nats > 0 else 0.0


def bit_entropy(constants: Constants, bits: int) -> float:
    """:func:`message_entropy` at the largest entropy of k bits: ``Tr I_M <= 2 log(2) rho^2 k``."""
    return 2 * math.log(2) * constants.proxy * at_least("bits", bits)


def sparse_bernoulli(theta: float, bits: int) -> float:
    """``Tr I_M <= k log 2 / (theta^2 (log(1/theta) - 1 + theta))`` for a product Bernoulli model.

    Assumes equal means theta <= 1/2. Order and constant are ours; rTop-k states the minimax risk up to a constant.
    Donsker and Varadhan with ``lambda = c E[S | m]``, ``c = theta^2 (1 - theta) log(1/theta)``, and
    ``e^b - 1 - b <= (b/a)^2 (e^a - 1 - a)`` for ``|b| <= a = log(1/theta)``. :func:`bit_entropy` with Kearns and Saul's
    proxy has the same leading term as theta vanishes, a smaller value at every theta, and allows unequal means.

    Raises:
        OptionError: theta outside of (0, 1/2].
    """
    if not 0 < theta <= 0.5:
        raise OptionError(f"theta = {theta!r} is outside of the bound's regime, (0, 1/2]")
    return at_least("bits", bits) * math.log(2) / (theta**2 * (math.log(1 / theta) - 1 + theta))


BIT_BOUNDS: Mapping[str, Callable[[Constants, int], float]] = {
    "Tr I_X": lambda constants, bits: constants.trace,
    "T1 finite variance": finite_variance,
    "T2 sub-Gaussian": lambda constants, bits: tails(constants, bits, 2),
    "T2 sub-exponential": lambda constants, bits: tails(constants, bits, 1),
    "entropy": bit_entropy,
}
"""Bounds in k by name; inf where a model lacks what they assume."""

MESSAGE_BOUNDS: Mapping[str, Callable[[Constants, Array], float]] = {
    "T2 sub-Gaussian, p(m)": lambda constants, probabilities: message_tails(constants, probabilities, 2),
    "T2 sub-exponential, p(m)": lambda constants, probabilities: message_tails(constants, probabilities, 1),
    "entropy, H(M)": message_entropy,
}
"""Bounds for messages of known probabilities by name."""


def sharpest(constants: Constants, bits: int) -> tuple[str, float]:
    """The least bound in k, and its name."""
    values = {name: bound(constants, bits) for name, bound in BIT_BOUNDS.items()}
    name = min(values, key=values.__getitem__)
    return name, values[name]


def van_trees(dim: int, information: float, half_width: float) -> float:
    """``E |estimate - theta|^2 >= d^2 / (I + d pi^2 / B^2)``, the mean also over theta; so the supremum over it, too.

    Assumes that theta has the product prior of densities ``cos(pi t / 2B)^2 / B`` around some centre, |t| <= B, that
    ``Tr`` of the Fisher information of all that the server sees is at most I on its support, and regular models. Any
    estimator, biased or not. ``pi^2 / B^2`` is this prior's own Fisher information per coordinate, the least of all
    priors on an interval; the constant is ours in the sense that the papers leave theirs universal.

    Args:
        dim: d.
        information: I, of all nodes together.
        half_width: B, positive.
    """
    within("half_width", half_width, 0, math.inf)
    return at_least("dim", dim) ** 2 / (information + dim * math.pi**2 / half_width**2)


@dataclass(frozen=True)
class RiskBound:
    """A lower bound on the squared error of any protocol.

    Attributes:
        value: the bound.
        binding: the name of the bound on information that it stands on.
        information: of all nodes together.
        prior: information of the prior, ``d pi^2 / B^2``.
    """

    value: float
    binding: str
    information: float
    prior: float

    @property
    def in_regime(self) -> bool:
        """Whether the samples weigh more than the prior: only then does the bound follow the published rate."""
        return self.information >= self.prior
