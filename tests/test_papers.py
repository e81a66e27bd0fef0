"""The papers' comparisons: simulated workers do what real ones would, runs are kept, and the document is whole."""

import json
from dataclasses import replace

import pytest
import torch

import models
from analysis import reproduce
from analysis.report import ReportError, load
from benchmarks import papers, store
from benchmarks.comparison import Study, compare, seconds
from benchmarks.methods import Share, build
from benchmarks.simulation import Outcome, Point, simulate
from isgq.bandwidth import Link
from isgq.core.payload import Factors
from isgq.layers.capture import find_units
from tests.training.texts import write
from training.config import Config

IMAGES = Config(model="fc:hidden=8", data="mnist5k", codecs=("dense",), workers=(2,), total_batch=8, epochs=1)
IMAGES = replace(IMAGES, epoch_steps=3, momentum=0.0)


def test_workers_share_the_steps_of_one(tmp_path):
    text = replace(IMAGES, model="lstm_lm:width=8", data=write(tmp_path), total_batch=4, sequence=5, clip=0.5)
    for config in (IMAGES, text):
        one, two, four = (simulate(replace(config, workers=(n,))) for n in (1, 2, 4))
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert four.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.sent == 4 * two.parameters
        assert (one.moved, two.moved, four.moved) == (0, 2 * two.sent, 3 * four.sent)


def test_one_local_step_of_plain_sgd_is_a_common_one():
    common, apart, rarely = (simulate(replace(IMAGES, local_steps=n)) for n in (None, 1, 2))
    assert apart.loss == pytest.approx(common.loss, rel=1e-5)
    assert apart.sent == common.sent
    assert rarely.sent == pytest.approx(common.sent * 2 / 3)  # after two steps, and at the end


def test_methods_average_what_they_should():
    model = models.build("fc:hidden=8", classes=10, in_shape=(1, 28, 28))
    parameters = dict(model.named_parameters())
    units, _ = find_units(model, skip=lambda name: False)
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(2):
        x, d = torch.randn(3, 784, generator=generator), torch.randn(3, 8, generator=generator)
        own = Share.of(units[:1], {units[0].name: Factors(x, d)})
        rest = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items() if n not in own.gradients}
        shares.append(Share({**own.gradients, **rest}, {**own.factors, units[1].name: Factors(x[:, :8], d[:, :1])}))
    mean = {name: (shares[0].gradients[name] + shares[1].gradients[name]) / 2 for name in parameters}
    for spec in (
        "dense",
        "exact + exact",
        "two_pass(dense;dense)",
        "two_pass(fp16;fp16):memory=none",
        "powersgd:rank=8",
    ):
        found, sent, moved = build(spec, units[:1], parameters, 2, 0)(shares, 0)
        assert moved == pytest.approx(2 * sent, rel=0.02)
        for name, expected in mean.items():
            if spec != "powersgd:rank=8" or expected.dim() == 1 or min(expected.shape) <= 8:
                assert torch.allclose(found[name], expected, atol=2e-2 if "fp16" in spec else 1e-4), (spec, name)


def test_a_finished_run_is_not_made_again(tmp_path, monkeypatch):
    [first] = store.run_all([IMAGES], tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "simulate", lambda config: pytest.fail("made again"))
        [second] = store.run_all([replace(IMAGES, out=tmp_path / "elsewhere")], tmp_path, 1)
    assert second.points == first.points
    assert store.load(replace(IMAGES, seed=1), tmp_path) is None
    [path] = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content["simulated_workers"]
    assert content["config"]["model"] == IMAGES.model
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ReportError, match="is no finished run"):
        store.run(IMAGES, tmp_path)


def test_a_run_that_diverges_has_no_loss():
    lost = simulate(replace(IMAGES, lr=1e30))
    assert lost.loss == float("inf")
    assert lost.accuracy == 0


@pytest.mark.parametrize(("method", "busiest"), [("two_pass(one_bit;one_bit)", 150), ("qsgd:levels=1", 200)])
def test_the_model_of_a_link(method, busiest):
    config = replace(IMAGES, codecs=(method,), epochs=2)
    run = Outcome(config, [Point(3, 1, 1, 0)], 100, 300, 10, 0)
    assert seconds(run, Link(50, 0.5)) == pytest.approx(6 * (busiest / 50 + 1))


def test_every_method_of_every_study_can_be_built():
    model = models.build("fc:hidden=8", classes=10, in_shape=(1, 28, 28))
    units, _ = find_units(model, skip=lambda name: False)
    for study in papers.STUDIES.values():
        for method in {*study.methods, *(m for methods in study.only.values() for m in methods)}:
            assert build(method, units, dict(model.named_parameters()), 2, 0)
        assert set(study.only) <= set(study.settings)


def test_quick_reports_leave_the_document_alone(tmp_path, monkeypatch):
    before = reproduce.DOCUMENT.read_text()
    monkeypatch.setattr(papers, "OUT", tmp_path)
    papers.main(["--quick", "--only", "double_squeeze", "prediction", "isgq_errors", "plans"])
    assert reproduce.DOCUMENT.read_text() == before
    ours = load(tmp_path / "quick" / "double_squeeze")
    lines = ours.table("methods").records()
    assert [line["method"] for line in lines] == ["dense", *papers.STUDIES["double_squeeze"].methods]
    assert lines[0]["to_dense"] == 0
    assert all(line["seeds"] == 1 and line["loss"] > 0 for line in lines)
    assert {figure.name for figure in ours.figures} == {"bytes0", "epochs0", "links"}
    assert len(load(tmp_path / "quick" / "isgq_errors").table("errors").rows) == 11


def test_the_document_has_the_markers_of_all_parts():
    text = reproduce.DOCUMENT.read_text()
    for name in papers.PARTS:
        assert reproduce.replaced(text, f"papers_{name}", "x")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("no_such", "unknown codec 'no_such'"),
        ("powersgd", "must have the form powersgd:rank=R"),
        ("powersgd:rank=0", "must have the form powersgd:rank=R"),
        ("two_pass(one_bit)", "must have the form two_pass"),
        ("two_pass(one_bit;one_bit):memory=mine", "memory='mine' must be one of"),
    ],
)
def test_mistakes_are_refused_with_a_message(method, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(papers, "OUT", tmp_path)
    monkeypatch.setattr(papers, "STUDIES", {"isgq": replace(papers.STUDIES["isgq"], methods=())})
    with pytest.raises(SystemExit, match="2"):
        papers.main(["--quick", "--only", "isgq", "--methods", method])
    assert said in capsys.readouterr().err


def test_dense_training_alone_has_a_table_too(tmp_path):
    base = Config(model="fc:hidden=4", codecs=("dense",), workers=(2,), epochs=1, epoch_steps=2)
    report = compare(Study("Dense", base, [], (0.1,)), [0], tmp_path, 1)
    assert [row["method"] for row in report.table("methods").records()] == ["dense"]
