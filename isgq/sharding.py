"""Which rank averages what: shards of a model's gradients, balanced by their size.

A factored parameter stays whole, because its factor X would otherwise have to travel to every server; the rows of all
other gradients fill the shards up, so that a gradient may be cut between two rows.
"""

from collections.abc import Iterator, Sequence

from isgq.rows import Rows


def assign(sizes: Sequence[int], servers: int) -> list[int]:
    """A server for each thing that stays whole: the largest first, each to the server with the least so far."""
    loads = [0] * servers
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[index] = min(range(servers), key=loads.__getitem__)
        loads[chosen[index]] += sizes[index]
    return chosen


def fill(loads: Sequence[int], amount: int) -> list[float]:
    """How much of an amount each server takes so that the smallest loads become level (water-filling)."""
    ordered = sorted(loads)
    level = float(ordered[0])
    for count in range(1, len(ordered) + 1):
        level = (amount + sum(ordered[:count])) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return [max(level - load, 0.0) for load in loads]


def cut(gradients: Sequence[Rows], takes: Sequence[float]) -> Iterator[tuple[int, Rows]]:
    """Cut gradients, one after the other, between two rows wherever a server has what it takes.

    Args:
        gradients: whole ones, in order.
        takes: elements for each server; they sum to all there are.

    Yields:
        A server and its rows; every row of every gradient exactly once, gradients without elements included.
    """
    ends, total = [], 0.0
    for take in takes:
        total += take
        ends.append(total)
    server, before = 0, 0
    for whole in gradients:
        rows = whole.stop
        row = whole.numel // rows if rows else 0
        start = 0
        while start < rows or start == rows == 0:
            stop = rows
            if server < len(ends) - 1 and row:
                stop = min(rows, max(start, round((ends[server] - before) / row)))
            if stop > start or not row:
                yield server, Rows(whole.name, whole.shape, start, stop)
            if stop == rows:
                break
            start, server = stop, server + 1
        before += whole.numel
