"""What a codec must carry: tensors and factors that have broken codecs before."""

import torch
from torch import Tensor

from isgq.core.keys import uniform

Case = tuple[Tensor, ...]
"""What is sent at once: ``(x,)`` for a codec of one tensor, ``(x, d)`` for a pair codec."""


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers, the same for the same seed: float32 of that shape."""
    numbers: Tensor = torch.special.ndtri(uniform(seed, "testing", shape).double() + 0.5)
    return numbers.float()


def linear_contract(x: Tensor, d: Tensor) -> Tensor:
    """Weight gradient of a linear layer: x ``[..., i]`` and d ``[..., o]`` to ``[o, i]``."""
    return d.reshape(-1, d.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def embedding_contract(x: Tensor, d: Tensor) -> Tensor:
    """Weight gradient of an embedding of 11 rows: indices x ``[...]`` and d ``[..., o]`` to ``[11, o]``."""
    return d.new_zeros(11, d.shape[-1]).index_add(0, x.reshape(-1), d.reshape(-1, d.shape[-1]))


def contract(x: Tensor, d: Tensor) -> Tensor:
    """The one of the two that x belongs to."""
    return (linear_contract if x.is_floating_point() else embedding_contract)(x, d)


def tensor_cases() -> dict[str, Case]:
    """Shapes, contents, memory layouts and dtypes of ``(x,)``."""
    shapes = [(), (1,), (0,), (3, 0), (7,), (5, 7), (1, 257), (2, 3, 5), (3, 2, 3, 3)]
    cases = {f"shape {shape}": normal(1, *shape) for shape in shapes}
    x = normal(2, 6, 14)
    cases |= {
        "zero": torch.zeros(5, 7),
        "a zero row": x * (torch.arange(6) != 2).unsqueeze(1),
        "constant": torch.full((5, 7), -0.3),
        "zero but for one": torch.zeros(5, 7).index_fill(1, torch.tensor([3]), 2.0),
        "half zeros": x.relu(),
        "large": x * 1e30,
        "small": x * 1e-30,
        "one outlier": torch.cat([x.reshape(-1), torch.tensor([1e6])]),
        "transposed": x.T,
        "strided": normal(3, 6, 28)[:, ::2],
        "expanded": normal(3, 6, 1).expand(6, 5),
        "expanded scalar": torch.tensor(0.7).expand(4, 3),
        "channels_last": normal(3, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "requires grad": normal(3, 4, 4).requires_grad_(),
        "float16": x.half(),
        "float16 near its largest": (x.sign() * 65504).half(),
        "bfloat16": x.bfloat16(),
        "float64": x.double(),
    }
    return {name: (tensor,) for name, tensor in cases.items()}


def pair_cases() -> dict[str, Case]:
    """Shapes, contents, memory layouts and dtypes of ``(x, d)``."""
    x, d = normal(4, 6, 14).relu(), normal(5, 6, 5)
    return {
        "plain": (x, d),
        "signed x": (normal(6, 6, 14), d),
        "one of all": (normal(1, 1, 1), normal(2, 1, 1)),
        "no rows": (x[:0], d[:0]),
        "three dimensions": (normal(1, 2, 3, 7), normal(2, 2, 3, 5)),
        "zero": (x * 0, d * 0),
        "zero x": (x * 0, d),
        "zero d": (x, d * 0),
        "constant": (torch.full_like(x, 0.3), torch.full_like(d, -0.1)),
        "large": (x * 1e15, d * 1e15),
        "small": (x * 1e-15, d * 1e-15),
        "transposed": (normal(1, 14, 6).T, normal(2, 5, 6).T),
        "expanded": (x, torch.tensor(0.1).expand(6, 5)),
        "float16": (x.half(), d.half()),
        "bfloat16": (x.bfloat16(), d.bfloat16()),
        "float64": (x.double(), d.double()),
        "mixed dtypes": (x, d.bfloat16()),
        "indices": (torch.tensor([[3, 0, 10], [3, 3, 1]]), normal(2, 2, 3, 5)),
    }


def statistical_cases(pair: bool) -> dict[str, Case]:
    """Cases that means are taken of: small, so that many samples cost little."""
    x, d = normal(7, 6, 16), normal(8, 6, 5)
    if pair:
        return {"plain": (x.relu(), d), "indices": (torch.arange(6), d)}
    return {"normal": (x,), "half zeros": (x.relu(),), "heavy tails": (x**3,)}
