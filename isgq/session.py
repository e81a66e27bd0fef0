"""instrument() and Session: the one place that knows the whole road.

    capture -> quantize -> encode -> exchange -> decode -> reconstruct -> p.grad

When a backward pass ends, each rank encodes one record per factored parameter that got a gradient, all ranks exchange
a fixed header (:mod:`isgq.wire.header`), then their messages; every rank decodes all messages in rank order, so every
rank holds the same bits. Parameters on the dense route share one all-reduce.
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isgq.agreement import check_headers, check_introductions, introduce, plan_digest
from isgq.backward import BackwardWatch
from isgq.codecs.feedback import memory_of
from isgq.codecs.roles import choose_codecs
from isgq.core.errors import CodecError, InstrumentError, MismatchError, NonFiniteError, OptionError
from isgq.core.keys import Key
from isgq.core.payload import Factors, check_finite
from isgq.core.registry import AnyCodec, spec_of
from isgq.exchange import Exchange, Loopback, TorchExchange
from isgq.layers.capture import Capture, Unit, find_units
from isgq.planner import Line, Plan
from isgq.records import Carrier, Record
from isgq.routing import make_carriers, make_plan, measure
from isgq.traffic import Traffic
from isgq.windows import Window
from isgq.wire import pack_message, unpack_message
from isgq.wire.header import NO_PARAMETER, Header, Status

RoutePolicy = Literal["auto", "factors", "dense"]
_INSTRUMENTED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def instrument(
    model: nn.Module,
    codec: str | AnyCodec = "isgq",
    *,
    dense: str | AnyCodec | None = None,
    scope: Literal["tensor", "model"] = "tensor",
    exchange: Exchange | None = None,
    skip: str | Collection[str] | Callable[[str], bool] = (),
    routes: RoutePolicy = "auto",
    sync: Literal["backward", "manual"] = "backward",
    seed: int = 0,
    log: Callable[[str], None] | None = None,
) -> "Session":
    """Synchronise the model's gradients over all ranks with quantized factors. A collective call.

    Args:
        model: the model; stays as it is (no wrapper, no attribute), all ranks get rank 0's parameters and buffers.
        codec: what compresses the factors, e.g. ``"dithered:levels=1,bucket=row"``. A codec that is made for gradients
            (``"error_feedback(top_k:k=0.01)"``) is used as ``dense`` instead, without factors; ``"dense"`` sends plain
            gradients.
        dense: direct codec for the parameters without factors; None all-reduces their plain gradients.
        scope: whether ``dense`` compresses each tensor by itself or the whole model as one vector.
        exchange: the transport; by default torch.distributed if it is initialised, else a loopback.
        skip: parameters that shall travel densely: a regular expression, a collection of names or a predicate.
        routes: ``"auto"`` sends factors where they are fewer bytes, ``"factors"`` wherever there are any, ``"dense"``
            nowhere.
        sync: ``"backward"`` synchronises when backward ends, as DistributedDataParallel; ``"manual"`` leaves it to
            :meth:`Session.synchronize`.
        seed: of all randomness; the same on every rank.
        log: where the one report of parameters without factors goes; by default ``warnings.warn`` for those that a
            user would not expect.

    Raises:
        InstrumentError: the model is instrumented already, wrapped, or has no trainable parameter.
        OptionError: unknown codec or option.
        MismatchError: the ranks disagree on model, codec, seed or version.
        ExchangeError: a rank is missing.
    """
    return Session(model, codec, dense, scope, exchange, _predicate(skip), routes, sync, seed, log)


def _predicate(skip: str | Collection[str] | Callable[[str], bool]) -> Callable[[str], bool]:
    if isinstance(skip, str):
        pattern = re.compile(skip)
        return lambda name: pattern.search(name) is not None
    if callable(skip):
        return skip
    names = set(skip)
    return lambda name: name in names


class Session:
    """A handle on an instrumented model, not a wrapper; a context manager that closes itself.

    Attributes:
        traffic: the ledger of bytes.
        plan: which route each parameter takes; empty before the first step.
        step: number of synchronisations so far.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: str | AnyCodec,
        dense: str | AnyCodec | None,
        scope: Literal["tensor", "model"],
        exchange: Exchange | None,
        skip: Callable[[str], bool],
        routes: RoutePolicy,
        sync: Literal["backward", "manual"],
        seed: int,
        log: Callable[[str], None] | None,
    ) -> None:
        _check_model(model)
        for option, value, allowed in (
            ("routes", routes, ("auto", "factors", "dense")),
            ("sync", sync, ("backward", "manual")),
            ("scope", scope, ("tensor", "model")),
        ):
            if value not in allowed:
                raise OptionError(f"{option}={value!r} must be one of {', '.join(allowed)}")
        self._codec, self._direct = choose_codecs(codec, dense)
        routes = routes if self._codec is not None else "dense"
        self._spec = " + ".join(spec_of(c) if c is not None else "dense" for c in (self._codec, self._direct))
        self._memory, self._scope = memory_of(self._direct), scope
        self._carriers: list[Carrier] = []
        self._policy, self._sync, self._seed = routes, sync, seed
        self._log = log
        self._exchange = exchange or (TorchExchange() if dist.is_initialized() else Loopback())
        self._start_bytes = (self._exchange.sent, self._exchange.received)
        self.traffic, self.plan, self.step = Traffic(), Plan(), 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = list(self._parameters)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._units, self._reasons = ([], {}) if routes == "dense" else find_units(model, skip)
        self._windows = {name: Window(name, p) for name, p in self._parameters.items()}
        self._agree(model)
        self._local_only = False
        self._backward = BackwardWatch(model, self._windows.values(), self._backward_ended)
        self._capture = Capture(self._units, self._caught, self._backward.forward_begins)
        self._modules = weakref.WeakSet(model.modules())
        _INSTRUMENTED.update(self._modules)

    # ---- agreement before the first step

    def _agree(self, model: nn.Module) -> None:
        settings = {"codec": self._spec, "routes": self._policy, "scope": self._scope}
        settings |= {"seed": str(self._seed), "sync": self._sync}
        settings["factored"] = ",".join(unit.name for unit in self._units)
        check_introductions(self._exchange.all_gather(introduce(model, settings)).wait())
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                self._exchange.broadcast(tensor.detach()).wait()
        self.traffic.setup = self.traffic.sent = self._exchange.sent - self._start_bytes[0]
        self._start_bytes = (self._start_bytes[0], self._exchange.received)

    # ---- backward passes

    def _caught(self, unit: Unit, factors: Factors) -> None:
        self._backward.begins()
        self._windows[unit.name].pending.append(factors)

    def _backward_ended(self) -> None:
        if self._sync == "backward" and not self._local_only:
            self.synchronize()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank only, as DistributedDataParallel.no_sync."""
        previous, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = previous

    # ---- one step

    def synchronize(self) -> None:
        """Replace what backward added to every ``p.grad`` by its mean over all ranks. A collective call.

        Called by itself when backward ends, unless ``sync="manual"``.

        Raises:
            InstrumentError: the session is closed, or trainable parameters changed.
            PeerError: some rank cannot take part; the same error on every rank.
            MismatchError: the ranks are at different steps or follow different plans.
            ExchangeError: some rank is missing.
        """
        if self._backward.closed:
            raise InstrumentError("the session is closed")
        for window in self._windows.values():
            window.check_edits()
        planning = not self.plan.lines
        if planning:
            self._make_plan()
        if not self._carriers:
            self._carriers = make_carriers(
                self.plan, self._units, self._codec, self._direct, self._scope, self._windows
            )
        records, failure, error = self._encode()
        try:
            message, sizes = pack_message([record for _, record in records])
        except CodecError as caught:
            message, sizes = torch.empty(0, dtype=torch.uint8), []
            failure, error = (Status.FAILED, NO_PARAMETER), caught
        try:
            headers = self._exchange_headers(failure, message.numel(), error)
        except Exception:
            if planning:  # what a refused step has measured is worth nothing
                self.plan, self._carriers = Plan(), []
            raise
        if planning:
            self._report()
        received = self._exchange.all_gather(message, [header.length for header in headers])
        used = [any(header.used[i] for header in headers) for i in range(len(self._names))]
        dense = [self._windows[n] for n, u in zip(self._names, used, strict=True) if u and self._is_dense(n)]
        reduced = [(group, self._exchange.all_reduce_mean(flat)) for group, flat in self._flatten(dense)]
        self._apply_records([h.used for h in headers], received.wait())
        for group, pending in reduced:
            flat = pending.wait()
            for window, part in zip(group, torch.split(flat, [w.parameter.numel() for w in group]), strict=True):
                window.close(part)
        for window in self._windows.values():
            window.reset()
        self._account(records, sizes, dense)
        if self._memory is not None:
            self._memory.commit()
        self.step += 1

    def _is_dense(self, name: str) -> bool:
        return all(name not in carrier.names for carrier in self._carriers)

    def _encode(self) -> tuple[list[tuple[Carrier, Record]], tuple[Status, int], Exception | None]:
        """Records of all carried parameters that got a gradient here; or why this rank cannot take part."""
        records: list[tuple[Carrier, Record]] = []
        name = ""
        try:
            self._check_parameters()
            for carrier in self._carriers:
                name = carrier.names[0]
                if any(self._windows[n].touched for n in carrier.names):
                    records.append((carrier, carrier.encode(self._key(carrier.name))))
            for name in filter(self._is_dense, self._names):
                window = self._windows[name]
                if window.touched:
                    check_finite(window.contribution(), f"the gradient of {name!r}")
        except NonFiniteError as error:
            return [], (Status.NON_FINITE, self._names.index(name)), error
        except Exception as error:  # any failure must reach the other ranks before it is raised here
            return [], (Status.FAILED, self._names.index(name) if name else NO_PARAMETER), error
        pairs = [pair for window in self._windows.values() for pair in window.pairs]
        if pairs and not any(pair.d.shape[0] for pair in pairs):
            return [], (Status.EMPTY_BATCH, NO_PARAMETER), None
        return records, (Status.OK, NO_PARAMETER), None

    def _key(self, name: str) -> Key:
        return Key(name, self._seed, self.step, self._exchange.rank)

    def _exchange_headers(self, failure: tuple[Status, int], length: int, error: Exception | None) -> list[Header]:
        status, parameter = failure
        digest = plan_digest(self._spec, [line.route for line in self.plan.lines])
        used = [self._windows[name].touched for name in self._names]
        mine = Header(status, parameter, self.step, digest, length, used).pack()
        gathered = self._exchange.all_gather(mine, [mine.numel()] * self._exchange.world_size).wait()
        headers = [Header.unpack(raw, len(self._names)) for raw in gathered]
        try:
            check_headers(headers, self._names)
        except Exception as refusal:
            if self._memory is not None:
                self._memory.rollback()
            raise refusal from error
        return headers

    def _flatten(self, windows: Sequence[Window]) -> Iterator[tuple[list[Window], Tensor]]:
        """Dense gradients, one flat vector per dtype and device, in the order of the parameters."""
        groups: dict[tuple[torch.dtype, torch.device], list[Window]] = {}
        for window in windows:
            groups.setdefault((window.parameter.dtype, window.parameter.device), []).append(window)
        for group in groups.values():
            yield group, torch.cat([window.contribution().reshape(-1) for window in group])

    def _apply_records(self, used: Sequence[Sequence[bool]], messages: Sequence[Tensor]) -> None:
        """Decode every rank's records, and write each carrier's mean."""  # noqa: DOC501
        index = {name: i for i, name in enumerate(self._names)}
        decoded: dict[str, list[Factors | Tensor]] = {carrier.name: [] for carrier in self._carriers}
        for rank, message in enumerate(messages):
            sent = [c for c in self._carriers if any(used[rank][index[n]] for n in c.names)]
            records = unpack_message(message)
            if len(records) != len(sent):
                raise CodecError(f"rank {rank} sent {len(records)} records for {len(sent)} parameters")
            for carrier, record in zip(sent, records, strict=True):
                decoded[carrier.name].append(carrier.decode(record))
        for carrier in self._carriers:
            if decoded[carrier.name]:
                carrier.close(decoded[carrier.name], self._exchange.world_size)

    def _account(self, records: Sequence[tuple[Carrier, Any]], sizes: Sequence[int], dense: Sequence[Window]) -> None:
        traffic, before = self.traffic, self.traffic.sent
        traffic.sent = self._exchange.sent - self._start_bytes[0]
        traffic.received = self._exchange.received - self._start_bytes[1]
        attributed = 0
        pieces = [(carrier.name, size) for (carrier, _), size in zip(records, sizes, strict=True)]
        pieces += [(w.name, w.parameter.numel() * w.parameter.element_size()) for w in dense]
        for name, size in pieces:
            traffic.by_parameter[name] += size
            attributed += size
        traffic.overhead += traffic.sent - before - attributed
        traffic.dense += sum(p.numel() * p.element_size() for p in self._parameters.values())
        traffic.steps += 1

    # ---- the plan

    def _make_plan(self) -> None:
        """Measure every candidate's message on this rank, share the sizes, decide alike. A collective call."""
        sizes = measure(self._units, self._codec, self._windows, self._key)
        shared = sizes[None]
        if self._units:
            length = sizes.numel() * sizes.element_size()
            headers = self._exchange_headers((Status.OK, NO_PARAMETER), length, None)  # are all ranks here to plan?
            gathered = self._exchange.all_gather(sizes.view(torch.uint8), [header.length for header in headers]).wait()
            shared = torch.stack([each.clone().view(torch.int64) for each in gathered])
        policy: Literal["auto", "factors"] = "factors" if self._policy == "factors" else "auto"
        self.plan = make_plan(
            self._units, shared, self._windows, self._reasons, policy, direct=self._direct is not None
        )

    def _report(self) -> None:
        """Say once, on rank 0, which parameters travel densely and why."""
        for line in self.plan.lines:
            if line.route == "dense" and self._log is not None and self._exchange.rank == 0:
                self._log(f"isgq: {line.name} travels densely: {line.reason}")

    # ---- state and end

    def _check_parameters(self) -> None:
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            raise InstrumentError(
                f"{len(thawed)} frozen parameter(s) became trainable after instrument(), so their gradients would not "
                "be synchronised: close() the session and instrument the model again"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step number, seed, codec, plan and memory. Plain types and tensors only."""
        lines = [vars(line) for line in self.plan.lines]
        return {
            "step": self.step,
            "seed": self._seed,
            "codec": self._spec,
            "rank": self._exchange.rank,
            "plan": lines,
            "memory": self._memory.state_dict() if self._memory is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, bit for bit.

        Raises:
            MismatchError: the state is of another codec, seed, rank or model.
        """
        expected = {"seed": self._seed, "codec": self._spec, "rank": self._exchange.rank}
        for name, value in expected.items():
            if state[name] != value:
                raise MismatchError(f"the state was saved with {name} = {state[name]}, this session has {value}")
        plan = Plan(tuple(Line(**line) for line in state["plan"]))
        unknown = [line.name for line in plan.lines if line.name not in self._parameters]
        if unknown:
            raise MismatchError(f"the state was saved for another model: it has {', '.join(unknown)}")
        self.step, self.plan = int(state["step"]), plan
        self._carriers = []
        if self._memory is not None:
            self._memory.load_state_dict(state["memory"])

    def close(self) -> None:
        """Remove every hook; the model is as it was, ``p.grad`` stays. May be called twice."""
        self._capture.close()
        self._backward.close()
        _INSTRUMENTED.difference_update(self._modules)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_model(model: nn.Module) -> None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InstrumentError(
            f"{type(model).__name__} already handles gradients: instrument the module it wraps (model.module) instead, "
            "without the wrapper"
        )
    if any(module in _INSTRUMENTED for module in model.modules()):
        raise InstrumentError("the model, its part or its whole is instrumented already: close() that session first")
    if not any(p.requires_grad for p in model.parameters()):
        raise InstrumentError("the model has no trainable parameter")
