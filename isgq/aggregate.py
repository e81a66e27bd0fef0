"""Mean over ranks of named tensors, each compressed by a direct codec: the road without capture and reconstruction.

Used by the DDP hook, by federated rounds and by sessions without factors. One header and one message a call; every
rank decodes all messages in rank order, so every rank holds the same bits.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isgq.agreement import check_headers
from isgq.codecs.feedback import memory_of
from isgq.core.codec import Codec
from isgq.core.errors import CodecError, NonFiniteError
from isgq.core.keys import Key
from isgq.core.payload import Payload
from isgq.core.registry import spec_of
from isgq.exchange import Exchange
from isgq.wire import pack_message, unpack_message
from isgq.wire.header import NO_PARAMETER, Header, Status


def gather_mean(
    exchange: Exchange, codec: Codec, tensors: Mapping[str, Tensor], *, seed: int, step: int
) -> dict[str, Tensor]:
    """Compress every tensor, all-gather, decode, average. A collective call.

    Args:
        exchange: the transport.
        codec: any direct codec; its memory, if it has one, is rolled back where the ranks refuse the step.
        tensors: name -> tensor; the same names, order and shapes on every rank.
        seed: of the codec's randomness.
        step: number of the call; the same on every rank.

    Returns:
        name -> mean, in the tensor's shape, dtype and device.

    Raises:
        PeerError: some rank cannot take part; the same error on every rank.
        MismatchError: the ranks differ in codec, names, shapes or step.
        WireError: a message is corrupt.
        CodecError: a message does not fit.
    """
    names = list(tensors)
    records, failure, error = _encode(codec, tensors, seed, step, exchange.rank)
    message = pack_message(records)[0] if failure[0] is Status.OK else torch.empty(0, dtype=torch.uint8)
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    digest = zlib.crc32("\n".join([spec_of(codec), str(seed), *shapes]).encode())
    mine = Header(failure[0], failure[1], step, digest, message.numel(), []).pack()
    gathered = exchange.all_gather(mine, [mine.numel()] * exchange.world_size).wait()
    headers = [Header.unpack(raw, 0) for raw in gathered]
    try:
        check_headers(headers, names)
    except Exception as refusal:
        memory = memory_of(codec)
        if memory is not None:
            memory.rollback()
        raise refusal from error
    messages = exchange.all_gather(message, [header.length for header in headers]).wait()
    return _decode(codec, tensors, messages)


def _encode(
    codec: Codec, tensors: Mapping[str, Tensor], seed: int, step: int, rank: int
) -> tuple[list[Payload], tuple[Status, int], Exception | None]:
    records: list[Payload] = []
    for index, (name, tensor) in enumerate(tensors.items()):
        parameter = min(index, NO_PARAMETER)
        try:
            records.append(codec.encode(tensor.detach(), Key(name, seed, step, rank)))
        except NonFiniteError as error:
            return [], (Status.NON_FINITE, parameter), error
        except Exception as error:  # any failure must reach the other ranks before it is raised here
            return [], (Status.FAILED, parameter), error
    return records, (Status.OK, NO_PARAMETER), None


def _decode(codec: Codec, tensors: Mapping[str, Tensor], messages: Sequence[Tensor]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for rank, message in enumerate(messages):
        records = unpack_message(message)
        if len(records) != len(tensors):
            raise CodecError(f"rank {rank} sent {len(records)} records for {len(tensors)} tensors")
        for (name, tensor), record in zip(tensors.items(), records, strict=True):
            part = decode_direct(codec, record, name, tensor)
            totals[name] = totals[name] + part if name in totals else part
    return {name: (total / len(messages)).to(tensors[name].dtype) for name, total in totals.items()}


def decode_direct(codec: Codec, record: object, name: str, like: Tensor) -> Tensor:
    """Decode one record into at least float32, in the shape and on the device of ``like``.

    Raises:
        CodecError: the record is no payload of that shape.
    """
    if not isinstance(record, Payload) or record.shape != tuple(like.shape):
        raise CodecError(
            f"{name!r} of shape {tuple(like.shape)} came as {getattr(record, 'shape', type(record).__name__)}"
        )
    return codec.decode(record).to(like.device, torch.promote_types(like.dtype, torch.float32))
