"""Asynchronous training with a parameter server: whoever sends first is served first.

The published text of asynchronous DoubleSqueeze was not at hand; this is our own reconstruction, not the paper's
algorithm. The server (rank 0) holds the parameters x and, for each worker i, the replica x_i that this worker has:

    worker i: g_i = gradient at x_i;  v = g_i + d_i;  send c = Q_up[v];  d_i <- v - c
    server:   x <- optimizer step with c;  reply r = Q_down[x - x_i];  both sides: x_i <- x_i + r

What the way down leaves out is x - x_i itself, so its error feedback needs no memory. Parameters and replicas are
float32 on both sides, whatever the model computes in, so that small updates of a half-precision model are not lost.

Every worker has one gradient under way. Its *staleness* is the number of updates between the moment its replica was
sent and the moment its gradient is applied.
"""

import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from isgq.aggregate import NOTHING, Gather, Outgoing, Step, header_of
from isgq.agreement import check_headers
from isgq.choice import Choice
from isgq.core.codec import Codec
from isgq.core.errors import ExchangeError, IsgqError, MismatchError, NonFiniteError, OptionError, PeerError
from isgq.correspondence import Correspondence
from isgq.exchange import Channel, Exchange
from isgq.masters import masters
from isgq.rows import place
from isgq.two_pass import decode_reply, replies_of
from isgq.wire.header import NO_PARAMETER, Header, Status, header_size

SERVER = 0


def check_bound(max_staleness: int | None, workers: int) -> None:
    """Refuse a bound that cannot be kept: the last of n gradients under way is n - 1 updates old.

    Raises:
        OptionError: the bound is below.
    """
    if max_staleness is not None and max_staleness < workers - 1:
        raise OptionError(f"max_staleness={max_staleness} with {workers} workers must be at least {workers - 1}")


class Worker(Gather):
    """A worker's side: its step is a message to the server and the server's reply.

    Args:
        exchange: for agreement before the first step.
        channel: to the server.
        up: the codec of gradients.
        down: the server's codec.
        parameters: the trainable ones, by name; they follow the server.

    Attributes:
        done: whether the server has applied all the gradients it wants.
    """

    def __init__(
        self,
        exchange: Exchange,
        channel: Channel,
        up: Codec | None,
        down: Codec,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(exchange, up)
        self._channel, self._down, self._parameters = channel, down, parameters
        self._replica, self._follows = masters(parameters), 0  # the server's update that the replica comes from
        self.done = False

    def agree(self, step: Step, outgoing: Outgoing) -> list[Header]:
        """This rank's header; PeerError where this rank cannot take part."""
        return self._checked(step, outgoing, lambda: [header_of(step, outgoing)])

    def _reduce(self, step: Step, outgoing: Outgoing, headers: Sequence[Header]) -> dict[str, Tensor]:
        """Send, wait for the reply, follow the server. No mean is left for an optimizer to apply.

        Raises:
            PeerError: the server cannot go on.
            ExchangeError: the server is gone.
        """
        self._channel.send(torch.cat([headers[0].pack(), *outgoing.messages]))
        header, message = open_message(self._channel.receive(), 0)
        self.up, self.down = [outgoing.messages[0].numel()], [message.numel()]
        self.done = header.status is Status.DONE
        if not self.done:
            check_headers([replace(header, step=step.number)], step.names)
            self.staleness, self._follows = header.step - 1 - self._follows, header.step
            replies, theirs = replies_of(step.carriers, self._down), replace(step, number=header.step)
            records = self._read(theirs, replies, message, self._exchange.rank)
            for name, change in decode_reply(replies, records).items():
                self._replica[name] += change
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._replica[name])
                parameter.grad = None  # the server's optimizer has stepped, this rank's must not
        return {}

    def leave(self, step: Step, failed: bool) -> None:
        """Tell the server that this worker is done, or has failed, unless it was the server that said so."""
        if self.done:
            return
        status = Status.FAILED if failed else Status.DONE
        with contextlib.suppress(ExchangeError):  # the server is gone itself, which whoever needs it has noticed
            self._channel.send(Header(status, NO_PARAMETER, step.number, step.digest, 0, step.used).pack())


def open_message(data: Tensor, parameters: int) -> tuple[Header, Tensor]:
    """A header and what follows it; WireError where they do not fit."""
    head = header_size(parameters)
    return Header.unpack(data[:head], parameters), data[head:]


@dataclass(frozen=True)
class _Reply:
    """What a worker's thread sends, and whether it ends then."""

    message: Tensor | None
    last: bool = False


@dataclass
class Service:
    """What a server has seen.

    Attributes:
        updates: gradients applied.
        staleness: staleness -> how many gradients had it.
        by_worker: gradients applied, by rank.
        lost: rank -> why it left before it was done.
        sent: bytes handed over to the workers.
        received: bytes that came from them.
    """

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    by_worker: Counter[int] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


class Server:
    """The server's side.

    Args:
        step: names, carriers, seed and digest, as on the workers.
        choice: what compresses the replies, and how old a gradient may get; a fast worker waits instead.
        parameters: the trainable ones, by name; the optimizer's. They become float32 if they are less.
        channels: to every worker, by rank.
        exchange: which counts the channels' bytes.
        say: told of workers that are lost.
    """

    def __init__(
        self,
        step: Step,
        choice: Choice,
        parameters: Mapping[str, nn.Parameter],
        channels: Mapping[int, Channel],
        exchange: Exchange,
        say: Callable[[str], None],
    ) -> None:
        for parameter in parameters.values():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        self._step, self._parameters, self._channels, self._say = step, parameters, channels, say
        self._bound, self._exchange = choice.max_staleness, exchange
        self._last: int | None = None
        self._replies = replies_of(step.carriers, choice.down)
        self._replicas = {worker: masters(parameters) for worker in channels}
        self._issued = dict.fromkeys(channels, 0)  # the update that each active worker's replica comes from
        self._inbox: queue.SimpleQueue[tuple[int, Tensor | IsgqError]] = queue.SimpleQueue()
        self._outbox: dict[int, queue.SimpleQueue[_Reply]] = {worker: queue.SimpleQueue() for worker in channels}
        self._correspondence = Correspondence()
        self.service = Service()

    def run(
        self, optimizer: torch.optim.Optimizer, on_update: Callable[[int], None], last: int | None = None
    ) -> Service:
        """Serve until every worker is done or lost.

        Args:
            optimizer: steps once per gradient that arrives.
            on_update: called with the number of updates after each.
            last: after so many updates, every worker is told that it is done; None to serve until all say so.

        Raises:
            PeerError: no worker is left, and none was done.
            NonFiniteError: the parameters are not finite any more.
        """
        self._last = last
        before = (self._exchange.sent, self._exchange.received)
        threads = [threading.Thread(target=self._listen, args=(worker,), daemon=True) for worker in self._channels]
        for thread in threads:
            thread.start()
        arrived: deque[tuple[int, Header, Tensor]] = deque()
        try:
            while self._issued:
                self._admit(*self._inbox.get(), arrived)
                while (turn := self._next(worker for worker, _, _ in arrived)) is not None:
                    worker, header, message = arrived[turn]
                    del arrived[turn]
                    if self.service.updates == self._last:
                        del self._issued[worker]
                        self._outbox[worker].put(_Reply(self._headed(Status.DONE), last=True))
                        continue
                    self._update(worker, header, message, optimizer)
                    on_update(self.service.updates)
        except BaseException as error:
            status = Status.NON_FINITE if isinstance(error, NonFiniteError) else Status.FAILED
            for worker in self._issued:
                self._outbox[worker].put(_Reply(self._headed(status), last=True))
            raise
        for thread in threads:
            thread.join()
        if len(self.service.lost) == len(self._channels):
            reasons = "; ".join(f"rank {worker}: {reason}" for worker, reason in self.service.lost.items())
            raise PeerError(f"all workers are lost: {reasons}")
        sent, received = before
        self.service.sent, self.service.received = self._exchange.sent - sent, self._exchange.received - received
        return self.service

    def _listen(self, worker: int) -> None:
        """A thread for each worker: its messages in, the replies to them out."""
        channel = self._channels[worker]
        try:
            while True:
                self._inbox.put((worker, channel.receive()))
                reply = self._outbox[worker].get()
                if reply.message is not None:
                    channel.send(reply.message)
                if reply.last:
                    return
        except IsgqError as error:
            self._inbox.put((worker, error))

    def _admit(self, worker: int, message: Tensor | IsgqError, arrived: deque[tuple[int, Header, Tensor]]) -> None:
        """Take a gradient in, or a worker out."""  # noqa: DOC501
        try:
            if isinstance(message, IsgqError):
                raise message
            header, body = open_message(message, len(self._step.names))
            if header.digest != self._step.digest:
                raise MismatchError(f"rank {worker} follows another plan than the server")
            if header.status is not Status.DONE:
                check_headers([header], self._step.names)
                arrived.append((worker, header, body))
                return
            del self._issued[worker]
        except IsgqError as error:
            self._lose(worker, error)
        self._outbox[worker].put(_Reply(None, last=True))

    def _lose(self, worker: int, error: IsgqError) -> None:
        if self._issued.pop(worker, None) is not None:
            self.service.lost[worker] = f"{type(error).__name__}: {error}"
            after = f"after {self.service.by_worker[worker]} gradients"
            self._say(f"worker {worker} is lost {after}, the others go on: {self.service.lost[worker]}")

    def _next(self, workers: Iterable[int]) -> int | None:
        """Position of the first arrived gradient that can be applied so that all others can still be in time.

        They can if, in the order of their replicas, the one at place r is at most ``max_staleness - r`` old by then; or
        if none will be applied any more.
        """
        bound = self._bound if self.service.updates != self._last else None
        now = self.service.updates + 1
        for position, worker in enumerate(workers):
            others = sorted(issued for other, issued in self._issued.items() if other != worker)
            if bound is None or all(now + r - issued <= bound for r, issued in enumerate(others)):
                return position
        return None

    def _update(self, worker: int, header: Header, message: Tensor, optimizer: torch.optim.Optimizer) -> None:
        sent = [carrier for carrier in self._step.carriers if self._step.sends(carrier, header.used)]
        keys = replace(self._step, number=header.step).keys(sent, worker)
        try:
            gradients: dict[str, Tensor] = {}
            for carrier, record in zip(sent, self._correspondence.read(message, sent, keys), strict=True):
                place(carrier.rows, carrier.means([carrier.decode(record)], 1), gradients)
        except IsgqError as error:
            self._correspondence.rollback()
            self._lose(worker, error)
            self._outbox[worker].put(_Reply(self._headed(Status.FAILED), last=True))
            return
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].to(parameter.device, parameter.dtype) if name in gradients else None
        optimizer.step()
        optimizer.zero_grad()
        service = self.service
        service.staleness[service.updates - self._issued[worker]] += 1
        service.updates += 1
        service.by_worker[worker] += 1
        self._outbox[worker].put(_Reply(self._reply(worker)))
        self._issued[worker] = service.updates

    def _reply(self, worker: int) -> Tensor:
        """The compressed difference to the worker's replica, which follows."""
        replica = self._replicas[worker]
        changes = {name: p.detach() - replica[name] for name, p in self._parameters.items()}
        keys = replace(self._step, number=self.service.updates).keys(self._replies, worker)
        records = [carrier.encode(changes, key) for carrier, key in zip(self._replies, keys, strict=True)]
        message, _ = self._correspondence.write(self._replies, records, keys)
        read = self._correspondence.read(message, self._replies, keys)
        for name, change in decode_reply(self._replies, read).items():
            replica[name] += change
        self._correspondence.commit()
        return self._headed(Status.OK, message)

    def _headed(self, status: Status, message: Tensor = NOTHING) -> Tensor:
        header = Header(status, NO_PARAMETER, self.service.updates, self._step.digest, message.numel(), [])
        return torch.cat([header.pack(), message])
