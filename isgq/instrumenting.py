"""instrument(): what a user asks for, and what it means."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from isgq.aggregate import AggregateName, InlineBytes
from isgq.choice import Scope, choose, predicate
from isgq.codecs.roles import MemoryPolicy
from isgq.core.errors import OptionError
from isgq.core.registry import AnyCodec
from isgq.exchange import Exchange
from isgq.planner import RoutePolicy
from isgq.scaling import LossScale
from isgq.session import Session

_INLINE_LIMIT = 1 << 30


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
    scaler: torch.amp.GradScaler | None = None,
    check_replicas: int = 0,
    skip_weight_grad: bool = True,
    bucket_cap_mb: float | None = None,
    inline_bytes: InlineBytes = 0,
    log: Callable[[str], None] | None = None,
) -> Session:
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
        scaler: the GradScaler that scales the loss, if one does; see :mod:`isgq.scaling`.
        check_replicas: every so many steps, compare hashes of all parameters between the ranks; 0 never.
        skip_weight_grad: do not let autograd make the gradient of a weight that travels as factors, where the mean
            replaces it at once: less work, and the same ``.grad`` after backward. False makes it all the same; see
            :mod:`isgq.sparing`. Concerns ``sync="backward"`` alone.
        bucket_cap_mb: encode, send and decode while backward goes on: records of so many MiB of float32 gradients go
            together as soon as these are there, see :mod:`isgq.overlap`. The same gradients; a few more bytes; worth it
            where the link takes about as long as the backward pass. None: all goes when backward ends. With
            ``aggregate="gather"`` and ``sync="backward"``.
        inline_bytes: so many bytes of each rank's message travel with the header, filled up with zeros where the
            message is shorter. If all messages fit (``session.messages().up`` tells how long they are), a step waits
            for the link once instead of twice, which halves what latency takes. ``"auto"`` makes room for a little
            more than the longest message of the step before, up to 64 KiB. With ``aggregate="gather"``.
        log: where the one report of parameters without factors goes; by default ``warnings.warn`` for those that a
            user would not expect.

    Raises:
        InstrumentError: the model is instrumented already, wrapped, sharded, compiled, or has no trainable parameter.
        OptionError: unknown codec or option, or a name or pattern in ``skip`` that means no parameter.
        MismatchError: the ranks disagree on model, codec, seed or version.
        ExchangeError: a rank is missing.
    """
    choice = choose(codec, dense, scope, aggregate, down, memory, max_staleness)
    if bucket_cap_mb is not None:
        _check_overlap(bucket_cap_mb, choice.aggregate, sync)
    if inline_bytes:
        choice = replace(choice, inline_bytes=_checked_inline(inline_bytes, choice.aggregate))
    scale, skips = LossScale(scaler), skip_weight_grad
    return Session(
        *(model, choice, exchange, _checked(skip, model), routes, sync, seed, scale),
        *(check_replicas, skips, bucket_cap_mb, log),
    )


def _checked(skip: str | Collection[str] | Callable[[str], bool], model: nn.Module) -> Callable[[str], bool]:
    """The predicate; OptionError where a name or pattern means no parameter, which would go unnoticed."""  # noqa: DOC501
    skip = skip if isinstance(skip, str) or callable(skip) else tuple(skip)  # which may be read only once
    chosen, names = predicate(skip), [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wrong = [name for name in skip if name not in names] if not isinstance(skip, str) and not callable(skip) else []
    if isinstance(skip, str) and not any(map(chosen, names)):
        wrong = [skip]
    if wrong:
        raise OptionError(
            f"skip={', '.join(map(repr, wrong))}: no parameter of the model is meant; there are {', '.join(names[:8])}"
            + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        )
    return chosen


def _check_overlap(cap_mb: float, aggregate: AggregateName, sync: str) -> None:
    """Refuse what cannot overlap.

    Raises:
        OptionError: always then.
    """
    if isinstance(cap_mb, str) or not 0 < cap_mb < float("inf"):
        raise OptionError(f"bucket_cap_mb={cap_mb} must be a positive number of MiB, or None to send nothing ahead")
    if aggregate != "gather" or sync != "backward":
        raise OptionError(
            f"bucket_cap_mb={cap_mb} sends ahead during backward, in one pass: it takes aggregate='gather', no "
            f"subspace (which makes two passes) and sync='backward', got {aggregate!r} and {sync!r}"
        )


def _checked_inline(size: InlineBytes, aggregate: AggregateName) -> InlineBytes:
    """The same.

    Raises:
        OptionError: it is none, or the messages are not for all ranks.
    """
    fits = isinstance(size, int) and not isinstance(size, bool) and 0 < size < _INLINE_LIMIT
    if size != "auto" and not fits:
        raise OptionError(
            f"inline_bytes={size!r} must be 'auto' or a whole number of bytes from 0 to {_INLINE_LIMIT - 1}; about as "
            "many as messages have, as every rank sends so many in every step"
        )
    if aggregate != "gather":
        raise OptionError(
            f"inline_bytes={size} sends messages for all ranks with the headers, in one pass: it takes "
            f"aggregate='gather' and no subspace (which makes two passes), got {aggregate!r}"
        )
    return size
