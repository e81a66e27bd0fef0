"""What each way of sending each gradient costs, and which ways are best together. Pure functions.

Of one gradient that N workers share, with message size up, plain bytes p (what an all-reduce carries), bandwidth W:

    seconds = encode + N decode + (N - 1) up / W + 2 (N - 1) / N p / W
    error   = squared error of the mean of all workers' gradients: a worker's, over N if the codec is unbiased

encode and decode are of one message, reconstruction included: every worker decodes all N messages. Seconds and errors
add up over gradients, so the fastest ways with a total error of at most a limit are, but for gaps between the few ways
that there are, those of least ``seconds + price * error`` for some price: one for the whole model. Latency is the same
for all ways that send messages, and left to the total (:func:`step_seconds`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isgq.bandwidth import Link

DENSE = "dense"


@dataclass(frozen=True)
class Estimate:
    """What one worker's share of one gradient is expected to take in a step.

    Attributes:
        way: a codec's spec, or ``"dense"``.
        size: bytes of the record.
        plain: bytes of gradients that are all-reduced: the whole of it, or a bias that travels beside.
        error: expected squared error of this worker's gradient.
        encode: seconds from the gradient to bytes.
        decode: seconds from one worker's bytes to a gradient.
        unbiased: whether errors of several workers average out.
    """

    way: str
    size: float
    plain: float
    error: float
    encode: float
    decode: float
    unbiased: bool

    def codec_seconds(self, workers: int) -> float:
        """Time of a step to encode one message and decode all workers'."""
        return self.encode + workers * self.decode

    def link_seconds(self, workers: int, link: Link) -> float:
        """Time of a step to send it, latencies left out."""
        return (workers - 1) * (self.size + 2 * self.plain / workers) / link.bytes_per_second

    def seconds(self, workers: int, link: Link) -> float:
        """Both."""
        return self.codec_seconds(workers) + self.link_seconds(workers, link)

    def error_of_mean(self, workers: int) -> float:
        """Expected squared error of the mean over workers."""
        return self.error / workers if self.unbiased else self.error


def dense(size: float) -> Estimate:
    """A gradient of so many bytes as it is."""
    return Estimate(DENSE, 0.0, size, 0.0, 0.0, 0.0, True)


def choose(
    table: Sequence[Sequence[Estimate]], workers: int, link: Link, limit: float, timed: bool = True
) -> list[Estimate]:
    """The fastest way of each gradient such that the errors of the means sum to no more than a limit.

    Args:
        table: for each gradient the ways that it has, one of them without error.
        workers: N.
        link: of each worker.
        limit: squared error.
        timed: whether codecs' times count, or that on the link alone.
    """

    def cost(way: Estimate) -> tuple[float, float]:
        seconds = way.seconds(workers, link) if timed else way.link_seconds(workers, link)
        return seconds, way.error_of_mean(workers)

    costs = [[cost(way) for way in ways] for ways in table]

    def at(price: float) -> list[int]:
        return [min(range(len(each)), key=lambda i: each[i][0] + price * each[i][1]) for each in costs]

    def error(chosen: Sequence[int]) -> float:
        return sum(each[i][1] for each, i in zip(costs, chosen, strict=True))

    chosen = at(0.0)
    if error(chosen) > limit:
        low, high = -120.0, 120.0  # log2 of seconds per squared gradient
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if error(at(2.0**middle)) > limit else (low, middle)
        chosen = at(2.0**high)
        if error(chosen) > limit:  # no finite price is high enough for errors that are next to nothing
            chosen = [min(range(len(each)), key=lambda i: (each[i][1], each[i][0])) for each in costs]
        _spend(costs, chosen, limit - error(chosen))
    return [ways[i] for ways, i in zip(table, chosen, strict=True)]


def _spend(costs: Sequence[Sequence[tuple[float, float]]], chosen: list[int], rest: float) -> None:
    """Take faster ways as long as what is left of the limit allows, the greatest savings first."""
    savings = [
        (each[i][0] - seconds, item, j)
        for item, (each, i) in enumerate(zip(costs, chosen, strict=True))
        for j, (seconds, _) in enumerate(each)
        if seconds < each[i][0]
    ]
    savings.sort(key=lambda saving: (-saving[0], saving[1:]))
    for _, item, j in savings:
        seconds, error = costs[item][chosen[item]]
        more = costs[item][j][1] - error
        if costs[item][j][0] < seconds and more <= rest:
            rest -= more
            chosen[item] = j


def explain(options: Sequence[Estimate], best: Estimate, workers: int, link: Link) -> str:
    """Why a way was chosen: its time and that of the next best."""
    seconds = {each.way: 1e3 * each.seconds(workers, link) for each in [*options, best]}
    others = sorted((time, way) for way, time in seconds.items() if way != best.way)
    if not others:
        return "nothing measured"
    if best.way != DENSE:
        return f"{seconds[best.way]:.2f} ms instead of {seconds[DENSE]:.2f} ms densely"
    time, way = others[0]
    verdict = ", but with too large an error" if time < seconds[DENSE] else ""
    return f"{seconds[DENSE]:.2f} ms; {way} {time:.2f} ms{verdict}"


def step_seconds(chosen: Sequence[Estimate], overhead: float, workers: int, link: Link) -> tuple[float, float]:
    """Codec time and transfer time of a session's step.

    Headers are gathered first, then messages, while what is plain is reduced.

    Args:
        chosen: the way of each gradient.
        overhead: bytes of header and frame.
        workers: N.
        link: of each worker.
    """
    size, plain = sum(each.size for each in chosen), sum(each.plain for each in chosen)
    codec = sum(each.codec_seconds(workers) for each in chosen)
    rings = [link.gather_seconds(0, workers) if size else 0.0, link.reduce_seconds(0, workers) if plain else 0.0]
    moved = sum(each.link_seconds(workers, link) for each in chosen)
    return codec, link.gather_seconds(overhead, workers) + moved + max(rings)


def ddp_seconds(size: float, forward: float, backward: float, workers: int, link: Link) -> float:
    """Step of DistributedDataParallel with plain gradients, its all-reduce hidden behind backward as far as it goes."""
    return forward + max(backward, link.reduce_seconds(size, workers))
