"""Finished runs as files, so that none is made twice: one JSON file a run, found by all that decides its result."""

import dataclasses
import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import isgq
from analysis.report import ReportError
from analysis.runs import write_atomically
from benchmarks.simulation import Outcome, Point, simulate
from isgq.launch import follow_parent
from training.config import Config

_WITHOUT_EFFECT = {"out", "resume", "telemetry", "timeout"}
_DEFAULT = Config()


def settings(config: Config) -> dict[str, Any]:
    """What decides a run's result, as far as it is not the default."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(Config)
        if field.name not in _WITHOUT_EFFECT and getattr(config, field.name) != getattr(_DEFAULT, field.name)
    }


def path_of(config: Config, folder: Path) -> Path:
    """Where a run is kept."""
    digest = hashlib.blake2b(json.dumps(settings(config), sort_keys=True).encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._=]+", "-", f"{config.model}-{Path(config.data).name}-{config.codecs[0]}").strip("-")
    return folder / f"{name}-{digest}.json"


def load(config: Config, folder: Path) -> Outcome | None:
    """A finished run; None where there is none.

    Raises:
        ReportError: the file is of another form; the message says what to do.
    """
    path = path_of(config, folder)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        points = [Point(**point) for point in content["points"]]
        return Outcome(config, points, **{name: content[name] for name in ("sent", "moved", "parameters", "seconds")})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ReportError(f"{path} is no finished run ({type(error).__name__}: {error}): remove it") from error


def run(config: Config, folder: Path) -> Outcome:
    """A run, made now if it is not there."""
    outcome = load(config, folder)
    if outcome is None:
        outcome = simulate(config)
        content = asdict(dataclasses.replace(outcome, config=_DEFAULT)) | {"config": settings(config)}
        versions = {"torch": str(torch.__version__), "isgq": isgq.__version__}
        folder.mkdir(parents=True, exist_ok=True)
        content |= {"simulated_workers": True, "versions": versions}
        write_atomically(path_of(config, folder), json.dumps(content, indent=1) + "\n")
        print(f"{config.codecs[0]}, rate {config.lr:g}, seed {config.seed}: {outcome.loss:.4f}", file=sys.stderr)
    return outcome


def _begin() -> None:
    """Prepare a process for runs."""
    threading.Thread(target=follow_parent, daemon=True).start()
    torch.set_num_threads(1)


def run_all(configs: Iterable[Config], folder: Path, processes: int) -> list[Outcome]:
    """The same for many, in so many processes of one thread each."""
    wanted = list(configs)
    if processes == 1:
        return [run(config, folder) for config in wanted]
    missing = list(dict.fromkeys(config for config in wanted if load(config, folder) is None))
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin) as pool:
        list(pool.map(partial(run, folder=folder), missing))
    return [run(config, folder) for config in wanted]
