"""Session: the one place that knows the whole road.

    capture -> quantize -> encode -> exchange -> decode -> reconstruct -> p.grad

When a backward pass ends, each rank encodes one record per factored parameter that got a gradient, all ranks exchange
a fixed header (:mod:`isgq.wire.header`), then their messages; every rank decodes all messages in rank order, so every
rank holds the same bits. Parameters on the dense route share one all-reduce.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import nn

from isgq.aggregate import Observer, Outgoing, Step, once
from isgq.aggregation import aggregation
from isgq.agreement import check_introductions, introduce, plan_digest
from isgq.asynchronous import SERVER, Server, Service, Worker, check_bound
from isgq.auto import Sizes
from isgq.backward import BackwardWatch
from isgq.bandwidth import Messages, messages_of
from isgq.choice import Choice, check_option
from isgq.core.errors import InstrumentError, MismatchError, OptionError, PeerNonFiniteError
from isgq.core.payload import Factors
from isgq.doubts import Doubts
from isgq.exchange import Channel, Exchange, Loopback, TorchExchange
from isgq.instrumented import Occupation, check_free
from isgq.layers.capture import Capture, Unit, find_units
from isgq.overlap import Overlapped
from isgq.planner import Line, Plan, RoutePolicy, report_plan
from isgq.records import Carrier, DirectCarrier, FactorCarrier
from isgq.refusals import refusal
from isgq.resume import ResizePolicy, pick, resized
from isgq.routing import make_carriers, plan_together
from isgq.scaling import LossScale
from isgq.sparing import Sparing
from isgq.traffic import Traffic
from isgq.two_pass import replies_of
from isgq.windows import Contributions, Window, captured_size, flat_gradients, parts_of
from isgq.wire.header import NEW_PLAN, Header, Status


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
        scale: LossScale,
        check_replicas: int,
        skip_weight_grad: bool,
        bucket_cap_mb: float | None,
        log: Callable[[str], None] | None,
    ) -> None:
        check_free(model)
        check_option("routes", routes, ("auto", "dense") if choice.auto else get_args(RoutePolicy))
        check_option("sync", sync, ("backward", "manual"))
        if check_replicas < 0:
            raise OptionError(f"check_replicas={check_replicas} must be a number of steps, or 0 for never")
        if choice.aggregate == "async" and (check_replicas or scale.scales):
            raise OptionError("scaler= and check_replicas= are for ranks in step: not for aggregate='async'")
        self._choice = choice
        self._policy: RoutePolicy = routes if choice.pair is not None or choice.auto is not None else "dense"
        self._sync, self._seed, self._log = sync, seed, log
        self._model, self._scale, self._check_every = model, scale, check_replicas
        self._say = once(log or warnings.warn)
        self._exchange = exchange or (TorchExchange() if dist.is_initialized() else Loopback())
        self._carriers: list[Carrier] = []
        self._start_bytes = (self._exchange.sent, self._exchange.received)
        self.traffic, self.plan, self.step = Traffic(), Plan(), 0
        self._sizes, self._outdated, self._local_only = Sizes(), False, False
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._size = list(self._parameters), sum(p.nbytes for p in self._parameters.values())
        self._doubts = Doubts(self._names, whole=choice.subspace is None)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._units, self._reasons = ([], {}) if self._policy == "dense" else find_units(model, skip)
        self._windows = {name: Window(name, p) for name, p in self._parameters.items()}
        self._agree(bucket_cap_mb)
        self._channels: Mapping[int, Channel] = {}
        if choice.aggregate == "async":
            check_bound(choice.max_staleness, self._exchange.world_size - 1)
            self._channels = self._exchange.star()
        self._aggregate = aggregation(choice, self._exchange, self._windows, self._channels, bucket_cap_mb)
        self._present = [True] * self._exchange.world_size  # which ranks had a batch in the last step
        self._backward = BackwardWatch(model, self._windows.values(), self._backward_ended, self._arrived)
        self._skips = skip_weight_grad and sync == "backward"
        self._sparing = Sparing(self._windows, self._caught, lambda: not self._local_only and not self._outdated)
        self._capture = Capture(self._units, self._caught, self._backward.forward_begins, self._sparing)
        self._occupied = Occupation(model)

    @property
    def serves(self) -> bool:
        """Whether this rank has to :meth:`serve` and not to train."""
        return self._choice.aggregate == "async" and self._exchange.rank == SERVER

    # ---- agreement before the first step

    def _agree(self, bucket_cap_mb: float | None) -> None:
        settings = {**self._choice.agreed, "routes": self._policy, "seed": str(self._seed), "sync": self._sync}
        settings |= {"factored": ",".join(unit.name for unit in self._units), "check_replicas": str(self._check_every)}
        settings |= {"scaler": "yes" if self._scale.scales else "no", "bucket_cap_mb": str(bucket_cap_mb)}
        check_introductions(self._exchange.all_gather(introduce(self._model, settings)).wait())
        self._copy_from(0)
        self.traffic.setup = self.traffic.sent = self._exchange.sent - self._start_bytes[0]
        self._start_bytes = (self._start_bytes[0], self._exchange.received)

    def _copy_from(self, rank: int) -> None:
        with torch.no_grad():
            for tensor in [*self._model.parameters(), *self._model.buffers()]:
                self._exchange.broadcast(tensor.detach(), rank).wait()

    # ---- backward passes

    def _caught(self, unit: Unit, factors: Factors) -> None:
        self._backward.begins()
        if not self._backward.closed:
            self._windows[unit.name].pending.append(factors)

    def _arrived(self, window: Window) -> None:
        if isinstance(self._aggregate, Overlapped) and self._planned and not self._local_only:
            window.scale = self._scale.value
            self._aggregate.arrived(self._step, window.name)

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

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches, as DistributedDataParallel's join; a collective call.

        A rank that leaves early takes part in the others' steps with a gradient of zero, until none has a batch left.
        Then all get the parameters and buffers of a rank with most batches. An optimizer's state stays each rank's.
        """
        self._present = [True] * self._exchange.world_size
        yield
        while self._choice.aggregate != "async" and self._step_together(Status.DONE):
            pass  # asynchronous workers wait for nobody
        if not all(self._present):
            self._copy_from(self._present.index(True))

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
        self._step_together(Status.OK)

    def _step_together(self, status: Status) -> bool:
        """A step of this rank, which has a batch (OK) or none any more (DONE); returns whether any rank has one."""  # noqa: DOC501
        try:
            return self._try_step(status)
        except PeerNonFiniteError:
            if self._scale.absorbs_overflow(self._windows.values()):
                return True
            raise
        finally:
            self._aggregate.withdraw()
            for window in self._windows.values():
                window.settle()  # what a refused step leaves

    def _try_step(self, status: Status) -> bool:
        scale = self._scale.value
        for window in self._windows.values():
            window.check_edits()
            window.scale = scale
        planned, planning = self._planned, self._outdated or not self.plan.lines
        if planning:
            self._make_plan()
        if not self._carriers:
            self._carriers = self._make_carriers(self._choice.shards(self._exchange.world_size))
            factored = {carrier.name for carrier in self._carriers if isinstance(carrier, FactorCarrier)}
            self._sparing.factored = frozenset(factored if self._skips else ())
        asks = self._choice.auto is not None and self._sizes.asks(captured_size(self._windows))
        step = replace(self._step(), new_plan=asks, planned=planned)
        outgoing = refusal(self._windows, self._dense, self._frozen) or self._aggregate.encode(step)
        if outgoing.status is Status.OK:
            outgoing = replace(outgoing, status=status)
        headers = []
        try:
            headers = self._aggregate.agree(step, outgoing)
        finally:
            present = [header.status is Status.OK for header in headers]
            if planning and not any(present):  # what a step that is refused, or nobody's, has measured is worth nothing
                self.plan, self._carriers = Plan(), []
        if not any(present):
            self._aggregate.rollback()
            return False
        self._present = present
        if self._check_every and self.step % self._check_every == 0:
            self._aggregate.compare(self._parameters, headers)
        self._apply(step, outgoing, headers)
        return True

    def _apply(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> None:
        dense = [self._windows[name] for name, i in self._dense.items() if any(header.used[i] for header in headers)]
        reduced = [(group, self._exchange.all_reduce_mean(flat)) for group, flat in flat_gradients(dense)]
        means = self._aggregate.reduce(step, outgoing, headers)
        for group, pending in reduced:
            means |= parts_of(pending.wait(), group)
        for name, window in self._windows.items():
            if name in means:
                window.close(means[name])
            else:  # there was none, or it has been applied: a server's optimizer has stepped
                window.owed.clear()
                window.reset()
        self._account(self._aggregate.sizes, dense)
        self._aggregate.commit()
        self._outdated = any(header.parameter == NEW_PLAN for header in headers)
        self._doubts.hear(headers, self._carriers, self._exchange.rank, self._say)
        self.step += 1

    def _make_carriers(self, servers: int) -> list[Carrier]:
        parts = self._units, self._choice, self._windows, servers, self._say
        return self._doubts.apply(make_carriers(self.plan, *parts))

    def _step(self) -> Step:
        digest = plan_digest(self._choice.spec, [line.codec or line.route for line in self.plan.lines])
        used, gradients = [self._windows[name].touched for name in self._names], Contributions(self._windows)
        state = self.step, digest, self._seed, self._names, used, self._carriers, gradients, self._say
        return Step(*state, planned=self._planned, doubted=self._doubts.next)

    @property
    def _planned(self) -> bool:
        return bool(self._carriers) and not self._outdated

    @property
    def _dense(self) -> dict[str, int]:
        """Names of the gradients that travel without a carrier, and their positions in the headers."""
        carried = {name for carrier in self._carriers for name in carrier.names}
        return {name: i for i, name in enumerate(self._names) if name not in carried}

    def _account(self, sizes: Mapping[str, int], dense: Sequence[Window]) -> None:
        sent, received = self._exchange.sent - self._start_bytes[0], self._exchange.received - self._start_bytes[1]
        pieces = [*sizes.items(), *((window.name, window.parameter.nbytes) for window in dense)]
        self.traffic.record(sent, received, pieces, self._size)

    def observe(self, observer: Observer | None) -> None:
        """Show each step's records to an observer, such as :class:`isgq.Telemetry`; None ends that."""
        self._aggregate.observer = observer

    def doubt(self, name: str, reason: str) -> None:
        """Let a gradient travel whole, from this rank's next step on and soon from all; InstrumentError if not."""
        self._doubts.add(name, reason)
        self._doubts.apply(self._carriers)

    def messages(self) -> Messages:
        """Sizes of the last step's messages, for :func:`isgq.bandwidth.predict`."""
        return messages_of(self._aggregate, sum(self._parameters[n].nbytes for n in self._dense), len(self._names))

    # ---- the plan

    def _make_plan(self) -> None:
        """Decide on all routes, the same on every rank. A collective call."""
        where = (self._exchange, self._step(), self._units)
        self.plan = plan_together(*where, self._choice, self._windows, self._reasons, self._policy)
        self._sizes.plan(captured_size(self._windows))
        self._carriers, self._outdated = [], False
        if self._exchange.rank == 0:
            report_plan(self.plan, self._log, self._say)

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

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step number, seed, codecs, plan and memories. Plain types and tensors only."""
        self._aggregate.withdraw()
        return {
            "step": self.step,
            "seed": self._seed,
            "codec": self._choice.spec,
            "rank": self._exchange.rank,
            "world_size": self._exchange.world_size,
            "plan": [vars(line) for line in self.plan.lines],
            "doubts": dict(self._doubts.reasons),
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
        if unknown := [line.name for line in plan.lines if line.name not in self._parameters]:
            raise MismatchError(f"the state was saved for another model: it has {', '.join(unknown)}")
        self._aggregate.abandon(self._step())
        self.step, self.plan, self._carriers, memories = int(own["step"]), plan, [], own["memory"]
        self._doubts.load(own.get("doubts", {}))
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
        self._aggregate.close()
        self._capture.close()
        self._backward.close()
        self._occupied.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(failed=exception[0] is not None)
