"""Plain torch networks by name: ``models.build("fc:hidden=1000-300-100", classes=10, in_shape=(1, 28, 28))``.

Networks of images map [b, c, h, w] float32 to [b, classes]; language models map tokens [b, t] int64 and the state that
they returned for the tokens before, or None, to logits [b, t, classes] and the state after.

A new network is one module with a function ``(classes, in_shape, **options) -> nn.Module`` and one entry below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from models import alexnet, cifarnet, fc, initial, lenet, lstm_lm, resnet18, transformer_lm
from models.shape import ModelError, Shape

__all__ = ["ModelError", "build", "names"]


@dataclass(frozen=True, slots=True)
class _Option:
    """How an option is read: raises ValueError where the text is not what ``wanted`` says."""

    read: Callable[[str], Any]
    wanted: str


@dataclass(frozen=True, slots=True)
class _Model:
    build: Callable[..., nn.Module]
    options: Mapping[str, _Option] = field(default_factory=dict)
    authors: initial.Initializer | None = None  # of the initial weights, where the papers say
    dimensions: int = 3  # of an input: 3 for images, 1 for texts


def _widths(text: str) -> tuple[int, ...]:
    widths = () if text == "none" else tuple(int(part) for part in text.split("-"))
    if any(width < 1 for width in widths):
        raise ValueError(text)
    return widths


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError(text)
    return text == "true"


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


def _initialization(text: str) -> str:
    if text not in {"torch", "authors"}:
        raise ValueError(text)
    return text


_INIT = _Option(_initialization, "torch or authors")
_COUNT = _Option(_positive, "1 or more")
_WIDTHS = _Option(_widths, "positive widths such as 300-100, or none")
_DROPOUT = _Option(_probability, "a number in [0, 1)")
_TEXT = {"width": _COUNT, "layers": _COUNT, "tied": _Option(_switch, "true or false")}
_MODELS = {
    "fc": _Model(fc.fc, {"hidden": _WIDTHS}, authors=initial.common),
    "lenet": _Model(lenet.lenet, authors=initial.common),
    "cifarnet": _Model(cifarnet.cifarnet, authors=initial.cifarnet),
    "alexnet": _Model(alexnet.alexnet, {"dropout": _DROPOUT}, authors=initial.common),
    "resnet18": _Model(resnet18.resnet18, {"width": _COUNT}),
    "lstm_lm": _Model(lstm_lm.lstm_lm, _TEXT, dimensions=1),
    "transformer_lm": _Model(transformer_lm.transformer_lm, {**_TEXT, "heads": _COUNT}, dimensions=1),
}


def names() -> list[str]:
    """The networks that :func:`build` knows."""
    return list(_MODELS)


def build(spec: str, *, classes: int, in_shape: Shape, seed: int = 0) -> nn.Module:
    """Build a network on the CPU; the global random state is as it was afterwards.

    Args:
        spec: ``name[:option=value{,option=value}]``: ``fc`` has ``hidden=300-100`` or ``none``, ``alexnet`` has
            ``dropout``, ``resnet18`` ``width``, ``lstm_lm`` ``width``, ``layers`` and ``tied=true``, ``transformer_lm``
            these and ``heads``. ``init=torch`` (default) or ``init=authors`` chooses the initial weights of the first
            four, see :mod:`models.initial`.
        classes: number of outputs; of a language model, the size of the vocabulary.
        in_shape: (c, h, w) of one image, or (t,), the number of tokens of one text.
        seed: the initial weights are a function of it.

    Returns:
        A module, see above.

    Raises:
        ModelError: unknown name or option, a value outside its range, or inputs that the network cannot take.
    """
    if classes < 1 or len(in_shape) not in {1, 3} or min(in_shape) < 1:
        raise ModelError(
            f"classes={classes}, in_shape={in_shape}: expected classes >= 1 and a positive (c, h, w) or (tokens,)"
        )
    name, _, text = spec.partition(":")
    if name not in _MODELS:
        raise ModelError(f"unknown model {name!r}; choose one of: {', '.join(_MODELS)}")
    model = _MODELS[name]
    options = _parse(name, text, {**model.options, **({"init": _INIT} if model.authors else {})})
    if model.dimensions != len(in_shape):
        fitting = ", ".join(name for name, other in _MODELS.items() if other.dimensions == len(in_shape))
        takes, given = ("texts", "images") if model.dimensions == 1 else ("images", "texts")
        raise ModelError(f"{name} takes {takes}, not {given}; for those choose one of: {fitting}")
    authors = options.pop("init", "torch") == "authors"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        network = model.build(classes, in_shape, **options)
    if authors and model.authors:
        model.authors(network, torch.Generator().manual_seed(seed))
    return network


def _parse(name: str, text: str, known: Mapping[str, _Option]) -> dict[str, Any]:
    """Read ``option=value,option=value``."""  # noqa: DOC501
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            raise ModelError(f"model {name!r} has no option {part!r}; write option=value with: {', '.join(known)}")
        if key in values:
            raise ModelError(f"option {key!r} of model {name!r} is given twice")
        try:
            values[key] = known[key].read(value)
        except ValueError as error:
            raise ModelError(f"option {part!r} of model {name!r} must be {known[key].wanted}") from error
    return values
