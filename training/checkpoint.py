"""A run's state in one file: the model, the optimizer, and what each worker has of its own.

The file is one of ``torch.save``: a zip archive of plainly stored records. It is written aside, flushed to the disk and
then renamed, so there is always a whole one. When it is read, every record must have its CRC-32 and no record may claim
more bytes than the file has; only tensors and plain types are built (``weights_only``), never code; and the content
must have the form that :func:`save` gives it.
"""

import io
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from analysis.runs import write_atomically
from isgq.core.errors import IsgqError
from isgq.exchange import TorchExchange
from training.config import Config, Run
from training.road import Road
from training.task import Task

_FORM = {"settings": dict, "epoch": int, "workers": list, "model": dict, "optimizer": dict}
_OWN = {"road": dict, "task": dict, "spent": Tensor}  # of each worker


class CheckpointError(IsgqError, OSError):
    """A checkpoint that cannot be written; or a file that is none, or one of something else."""


def settings(config: Config, run: Run) -> dict[str, Any]:
    """What must be the same to resume; a constant learning rate may go on for more epochs."""
    keep = ["dense", "routes", "model", "data", "standardize", "sequence", "epoch_steps", "lr", "momentum", "clip"]
    keep += ["schedule", "seed", "memory"]
    keep += ["epochs"] if config.schedule == "cosine" else []
    return asdict(run) | {name: asdict(config)[name] for name in keep}


def save(
    path: Path,
    made_with: dict[str, Any],
    epoch: int,
    spent: Tensor,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    road: Road,
) -> None:
    """Write the state of all workers as one file: a reader finds the old one or the new one. A collective call.

    Raises:
        CheckpointError: it cannot be written; on every worker alike. The old one stays.
        ExchangeError: a worker is missing.
    """
    states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    problem: list[str | None] = [None]
    with TorchExchange().guarded():
        dist.gather_object({"road": road.state_dict(), "task": task.state_dict(), "spent": spent}, states)
        if states is not None:
            content = {"settings": made_with, "epoch": epoch, "workers": states}
            content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            file = io.BytesIO()
            torch.save(content, file)
            try:
                write_atomically(path, file.getbuffer())
            except OSError as error:
                problem = [f"{error.strerror or error}"]
        dist.broadcast_object_list(problem)
    if problem[0] is not None:
        kept = f"that of epoch {epoch - 1} is still there" if epoch > 1 else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of epoch {epoch} cannot be written to {path}: {problem[0]}; {kept}. "
            "Make room and go on with --resume"
        )


def read(path: Path) -> dict[str, Any]:
    """What :func:`save` wrote.

    Raises:
        CheckpointError: the file is something else, was cut or changed, or would run code.
    """
    try:
        _check_records(path)
        content = torch.load(path, weights_only=True)
        _check_form(content, _FORM)
        for mine in content["workers"]:
            _check_form(mine, _OWN)
    except Exception as error:  # whatever a hostile file makes the readers of torch raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"{path} is no whole checkpoint of train.py ({reason}); remove it, or choose another --out"
        ) from error
    found: dict[str, Any] = content
    return found


def _check_records(path: Path) -> None:
    """Every record must be there as it was written; ValueError where one is not."""  # noqa: DOC501
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("a record is compressed")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("the records claim more bytes than the file has")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"record {damaged} is damaged")


def _check_form(content: Any, form: dict[str, type]) -> None:
    if not isinstance(content, dict) or {*content} != {*form}:
        raise ValueError(f"expected the entries {', '.join(form)}")
    for name, kind in form.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"entry {name} is {type(content[name]).__name__}, expected {kind.__name__}")


def restore(
    path: Path, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, road: Road
) -> tuple[int, Tensor]:
    """Put back what :func:`save` wrote: epochs done, and this worker's bytes and seconds.

    Raises:
        CheckpointError: it does not fit this run, though it may say so.
    """
    content = read(path)
    try:
        mine = content["workers"][dist.get_rank()]
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        road.load_state_dict(mine["road"])
        task.load_state_dict(mine["task"])
    except (IsgqError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit this run ({error}); remove it, or choose another --out") from error
    return content["epoch"], mine["spent"]


def check_resume(path: Path, wanted: dict[str, Any], epochs: int) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        CheckpointError: it is none, was made with other settings, or is further than asked for.
    """
    content = read(path)
    made_with, done = content["settings"], content["epoch"]
    changed = [f"{k}={made_with.get(k)!r}" for k, value in wanted.items() if made_with.get(k) != value]
    if changed or not 0 <= done <= epochs:
        was = ", ".join(changed) or f"epochs={done}"
        raise CheckpointError(f"{path} was made with {was}: use the same, or another --out")
