"""The reports' commands at small sizes: what they write, that factors are reused, and how they refuse."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from torch import nn

from analysis import convergence, gradients, rate_distortion, reconstruction, reproduce, scaling
from analysis.methods import NAMES, SPECS, name_of
from analysis.rate_distortion import FAMILIES, pareto
from analysis.report import ReportError, load
from analysis.runs import Summary, append_metrics, save_summary
from isgq.codecs import codec, codec_names

SMALL = ["--model", "fc:hidden=8", "--data", "mnist5k", "--batch", "4", "--processes", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reconstruction")
    specs = ["exact", "separate(exact)", "dithered:levels=4"]
    options = ["--steps", "3", "0", "--cache", str(folder / "cache"), "--codecs", *specs]
    reconstruction.main([*SMALL, *options, "--out", str(folder / "out")])
    return folder


def test_reconstruction_has_a_row_for_each_layer_codec_and_step(run):
    lines = load(run / "out").table("layers").records()
    assert [line["step"] for line in lines] == [0] * 6 + [3] * 6
    assert len({(line["step"], line["layer"], line["codec"]) for line in lines}) == 12
    for line in lines:
        assert line["coded_bits"] == 8 * line["bytes"] / line["parameters"]
        assert line["theory"] is not None
        assert line["measured_to_theory"] == pytest.approx(1, abs=0.02) or "exact" in line["codec"]
        assert line["entropy_bits"] <= line["alphabet_bits"] + 1e-9


def test_totals_add_up(run):
    report = load(run / "out")
    layers, totals = report.table("layers").records(), report.table("totals").records()
    assert len(totals) == 6
    for total in totals:
        own = [line for line in layers if (line["step"], line["codec"]) == (total["step"], total["codec"])]
        assert total["bytes"] == sum(line["bytes"] for line in own)
        norm = sum(line["norm"] for line in own)
        assert total["nmse"] == pytest.approx(sum(line["nmse"] * line["norm"] for line in own) / norm)


def test_factors_are_shown_with_sparsity_and_rank(run):
    for line in load(run / "out").table("factors").records():
        assert line["rows"] == 4
        assert 0 <= line["g_rank"] <= min(line["x_rank"], 4) + 4
        assert 0 <= line["d_sparsity"] < 1
    first = load(run / "out").table("factors").records()[0]
    assert 0.5 < first["x_sparsity"] < 0.95  # most of a digit's pixels are black


def test_the_summary_counts_the_agreement(run):
    assert (
        "agree within 2 % in 12 of 12 comparisons, 4 of them with codecs that are random"
        in load(run / "out").summary[0]
    )


def test_a_second_run_reuses_the_factors_and_repairs_a_damaged_file(run, monkeypatch):
    recipe = gradients.Recipe("fc:hidden=8", "mnist5k", (0, 3), 4)
    first = recipe.capture(run / "cache")
    [path] = (run / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_train", lambda *_: pytest.fail("trained again"))
        second = recipe.capture(run / "cache")
    assert all(torch.equal(a.gradient, b.gradient) for s in first for a, b in zip(first[s], second[s], strict=True))
    path.write_bytes(path.read_bytes()[:1000])
    third = recipe.capture(run / "cache")
    assert torch.equal(first[3][0].factors.d, third[3][0].factors.d)
    assert list((run / "cache").iterdir()) == [path]


def test_other_options_are_other_files():
    recipe = gradients.Recipe()
    for name, value in asdict(recipe).items():
        other = {"steps": (1,), "standardize": True}.get(name, f"{value}0" if isinstance(value, str) else 7)
        assert gradients.Recipe(**{**asdict(recipe), name: other})._digest() != recipe._digest()


def test_rate_and_distortion_mark_the_front(run):
    options = ["--steps", "3", "--cache", str(run / "cache"), "--families", "top_k", "qsgd", "casts"]
    rate_distortion.main([*SMALL, *options, "--out", str(run / "curves")])
    lines = load(run / "curves").table("curves").records()
    assert {line["family"] for line in lines} == {"top_k", "qsgd", "casts"}
    for line in lines:
        better = [o for o in lines if o["bytes"] < line["bytes"] and o["nmse"] < line["nmse"]]
        assert not (line["front"] and better)
        assert line["unbiased"] or not line["unbiased_front"]
    assert any(line["codec"] == "exact" and line["front"] for line in lines)


def test_pareto_front():
    assert pareto([(1, 5), (2, 2), (3, 2), (4, 1), (2, 6), (1, 5)]) == [True, True, False, True, False, True]


def test_every_codec_has_a_name_and_every_family_builds():
    assert set(codec_names()) - {"scheduled", "scheduled_pair"} <= set(NAMES)
    for spec in (*SPECS, *(spec for family in FAMILIES.values() for spec in family)):
        codec(spec)
    assert name_of("error_feedback(top_k:k=0.01)") == "error feedback (Seide et al. 2014, Stich et al. 2018) with top-k"
    assert name_of("separate(dithered:levels=1,bucket=row)").startswith("ISGQ, one quantizer a factor")
    assert name_of("minimum_variance:levels=2") == "ISGQ, minimum variance, MV (Abdi and Fekri 2020)"


def trained(folder, **changes):
    values = dict.fromkeys(Summary.__annotations__, 1.0) | {"model": "fc", "data": "mnist5k", "codec": "isgq"}
    values |= {"workers": 2, "batch_per_worker": 8, "aggregate": "gather", "down": "dense", "staleness": {}}
    summary = Summary(**(values | changes))
    folder.mkdir(exist_ok=True)
    save_summary(folder, [summary])
    for epoch in (1, 2):
        entry = {
            "run": summary.run,
            "epoch": epoch,
            "step": 10 * epoch,
            "train_loss": 2 / epoch,
            "test_loss": 1 / epoch,
        }
        entry |= {"test_accuracy": 0.5, "seconds": 1.0, "sent_bytes": 5000 * epoch, "received_bytes": 2500 * epoch}
        append_metrics(folder, entry)
    return folder


def test_convergence_models_the_time_of_the_bytes(tmp_path):
    folder = trained(tmp_path / "run")
    convergence.main([
        str(folder),
        "--links",
        "8kbit/100ms",
        "1Gbit",
        "--compute",
        "0.5",
        "--out",
        str(tmp_path / "out"),
    ])
    report = load(tmp_path / "out")
    first, second = report.table("epochs").records()
    # 10 steps of 500 bytes at 1000 bytes/s, two rounds of 0.1 s, half a second of compute
    assert first["modelled_8kbit/100ms"] == pytest.approx(10 * (0.5 + 0.5 + 0.2))
    assert second["modelled_8kbit/100ms"] == pytest.approx(20 * (0.5 + 0.5 + 0.2))
    assert second["modelled_1Gbit"] == pytest.approx(20 * (0.5 + 500 / 1.25e8))
    assert (second["sent_bytes"], second["test_loss"]) == (10_000, 0.5)
    assert [figure.name for figure in report.figures] == ["steps", "sent", "time0", "time1"]


def test_scaling_runs_real_processes_and_models_more(tmp_path):
    options = [
        "--model",
        "fc:hidden=8",
        "--workers",
        "1",
        "2",
        "--beyond",
        "16",
        "--epochs",
        "1",
        "--total-batch",
        "1008",
    ]
    scaling.main([*options, "--codecs", "dense", "qsgd", "--out", str(tmp_path)])
    lines = {(line["codec"], line["workers"]): line for line in load(tmp_path).table("scaling").records()}
    assert len(lines) == 6
    gradient = 4 * (784 * 8 + 8 + 8 * 10 + 10)
    for codec_name, workers in ((name, count) for name in ("dense", "qsgd") for count in (1, 2)):
        line = lines[codec_name, workers]
        assert codec_name != "dense" or line["sent_bytes"] == pytest.approx(gradient, rel=0.01)
        assert line["model_sent_bytes"] == pytest.approx(line["sent_bytes"], rel=0.1)
        assert line["model_received_bytes"] == pytest.approx(line["received_bytes"], rel=0.1)
    assert lines["qsgd", 16]["model_received_bytes"] == 15 * lines["qsgd", 16]["model_sent_bytes"]
    assert lines["qsgd", 16]["sent_bytes"] is lines["qsgd", 16]["accuracy"] is None


def refused(main, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (reconstruction.main, [*SMALL, "--codecs", "no_such"], "unknown codec 'no_such'; known: "),
        (reconstruction.main, [*SMALL[2:], "--model", "no_such"], "unknown model 'no_such'"),
        (reconstruction.main, [*SMALL, "--data", "no_such"], "unknown data set 'no_such'"),
        (reconstruction.main, [*SMALL, "--steps", "-1"], "steps (-1,) must be 0 or more"),
        (reconstruction.main, [*SMALL, "--processes", "0"], "--processes 0 must be 1 or more"),
        (rate_distortion.main, [*SMALL, "--families", "no_such"], "unknown family ['no_such']; known: all, isgq"),
        (rate_distortion.main, [*SMALL, "--steps", "0", "1"], "must be one step"),
        (scaling.main, ["--workers", "16"], "real processes go to 8"),
        (scaling.main, ["--beyond", "48"], "--beyond 48 must be more than 8 and divide"),
        (scaling.main, ["--codecs", "no_such"], "unknown codec 'no_such'"),
        (convergence.main, ["nowhere"], "summary.json is no summary of runs"),
        (convergence.main, ["nowhere", "--links", "fast"], "link 'fast' must look like 100Mbit"),
        (convergence.main, ["nowhere", "--compute", "-1"], "--compute -1.0 must be 0 or more"),
    ],
)
def test_mistakes_are_refused_with_a_message(main, arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(main, *arguments)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs" / "reconstruction").exists()


def test_a_model_without_factors_is_refused(tmp_path, monkeypatch, capsys):
    def build(spec, classes, in_shape, seed):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784))

    monkeypatch.setattr(gradients, "build", build)
    refused(reconstruction.main, *SMALL, "--cache", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "no layer whose gradient is made of factors (1.weight: BatchNorm1d has no adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("metrics.jsonl", lambda text: text[:-20], "metrics.jsonl is no file of metrics"),
        ("metrics.jsonl", lambda text: text.replace("test_loss", "loss"), "line 1 lacks test_loss"),
        ("metrics.jsonl", lambda text: text.replace("sent_bytes", "bytes"), "has metrics of its bytes"),
        ("summary.json", lambda text: text[:-20], "summary.json is no summary of runs"),
        ("summary.json", lambda text: json.dumps([{"codec": "isgq"}]), "summary.json is no summary of runs"),
    ],
)
def test_damaged_runs_are_refused(name, damage, said, tmp_path, capsys):
    path = trained(tmp_path / "run") / name
    path.write_text(damage(path.read_text()))
    refused(convergence.main, str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_results_are_rewritten_between_the_markers_alone(run, tmp_path, monkeypatch):
    document = tmp_path / "results.md"
    document.write_text("before\n<!-- begin small -->\nold\n<!-- end small -->\nafter\n")
    entry = reproduce.Entry(["-c pass"], "totals", ("codec", "bytes"), {"step": 3})
    monkeypatch.setattr(reproduce, "DOCUMENT", document)
    monkeypatch.setattr(reproduce, "ENTRIES", {"small": entry})
    monkeypatch.setattr(reproduce, "RUNS", tmp_path)
    shutil.copytree(run / "out", tmp_path / "small")
    reproduce.reproduce("small")
    text = document.read_text()
    assert text.startswith("before\n<!-- begin small -->\n```sh\n.venv/bin/python -c pass --out")
    assert text.endswith("\n<!-- end small -->\nafter\n")
    assert "old" not in text
    assert text.count("| exact |") == 1  # of the two steps one
    monkeypatch.setattr(reproduce, "ENTRIES", {"small": reproduce.Entry(["-c 1/0"], "totals", ())})
    with pytest.raises(ReportError, match="ended with status 1"):
        reproduce.reproduce("small")
    assert document.read_text() == text


def test_the_document_has_the_markers_of_all_entries():
    text = reproduce.DOCUMENT.read_text()
    for name in reproduce.ENTRIES:
        assert reproduce.replaced(text, name, "x")
    with pytest.raises(ReportError, match="begin other"):
        reproduce.replaced(text, "other", "x")
