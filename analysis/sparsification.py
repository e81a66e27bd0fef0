"""Ways to keep about m of n entries with an exact mean, and what each costs in squared error.

    python -m analysis.sparsification            # one table: E ||Q - x||^2 / ||x||^2 on four kinds of vectors

Every way draws a random Q with ``E Q = x``:

    efficient          exactly m entries with the probabilities of USA (:mod:`isgq.codecs.eus_plan`)
    poisson            the same probabilities, each entry for itself, so m on average (Wangni et al. 2018)
    priority           the m largest of ``|x_i| / u_i``, none below the next one (Duffield, Lund and Thorup 2007)
    with_replacement   m independent draws with probabilities ``|x_i| / ||x||_1``
    uniform_entries    m entries, all alike

Poisson has the same squared error as USA: what USA adds is the hard cap on m and the exact l1 norm of every draw.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.runs import align
from isgq.codecs.eus_plan import usa
from isgq.codecs.eus_sample import systematic
from isgq.core.keys import Key, random_int32, uniform

Sparsifier = Callable[[Tensor, int, int], Tensor]
"""``(x, m, digest) -> Q``: float64 ``[n]`` each; the digest names the draw."""


def _unit(digest: int, role: str, n: int) -> Tensor:
    """Numbers in (0, 1): float64 ``[n]``."""
    return uniform(digest, role, (n,)).double().add_(0.5)


def efficient(x: Tensor, m: int, digest: int) -> Tensor:
    """Efficient unbiased sparsification by systematic sampling (Barnes et al. 2024)."""
    plan = usa(x.abs(), m)
    kept = torch.cat([plan.heavy, systematic(plan.light_scores, plan.light, digest)])
    return torch.zeros_like(x).index_copy(0, kept, x[kept] / plan.inclusion()[kept])


def poisson(x: Tensor, m: int, digest: int) -> Tensor:
    """Every entry by itself, with USA's probability (Wangni et al. 2018, "Gradient Sparsification")."""
    pi = usa(x.abs(), m).inclusion()
    return torch.where(_unit(digest, "poisson", x.numel()) < pi, x / pi, 0.0)


def priority(x: Tensor, m: int, digest: int) -> Tensor:
    """Priority sampling (Duffield et al. 2007): the m highest of ``|x_i| / u_i``, at no less than the next one."""
    rank = x.abs() / _unit(digest, "priority", x.numel())
    top = rank.topk(min(m + 1, x.numel()))
    kept, threshold = top.indices[:m], top.values[m] if m < x.numel() else 0.0
    return torch.zeros_like(x).index_copy(0, kept, x[kept].sign() * x[kept].abs().clamp(min=threshold))


def with_replacement(x: Tensor, m: int, digest: int) -> Tensor:
    """Importance sampling: m independent draws, so up to m entries."""
    cumulated = x.abs().cumsum(0)
    drawn = torch.searchsorted(cumulated, _unit(digest, "with_replacement", m) * cumulated[-1], right=True)
    counts = torch.bincount(drawn.clamp(max=x.numel() - 1), minlength=x.numel())
    return x.sign() * counts * (cumulated[-1] / m)


def uniform_entries(x: Tensor, m: int, digest: int) -> Tensor:
    """Random-m, scaled by n / m."""
    kept = random_int32(digest, "uniform_entries", x.numel()).argsort()[:m]
    return torch.zeros_like(x).index_copy(0, kept, x[kept] * (x.numel() / m))


SPARSIFIERS: Mapping[str, Sparsifier] = {
    "USA": efficient,
    "Poisson": poisson,
    "priority": priority,
    "with replacement": with_replacement,
    "random m": uniform_entries,
}


def closed_form(name: str, x: Tensor, m: int) -> float | None:
    """``E ||Q - x||^2 / ||x||^2`` of a sparsifier by its name; None for priority sampling, which has no simple one."""
    total = float(x.square().sum())
    forms: dict[str, Callable[[], float]] = {
        "USA": lambda: float(usa(x.abs(), m).variance(x.abs())) / total,
        "Poisson": lambda: float(usa(x.abs(), m).variance(x.abs())) / total,
        "with replacement": lambda: (float(x.abs().sum()) ** 2 / total - 1) / m,
        "random m": lambda: x.numel() / m - 1,
    }
    return forms[name]() if name in forms else None


def vectors(n: int, seed: int) -> dict[str, Tensor]:
    """Four kinds of random vectors, from light to heavy tails: float64 ``[n]`` each, by inverse distributions."""
    u = {
        name: _unit(Key(name, seed).digest, "vectors", n) for name in ("Gaussian", "Laplace", "Student t2", "lognormal")
    }
    v = u["Laplace"] - 0.5
    return {
        "Gaussian": torch.special.ndtri(u["Gaussian"]),
        "Laplace": -v.sign() * torch.log1p(-2 * v.abs()),
        "Student t2": (2 * u["Student t2"] - 1) / (2 * u["Student t2"] * (1 - u["Student t2"])).sqrt(),
        "lognormal": (2 * torch.special.ndtri(u["lognormal"])).exp(),  # sigma 2
    }


@dataclass(frozen=True)
class Measured:
    """One sparsifier on one vector.

    Attributes:
        error: mean of ``||Q - x||^2 / ||x||^2`` over the draws.
        deviation: standard error of that mean.
        fewest: least number of nonzero entries of a draw.
        most: largest.
    """

    error: float
    deviation: float
    fewest: int
    most: int


def measure(sparsifier: Sparsifier, x: Tensor, m: int, draws: int, seed: int = 0) -> Measured:
    """Monte Carlo over ``draws`` keys."""
    errors, kept = [], []
    for step in range(draws):
        q = sparsifier(x, m, Key("analysis.sparsification", seed, step).digest)
        errors.append((q - x).square().sum())
        kept.append(int(q.count_nonzero()))
    error = torch.stack(errors) / x.square().sum()
    return Measured(float(error.mean()), float(error.std()) / draws**0.5, min(kept), max(kept))


def table(n: int, m: int, draws: int, seed: int) -> str:
    """A line for each vector, a column for each sparsifier; Poisson with the range of its numbers of entries."""
    rows: list[Sequence[str]] = [("vector", "heavy", "closed form", *SPARSIFIERS)]
    for name, x in vectors(n, seed).items():
        cells = []
        for sparsifier in SPARSIFIERS.values():
            found = measure(sparsifier, x, m, draws, seed)
            entries = f" ({found.fewest}-{found.most} kept)" if sparsifier is poisson else ""
            cells.append(f"{found.error:.4g}{entries}")
        rows.append((name, str(usa(x.abs(), m).heavy.numel()), f"{closed_form('USA', x, m):.4g}", *cells))
    return align(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m analysis.sparsification", description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=1000, help="entries of a vector")
    parser.add_argument("--m", type=int, default=50, help="entries to keep; fewer is more aggressive")
    parser.add_argument("--draws", type=int, default=1000, help="of each mean; more is more accurate")
    parser.add_argument("--seed", type=int, default=0, help="of the vectors and the draws")
    given = parser.parse_args(arguments)
    if not 1 <= given.m <= given.n or given.draws < 2:
        parser.error(f"--m {given.m} must be in 1 .. {given.n} (--n), --draws {given.draws} at least 2")
    print(f"E ||Q - x||^2 / ||x||^2, n = {given.n}, m = {given.m}, mean of {given.draws} draws\n")
    print(table(given.n, given.m, given.draws, given.seed))


if __name__ == "__main__":
    main()
