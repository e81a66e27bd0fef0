"""The codec benchmark: what it covers, the form of its report, and its figures where the truth is known."""

import json
import math
import re

import pytest
import torch

from analysis.measure import entropy
from analysis.methods import SPECS
from benchmarks.codecs import NETWORKS, QUICK, STAGES, kept, main, table
from benchmarks.frontier import main as frontier
from benchmarks.gather import main as gather
from benchmarks.layer import main as layer
from benchmarks.overhead import main as overhead
from isgq.codecs import codec, codec_names

CHOSEN = ("exact", "sign", "dithered:levels=1", "error_feedback(top_k:k=0.01)", "separate(dithered)", "naive")
QUALITY = {"bytes", "bits_per_element", "symbols", "nmse", "bias", "bias_noise"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmarks") / "new" / "codecs.json"
    main(["--quick", "--data", "mnist5k", "--out", str(path), "--codecs", *CHOSEN])
    return json.loads(path.read_text())


def test_every_codec_is_measured_by_default():
    named = {name for spec in SPECS for name in re.findall(r"[a-z]\w*", spec)}
    assert set(codec_names()) - {"scheduled", "scheduled_pair", "subspace"} <= named
    assert len(set(SPECS)) == len(SPECS)
    for spec in SPECS:
        codec(spec)


def test_the_report_has_the_documented_form(report):
    assert report["schema"] == 1
    assert report["command"].startswith("python -m benchmarks.codecs --quick")
    assert set(report["versions"]) == {"python", "torch", "numpy", "isgq"}
    assert (report["quick"], report["data"], report["threads"]) == (True, "mnist5k", torch.get_num_threads())
    assert (report["keys"], report["repeats"]) == (QUICK.keys, QUICK.repeats)
    assert set(report["gradients"]) == set(NETWORKS)
    assert [entry["spec"] for entry in report["codecs"]] == list(CHOSEN)
    for entry in report["codecs"]:
        assert set(entry) == {"spec", "unbiased", "pair", "quality", "speed"}
        assert set(entry["quality"]) == set(NETWORKS)
        for network, quality in entry["quality"].items():
            assert set(quality) == QUALITY
            assert all(math.isfinite(quality[name]) and quality[name] >= 0 for name in QUALITY - {"symbols"})
            elements = report["gradients"][network]["elements"]
            assert quality["bits_per_element"] == pytest.approx(8 * quality["bytes"] / elements)
            for stream in quality["symbols"].values():
                assert set(stream) == {"count", "alphabet_bits", "entropy_bits"}
                assert stream["entropy_bits"] <= stream["alphabet_bits"] + 1e-9


def test_every_stage_is_timed_on_the_same_number_of_elements(report):
    for entry in report["codecs"]:
        speed = entry["speed"]
        assert set(speed) == {"elements", "bytes", "top_k", *STAGES}
        assert abs(speed["elements"] - QUICK.elements) < 0.01 * QUICK.elements
        for stage in STAGES:
            rate = speed[stage]
            assert set(rate) == {"seconds", "gb_per_s", "best_gb_per_s"}
            assert 0 < rate["gb_per_s"] <= rate["best_gb_per_s"]
            assert rate["gb_per_s"] == pytest.approx(4 * speed["elements"] / rate["seconds"] / 1e9)
        assert (speed["top_k"] is None) == ("top_k" not in entry["spec"])
        if speed["top_k"]:
            assert set(speed["top_k"]) == {"k", "seconds", "ratio"}
            assert speed["top_k"]["k"] == speed["elements"] // 100


def test_the_figures_are_right_where_the_truth_is_known(report):
    by_spec = {entry["spec"]: entry for entry in report["codecs"]}
    for network in NETWORKS:
        exact, sign, dithered = (by_spec[spec]["quality"][network] for spec in CHOSEN[:3])
        assert (exact["nmse"], exact["bias"], exact["bias_noise"]) == (0, 0, 0)
        assert 32 < exact["bits_per_element"] < 32.1
        assert sign["bias_noise"] == 0  # nothing is random, so that all of the error is bias
        assert sign["bias"] == pytest.approx(math.sqrt(sign["nmse"]))
        assert 0.5 < dithered["bias"] / dithered["bias_noise"] < 2  # unbiased: nothing but noise
        assert set(by_spec["naive"]["quality"][network]["symbols"]) == {"x.codes", "d.codes"}
    assert by_spec["separate(dithered)"]["pair"]
    assert by_spec["separate(dithered)"]["unbiased"]


def test_the_table_is_aligned_and_has_a_line_for_each_network(report):
    header, rule, *lines = table(report["codecs"]).splitlines()
    assert len(lines) == len(CHOSEN) * len(NETWORKS)
    assert len(header) == len(rule) == max(map(len, lines))
    end = header.index("NMSE") + len("NMSE")
    assert all(line[end] == " " and line[end - 1] != " " for line in lines)


def test_entropy_of_known_distributions():
    assert entropy(torch.tensor([], dtype=torch.uint8)) == 0
    assert entropy(torch.tensor([3, 3, 3])) == 0
    assert entropy(torch.tensor([0, 1, 2, 3])) == pytest.approx(2)
    assert entropy(torch.tensor([0, 0, 0, 1])) == pytest.approx(2 - 0.75 * math.log2(3))


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("sign", None),
        ("top_k:k=0.1", 10),
        ("eus:m=7", 7),
        ("momentum_correction(top_k:k=0.2)", 20),
        ("top_k:k=500", 100),
    ],
)
def test_kept_entries(spec, count):
    assert kept(codec(spec), 100) == count


@pytest.mark.parametrize(
    "arguments", [["--codecs", "no_such_codec"], ["--data", "no_such_data"], ["--codecs", "sign:scale=l3"]]
)
def test_a_wrong_name_is_a_usage_error(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--out", str(tmp_path / "x.json"), *arguments])
    assert re.search("no_such_codec|no_such_data|l3", capsys.readouterr().err)
    assert not (tmp_path / "x.json").exists()


def test_the_frontier_trains_with_real_messages(tmp_path, capsys):
    methods = ["dense", "exact", "rotated:ratio=100", "rotated:atoms=2", "qsgd", "powersgd:rank=2", "isgq"]
    methods += ["subspace:rank=2", "subspace:rank=2,step=0.0001"]
    options = [
        "--data",
        "mnist5k",
        "--epochs",
        "1",
        "--rates",
        "0.05",
        "--sizes",
        "2x1000",
        "--out",
        str(tmp_path / "f.json"),
        "--figure",
        str(tmp_path / "f.png"),
    ]
    frontier(["--methods", *methods, *options])
    report = json.loads((tmp_path / "f.json").read_text())
    runs = {run["method"]: run for run in report["runs"]}
    assert list(runs) == methods
    assert report["simulated_workers"]
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    assert runs["dense"]["bytes"] == 4 * 266610
    # sent without loss, the factors give the same gradients up to the order of sums
    assert runs["exact"]["test_loss"] == pytest.approx(runs["dense"]["test_loss"], rel=1e-3)
    assert runs["rotated:ratio=100"]["compression"] == pytest.approx(100, rel=0.1)
    # with fine steps a common subspace is PowerSGD, and the biases, which are sent as they are, go with memory
    assert runs["subspace:rank=2,step=0.0001"]["test_loss"] == pytest.approx(
        runs["powersgd:rank=2"]["test_loss"], rel=0.02
    )
    assert runs["powersgd:rank=2"]["moved"] == 2 * runs["powersgd:rank=2"]["bytes"]
    assert runs["isgq"]["moved"] == 2 * runs["isgq"]["bytes"]
    for run in runs.values():
        assert 0 < run["test_loss"] < 2.31
    shown = capsys.readouterr().out
    assert "simulated workers" in shown
    assert shown.count("| 2x1000 | 0.05 | 1 |") == len(methods)


def test_the_cost_of_a_step_is_a_row_for_each_way(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    ways = ["plain", "capture", "ddp", "exact"]
    overhead(["--models", "fc:hidden=20", "--ways", *ways, "--rounds", "2", "--out", str(path)])
    report = json.loads(path.read_text())
    assert [row["way"] for row in report["rows"]] == ways
    assert report["command"].startswith("python -m benchmarks.overhead --models")
    plain = report["rows"][0]
    assert plain["ratio"] == plain["cpu_ratio"] == 1
    assert all(row["milliseconds"] > 0 for row in report["rows"])
    assert capsys.readouterr().out.count("`fc:hidden=20`") == len(ways)


def test_gathering_has_a_row_for_each_size(capsys):
    gather(["--workers", "2", "--sizes", "10", "3000000", "--rounds", "2"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1:3] for row in rows] == [[" 2 ", " 10 "], [" 2 ", " 3,000,000 "]]
    assert all(float(cell) > 0 for row in rows for cell in row.split("|")[3:5])


def test_one_layer_has_a_row_for_each_codec(capsys):
    layer([
        "isgq",
        "rotated:ratio=20",
        "--inputs",
        "40",
        "--outputs",
        "12",
        "--batch",
        "8",
        "--repeats",
        "1",
        "--data",
        "mnist5k",
    ])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["isgq", "rotated:ratio=20"]
    with pytest.raises(SystemExit):
        layer(["qsgd"])
