"""instrument() and Session: the one place that knows the whole road.

    capture -> quantize -> encode -> exchange -> decode -> reconstruct -> p.grad

When a backward pass ends, each rank encodes one record per factored parameter that got a gradient, all ranks exchange
a fixed header (:mod:`isgq.wire.header`), then their messages; every rank decodes all messages in rank order, so every
rank holds the same bits. Parameters on the dense route share one all-reduce.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import nn

from isgq.aggregate import AggregateName, Gather, Outgoing, Step, aggregation, once, replies_of
from isgq.agreement import check_introductions, introduce, plan_digest
from isgq.asynchronous import SERVER, Server, Service, Worker, check_bound
from isgq.auto import Sizes
from isgq.backward import BackwardWatch
from isgq.bandwidth import Messages
from isgq.choice import Choice, Scope, check_option, choose, predicate
from isgq.codecs.roles import MemoryPolicy
from isgq.core.errors import InstrumentError, MismatchError, NonFiniteError
from isgq.core.extremes import check_finite
from isgq.core.payload import Factors
from isgq.core.registry import AnyCodec
from isgq.exchange import Channel, Exchange, Loopback, TorchExchange
from isgq.instrumented import check_free, occupy, release
from isgq.layers.capture import Capture, Unit, find_units
from isgq.planner import Line, Plan, RoutePolicy
from isgq.records import Carrier, DirectCarrier
from isgq.resume import ResizePolicy, pick, resized
from isgq.rounds import Rounds
from isgq.routing import make_carriers, plan_together
from isgq.traffic import Traffic
from isgq.windows import Contributions, Window, captured_size, flat_gradients
from isgq.wire.header import NEW_PLAN, Status


def instrument(
    model: nn.Module,
    codec: str | AnyCodec = "isgq",
    *,
    dense: str | AnyCodec | None = None,
    scope: Scope = "tensor",
    aggregate: AggregateName = "gather",
    down: str | AnyCodec | None = None,
    memory: MemoryPolicy = "both",
    max_staleness: int | None = None,
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
            gradients; ``"subspace"`` makes the mean in rounds of two passes, with a memory of its own;
            ``"auto:link=100Mbit/s+1ms"`` chooses for each gradient, see :mod:`isgq.auto`.
        dense: direct codec for the parameters without factors; None all-reduces their plain gradients.
        scope: whether ``dense`` compresses each tensor by itself or the whole model as one vector.
        aggregate: ``"gather"``: every rank gets all messages; ``"two_pass"`` (DoubleSqueeze): every rank averages a
            shard and compresses it again; ``"server"``: rank 0 averages all and compresses it again; ``"async"``: rank
            0 does nothing but :meth:`Session.serve` the others as they come.
        down: direct codec of the averages in two passes; None sends them as they are.
        memory: in two passes, who remembers what a biased codec leaves out: ``"both"`` workers and servers,
            ``"worker"`` alone, ``"none"``. With ``"gather"`` write ``error_feedback(...)``.
        max_staleness: with ``"async"``, after how many updates a gradient is too old; fast workers wait for slow ones
            instead. None for no bound.
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
    choice = choose(codec, dense, scope, aggregate, down, memory, max_staleness)
    return Session(model, choice, exchange, predicate(skip), routes, sync, seed, log)


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
        choice: Choice,
        exchange: Exchange | None,
        skip: Callable[[str], bool],
        routes: RoutePolicy,
        sync: Literal["backward", "manual"],
        seed: int,
        log: Callable[[str], None] | None,
    ) -> None:
        check_free(model)
        check_option("routes", routes, ("auto", "dense") if choice.auto else get_args(RoutePolicy))
        check_option("sync", sync, ("backward", "manual"))
        self._choice = choice
        self._policy: RoutePolicy = routes if choice.pair is not None or choice.auto is not None else "dense"
        self._sync, self._seed, self._log = sync, seed, log
        self._say = once(log or warnings.warn)
        self._exchange = exchange or (TorchExchange() if dist.is_initialized() else Loopback())
        self._carriers: list[Carrier] = []
        self._start_bytes = (self._exchange.sent, self._exchange.received)
        self.traffic, self.plan, self.step = Traffic(), Plan(), 0
        self._sizes, self._outdated = Sizes(), False
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = list(self._parameters)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._units, self._reasons = ([], {}) if self._policy == "dense" else find_units(model, skip)
        self._windows = {name: Window(name, p) for name, p in self._parameters.items()}
        self._agree(model)
        self._channels: Mapping[int, Channel] = {}
        if choice.aggregate == "async":
            check_bound(choice.max_staleness, self._exchange.world_size - 1)
            self._channels = self._exchange.star()
        self._aggregate = self._make_aggregate()
        self._local_only = False
        self._backward = BackwardWatch(model, self._windows.values(), self._backward_ended)
        self._capture = Capture(self._units, self._caught, self._backward.forward_begins)
        self._modules = occupy(model)

    def _make_aggregate(self) -> Gather:
        choice = self._choice
        if choice.subspace is not None:
            return Rounds(self._exchange, choice)
        if choice.aggregate != "async":
            return aggregation(choice.aggregate, self._exchange, choice.direct, choice.down, choice.pair)
        if self.serves:
            return Gather(self._exchange)
        return Worker(self._exchange, self._channels[SERVER], choice.direct, choice.down, self._parameters)

    @property
    def serves(self) -> bool:
        """Whether this rank has to :meth:`serve` and not to train."""
        return self._choice.aggregate == "async" and self._exchange.rank == SERVER

    # ---- agreement before the first step

    def _agree(self, model: nn.Module) -> None:
        settings = {**self._choice.settings, "routes": self._policy, "seed": str(self._seed), "sync": self._sync}
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
        if self._backward.closed or self.serves:
            raise InstrumentError("the session is closed" if self._backward.closed else "a server serves, see serve()")
        for window in self._windows.values():
            window.check_edits()
        planning = self._outdated or not self.plan.lines
        if planning:
            self._make_plan()
        if not self._carriers:
            self._carriers = self._make_carriers(self._choice.shards(self._exchange.world_size))
        asks = self._choice.auto is not None and self._sizes.asks(captured_size(self._windows))
        step = replace(self._step(), new_plan=asks)
        outgoing = self._refusal() or self._aggregate.encode(step)
        try:
            headers = self._aggregate.agree(step, outgoing)
        except Exception:
            if planning:  # what a refused step has measured is worth nothing
                self.plan, self._carriers = Plan(), []
            raise
        used = [any(header.used[i] for header in headers) for i in range(len(self._names))]
        dense = [self._windows[n] for n, u in zip(self._names, used, strict=True) if u and self._is_dense(n)]
        reduced = [(group, self._exchange.all_reduce_mean(flat)) for group, flat in flat_gradients(dense)]
        means = self._aggregate.reduce(step, outgoing, headers)
        for group, pending in reduced:
            for window, part in zip(
                group, torch.split(pending.wait(), [w.parameter.numel() for w in group]), strict=True
            ):
                means[window.name] = part
        for name, mean in means.items():
            self._windows[name].close(mean)
        for window in self._windows.values():
            window.reset()
        self._account(self._aggregate.sizes, dense)
        self._aggregate.commit()
        self._outdated = any(header.parameter == NEW_PLAN for header in headers)
        self.step += 1

    def _make_carriers(self, servers: int) -> list[Carrier]:
        return make_carriers(self.plan, self._units, self._choice, self._windows, servers)

    def _step(self) -> Step:
        digest = plan_digest(self._choice.spec, [line.codec or line.route for line in self.plan.lines])
        used = [self._windows[name].touched for name in self._names]
        gradients = Contributions(self._windows)
        return Step(self.step, digest, self._seed, self._names, used, self._carriers, gradients, self._say)

    def _is_dense(self, name: str) -> bool:
        return all(name not in carrier.names for carrier in self._carriers)

    def _refusal(self) -> Outgoing | None:
        """Why this rank cannot take part, as far as no carrier can tell."""
        touched = [window for window in self._windows.values() if window.touched]
        if touched and not any(window.filled for window in touched):
            return Outgoing(status=Status.EMPTY_BATCH)
        name = ""
        try:
            self._check_parameters()
            for name in filter(self._is_dense, self._names):
                if self._windows[name].touched:
                    check_finite(self._windows[name].contribution(), f"the gradient of {name!r}")
        except NonFiniteError as error:
            return Outgoing(status=Status.NON_FINITE, parameter=self._names.index(name), error=error)
        except InstrumentError as error:
            return Outgoing(status=Status.FAILED, error=error)
        return None

    def _account(self, sizes: Mapping[str, int], dense: Sequence[Window]) -> None:
        sent, received = self._exchange.sent - self._start_bytes[0], self._exchange.received - self._start_bytes[1]
        pieces = [*sizes.items(), *((w.name, w.parameter.numel() * w.parameter.element_size()) for w in dense)]
        whole = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self.traffic.record(sent, received, pieces, whole)

    def messages(self) -> Messages:
        """Sizes of the last step's messages, for :func:`isgq.bandwidth.predict`."""
        dense = sum(p.numel() * p.element_size() for name, p in self._parameters.items() if self._is_dense(name))
        return Messages(self._aggregate.up, self._aggregate.down, dense, len(self._names), self._aggregate.rounds)

    # ---- the plan

    def _make_plan(self) -> None:
        """Decide on all routes, the same on every rank. A collective call."""
        where = (self._exchange, self._step(), self._units)
        self.plan = plan_together(*where, self._choice, self._windows, self._reasons, self._policy)
        self._sizes.plan(captured_size(self._windows))
        self._carriers, self._outdated = [], False
        for line in self.plan.lines:
            if line.route == "dense" and self._log is not None and self._exchange.rank == 0:
                self._log(f"isgq: {line.name} travels densely: {line.reason}")

    # ---- an asynchronous server

    @property
    def done(self) -> bool:
        """Whether the server of an asynchronous worker has had all the gradients it wants."""
        return isinstance(self._aggregate, Worker) and self._aggregate.done

    def serve(
        self,
        optimizer: torch.optim.Optimizer,
        on_update: Callable[[int], None] = lambda _: None,
        updates: int | None = None,
    ) -> Service:
        """Apply the workers' gradients as they come, until every worker is done or lost; see :mod:`isgq.asynchronous`.

        The model becomes float32 if it was not.

        Args:
            optimizer: of this rank's model; steps once per gradient.
            on_update: called with the number of updates after each: for learning rates, evaluation and the like.
            updates: how many to make; then every worker's session is :attr:`done`. None: until the workers close.

        Raises:
            InstrumentError: this rank is no server.
            PeerError: all workers are lost.
        """
        if not self.serves:
            raise InstrumentError("serve() is for rank 0 of a session with aggregate='async'")
        if not self.plan.lines:
            self._make_plan()
        self._carriers = self._make_carriers(1)
        server = Server(self._step(), self._choice, self._parameters, self._channels, self._exchange, self._say)
        return server.run(optimizer, on_update, updates)

    # ---- state and end

    def _check_parameters(self) -> None:
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            raise InstrumentError(
                f"{len(thawed)} frozen parameter(s) became trainable after instrument(), so their gradients would not "
                "be synchronised: close() the session and instrument the model again"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step number, seed, codecs, plan and memories. Plain types and tensors only."""
        return {
            "step": self.step,
            "seed": self._seed,
            "codec": self._choice.spec,
            "rank": self._exchange.rank,
            "world_size": self._exchange.world_size,
            "plan": [vars(line) for line in self.plan.lines],
            "memory": self._aggregate.save_memories(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, resize: ResizePolicy = "error"
    ) -> None:
        """Continue where :meth:`state_dict` was taken, bit for bit if the number of ranks is the same.

        Args:
            state: this rank's, or all ranks' in rank order.
            resize: what to do with memories if the number of ranks is another, for which all ranks' states are needed:
                ``"sum"`` shares them out so that nothing that was left out is lost, ``"reset"`` drops them,
                ``"error"`` refuses. What was done is reported once.

        Raises:
            MismatchError: the state is of another codec, seed, rank, number of ranks or model.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        rank, ranks = self._exchange.rank, self._exchange.world_size
        own = pick(states, {"seed": self._seed, "codec": self._choice.spec}, rank, ranks, resize)
        plan = Plan(tuple(Line(**line) for line in own["plan"]))
        unknown = [line.name for line in plan.lines if line.name not in self._parameters]
        if unknown:
            raise MismatchError(f"the state was saved for another model: it has {', '.join(unknown)}")
        self.step, self.plan = int(own["step"]), plan
        self._carriers = []
        memories = own["memory"]
        if own["world_size"] != ranks:
            memories, report = resized(states, self._shards, rank, ranks, resize)
            if rank == 0:
                self._say(report)
        self._aggregate.load_memories(memories)

    def _shards(self, ranks: int) -> dict[str, Sequence[DirectCarrier]]:
        """What has memory where, in a session of so many ranks."""
        carriers = self._make_carriers(self._choice.shards(ranks))
        up = [carrier for carrier in carriers if isinstance(carrier, DirectCarrier)]
        return {"up": up, "down": replies_of(carriers, self._choice.down)}

    def close(self, failed: bool = False) -> None:
        """Remove every hook; the model is as it was, ``p.grad`` stays. May be called twice.

        Args:
            failed: whether an asynchronous worker ends before it is done, which its server reports.
        """
        if isinstance(self._aggregate, Worker) and not self._backward.closed:
            self._aggregate.leave(self._step(), failed)
        self._capture.close()
        self._backward.close()
        release(self._modules)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(failed=exception[0] is not None)
