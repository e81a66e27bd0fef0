"""Memory is used again only when nobody can see it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isgq.core.memory import Place

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a view": lambda x: x[0],
    "another shape": lambda x: x.view(-1),
    "detached": lambda x: x.detach(),
    "numpy": lambda x: x.numpy(),
    "the storage": lambda x: x.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "a graph": lambda x: (torch.ones(3, 4, requires_grad=True) * x).sum(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_that_somebody_holds_is_not_free(name: str) -> None:
    place = Place(torch.zeros(3, 4))
    assert place.free() is not None
    assert place.tensor is not None
    held = HOLDERS[name](place.tensor)
    assert place.free() is None
    del held
    assert place.free() is place.tensor


def test_no_tensor_is_not_free() -> None:
    assert Place().free() is None
