"""The documents: their code runs, their links lead somewhere, what they name exists."""

import functools
import importlib
import re
from pathlib import Path

import pytest
from torch import nn

import isgq
from isgq.core import registry

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL))


def prose(page: Path) -> str:
    """Without code, in which brackets and hashes mean something else."""
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, by the rule that code hosts and the site share."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def named(path: str) -> object:
    """The object of a dotted name, in whatever module it is."""
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        return importlib.import_module(path)


def test_the_example_codec_is_short_and_passes_every_law(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isgq.codecs.codec_names()  # has registered all
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # other tests must not find it
    code = blocks("docs/adding-a-codec.md")
    first = code.split("\n\n\n")[1]
    assert len(first.strip().splitlines()) <= 30
    exec(compile(code, "docs/adding-a-codec.md", "exec"), {"__name__": "example"})


def test_the_quick_start_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("docs/quick-start.md"), "docs/quick-start.md", "exec"), {"__name__": "mine"})
    shown = re.findall(r"^[02]\.weight.*fewer bytes$", (ROOT / "docs/quick-start.md").read_text(), re.MULTILINE)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    for line, example in zip(lines, (line.split() for line in shown), strict=True):
        for column in (0, 1, 3):  # name, route, dense bytes; the coded bytes are those of random data
            assert line[column] == example[column]
        assert int(line[2].replace(",", "")) == pytest.approx(int(example[2].replace(",", "")), rel=0.1)


def test_the_others_see_as_much_as_the_page_on_privacy_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("docs/privacy.md"), "docs/privacy.md", "exec"), {"__name__": "privacy"})
    cosines = [float(value) for value in re.findall(r"tensor\((.*)\)", capsys.readouterr().out)]
    text = " ".join((ROOT / "docs/privacy.md").read_text().split())
    for sentence, value in zip(("a cosine of {:.2f} with", "{:.2f} after 4", "{:.3f} after 32"), cosines, strict=True):
        assert sentence.format(value) in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):  # other sites are not asked
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert page.parent == ROOT or target.is_relative_to(ROOT / "docs"), f"{link} leaves the site"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_site_has_every_page_once() -> None:
    found = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(page.name for page in PAGES[1:])


def test_the_reference_names_what_there_is_and_everything_public() -> None:
    names = re.findall(r"^::: (.*)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    objects = [named(name) for name in names]
    shown = {id(thing) for thing in objects}
    known = {"IsgqError", "__version__", "choose_codecs", "codecs", "ddp", "wire"}  # by their modules, or of use within
    assert {name for name in isgq.__all__ if id(getattr(isgq, name)) not in shown} == known


def test_the_codecs_to_choose_from_exist() -> None:
    specs = re.findall(r'`(?:dense=)?"([^"]+)"', (ROOT / "docs/choosing-a-codec.md").read_text())
    assert len(specs) > 8
    for spec in specs:
        isgq.instrument(nn.Linear(2, 2), spec).close()
