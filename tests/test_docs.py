"""The code in the documents runs."""

import re
from pathlib import Path

import pytest

from isgq.core import registry

ROOT = Path(__file__).parent.parent


def blocks(path: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL))


def test_the_example_codec_is_short_and_passes_every_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # other tests must not find it
    code = blocks("docs/adding-a-codec.md")
    first = code.split("\n\n\n")[1]
    assert len(first.strip().splitlines()) <= 30
    exec(compile(code, "docs/adding-a-codec.md", "exec"), {"__name__": "example"})
