"""When kernels are used, what is said meanwhile, and that nothing depends on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QUANTIZE = """
import sys, torch
from isgq.codecs.dithered import Dithered
from isgq.core.keys import Key
assert "numba" not in sys.modules, "importing the package must not import numba"
payload = Dithered(levels=3).encode(torch.linspace(-1, 1, 1000), Key("w"))
print(hash(tuple(payload.symbols["levels"].values.tolist())), "isgq.core.kernels.quantize" in sys.modules)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def plain() -> str:
    result = run(QUANTIZE, ISGQ_KERNELS="0")
    assert result.stderr == ""
    symbols, used = result.stdout.split()
    assert used == "False"
    return symbols


def test_processes_that_start_together_compile_once_and_say_so(tmp_path: Path, plain: str) -> None:
    cold = [
        subprocess.Popen(
            [sys.executable, "-c", QUANTIZE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in cold:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.split() == [plain, "True"]
        assert err.startswith("isgq: compiling")
        assert err.count("\n") == 1
    warm = run(QUANTIZE, NUMBA_CACHE_DIR=str(tmp_path))
    assert warm.stdout.split() == [plain, "True"]
    assert warm.stderr == ""


def test_without_the_compiler_plain_code_serves_and_one_line_says_so(plain: str) -> None:
    result = run("import sys; sys.modules['numba'] = None\n" + QUANTIZE.replace('assert "numba"', 'True or "numba"'))
    assert result.stdout.split() == [plain, "False"]
    assert result.stderr.startswith("isgq: no compiled kernels, plain code is used")
    assert result.stderr.count("\n") == 1


def test_without_the_compiler_for_gpus_one_line_says_so() -> None:
    result = run("""
import sys, torch
sys.modules["triton"] = None
from isgq.core.kernels import compiled
print([compiled(module, torch.device("cuda")) for module in ("quantize", "quantize", "search", "coding", "laplace")])
""")
    assert result.stdout.split() == ["[None,", *["None,"] * 3, "None]"]
    assert result.stderr.startswith("isgq: no compiled kernels, plain code is used")
    assert result.stderr.count("\n") == 1


def test_kernels_for_gpus_are_turned_off_like_others() -> None:
    result = run(
        """
import sys, torch
from isgq.core.kernels import compiled
print(compiled("quantize", torch.device("cuda")), "triton" in sys.modules)
""",
        ISGQ_KERNELS="0",
    )
    assert result.stdout.split() == ["None", "False"]
    assert result.stderr == ""


def test_without_a_place_to_keep_machine_code_plain_code_serves(tmp_path: Path, plain: str) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")  # no folder can be made in it
    refuse = """
from numba.core import caching
for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda *_: None)
sys.modules.pop("numba")
"""
    result = run(QUANTIZE.replace("payload =", refuse + "payload ="), NUMBA_CACHE_DIR=str(nowhere))
    assert result.stdout.split() == [plain, "False"]
    assert "no locator available" in result.stderr
    assert result.stderr.count("\n") == 1
