"""What each module type's weight gradient is, as a bilinear map of its two factors.

Layout, one line per case (``b`` rows or samples, ``i`` in, ``o`` out, ``g`` groups, ``s`` spatial):

    Linear       x [b, i]          d [b, o]          weight [o, i]          sum_b d[b, o] x[b, i]
    Conv1d/2d/3d x [b, i, s...]    d [b, o, s'...]   weight [o, i/g, k...]  the convolution's weight gradient
    Embedding    x [b] (indices)   d [b, o]          weight [v, o]          sum_b 1[x_b = v] d[b, o]

A call of an embedding has a row for each different index, as large as the tokens in the batch at most, never the table.
Factors of a convolution travel as activations, never as unfolded patches: those repeat each pixel up to prod(k) times.
An adapter is chosen by the exact type of the module: a subclass may compute something else.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isgq.core.errors import InstrumentError, OptionError


class Adapter(Protocol):
    """One module type: how its factors look and how they make its gradients. Stateless.

    Attributes:
        outputs: the weight's dimension that counts the module's outputs; in d it is always the second.
    """

    outputs: int

    def refusal(self, module: Any) -> str | None:
        """Why this module's weight gradient is not a product of captured factors; None where it is."""
        ...

    def canonical(self, module: Any, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output gradient of one call in the layout above: the first dimension counts samples."""
        ...

    def contract(self, module: Any, x: Tensor, d: Tensor) -> Tensor:
        """The weight's gradient, in the weight's shape and d's dtype; linear in x and in d.

        d may have fewer outputs than the module, as many for each group; then so has the result.
        """
        ...

    def bias_grad(self, module: Any, d: Tensor) -> Tensor:
        """The bias's gradient, ``[o]``; called only where the module has a bias."""
        ...


@runtime_checkable
class Writes(Protocol):
    """What an adapter has besides, if it can write to memory that is there."""

    def contract_into(self, module: Any, x: Tensor, d: Tensor, out: Tensor) -> Tensor:
        """:meth:`Adapter.contract` written to ``out``, which is returned."""
        ...


@runtime_checkable
class Spares(Protocol):
    """What an adapter has besides, if its layers can be spared a weight gradient."""

    def made(self, module: Any, x: Tensor, output: Tensor) -> bool:
        """Whether the output is what the module's forward makes of its weight and x, and nothing has changed it."""
        ...

    def input_grad(self, module: Any, weight: Tensor, x: Tensor, d: Tensor) -> Tensor:
        """The gradient of the input, as autograd makes it; differentiable."""
        ...


_A = TypeVar("_A", bound=type[Any])
_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_adapter(*module_types: type[nn.Module]) -> Callable[[_A], _A]:
    """Class decorator: use an instance of the decorated class for modules of exactly these types.

    The class has what :class:`Adapter` has::

        outputs = 0
        def refusal(self, module) -> str | None: ...
        def canonical(self, module, x, d) -> tuple[Tensor, Tensor]: ...
        def contract(self, module, x, d) -> Tensor: ...
        def bias_grad(self, module, d) -> Tensor: ...

    Args:
        module_types: module classes; the module's weight must be its parameter ``weight``, its bias ``bias``.

    Raises:
        OptionError: a type has an adapter already.
    """

    def register(cls: _A) -> _A:
        for module_type in module_types:
            if module_type in _ADAPTERS:
                raise OptionError(f"{module_type.__name__} already has an adapter: {_ADAPTERS[module_type]!r}")
            _ADAPTERS[module_type] = cls()
        return cls

    return register


def adapter_for(module: nn.Module) -> Adapter | None:
    """The adapter of the module's exact type, or None."""
    return _ADAPTERS.get(type(module))


def has_adapter(module_type: type) -> bool:
    """Whether modules of exactly this type have an adapter."""
    return module_type in _ADAPTERS


def refuse_sparse_gradients(model: nn.Module) -> None:
    """No route carries sparse tensors, so better no session than an error in the first backward pass.

    Raises:
        InstrumentError: a trainable table was built with ``sparse=True``; the message says what to do.
    """
    for name, module in model.named_modules():
        table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if table and module.weight.requires_grad:
            raise InstrumentError(
                f"{name or 'the model'} is {type(module).__name__}(sparse=True), which makes sparse gradients; those "
                "cannot be synchronised: set its sparse to False, or freeze its weight. As factors, indices and rows, "
                "the gradient of an Embedding stays as small as a sparse one"
            )


def _leads_to(node: Any, edge: int, leaf: Tensor) -> bool:
    """Whether an input of a node of the graph is this leaf."""
    return getattr(node.next_functions[edge][0], "variable", None) is leaf


@register_adapter(nn.Linear)
class LinearAdapter:
    """``y = x W^T + b`` over any leading dimensions, which become rows."""

    outputs = 0

    def refusal(self, module: nn.Linear) -> str | None:
        """Always factored."""
        return None

    def canonical(self, module: nn.Linear, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., i]`` and ``[..., o]`` as rows."""
        return x.reshape(-1, module.in_features), d.reshape(-1, module.out_features)

    def contract(self, module: nn.Linear, x: Tensor, d: Tensor) -> Tensor:
        """``[o, i] = d^T x``."""
        return d.t() @ x

    def contract_into(self, module: nn.Linear, x: Tensor, d: Tensor, out: Tensor) -> Tensor:
        """See :class:`Writes`."""
        return torch.mm(d.t(), x, out=out)

    def bias_grad(self, module: nn.Linear, d: Tensor) -> Tensor:
        """Sum over rows."""
        return d.sum(0)

    def made(self, module: nn.Linear, x: Tensor, output: Tensor) -> bool:
        """See :class:`Spares`: a product, perhaps of another shape, with the transposed weight."""
        node: Any = output.grad_fn
        if node.name() in {"ViewBackward0", "UnsafeViewBackward0"}:
            node = node.next_functions[0][0]
        if output.shape[:-1] != x.shape[:-1] or node.name() not in {"AddmmBackward0", "MmBackward0"}:
            return False
        turned = node.next_functions[-1][0]
        return turned is not None and turned.name() == "TBackward0" and _leads_to(turned, 0, module.weight)

    def input_grad(self, module: nn.Linear, weight: Tensor, x: Tensor, d: Tensor) -> Tensor:
        """``[..., i] = d W``."""
        return d @ weight


@register_adapter(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvAdapter:
    """Convolutions with any stride, padding, padding mode, dilation and groups."""

    outputs = 0

    def refusal(self, module: nn.Conv2d) -> str | None:
        """Always factored."""
        return None

    def canonical(self, module: nn.Conv2d, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """``[b, i, s...]`` and ``[b, o, s'...]``; an input without batch dimension gets one."""
        unbatched = x.dim() == len(module.kernel_size) + 1
        return (x[None], d[None]) if unbatched else (x, d)

    def contract(self, module: nn.Conv2d, x: Tensor, d: Tensor) -> Tensor:
        """``[o, i/g, k...]``: the weight gradient of the convolution."""
        padding: list[int] = [0] * len(module.kernel_size)
        if isinstance(module.padding, str) or module.padding_mode != "zeros":
            # "same" may pad unevenly, and the other modes pad with data: pad the input as forward did.
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        else:
            padding = list(module.padding)
        _, grad, _ = torch.ops.aten.convolution_backward(
            d,
            x,
            module.weight.detach()[: d.shape[1]].to(d.dtype),  # only its shape is read
            None,
            list(module.stride),
            padding,
            list(module.dilation),
            False,
            [0] * len(padding),
            module.groups,
            [False, True, False],
        )
        result: Tensor = grad
        return result

    def bias_grad(self, module: nn.Conv2d, d: Tensor) -> Tensor:
        """Sum over samples and positions."""
        return d.sum([0, *range(2, d.dim())])

    def made(self, module: nn.Conv2d, x: Tensor, output: Tensor) -> bool:
        """See :class:`Spares`: a plain convolution of a batch."""
        node: Any = output.grad_fn
        padded = isinstance(module.padding, str) or module.padding_mode != "zeros"
        batched = x.dim() == output.dim() == len(module.kernel_size) + 2
        return not padded and batched and node.name() == "ConvolutionBackward0" and _leads_to(node, 1, module.weight)

    def input_grad(self, module: nn.Conv2d, weight: Tensor, x: Tensor, d: Tensor) -> Tensor:
        """The transposed convolution."""
        padding, nothing = [int(side) for side in module.padding], [0] * len(module.kernel_size)
        result: Tensor = torch.ops.aten.convolution_backward(
            d, x, weight, None, list(module.stride), padding, list(module.dilation), False, nothing, module.groups,
            [True, False, False],
        )[0]  # fmt: skip
        return result


@register_adapter(nn.Embedding)
class EmbeddingAdapter:
    """A table lookup: the indices are the first factor, so the gradient's size follows the tokens of the batch."""

    outputs = 1

    def refusal(self, module: nn.Embedding) -> str | None:
        """Always factored."""
        return None

    def canonical(self, module: nn.Embedding, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """The different indices of the call, ascending, and for each the sum of its rows, as autograd adds them up.

        With ``scale_grad_by_freq`` the mean instead: it depends on one call's counts, which later nobody knows.
        """
        indices, places = torch.unique(x.reshape(-1), return_inverse=True)
        d = d.reshape(-1, module.embedding_dim)
        rows = torch.ops.aten.embedding_dense_backward(d, places, len(indices), -1, module.scale_grad_by_freq)
        return indices, rows

    def contract(self, module: nn.Embedding, x: Tensor, d: Tensor) -> Tensor:
        """``[v, o]``: rows of d added up by index; the row of ``padding_idx`` stays zero."""
        padding = -1 if module.padding_idx is None else module.padding_idx
        result: Tensor = torch.ops.aten.embedding_dense_backward(d, x, module.num_embeddings, padding, False)
        return result

    def bias_grad(self, module: nn.Embedding, d: Tensor) -> Tensor:
        """An embedding has no bias."""
        raise NotImplementedError("nn.Embedding has no bias")
