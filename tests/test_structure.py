"""Who may import whom, how long a file may be, and that importing does nothing else."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = {"isgq.layers", "isgq.codecs", "isgq.wire", "isgq.exchange"}
ALLOWED = {
    "isgq.core": set(),
    **{stage: {"isgq.core", stage} for stage in STAGES},
    "isgq.planner": {"isgq.core", *STAGES},
    "isgq.agreement": {"isgq.core", "isgq.wire"},
    "isgq.rows": set(),
    "isgq.records": {"isgq.core", "isgq.planner", "isgq.rows", "isgq.windows", *STAGES},
    "isgq.correspondence": {"isgq.core", "isgq.records", *STAGES},
    "isgq.aggregate": {"isgq.core", "isgq.agreement", "isgq.correspondence", "isgq.records", "isgq.rows", *STAGES},
    "models": {"models"},
    "data": {"data"},
    "analysis": {"isgq", "models", "data", "training", "analysis", "train"},
    "benchmarks": {"isgq", "models", "data", "analysis", "training", "benchmarks"},
    "training": {"isgq", "models", "data", "analysis", "training"},
    "train": {"isgq", "models", "data", "analysis", "training"},
}
FOLDERS = ("isgq", "models", "data", "training", "analysis", "benchmarks")
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
FILES.append(Path("train.py"))
OURS = {"isgq", "models", "data", "training", "analysis", "benchmarks", "train", "tests"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    allowed = next((a | {p} for p, a in ALLOWED.items() if within(name, p)), {"isgq"})
    for imported in imports(path):
        if imported.split(".")[0] in OURS:
            assert any(within(imported, package) for package in allowed), f"{path} imports {imported}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "isgq"], ids=str)
def test_no_file_holds_two_things(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= 400


SCRIPT = """
import threading, time
import numpy, torch
state, threads, seed = torch.get_rng_state(), threading.active_count(), numpy.random.get_state()[1].tolist()
start = time.perf_counter()
import isgq
print(time.perf_counter() - start)
for name in isgq.__all__:  # which imports all that a user may name
    getattr(isgq, name)
assert torch.equal(state, torch.get_rng_state())
assert seed == numpy.random.get_state()[1].tolist()
assert threads == threading.active_count()
assert torch.get_default_dtype() == torch.float32 and not torch.distributed.is_initialized()
"""


def test_importing_does_nothing_else_and_is_quick() -> None:
    result = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 0.2
