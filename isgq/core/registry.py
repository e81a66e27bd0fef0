"""One string names a codec and its options, for instance ``"dithered:levels=4,bucket=row"``.

Grammar::

    spec   := name [ "(" spec { ";" spec } ")" ] [ ":" option { "," option } ]
    option := field "=" value

A codec is a dataclass; its fields are its options, their annotations say how a value is read, and its
``__post_init__`` checks the ranges. The inner specs in parentheses fill the fields annotated ``Codec`` in their order;
the last one given stands for the fields that follow too.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from isgq.core.codec import Codec, PairCodec
from isgq.core.errors import OptionError

AnyCodec = Codec | PairCodec
_T = TypeVar("_T")
_REGISTRY: dict[str, type[Any]] = {}
_ALIASES: dict[str, str] = {}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def register_codec(name: str) -> Callable[[type[_T]], type[_T]]:
    """Class decorator that makes a codec available as ``isgq.codec("name:option=value")``.

    The class is a dataclass with these members (a pair codec has ``encode_pair`` and ``decode_pair`` instead)::

        unbiased: ClassVar[bool]                       # or a property
        def encode(self, x: Tensor, key: Key) -> Payload: ...
        def decode(self, payload: Payload) -> Tensor: ...

    Its ``name`` attribute is set by the decorator.

    Args:
        name: lower-case identifier, at most 31 ASCII characters, not yet taken.

    Raises:
        OptionError: the name is taken or malformed, or the class is no dataclass.
    """

    def register(cls: type[_T]) -> type[_T]:
        if not (name.isidentifier() and name.isascii() and name == name.lower() and len(name) <= 31):
            raise OptionError(f"codec name {name!r} must be a lower-case ASCII identifier of at most 31 letters")
        if name in _REGISTRY:
            raise OptionError(f"codec {name!r} is already registered by {_REGISTRY[name].__qualname__}")
        if not dataclasses.is_dataclass(cls):
            raise OptionError(f"{cls.__qualname__} must be a dataclass: its fields are the codec's options")
        cls.name = name  # type: ignore[attr-defined]
        _REGISTRY[name] = cls
        return cls

    return register


def register_alias(name: str, spec: str) -> None:
    """Let a name stand for a whole spec.

    Raises:
        OptionError: the name is taken.
    """
    if name in _REGISTRY or name in _ALIASES:
        raise OptionError(f"codec {name!r} is already registered")
    _ALIASES[name] = spec


def schedule_value(text: str, step: int) -> str:
    """Value at a step of ``"start->end@steps"``; any other text is returned as it is.

    Geometric between positive values, linear otherwise; rounded where start and end are integers.

    Raises:
        OptionError: malformed schedule.
    """
    if "->" not in text:
        return text
    try:
        first, rest = text.split("->")
        last, steps = rest.split("@")
        start, end, span = float(first), float(last), int(steps)
    except ValueError:
        raise OptionError(f"schedule {text!r} must look like start->end@steps, for instance 0.25->0.001@500") from None
    if span < 1:
        raise OptionError(f"schedule {text!r} must last at least one step")
    done = min(step / span, 1.0)
    if done == 1.0:
        return last.strip()
    value = start * (end / start) ** done if start > 0 and end > 0 else start + (end - start) * done
    integers = not any(letter in first + last for letter in ".e")
    return str(round(value)) if integers else repr(value)


def codec_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_REGISTRY)


def codec_class(name: str, also: Sequence[str] = ()) -> type[Any]:
    """The class registered under a name.

    Args:
        name: the name.
        also: names to list besides, which mean something where the name comes from.

    Raises:
        OptionError: unknown name; the message lists the known ones.
    """
    if name in _ALIASES:
        raise OptionError(f"{name!r} stands for {_ALIASES[name]!r} and takes no options itself: give that with yours")
    if name not in _REGISTRY:
        raise OptionError(f"unknown codec {name!r}; known: {', '.join(sorted([*_REGISTRY, *_ALIASES, *also]))}")
    return _REGISTRY[name]


def codec(spec: "str | AnyCodec", *, also: Sequence[str] = ()) -> AnyCodec:
    """Build a codec from its spec string; a codec object is returned as it is.

    Args:
        spec: e.g. ``"dithered:levels=1,bucket=row"``.
        also: what else the caller takes in the place of a spec; an unknown name's error lists it.

    Raises:
        OptionError: malformed spec, unknown name or option, or a value outside its range.
    """
    if not isinstance(spec, str):
        return spec
    spec = _ALIASES.get(spec.strip(), spec)
    name, inner, options = split_spec(spec)
    if any("->" in option for option in options):
        pairs = hasattr(codec_class(name, also), "encode_pair")
        scheduled: AnyCodec = codec_class("scheduled_pair" if pairs else "scheduled")(spec)
        return scheduled
    cls = codec_class(name, also)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    nested = [n for n in known if hints[n] in {Codec, PairCodec, AnyCodec}]
    values: dict[str, Any] = {}
    if inner is not None:
        inners = split_outside(inner, ";")
        if len(inners) > len(nested):
            raise OptionError(f"codec {name!r} takes {len(nested) or 'no'} inner codec(s), got ({inner})")
        for at, field in enumerate(nested):
            values[field] = codec(inners[min(at, len(inners) - 1)])
    elif nested:
        raise OptionError(f"codec {name!r} needs an inner codec: {name}(...), for instance {name}(top_k)")
    for option in options:
        field, equals, text = option.partition("=")
        field = field.strip()
        if not equals or field not in known or field in nested:
            allowed = ", ".join(n for n in known if n not in nested) or "none"
            raise OptionError(f"codec {name!r} has no option {option.strip()!r}; write option=value with: {allowed}")
        if field in values:
            raise OptionError(f"option {field!r} of codec {name!r} is given twice")
        values[field] = _parse(name, field, text.strip(), hints[field])
    missing = [n for n, f in known.items() if n not in values and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise OptionError(f"codec {name!r} needs the option {', '.join(missing)}")
    built: AnyCodec = cls(**values)
    return built


def spec_of(codec_object: Any) -> str:
    """Canonical spec string of anything registered: every option, in the order of the fields; what ranks compare."""
    if codec_object.name in {"scheduled", "scheduled_pair"}:
        spec: str = codec_object.spec
        return spec
    inners, options = [], []
    for f in dataclasses.fields(codec_object):
        if not f.init:
            continue
        value = getattr(codec_object, f.name)
        if isinstance(value, (Codec, PairCodec)):
            inners.append(spec_of(value))
        else:
            options.append(f"{f.name}={value}")
    inner = f"({';'.join(inners)})" if inners else ""
    return f"{codec_object.name}{inner}" + (":" + ",".join(options) if options else "")


def split_spec(spec: str) -> tuple[str, str | None, list[str]]:
    """Split ``name(inner):a=1,b=2`` at the outer level; OptionError where it is malformed."""  # noqa: DOC501
    head, inner, rest = spec.strip(), None, ""
    opening = head.find("(")
    colon = head.find(":")
    if opening >= 0 and (colon < 0 or opening < colon):
        depth = 0
        for at, letter in enumerate(head):
            depth += (letter == "(") - (letter == ")")
            if letter == ")" and depth == 0:
                head, inner, rest = head[:opening], head[opening + 1 : at], head[at + 1 :]
                break
        else:
            raise OptionError(f"codec spec {spec!r} has an unclosed '('")
        if rest and not rest.startswith(":"):
            raise OptionError(f"codec spec {spec!r}: after ')' only ':option=value' may follow, got {rest!r}")
        rest = rest[1:]
    elif colon >= 0:
        head, rest = head[:colon], head[colon + 1 :]
    return head.strip(), inner, [o for o in rest.split(",") if o.strip()]


def split_outside(text: str, separator: str) -> list[str]:
    """Split at the separators that stand in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(name: str, field: str, text: str, hint: Any) -> Any:
    """Read one option as the type that its annotation names; OptionError where it is none."""  # noqa: DOC501
    union = typing.get_origin(hint) in {types.UnionType, typing.Union}  # int | Literal[...] is a typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    for kind in kinds:
        if kind is type(None) and text.lower() == "none":
            return None
        if typing.get_origin(kind) is typing.Literal:
            if text in typing.get_args(kind):
                return text
        elif kind is bool:
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
        elif kind in {int, float}:
            try:
                return kind(text)
            except ValueError:
                continue
        elif kind is str:
            return text
    raise OptionError(f"option {field}={text!r} of codec {name!r} must be {_wanted(kinds)}")


def _wanted(kinds: tuple[Any, ...]) -> str:
    words: list[str] = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            words += [repr(v) for v in typing.get_args(kind)]
        elif kind is bool:
            words.append("true or false")
        else:
            words.append({int: "an integer", float: "a number", type(None): "none"}.get(kind, "text"))
    return " or ".join(words)
