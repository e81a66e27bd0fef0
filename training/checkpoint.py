"""A run's state in one file: the model, the optimizer, and what each worker has of its own."""

import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isgq.core.errors import OptionError
from training.config import Config, Run
from training.road import Road
from training.task import Task


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
    """Write the state of all workers as one file: a reader finds the old one or the new one."""
    states: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object({"road": road.state_dict(), "task": task.state_dict(), "spent": spent}, states)
    if states is not None:
        content = {"settings": made_with, "epoch": epoch, "workers": states}
        content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, path)


def restore(
    path: Path, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, road: Road
) -> tuple[int, Tensor]:
    """Read what :func:`save` wrote: epochs done, and this worker's bytes and seconds."""
    content = torch.load(path, weights_only=True)
    mine = content["workers"][dist.get_rank()]
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    road.load_state_dict(mine["road"])
    task.load_state_dict(mine["task"])
    return content["epoch"], mine["spent"]


def check_resume(path: Path, wanted: dict[str, Any], epochs: int) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        OptionError: it is none, was made with other settings, or is further than asked for.
    """
    try:
        content = torch.load(path, weights_only=True, mmap=True)
        made_with, done = content["settings"], content["epoch"]
    except (RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise OptionError(f"{path} is no checkpoint of train.py; remove it or choose another --out") from error
    changed = [f"{k}={made_with.get(k)!r}" for k, value in wanted.items() if made_with.get(k) != value]
    if changed or done > epochs:
        was = ", ".join(changed) or f"epochs={done}"
        raise OptionError(f"{path} was made with {was}: use the same, or another --out")
