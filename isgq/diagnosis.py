"""isgq.doctor: before a training begins, what each parameter of a model will do in it, and why.

One forward and one backward pass in this process alone, along the road that a session takes up to the exchange. The
model is left as it was: gradients, buffers and random numbers are put back.

    isgq doctor package.module:function      # function() returns (model, batch) or (model, batch, loss)
"""

import argparse
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isgq.aggregate import Gather, Step
from isgq.backward import BackwardWatch
from isgq.choice import check_option, choose, predicate
from isgq.core.errors import InstrumentError, OptionError
from isgq.core.extremes import check_finite
from isgq.core.payload import Factors
from isgq.core.registry import AnyCodec
from isgq.exchange import Loopback
from isgq.instrumented import check_free
from isgq.layers.capture import Capture, Unit, find_units, merge
from isgq.layers.trust import gap
from isgq.planner import Line, Plan, table
from isgq.records import FactorCarrier
from isgq.routing import make_carriers, make_plan, measure
from isgq.windows import Contributions, Window
from isgq.wire.header import header_size

_POLICIES = ("auto", "factors", "dense")


@dataclass(frozen=True)
class Finding:
    """One parameter.

    Attributes:
        name: parameter name.
        shape: its shape.
        route: ``factors``, ``direct``, ``dense``, or ``frozen`` for one that is not trained.
        reason: why.
        sent: predicted bytes a step; those of a riding bias are its weight's.
        dense: bytes of the plain gradient.
        error: how far the product of the captured factors is from autograd's gradient, relative; None without factors.
        expected: whether a user would expect this; otherwise it is a problem.
    """

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    sent: int
    dense: int
    error: float | None
    expected: bool


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`doctor` found; prints as a table.

    Attributes:
        findings: one for each parameter, in the model's order.
        sent: predicted bytes that this rank sends in its first step, planning left out.
    """

    findings: tuple[Finding, ...]
    sent: int

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Weights that travel without factors for another reason than their size or the caller's wish."""
        return tuple(finding for finding in self.findings if not finding.expected)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "route", "bytes", "dense bytes", "error", "why")]
        for f in self.findings:
            shape, error = "x".join(map(str, f.shape)) or "-", "-" if f.error is None else f"{f.error:.0e}"
            rows.append((f.name, shape, f.route, f"{f.sent:,}", f"{f.dense:,}", error, f.reason))
        dense = sum(f.dense for f in self.findings if f.route != "frozen")
        lines = [table(rows, numbers=(3, 4, 5))]
        lines.append(f"{self.sent:,} bytes a step, dense {dense:,}: x{dense / max(self.sent, 1):.1f}")
        lines += [f"problem: {f.name}: {f.reason}" for f in self.problems]
        return "\n".join(lines)


def doctor(
    model: nn.Module,
    batch: Any,
    codec: str | AnyCodec = "isgq",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    dense: str | AnyCodec | None = None,
    skip: str | Collection[str] | Callable[[str], bool] = (),
    routes: Literal["auto", "factors", "dense"] = "auto",
    seed: int = 0,
    strict: bool = False,
) -> Diagnosis:
    """Tell each parameter's route and why, check captured factors against autograd, predict bytes. No collective call.

    Args:
        model: not instrumented; left as it was.
        batch: what the model is called with: its argument, a tuple or list of arguments, or a mapping of keywords.
        codec: as for :func:`isgq.instrument`.
        loss: makes the loss of the model's output; by default the output's ``loss``, or its mean square.
        dense: as for :func:`isgq.instrument`.
        skip: as for :func:`isgq.instrument`; these are no problems.
        routes: as for :func:`isgq.instrument`.
        seed: as for :func:`isgq.instrument`.
        strict: whether to raise where there are problems.

    Raises:
        InstrumentError: the model cannot be instrumented; or with ``strict``, there are problems.
        NonFiniteError: a gradient has NaN or Inf.
        OptionError: unknown codec or option.
    """
    check_free(model)
    check_option("routes", routes, _POLICIES)
    choice = choose(codec, dense, "tensor", "gather", None, "none")
    if choice.auto is not None or choice.subspace is not None:
        raise OptionError(f"doctor() looks at one codec of factors or gradients, not at {codec!r}; see isgq.plan()")
    units, reasons = find_units(model, predicate(skip)) if choice.pair and routes != "dense" else ([], {})
    windows = {name: Window(name, p) for name, p in model.named_parameters() if p.requires_grad}
    gradients, names, exchange = Contributions(windows), list(windows), Loopback()
    with _as_it_was(model), _watched(model, windows, units):
        _run(model, batch, loss)
        for window in windows.values():
            check_finite(window.contribution(), f"the gradient of {window.name!r}")
        used = [window.touched for window in windows.values()]
        start = Step(0, 0, seed, names, used, [], gradients)
        sizes = measure(units, choice.pair, windows, lambda name: start.key(name, 0))
        policy: Literal["auto", "factors"] = "factors" if routes == "factors" else "auto"
        plan = make_plan(units, sizes[None], windows, reasons, policy, choice.direct is not None)
        carriers = make_carriers(plan, units, choice, windows, 1, lambda _: None)
        gather = Gather(exchange, choice.direct, choice.pair)
        outgoing = gather.encode(Step(0, 0, seed, names, used, carriers, gradients))
        gather.rollback()
        if outgoing.error is not None:
            raise outgoing.error
        errors = {unit.name: _error(FactorCarrier(choice.pair, unit, windows), gradients) for unit in units}  # type: ignore[arg-type]
        touched = {window.name for window in windows.values() if window.touched}
    sent = dict(gather.sizes)
    carried = {name for carrier in carriers for name in carrier.names}
    sent |= {n: p.numel() * p.element_size() for n, p in model.named_parameters() if n in touched - carried}
    findings = tuple(_findings(model, plan, units, sent, errors, touched))
    whole = header_size(len(names)) + sum(message.numel() for message in outgoing.messages)
    diagnosis = Diagnosis(findings, whole + sum(sent[name] for name in touched - carried))
    if strict and diagnosis.problems:
        problems = "; ".join(f"{f.name}: {f.reason}" for f in diagnosis.problems)
        raise InstrumentError(
            f"{len(diagnosis.problems)} parameter(s) have no factors (skip= accepts that): {problems}"
        )
    return diagnosis


def _findings(
    model: nn.Module,
    plan: Plan,
    units: Sequence[Unit],
    sent: Mapping[str, int],
    errors: Mapping[str, float | None],
    touched: Collection[str],
) -> Iterator[Finding]:
    lines = {line.name: line for line in plan.lines}
    weights = {unit.bias_name: unit.name for unit in units}
    for name, p in model.named_parameters():
        size = p.numel() * p.element_size()
        if not p.requires_grad:
            yield Finding(name, tuple(p.shape), "frozen", "frozen: requires_grad is False", 0, size, None, True)
            continue
        rides = name in weights
        line = Line(name, plan.route(weights[name]), f"rides with {weights[name]}", 0, 0) if rides else lines[name]
        reason, expected = line.reason.removeprefix("rank 0: "), line.expected
        if name not in touched:
            reason, expected = f"never called: the loss of this batch does not reach it ({reason})", False
        yield Finding(name, tuple(p.shape), line.route, reason, sent.get(name, 0), size, errors.get(name), expected)


def _error(carrier: FactorCarrier, gradients: Mapping[str, Tensor]) -> float | None:
    pairs = carrier.windows[carrier.name].pairs
    one_size = len({(pair.x.shape[1:], pair.d.shape[1:]) for pair in pairs}) == 1
    if not one_size:
        return None
    apart, size = gap(carrier.unit, merge(pairs), [gradients[name] for name in carrier.names])
    return apart / size if size else apart


@contextmanager
def _watched(model: nn.Module, windows: Mapping[str, Window], units: Sequence[Unit]) -> Iterator[None]:
    """Pairs and gradients of backward passes gather in the windows."""
    watch = BackwardWatch(model, windows.values(), lambda: None)

    def caught(unit: Unit, factors: Factors) -> None:
        watch.begins()
        windows[unit.name].pending.append(factors)

    capture = Capture(units, caught, watch.forward_begins)
    try:
        yield
    finally:
        capture.close()
        watch.close()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and random numbers back in the end."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng():
            for p, _ in gradients:
                p.grad = None
            yield
    finally:
        with torch.no_grad():
            for b, before in buffers:
                b.copy_(before)
        for p, gradient in gradients:
            p.grad = gradient


def _run(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> None:
    """One forward and one backward pass."""  # noqa: DOC501
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        value = loss(output) if loss is not None else _default_loss(output)
        if not value.requires_grad:
            raise InstrumentError(
                "the loss depends on no trainable parameter: give doctor the loss=... of the training"
            )
        value.backward()  # type: ignore[no-untyped-call]


def _default_loss(output: Any) -> Tensor:
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, Tensor):
        return given
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.double().square().mean() for leaf in leaves]).sum() if leaves else torch.zeros(())


# ---- the command


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``isgq doctor``."""
    parser.add_argument("target", help="package.module:function that returns (model, batch) or (model, batch, loss)")
    parser.add_argument("--codec", default="isgq", help="as for isgq.instrument")
    parser.add_argument("--dense", help="codec of what has no factors, as for isgq.instrument")
    parser.add_argument("--skip", default=(), help="regular expression of parameters that shall travel densely")
    parser.add_argument("--routes", default="auto", choices=_POLICIES, help="as for isgq.instrument")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are problems")


def run(arguments: argparse.Namespace) -> int:
    """Examine the model that the target makes, print the diagnosis; returns the exit status."""
    model, batch, *rest = _load(arguments.target)()
    chosen = {name: getattr(arguments, name) for name in ("codec", "dense", "skip", "routes")}
    diagnosis = doctor(model, batch, loss=rest[0] if rest else None, **chosen)
    print(diagnosis)
    return int(arguments.strict and bool(diagnosis.problems))


def _load(target: str) -> Callable[[], Any]:
    """The function that a target names; OptionError if there is none."""  # noqa: DOC501
    module, _, name = target.partition(":")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{target!r} is no package.module:function ({error})") from error
    return found
