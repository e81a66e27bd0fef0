"""Hadamard matrices, H H^T = n I with entries +-1, and products with them.

Orders: ``2**a`` (Sylvester), and ``2**a`` times 12, 20, 100 or 144 (Paley 1933: order 12 over GF(11), 20 over GF(19),
100 over GF(49); 144 = 12 * 12). A matrix is the Kronecker product of its factors, the Sylvester factor first, so that
its first rows repeat those of the same matrix of half the order.

Products are sums and differences in a fixed order: the same bits on every device.
"""

import itertools
import math
from functools import cache

import torch
from torch import Tensor

from isgq.core.errors import OptionError

# Odd part of an order -> orders of its Paley factors.
_PALEY = {1: (), 3: (12,), 5: (20,), 9: (12, 12), 25: (100,)}
# Order of a Paley factor -> (p, degree): its field has p**degree elements.
_FIELDS = {12: (11, 1), 20: (19, 1), 100: (7, 2)}


def factors(order: int) -> tuple[int, ...]:
    """Orders of the Kronecker factors, the power of two first.

    Raises:
        OptionError: no matrix of this order is known here.
    """
    if order >= 1:
        paley = _PALEY.get(order // (order & -order))
        if paley is not None and order % math.prod(paley) == 0:
            return (order // math.prod(paley), *paley)
    raise OptionError(f"no Hadamard matrix of order {order}: allowed are 2**a times 1, 12, 20, 100 or 144")


def smallest_period(order: int, rows: int) -> int:
    """Smallest K such that the first ``rows`` rows of H, as long as ``order``, repeat with period K; a valid order."""
    twos, period = factors(order)[0], order
    while twos % 2 == 0 and period // 2 >= rows:
        twos, period = twos // 2, period // 2
    return period


def multiply(x: Tensor, *, transposed: bool = False) -> Tensor:
    """``H x``, or ``H^T x``.

    Args:
        x: float32 ``[n, columns]`` with n a valid order; left as it is.
        transposed: whether to multiply by the transpose.
    """
    n, columns = x.shape
    twos, *paley = factors(n)
    x = _sylvester(x.reshape(twos, -1))
    left = twos
    for order in paley:
        matrix = paley_matrix(order).to(x.device)
        x = _dense(matrix.T if transposed else matrix, x.reshape(left, order, -1))
        left *= order
    return x.reshape(n, columns)


def _sylvester(x: Tensor) -> Tensor:
    """Fast Walsh-Hadamard transform over the first dimension, a power of two."""
    n, columns = x.shape
    source, target, spare = x, torch.empty_like(x), torch.empty_like(x)
    half = 1
    while half < n:
        (upper, lower), (total, difference) = (t.view(-1, 2, half, columns).unbind(1) for t in (source, target))
        torch.add(upper, lower, out=total)
        torch.sub(upper, lower, out=difference)
        source, target, spare = target, spare, target  # x itself is never written
        half *= 2
    return source if n > 1 else x.clone()


def _dense(matrix: Tensor, x: Tensor) -> Tensor:
    """Product over the second dimension of x ``[left, order, right]``, column by column."""
    result = torch.zeros_like(x)
    for j in range(matrix.shape[1]):
        result.addcmul_(matrix[:, j, None], x[:, j : j + 1])
    return result


@cache
def paley_matrix(order: int) -> Tensor:
    """Paley's matrix of order 12, 20 or 100: float32 ``[order, order]``."""
    p, degree = _FIELDS[order]
    field = list(itertools.product(range(p), repeat=degree))
    q = len(field)
    character = torch.tensor([
        [_character([s - t for s, t in zip(a, b, strict=True)], p) for b in field] for a in field
    ])
    bordered = torch.zeros(q + 1, q + 1)
    bordered[0, 1:], bordered[1:, 1:] = 1, character
    if q % 4 == 3:
        bordered[1:, 0] = -1
        return bordered + torch.eye(q + 1)
    bordered[1:, 0] = 1
    signs, diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(bordered, signs) + torch.kron(torch.eye(q + 1), diagonal)


def _character(element: list[int], p: int) -> int:
    """1 for a square of the field, -1 for a non-square, 0 for 0.

    In GF(p**2) = GF(p)(i), p = 3 modulo 4, an element a + b i is a square exactly if its norm a**2 + b**2 is one in
    GF(p).
    """
    number = element[0] if len(element) == 1 else sum(part * part for part in element)
    power = pow(number % p, (p - 1) // 2, p)
    return -1 if power == p - 1 else power
