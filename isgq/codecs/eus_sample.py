"""Samplers: draw exactly m of n positions so that position i is drawn with a given probability pi_i.

All three keep the marginals exactly and differ in which sets they draw:

    systematic            one random offset, then every unit of cumulated probability; fastest
    pivotal               duels in a random order (Deville and Tillé 1998)
    conditional_poisson   independent draws, given that there are m of them: the law of largest entropy
                          (Chen, Dempster and Liu 1994); for small problems

A fixed order would give many pairs of positions no chance to be drawn together, so the order is random first.
Every sampler takes ``(weights, count, digest)``: weights is ``[n]``, not negative, such that
``pi = count * weights / sum(weights)`` is below 1; the digest names the draw. It returns ``count`` positions, int64,
increasing, none of weight 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.kernels import compiled
from isgq.core.keys import random_int32, stream_state

Sampler = Callable[[Tensor, int, int], Tensor]
"""``(weights, count, digest) -> positions``."""

_Reals = npt.NDArray[np.float64]

_ROWS = 1 << 18  # up to here the order is a full permutation; above, of rows of several entries
_ABOVE = 1 + 2.0**-50
_PASSES = 200
_CLOSE = 1e-11  # relative, on the inclusion probabilities
_MAX_ENTRIES, _MAX_TABLE = 1 << 12, 1 << 20


def _uniform(digest: int, role: str, n: int, device: torch.device) -> Tensor:
    """Numbers in (0, 1) of 52 random bits, which float32's 24 do not give: float64 ``[n]``."""
    halves = random_int32(digest, role, 2 * n, device).to(torch.int64).bitwise_and_((1 << 26) - 1)
    return ((halves[:n] << 26) + halves[n:]).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _order(digest: int, role: str, n: int, device: torch.device) -> Tensor:
    """A random permutation: int64 ``[n]``. The keys that are sorted are distinct (a bijection of the counter)."""
    return random_int32(digest, role, n, device).argsort(stable=True)


def systematic(weights: Tensor, count: int, digest: int) -> Tensor:
    """Systematic sampling in a random order (Madow 1949): see the module's docstring for arguments and result.

    The order is made of rows (see :func:`systematic_points`): up to 2**18 entries a row is an entry and the order a
    uniformly random permutation. With more, a row takes one entry from each of several segments of the vector;
    segments are rotated and rows permuted at random, so that any two entries still have a chance to be drawn together.
    """
    n, device = weights.numel(), weights.device
    if count == 0:
        return torch.arange(0, device=device)
    rows = math.ceil(n / math.ceil(n / _ROWS))
    if rows == n and (kernels := compiled("choose", device)):
        states = (stream_state(digest, f"systematic.{role}", 0) for role in ("order", "offsets", "start"))
        drawn = torch.empty(n, dtype=torch.int64)
        return drawn[: kernels.systematic(weights.double().contiguous().numpy(), count, _ABOVE, *states, drawn.numpy())]
    offsets = (random_int32(digest, "systematic.offsets", math.ceil(n / rows)).to(torch.int64) % rows).tolist()
    order = _order(digest, "systematic.order", rows, device)
    start = float(_uniform(digest, "systematic.start", 1, torch.device("cpu")))
    if device.type == "cpu" and rows == n:
        return torch.from_numpy(_points_on_host(weights.double().numpy(), count, start, order.numpy(), offsets[0]))
    return systematic_points(weights, count, start, order, offsets).nonzero().squeeze(1)


def systematic_points(weights: Tensor, count: int, start: float, order: Tensor, offsets: Sequence[int]) -> Tensor:
    """Which entries hold one of the points ``start, start + 1, ...`` of the cumulated probability.

    Entry ``c * rows + t`` (segment c, ``t < rows``) stands in row ``(t + offsets[c]) % rows`` at place c. The order is
    row ``order[0]`` from its first place to its last, then row ``order[1]``, and so on.

    1. Sum the rows; cumulate the sums in order; this gives each row's begin and end.
    2. Go through the places, all rows at once, and cumulate from each row's begin: an entry is drawn if the number of
       points passed grows. A row's end is the next row's begin to the last bit, so no point is lost between rows.

    Args:
        weights: ``[n]``, as of the samplers.
        count: how many points.
        start: in (0, 1).
        order: int64 ``[rows]``, a permutation.
        offsets: one a segment, in ``0 .. rows - 1``.

    Returns:
        bool ``[n]``, with ``count`` entries true.
    """
    n, rows = weights.numel(), order.numel()

    def in_rows(place: int) -> Tensor:
        segment = weights[place * rows : (place + 1) * rows]
        return torch.nn.functional.pad(segment, (0, rows - segment.numel())).roll(offsets[place])

    sums = torch.zeros(rows, dtype=torch.float64, device=weights.device)
    for place in range(len(offsets)):
        sums += in_rows(place)
    # A parallel scan may fall by a rounding error; the count of points must not.
    cumulated = sums[order].cumsum(0).cummax(0).values
    ends, begins = torch.empty_like(sums), torch.zeros_like(sums)
    ends[order], begins[order[1:]] = cumulated, cumulated[:-1]
    scale = cumulated[-1].reciprocal() * (count * _ABOVE)  # the last end lies at count or a rounding error above

    def points_below(x: Tensor) -> Tensor:
        return (x * scale).sub_(start).ceil_().clamp_(max=count)

    drawn = torch.empty(n, dtype=torch.bool, device=weights.device)
    passed, within = points_below(begins), torch.zeros_like(sums)
    for place in range(len(offsets)):
        within += in_rows(place)
        last = place == len(offsets) - 1
        reached = points_below(ends if last else torch.minimum(begins + within, ends))
        part = drawn[place * rows : (place + 1) * rows]
        part.copy_((reached > passed).roll(-offsets[place])[: part.numel()])
        passed = reached
    return drawn


def _points_on_host(
    weights: _Reals, count: int, start: float, order: npt.NDArray[np.int64], offset: int
) -> npt.NDArray[np.int64]:
    """Positions that :func:`systematic_points` marks where a row is an entry, in fewer and quicker operations."""
    rows = (np.arange(len(weights)) + offset) % len(weights)
    cumulated = np.empty_like(weights)
    cumulated[rows] = weights
    cumulated = cumulated[order].cumsum()
    points = np.minimum(np.ceil(cumulated * (1 / cumulated[-1] * (count * _ABOVE)) - start), count)
    hit = order[np.diff(points, prepend=max(math.ceil(-start), 0)) > 0]
    entries: npt.NDArray[np.int64] = np.sort((hit - offset) % len(weights))
    return entries


def _positive(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions of the nonzero weights, and their probabilities: float64, with the sum ``count``."""
    entries = weights.nonzero().squeeze(1)
    probability = weights[entries].to(torch.float64)
    return entries, (probability * (count / probability.sum())).clamp_(max=1.0)


def pivotal(weights: Tensor, count: int, digest: int) -> Tensor:
    """Pivotal sampling (Deville and Tillé 1998) as a tournament: arguments and result as in the module's docstring.

    Two entries duel: if their probabilities a + b stay below 1, one drops out and the other goes on with a + b; if
    not, one is drawn and the other goes on with a + b - 1. Each outcome's chance is such that both means are kept.
    All duels of a round are independent, so there are log2(n) rounds.
    """
    if count == 0:
        return torch.arange(0, device=weights.device)
    entries, probability = _positive(weights, count)
    order = _order(digest, "pivotal.order", entries.numel(), weights.device)
    entries, probability = entries[order], probability[order]
    drawn: list[Tensor] = []
    while (half := entries.numel() // 2) > 0:
        pair, odd = probability[: 2 * half].view(2, half), entries[2 * half :]
        total = pair.sum(0)
        small = total < 1
        stays = torch.where(small, pair[0] / total, (1 - pair[0]) / (2 - total))
        first = _uniform(digest, f"pivotal.round.{len(drawn)}", half, weights.device) < stays
        going = torch.where(first, entries[:half], entries[half : 2 * half])
        out = torch.where(first, entries[half : 2 * half], entries[:half])
        drawn.append(out[~small])
        entries = torch.cat([going, odd])
        probability = torch.cat([torch.where(small, total, total - 1), probability[2 * half :]])
    # The sum is an integer, so the last one's probability is 0 or 1 up to rounding.
    return torch.cat([*drawn, entries[probability > 0.5]]).sort().values


def _counts(p: _Reals, not_p: _Reals, m: int) -> _Reals:
    """Law of the number of successes among the last entries: ``[n + 1, m + 1]``, row i for entries ``i ..``."""
    table = np.zeros((len(p) + 1, m + 1))
    table[-1, 0] = 1
    for i in range(len(p) - 1, -1, -1):
        table[i] = not_p[i] * table[i + 1]
        table[i, 1:] += p[i] * table[i + 1, :-1]
    return table


def _conditional_inclusion(p: _Reals, not_p: _Reals, m: int) -> tuple[_Reals, _Reals]:
    """Inclusion probabilities of independent draws p given that there are m, and the table of :func:`_counts`."""
    after = _counts(p, not_p, m)
    before = _counts(p[::-1], not_p[::-1], m)[::-1]
    others = (before[:-1, :m] * after[1:, :m][:, ::-1]).sum(1)
    return p * others / after[0, m], after


def conditional_poisson(weights: Tensor, count: int, digest: int) -> Tensor:
    """Conditional Poisson sampling (Chen, Dempster and Liu 1994): arguments, result as in the module's docstring.

    1. Find independent probabilities p whose inclusion probabilities, given ``count`` successes, are pi: a damped
       Newton step on the log odds with the Jacobian's diagonal ``pi (1 - pi)``. The Jacobian, a covariance with
       row sums 0 and no positive off-diagonal entry, has eigenvalues in [0, 2] relative to its diagonal (Gershgorin),
       so a damping of 2/3 contracts.
    2. Go through the entries once and draw each with its probability given what is still to be drawn.

    Computed on the host, entry by entry.

    Raises:
        CodecError: more than 2**12 nonzero entries, or a table of more than 2**20 numbers; or no p was found.
    """
    if count == 0:
        return torch.arange(0, device=weights.device)
    entries, probability = _positive(weights, count)
    n = entries.numel()
    if n > _MAX_ENTRIES or n * (count + 1) > _MAX_TABLE:
        raise CodecError(
            f"conditional_poisson takes at most {_MAX_ENTRIES} nonzero entries and {_MAX_TABLE} of entries times "
            f"draws, got {n} and {n * (count + 1)}; use the sampler 'systematic' or 'pivotal'"
        )
    wanted: _Reals = probability.cpu().numpy()
    unwanted = np.maximum(1 - wanted, 2.0**-53)
    log_odds = np.log(wanted) - np.log(unwanted)
    for _ in range(_PASSES):
        p, not_p = 1 / (1 + np.exp(-log_odds)), 1 / (1 + np.exp(log_odds))
        found, after = _conditional_inclusion(p, not_p, count)
        error = wanted - found
        if (np.abs(error) <= _CLOSE * wanted + n * 2.0**-50).all():
            break
        log_odds += 2 / 3 * error / (wanted * unwanted)
    else:
        raise CodecError("conditional_poisson found no odds for these probabilities; use 'systematic' or 'pivotal'")
    chance = _uniform(digest, "conditional_poisson", n, torch.device("cpu")).numpy()
    drawn, left = [], count
    for i in range(n):
        if left and chance[i] * after[i, left] < p[i] * after[i + 1, left - 1]:
            drawn.append(i)
            left -= 1
    return entries[torch.tensor(drawn, dtype=torch.int64, device=entries.device)]


SAMPLERS: Mapping[str, Sampler] = {
    "systematic": systematic,
    "pivotal": pivotal,
    "conditional_poisson": conditional_poisson,
}
