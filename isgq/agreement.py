"""What the ranks must agree on before the first step, and in the header of every step; pure checks on what came.

Every check looks at the same messages in the same order on every rank, so all ranks go on or all raise the same error.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
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


def replica_digests(parameters: Iterable[Tensor]) -> Tensor:
    """64 bits of each parameter's content: uint8 ``[8 * parameters]``."""
    contents = (p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for p in parameters)
    digests = b"".join(hashlib.blake2b(content.tobytes(), digest_size=8).digest() for content in contents)
    return torch.frombuffer(bytearray(digests), dtype=torch.uint8)


def check_replicas(digests: Sequence[Tensor], headers: Sequence[Header], names: Sequence[str]) -> None:
    """All ranks that take part must hold the same bits.

    Args:
        digests: by rank, as :func:`replica_digests` makes them.
        headers: by rank; one that has no more batches has stopped following.
        names: of the parameters.

    Raises:
        MismatchError: they do not; the message names the rank and its first parameter that differs.
    """
    present = [rank for rank, header in enumerate(headers) if header.status is Status.OK]
    for rank in present[1:]:
        wrong = (digests[rank] != digests[present[0]]).view(-1, 8).any(1).nonzero()
        if wrong.numel():
            raise MismatchError(
                f"rank {rank}, step {headers[rank].step}, parameter {names[int(wrong[0])]!r}: holds other bits than on "
                f"rank {present[0]}, and so do {wrong.numel() - 1} more; the replicas have drifted apart. Did a rank "
                "step its optimizer on other gradients, load another checkpoint, or compute on other hardware?"
            )


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
        if header.status not in {Status.OK, Status.DONE}:
            name = "" if header.parameter == NO_PARAMETER else names[header.parameter]
            _refuse(rank, header, name)


def _refuse(rank: int, header: Header, name: str) -> NoReturn:
    where = f"rank {rank}, step {header.step}" + (f", parameter {name!r}" if name else "")
    if header.status is Status.NON_FINITE:
        raise PeerNonFiniteError(
            f"{where}: NaN or Inf in the gradient or its factors; no rank has applied this step. Look for a diverging "
            "loss, a bad sample or an overflow in reduced precision (with a GradScaler: instrument(..., scaler=...))"
        )
    if header.status is Status.EMPTY_BATCH:
        raise EmptyBatchError(
            f"{where}: the batch is empty, so this rank has no gradient to average; no rank has applied this step. "
            "Give every rank at least one sample, for instance by drop_last=True"
        )
    raise PeerError(
        f"{where}: the gradient could not be encoded; no rank has applied this step. See that rank's own error"
    )
