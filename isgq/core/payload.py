"""What travels between the stations of the road: factors, symbols and payloads.

Index legend used throughout the package: ``b`` batch (or row), ``i`` input features, ``o`` output features.
For a linear layer x is ``[b, i]``, d is ``[b, o]`` and the weight gradient is ``einsum("bo,bi->oi", d, x)``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isgq.core.errors import CodecError
from isgq.core.outer import outer_sum

Contract = Callable[[Tensor, Tensor], Tensor]
"""``(x, d) -> weight gradient``, linear in either argument; what an adapter computes for its module."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of a weight gradient.

    Attributes:
        x: the layer's input; floating point, or integer where the input is a table of indices (Embedding).
        d: gradient of the loss with respect to the layer's output (before the non-linearity).
    """

    x: Tensor
    d: Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """A gradient as a sum of outer products: what a codec sends that replaces the factors by others.

    Row j adds the matrix ``outer(left[j], right[j])``. Matrix ``[o, p]`` is the weight's gradient with its first
    dimension kept and all others flattened, and last a column that is the bias's gradient.

    Attributes:
        left: ``[j, o]``.
        right: ``[j, p]``.
    """

    left: Tensor
    right: Tensor

    def weight(self, out: Tensor | None = None) -> Tensor:
        """The weight's gradient as a matrix ``[o, p - 1]``; written to ``out``, contiguous, if given."""
        right = self.right[:, :-1]
        return outer_sum(self.left, right, None if out is None else out.view(self.left.shape[1], right.shape[1]))

    def bias(self) -> Tensor:
        """The bias's gradient ``[o]``."""
        return self.left.T @ self.right[:, -1]


def symbol_dtype(alphabet: int) -> torch.dtype:
    """Smallest of torch's integer types that holds ``0 .. alphabet - 1``."""
    for dtype, limit in ((torch.uint8, 1 << 8), (torch.int16, 1 << 15), (torch.int32, 1 << 31)):
        if alphabet <= limit:
            return dtype
    return torch.int64


@dataclass(frozen=True, slots=True)
class Symbols:
    """Integers in ``[0, alphabet)``; the wire decides how many bits each takes.

    Attributes:
        values: 1-d, contiguous, of dtype ``symbol_dtype(alphabet)`` (converted when made, if need be).
        alphabet: number of different symbols, at least 1.

    Raises:
        CodecError: no such alphabet, or values to be converted that are outside it; what is of the right dtype already
            is checked when it is sent.
    """

    values: Tensor
    alphabet: int

    def __post_init__(self) -> None:
        if not 1 <= self.alphabet <= 1 << 62:
            raise CodecError(f"alphabet is {self.alphabet}, must be in 1 .. 2**62")
        dtype = symbol_dtype(self.alphabet)
        if self.values.dtype != dtype and self.values.numel():  # where a cast would wrap them
            low, high = (bound.item() for bound in torch.aminmax(self.values))
            if not 0 <= low <= high < self.alphabet:
                raise CodecError(f"symbols are {low} .. {high}, allowed are 0 .. {self.alphabet - 1}")
        if self.values.dtype != dtype or self.values.dim() != 1 or not self.values.is_contiguous():
            object.__setattr__(self, "values", self.values.to(dtype).reshape(-1).contiguous())


@dataclass(frozen=True, slots=True)
class Payload:
    """Everything a receiver needs to rebuild one tensor, and nothing else.

    Attributes:
        codec: registry name of the codec that made it.
        shape: shape of the tensor.
        dtype: dtype of the tensor; decoding returns it.
        symbols: named streams of small integers.
        tensors: named raw tensors (scales, codebooks), sent as they are.
        digest: ``Key.digest`` of the sender's key, from which shared randomness is drawn again; 0 where none is used.
    """

    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    symbols: Mapping[str, Symbols] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    digest: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def require_symbols(self, name: str, count: int, alphabet: int | None = None) -> Symbols:
        """The stream of symbols of this name.

        Args:
            name: the stream's name.
            count: how many symbols it must have.
            alphabet: which alphabet it must have; None for any.

        Raises:
            CodecError: it is missing, or its length or alphabet is another.
        """
        stream = self.symbols.get(name)
        if stream is None:
            raise CodecError(f"payload of {self.codec!r} lacks the symbols {name!r}; it has {sorted(self.symbols)}")
        if stream.values.numel() != count or alphabet not in {None, stream.alphabet}:
            wanted = "" if alphabet is None else f" of alphabet {alphabet}"
            raise CodecError(
                f"symbols {name!r} of a payload of shape {self.shape} must be {count}{wanted}, "
                f"got {stream.values.numel()} of alphabet {stream.alphabet}; do sender and receiver use the same codec?"
            )
        return stream

    def require_tensor(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """The raw tensor of this name, as it is.

        Args:
            name: the tensor's name.
            count: how many elements it must have.
            dtype: its dtype.

        Raises:
            CodecError: it is missing, or its size or dtype is another.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CodecError(f"payload of {self.codec!r} lacks the tensor {name!r}; it has {sorted(self.tensors)}")
        if tensor.numel() != count or tensor.dtype != dtype:
            raise CodecError(
                f"tensor {name!r} of a payload of shape {self.shape} must be {count} x {dtype}, "
                f"got {tensor.numel()} x {tensor.dtype}; do sender and receiver use the same codec?"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class PairPayload:
    """A payload for each factor.

    Attributes:
        codec: registry name of the pair codec that made it.
        x: the input's payload.
        d: the output gradient's payload.
    """

    codec: str
    x: Payload
    d: Payload
