"""Reports: their files, how they are read again and joined, and what a browser makes of them."""

import csv
import json
import math
import re
import shutil
import subprocess
from html import escape

import pytest

from analysis.report import Report, ReportError, Table, draw, load, main, page, show, style
from analysis.runs import COLORS

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE, DESK = 390, 1280


def paint(axes):
    for i, name in enumerate(("isgq", "qsgd", "top_k")):
        axes.plot([1, 2, 4], [i + 1, i + 2, i + 4], label=name, linewidth=4, **style(i))
    axes.set_xlabel("workers")
    axes.set_ylabel("sent (bytes)")


def example(title="Bytes <sent> & received"):
    columns = {"codec": "spec", "nmse": "error", **{f"column_{i}": "more" for i in range(20)}}
    rows = [["isgq", 0.123456, *[10**i for i in range(20)]], ["exact", math.nan, *[None] * 20]]
    figures = [draw("sent", "Bytes sent", paint), draw("received", "Bytes received", paint)]
    return Report(title, ["Fewer bytes."], [Table("sizes", "Sizes", columns, rows)], figures, ["Measured."], "make it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    example().save(path)
    return path


def test_the_json_has_the_documented_form(folder):
    content = json.loads((folder / "report.json").read_text())
    assert list(content) == ["schema", "title", "summary", "notes", "tables", "figures", "command", "versions"]
    assert content["schema"] == 1
    [table] = content["tables"]
    assert set(table) == {"name", "caption", "columns", "rows"}
    assert table["columns"][1] == {"name": "nmse", "meaning": "error"}
    assert [row[1] for row in table["rows"]] == [0.123456, None]  # no NaN, which is no JSON
    assert content["figures"][0] == {"name": "sent", "caption": "Bytes sent"}
    assert set(content["versions"]) == {"python", "torch", "numpy", "matplotlib", "isgq"}


def test_the_csv_has_all_digits(folder):
    header, first, second = csv.reader((folder / "sizes.csv").open())
    assert header[:2] == ["codec", "nmse"]
    assert (first[1], first[-1], second[1]) == ("0.123456", str(10**19), "")


def test_what_is_read_again_is_what_was_written(folder):
    report, again = example(), load(folder)
    assert (again.title, again.summary, again.command) == (report.title, list(report.summary), report.command)
    assert [figure.svg for figure in again.figures] == [figure.svg for figure in report.figures]
    assert again.table("sizes").rows[0] == report.table("sizes").rows[0]
    assert page([again]) == page([report])


def test_figures_are_the_same_each_time_and_no_text_needs_a_font():
    first, second = draw("sent", "Bytes", paint), draw("sent", "Bytes", paint)
    assert (first.svg, first.png) == (second.svg, second.png)
    assert "<text" not in first.svg
    assert all(color.lower() in first.svg for color in COLORS[:3])


def test_the_page_holds_all_and_asks_for_nothing(folder):
    html = (folder / "report.html").read_text()
    assert "Bytes &lt;sent&gt; &amp; received" in html
    assert html.index("Fewer bytes.") < html.index("<img") < html.index("<table") < html.index("make it")
    assert 'name="viewport" content="width=device-width' in html
    assert not re.search(r"https?:|<script|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")", html)
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]{5})', html))


def test_numbers_for_readers():
    cells = (None, math.inf, True, 12345, 0.000123456, 123456.7, "text")
    assert [show(cell) for cell in cells] == ["–", "–", "yes", "12,345", "0.0001235", "123,457", "text"]


def test_markdown_of_some_columns():
    table = Table("t", "", {"a": "", "b": "", "c": ""}, [[1, 0.5, "x"]])
    assert table.markdown(["c", "b"]).splitlines() == ["| c | b |", "| --- | --- |", "| x | 0.5 |"]
    with pytest.raises(ReportError, match=r"no column \['d'\]"):
        table.markdown(["d"])


def test_mistakes_are_named():
    with pytest.raises(ReportError, match="has 2 columns"):
        Table("t", "", {"a": "", "b": ""}, [[1]])
    with pytest.raises(ReportError, match="lower-case"):
        draw("../x", "", paint)
    with pytest.raises(ReportError, match="names and units"):
        draw("x", "", lambda axes: None)


def test_reports_are_joined(folder, tmp_path, capsys):
    example("Another one").save(tmp_path / "b")
    main([str(folder), str(tmp_path / "b"), "--out", str(tmp_path / "all")])
    html = (tmp_path / "all" / "report.html").read_text()
    assert html.count("<article") == 2
    assert "2 reports" in html
    assert html.count("Another one") == 2  # in the list and above the report
    assert "2 reports" in capsys.readouterr().out


def half(folder):
    path = folder / "report.json"
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def other_schema(folder):
    path = folder / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 7}))


def without_table_names(folder):
    path = folder / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tables": [{}]}))


def a_list(folder):
    (folder / "report.json").write_text("[]")


def without_figure(folder):
    (folder / "sent.svg").unlink()


def path_as_name(folder):
    path = folder / "report.json"
    figures = [{"name": "../../secret", "caption": ""}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"figures": figures}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "report.json is missing"),
        (half, "is no report"),
        (other_schema, "of schema 7, this version reads 1"),
        (without_table_names, "is no report"),
        (a_list, "is no report"),
        (without_figure, "sent.svg is missing"),
        (path_as_name, "lower-case"),
    ],
)
def test_what_is_no_report_is_refused(damage, said, folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    with pytest.raises(SystemExit, match="2"):
        main([str(copy), "--out", str(tmp_path / "all")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


# ---- in a browser


def screenshot(html, width, tmp_path):
    """A picture of a page of some width in a browser without network, what the browser said, and its document."""
    picture, probe = tmp_path / "picture.png", tmp_path / "probe.html"
    # In a frame, as a browser's window has a least width; what is asked of it becomes the title.
    probe.write_text(
        f'<body style="margin:0"><iframe width={width} height=3000 style="border:0" srcdoc="{escape(html)}"></iframe>'
        "<script>onload = () => { const page = frames[0].document; document.title = ["
        "page.documentElement.scrollWidth, frames[0].innerWidth, ...[...page.images].map(i => i.naturalWidth),"
        "frames[0].getComputedStyle(page.body).fontSize].join(' ') }</script>"
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1300,3000"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", "--dump-dom", probe.as_uri()]
    done = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=120)
    return picture, done.stderr, done.stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: install Debian's package chromium to look at reports")
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_browser_shows_the_figures(width, tmp_path):
    from PIL import Image

    picture, complaints, document = screenshot(page([example(), example("Second")]), width, tmp_path)
    assert "CONSOLE" not in complaints
    title = re.search(r"<title>([^<]*)</title>", document)
    assert title
    needed, inner, *images, size = title[1].split()
    assert (int(needed), int(inner)) == (width, width)  # nothing sticks out: wide tables scroll within their boxes
    assert len(images) == 4
    assert all(int(image) > 0 for image in images)
    assert size == "16px"
    image = Image.open(picture).convert("RGB").crop((0, 0, width, 3000))
    counts = {color: count for count, color in image.getcolors(1 << 24)}
    for color in COLORS[1:3]:  # the curves of the figures: black is also text
        rgb = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert counts.get(rgb, 0) > 200, f"no curve of colour {color} at a width of {width}"
