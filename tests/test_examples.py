"""The examples run as their first lines say, on two processes, learn, and save bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")


def run(example: str, *launcher: str) -> tuple[float, int]:
    """The accuracy and the compression that an example prints, once."""
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path}, timeout=300)
    assert done.returncode == 0, done.stderr
    [(accuracy, compression)] = re.findall(r"accuracy ([\d.]+), (\d+) times fewer bytes", done.stdout)
    return float(accuracy), int(compression)


def test_torchrun() -> None:
    accuracy, compression = run("torchrun_loop.py", *TORCHRUN)
    assert accuracy > 0.9
    assert compression > 40


def test_federated_rounds_learn_what_no_rank_has_alone() -> None:
    accuracy, compression = run("federated_loop.py", *TORCHRUN)
    assert accuracy > 0.9
    assert compression > 15


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="needs the extra 'examples': pip install '.[examples]'")
    accuracy, compression = run("accelerate_loop.py", *ACCELERATE)
    assert accuracy > 0.9
    assert compression > 40


def test_lightning_fabric() -> None:
    pytest.importorskip("lightning", reason="needs the extra 'examples': pip install '.[examples]'")
    accuracy, compression = run("fabric_loop.py")
    assert accuracy > 0.9
    assert compression > 40
