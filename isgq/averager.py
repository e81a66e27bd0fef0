"""Mean over ranks of named tensors, each compressed by a direct codec: the road without capture and reconstruction.

Used by the hook for DistributedDataParallel and by federated rounds.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isgq.aggregate import Step
from isgq.aggregation import aggregation
from isgq.choice import Choice
from isgq.exchange import Exchange
from isgq.records import Carrier
from isgq.resume import pick
from isgq.routing import direct_carriers


class Averager:
    """Averages tensors over all ranks.

    Args:
        choice: with a direct codec.
        seed: of the codecs' randomness; the same on every rank.
        exchange: the transport.
        like: all tensors that will come, by name, so that shards are cut once and level; one that is not among them
            is cut by itself. Cuts never depend on what else is in a call, because memory is kept by them.
    """

    def __init__(self, choice: Choice, seed: int, exchange: Exchange, like: Mapping[str, Tensor]) -> None:
        self.exchange = exchange
        self._choice, self._seed = choice, seed
        self._aggregate = aggregation(choice, exchange)
        self._carriers: dict[str, list[Carrier]] = {}
        self._cut(like)

    def _cut(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._choice.direct is not None
        for carrier in direct_carriers(self._choice.direct, tensors, "tensor", [0] * self._aggregate.servers):
            self._carriers.setdefault(carrier.names[0], []).append(carrier)

    def __call__(self, tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Compress every tensor, exchange, average. A collective call; :meth:`commit` ends a step of one or more.

        Args:
            tensors: name -> tensor; the same names, order and shapes on every rank.
            step: number of the step; the same on every rank.

        Returns:
            name -> mean, in the tensor's shape, dtype and device.

        Raises:
            PeerError: some rank cannot take part; the same error on every rank.
            MismatchError: the ranks differ in codec, names, shapes or step.
            WireError: a message is corrupt.
            CodecError: a message does not fit.
        """
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        digest = zlib.crc32("\n".join([self._choice.spec, str(self._seed), *shapes]).encode())
        names = tuple(tensors)
        for name, tensor in tensors.items():
            if name not in self._carriers:
                self._cut({name: tensor})
        carriers = [carrier for name in names for carrier in self._carriers[name]]
        this = Step(step, digest, self._seed, names, [True] * len(names), carriers, tensors)
        outgoing = self._aggregate.encode(this)
        means = self._aggregate.reduce(this, outgoing, self._aggregate.agree(this, outgoing))
        return {name: means[name].to(tensor.device, tensor.dtype) for name, tensor in tensors.items()}

    def commit(self) -> None:
        """The step was applied: nothing of it is taken back any more."""
        self._aggregate.commit()

    def state_dict(self) -> dict[str, Any]:
        """This rank's codecs and memories."""
        return {
            "seed": self._seed,
            "codec": self._choice.spec,
            "rank": self.exchange.rank,
            "world_size": self.exchange.world_size,
            "memory": self._aggregate.save_memories(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken on this rank.

        Raises:
            MismatchError: the state is of another codec, seed, rank or number of ranks.
        """
        expected = {"seed": self._seed, "codec": self._choice.spec}
        own = pick([state], expected, self.exchange.rank, self.exchange.world_size, "error")
        self._aggregate.load_memories(own["memory"])
