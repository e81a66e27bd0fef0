"""What the ranks must agree on before the first step, and in the header of every step; pure checks on what came."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from isgq.core.errors import EmptyBatchError, MismatchError, PeerError, PeerNonFiniteError
from isgq.wire.header import NO_PARAMETER, PROTOCOL, Header, Status


def introduce(model: nn.Module, settings: Mapping[str, str]) -> Tensor:
    """This rank's introduction: uint8 JSON of protocol, settings and a digest of the model's parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors]
    text = {
        "protocol": str(PROTOCOL),
        **settings,
        "parameters": str(sum(p.requires_grad for p in model.parameters())),
        "model": hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest(),
    }
    return torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)


def check_introductions(messages: Sequence[Tensor]) -> None:
    """All ranks must have introduced themselves alike.

    Raises:
        MismatchError: they differ; the message names the rank, the setting and both values.
    """
    try:
        texts = [json.loads(message.cpu().numpy().tobytes()) for message in messages]
    except ValueError as error:
        raise MismatchError(
            f"a rank's introduction cannot be read ({error}): do all ranks run the same version?"
        ) from error
    for rank, text in enumerate(texts):
        for setting in sorted(set(texts[0]) | set(text)):
            if text.get(setting) != texts[0].get(setting):
                raise MismatchError(
                    f"rank {rank} has {setting} = {text.get(setting)}, rank 0 has {setting} = {texts[0].get(setting)}; "
                    "all ranks must instrument the same model with the same settings"
                )


def plan_digest(spec: str, routes: Sequence[str]) -> int:
    """32 bits that all ranks' headers must share."""
    return zlib.crc32(f"{spec} {','.join(routes)}".encode())


def check_headers(headers: Sequence[Header], names: Sequence[str]) -> None:
    """All ranks must be at the same step of the same plan, and able to take part.

    Args:
        headers: by rank.
        names: of all parameters, in the order of the headers' bitmaps.

    Raises:
        MismatchError: steps or plans differ.
    """
    for rank, header in enumerate(headers):
        if header.step != headers[0].step:
            raise MismatchError(
                f"rank {rank} is at step {header.step}, rank 0 at step {headers[0].step}: did a rank skip a backward "
                "pass, or resume from another checkpoint?"
            )
        if header.digest != headers[0].digest:
            raise MismatchError(f"rank {rank} and rank 0 follow different plans at step {header.step}")
    for rank, header in enumerate(headers):
        if header.status is not Status.OK:
            name = "" if header.parameter == NO_PARAMETER else names[header.parameter]
            _refuse(rank, header, name)


def _refuse(rank: int, header: Header, name: str) -> NoReturn:
    where = f"rank {rank}, step {header.step}" + (f", parameter {name!r}" if name else "")
    if header.status is Status.NON_FINITE:
        raise PeerNonFiniteError(
            f"{where}: NaN or Inf in the gradient or its factors; no rank has applied this step. Look for a diverging "
            "loss, a bad sample or an overflow in reduced precision"
        )
    if header.status is Status.EMPTY_BATCH:
        raise EmptyBatchError(
            f"{where}: the batch is empty, so this rank has no gradient to average; no rank has applied this step. "
            "Give every rank at least one sample, for instance by drop_last=True"
        )
    raise PeerError(
        f"{where}: the gradient could not be encoded; no rank has applied this step. See that rank's own error"
    )
