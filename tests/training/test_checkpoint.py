"""Checkpoints: whole or refused, never half; the last good one survives whatever happens to the next."""

import os
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from analysis.runs import write_atomically
from isgq.core.errors import RankError
from isgq.launch import launch
from training.checkpoint import CheckpointError, check_resume, read, restore, save
from training.config import Config, Run
from training.images import Images

SETTINGS = {"codec": "isgq", "lr": 0.1}


class Memories:
    """The part of a road that a checkpoint knows."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "memory": torch.full((7,), float(dist.get_rank()) if dist.is_initialized() else 0)
        }
        self.before: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        self.before()
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def parts() -> tuple[Any, ...]:
    """Task, model, optimizer and road."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return Images.__new__(Images), model, optimizer, Memories()


def write(path: Path, epoch: int, made: tuple[Any, ...]) -> None:
    save(path, SETTINGS, epoch, torch.arange(4.0), *made)


def saved(folder: str) -> None:
    write(Path(folder) / "run.pt", 1, parts())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("checkpoint")
    launch(saved, 2, args=(str(folder),))
    assert [path.name for path in folder.iterdir()] == ["run.pt"]
    return (folder / "run.pt").read_bytes()


def put(folder: Path, content: bytes) -> Path:
    path = folder / "run.pt"
    path.write_bytes(content)
    return path


def test_it_comes_back_as_it_was(checkpoint: bytes, tmp_path: Path) -> None:
    path = put(tmp_path, checkpoint)
    content = read(path)
    assert (content["settings"], content["epoch"], len(content["workers"])) == (SETTINGS, 1, 2)
    assert content["workers"][1]["road"]["memory"].tolist() == [1.0] * 7
    check_resume(path, SETTINGS, 1)
    with pytest.raises(CheckpointError, match=r"was made with lr=0\.1"):
        check_resume(path, SETTINGS | {"lr": 0.2}, 1)
    with pytest.raises(CheckpointError, match="was made with epochs=1"):
        check_resume(path, SETTINGS, 0)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_one_is_refused(checkpoint: bytes, tmp_path: Path, share: float) -> None:
    path = put(tmp_path, checkpoint[: int(share * len(checkpoint))])
    with pytest.raises(CheckpointError, match=r"no whole checkpoint .*; remove it, or choose another --out"):
        read(path)


def test_one_changed_bit_of_a_weight_is_noticed(checkpoint: bytes, tmp_path: Path) -> None:
    """The reader of torch alone takes it for another weight."""
    weight = parts()[1].weight.detach().numpy().tobytes()
    at = checkpoint.index(weight) + 5
    path = put(tmp_path, checkpoint[:at] + bytes([checkpoint[at] ^ 4]) + checkpoint[at + 1 :])
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["weight"], parts()[1].weight)
    with pytest.raises(CheckpointError, match="is damaged"):
        read(path)


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_one_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    torch.save({"settings": {}, "epoch": 1, "workers": [Hostile(tmp_path / "ran")], "model": {}, "optimizer": {}}, path)
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        read(path)
    assert not (tmp_path / "ran").exists()


def test_one_that_grows_when_it_is_read_is_refused_unread(checkpoint: bytes, tmp_path: Path) -> None:
    path, bomb = put(tmp_path, checkpoint), tmp_path / "bomb.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.namelist():
            new.writestr(record, bytes(64 << 20) if record.endswith("data/0") else old.read(record))
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match="a record is compressed"):
        read(bomb)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": {}}, "entry workers is dict, expected list"),
        ({"workers": [{"road": {}}]}, "expected the entries road, task, spent"),
        ({"more": 1}, "expected the entries settings"),
        ({"epoch": "1"}, "entry epoch is str, expected int"),
    ],
)
def test_one_of_another_form_is_refused(checkpoint: bytes, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = put(tmp_path, checkpoint)
    torch.save(torch.load(path, weights_only=True) | change, path)
    with pytest.raises(CheckpointError, match=said):
        read(path)


def alone(folder: str, changes: list[dict[str, Any]]) -> list[str]:
    said = []
    for change in changes:
        path = Path(folder) / "run.pt"
        torch.save(torch.load(path, weights_only=True) | change, other := Path(folder) / "other.pt")
        try:
            restore(other, *parts())
            said.append("fine")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_one_that_does_not_fit_the_run_is_refused(checkpoint: bytes, tmp_path: Path) -> None:
    put(tmp_path, checkpoint)
    changes: list[dict[str, Any]] = [{}, {"model": {}}, {"optimizer": {"state": 3}}, {"workers": []}]
    [[fine, *refused]] = launch(alone, 1, args=(str(tmp_path), changes))
    assert fine == "fine"
    assert all("does not fit this run" in said for said in refused)


def disk_full(folder: str) -> str:
    path, made = Path(folder) / "run.pt", parts()
    write(path, 1, made)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        write(path, 2, made)
    except CheckpointError as error:
        return str(error)
    return "fine"


def test_a_full_disk_is_one_error_on_all_ranks_and_leaves_the_last_good_one(tmp_path: Path) -> None:
    said = launch(disk_full, 2, args=(str(tmp_path),))
    assert said[0] == said[1]
    assert "the checkpoint of epoch 2 cannot be written to" in said[0]
    assert "that of epoch 1 is still there. Make room and go on with --resume" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert read(tmp_path / "run.pt")["epoch"] == 1


def test_what_stops_between_writing_and_renaming_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order = tmp_path / "file", []
    write_atomically(path, "old")
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        order.append("flush")
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        order.append("rename")
        assert source.read_bytes() == b"new"
        assert target.read_text() == "old"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(path, b"new")
    assert path.read_text() == "new"
    assert order == ["flush", "rename", "flush"]


def interrupted(folder: str, how: int) -> str:
    path, made = Path(folder) / "run.pt", parts()
    write(path, 1, made)
    if dist.get_rank() == 1:
        made[3].before = lambda: os.kill(os.getpid(), how)
    try:
        write(path, 2, made)
    except Exception as error:
        (Path(folder) / "said").write_text(f"{type(error).__name__}: {error}")
        raise
    return "fine"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_ends_while_checkpointing_is_missed_and_the_last_good_one_stays(tmp_path: Path, how: int) -> None:
    with pytest.raises(RankError, match=r"ExchangeError|killed"):
        launch(interrupted, 2, args=(str(tmp_path), how), timeout=5)
    assert (tmp_path / "said").read_text().startswith("ExchangeError: rank 0 of 2")
    assert read(tmp_path / "run.pt")["epoch"] == 1


def test_a_run_says_so_in_one_line(checkpoint: bytes, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from train import main

    config = Config(model="fc:hidden=16", data="mnist5k", workers=(2,), out=tmp_path)
    put(tmp_path, checkpoint[:-100]).rename(tmp_path / f"{Run('isgq', 2, config.batch_of_each(2)).name}.pt")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options = ["--model", "fc:hidden=16", "--workers", "2", "--out", str(tmp_path), "--resume"]
    monkeypatch.setattr("sys.argv", ["train.py", *options])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no whole checkpoint" in said
