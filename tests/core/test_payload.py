"""Symbols refuse what a cast would wrap."""

import pytest
import torch

from isgq.core.errors import CodecError
from isgq.core.payload import Symbols


@pytest.mark.parametrize("values", [[0, 256], [-1], [5], [2.0**40], [float("nan")]])
def test_symbols_that_a_cast_would_wrap_are_refused(values: list[float]) -> None:
    with pytest.raises(CodecError, match=r"symbols are .*, allowed are 0 \.\. 4"):
        Symbols(torch.tensor(values), 5)


def test_symbols_take_the_smallest_dtype() -> None:
    for alphabet, dtype in ((256, torch.uint8), (257, torch.int16), (1 << 15, torch.int16), (1 << 16, torch.int32)):
        symbols = Symbols(torch.tensor([[0], [alphabet - 1]]), alphabet)
        assert symbols.values.dtype == dtype
        assert symbols.values.tolist() == [0, alphabet - 1]
    assert Symbols(torch.empty(0), 3).values.numel() == 0
