"""Schemes on the board, the bridge to sparsifiers, and the report."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from analysis.estimation import bridge, models, priors, quantizers, schemes
from analysis.estimation.__main__ import main
from analysis.estimation.protocols import Board
from analysis.report import load
from isgq.core.errors import OptionError

D = 32


def rng(seed=0):
    return np.random.default_rng(seed)


def simulated(scheme, model, truth, board, trials=30, seed=0):
    return schemes.simulate(scheme, model, truth, board, trials, rng(seed))


def test_signs_have_their_exact_risk():
    theta = np.linspace(-0.9, 0.9, D)
    counts = schemes.served(500, 3, D)
    exact = sum(float(schemes.sign_bits_risk(theta[j : j + 1], int(counts[j]))[0]) for j in range(D))
    found = simulated(schemes.SignBits(), models.GaussianLocation(theta), theta, (500, 3, "independent"))
    assert abs(found.value - exact) <= 4 * found.error
    assert found.bits == 3


@pytest.mark.parametrize(
    ("n", "k", "known"), [(2000, 1, 3.57), (2000, 4, 0.910), (2000, 16, 0.2275), (8000, 4, 0.2295)]
)
def test_signs_cost_what_is_known(n, k, known):
    means, counts = np.array([0.0, 0.5, 1.0]), schemes.served(n, k, 64)
    worst = 64 * float(schemes.sign_bits_risk(means, int(counts.min())).max())
    assert worst == pytest.approx(known, rel=0.05)
    assert worst >= priors.gaussian_location(64).bound(n, k).value


def test_adaptive_signs_cost_the_same_at_every_mean():
    for mean in (0.0, 0.8):
        theta = np.full(D, mean)
        model = models.GaussianLocation(theta)
        found = simulated(schemes.AdaptiveSigns(), model, theta, (4000, 4, "sequential"), 10)
        assert found.value == pytest.approx(math.pi / 2 * D**2 / (4000 * 4), rel=0.25)


def test_finding_first_is_worth_it_for_few_large_means():
    theta = np.where(np.arange(D) < 3, 1.0, 0.0)
    model = models.GaussianLocation(theta)
    alone = simulated(schemes.SignBits(nonzero=3, largest=2.0), model, theta, (1000, 6, "independent"))
    found = simulated(schemes.FindThenRefine(3, largest=2.0), model, theta, (1000, 6, "blackboard"))
    assert found.value < alone.value / 2
    assert found.value > priors.sparse_gaussian_location(D, 3).bound(1000, 6).value


def test_histograms_have_their_exact_risk():
    theta = rng(5).dirichlet(np.ones(64))
    for k, known in enumerate((3.11e-3, 1.07e-3, 4.85e-4, 2.43e-4), 1):
        exact = schemes.group_histogram_risk(theta, 20_000, k)
        found = simulated(schemes.GroupHistogram(64), models.Categorical(theta), theta, (20_000, k, "independent"))
        assert abs(found.value - exact) <= 4 * found.error
        assert exact == pytest.approx(known, rel=0.03)


@pytest.mark.parametrize(
    ("d", "s", "ones", "n", "known"), [(200, 20, 8, 50, 0.957), (200, 20, 4, 50, 2.003), (500, 10, 2, 100, 0.544)]
)
def test_random_ones_have_their_exact_risk(d, s, ones, n, known):
    theta = rng(1).exponential(size=d)
    theta *= s / theta.sum()
    exact = schemes.random_ones_risk(theta, ones, n)
    bits = (ones + 1) * quantizers.index_bits(d + 1)
    found = simulated(schemes.RandomOnesMean(), models.ProductBernoulli(theta), theta, (n, bits, "independent"), 60)
    assert abs(found.value - exact) <= 4 * found.error
    assert exact == pytest.approx(known, rel=0.02)
    assert found.bits <= bits


def test_verbatim_bits_and_exceedances():
    theta = rng(2).uniform(0.3, 0.7, D)
    exact = schemes.verbatim_bits_risk(theta, 300, 5)
    found = simulated(schemes.VerbatimBits(), models.ProductBernoulli(theta), theta, (300, 5, "independent"))
    assert abs(found.value - exact) <= 4 * found.error
    variances = rng(3).uniform(0.5, 2, 30)
    model, scheme = models.GaussianVariance(variances), schemes.FirstExceedance(0.5, 2)
    risks = [simulated(scheme, model, variances, (8000, k, "independent"), 8).value for k in (1, 2, 4)]
    assert risks[0] > 1.8 * risks[1] > 1.8 * 1.8 * risks[2]
    assert risks[2] > priors.gaussian_variance(30, 0.5, 2).bound(8000, 4).value


def test_a_histogram_of_a_holder_density_keeps_its_guarantee():
    for k in (1, 3):
        bins = schemes.holder_bins(0.5, 1.0, 10_000, k)
        guarantee = schemes.holder_guarantee(0.5, 1.0, bins, 10_000, k)
        for cells in (1, 4, 9):
            model = models.HolderDensity(rng(cells).uniform(-0.9, 0.9, cells), 0.5)
            assert schemes.holder_risk(model, bins, 10_000, k) <= guarantee


def test_the_board_holds_protocols_to_their_rules():
    one = np.array([0])
    board = Board(2, 3, "independent")
    board.write(np.arange(2), np.array([[1], [3]]), 2)
    assert board.used.tolist() == [2, 2]
    with pytest.raises(OptionError, match="read nothing"):
        board.read()
    with pytest.raises(OptionError, match="its budget is 3"):
        board.write(one, np.array([[1]]), 2)
    with pytest.raises(OptionError, match="do not fit fields of 1 bits"):
        Board(1, 3).write(one, np.array([[2]]), 1)
    taken = Board(2, 3, "sequential")
    taken.write(one, np.array([[1]]), 1)
    with pytest.raises(OptionError, match="after its turn"):
        taken.write(one, np.array([[1]]), 1)
    with pytest.raises(OptionError, match="must be one of independent, sequential, blackboard"):
        Board(1, 1, "gossip")


def test_budgets_that_are_too_small_are_refused():
    for call, message in (
        (lambda: schemes.served(3, 2, 7), "do not reach all 7"),
        (lambda: schemes.groups(2, 1, 5), "fewer than the 5 groups"),
        (lambda: schemes.random_ones(15, 200), "needs at least 16"),
        (
            lambda: schemes.FindThenRefine(1)(np.zeros((9, 3)), Board(9, 1, "blackboard"), rng()),
            "bits of FindThenRefine",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            call()


def test_r_top_k_of_many_workers_has_its_closed_form():
    w = torch.from_numpy(rng(6).standard_normal(1000)).float()
    energy = w.square().sort(descending=True).values.double()
    for r, n in ((50, 1), (50, 4), (1000, 4)):
        top = float(energy[:r].sum())
        measured, error = bridge.mean_error(w, r, 10, n, 25)
        assert abs(measured - (float(energy.sum()) - top + (r / 10 - 1) * top / n)) <= 4.5 * error


def synthetic(workers, seed, noise=0.3):
    """5 % large entries, 15 % small, the rest zero."""
    generator = rng(seed)
    scale = np.repeat([1.0, 0.1, 0.0], [100, 300, 1600])
    truth = scale * rng(0).standard_normal(2000)
    return truth, truth + noise * scale * generator.standard_normal((workers, 2000))


def test_the_fit_finds_the_classes_of_a_model():
    fitted = bridge.fit(synthetic(16, 1)[1], classes=2)
    order = np.argsort(-fitted.signal)
    assert fitted.weights[order] == pytest.approx([0.05, 0.15], rel=0.05)
    assert fitted.signal[order] == pytest.approx([1.0, 0.01], rel=0.3)
    assert fitted.noise[order] == pytest.approx([0.09, 0.0009], rel=0.15)


def test_predictions_are_what_is_measured_on_the_model_itself():
    truth, gradients = synthetic(64, 2)
    fitted = bridge.fit(synthetic(16, 1)[1], classes=2)
    target, drawn = torch.from_numpy(truth).float(), torch.from_numpy(gradients).float()
    for r in (20, 80, 2000):
        measured = bridge.measured_errors(drawn, target, r, 20, (1, 8))
        for (n, factor), error in measured.items():
            if factor > 10:
                continue  # a handful of large entries would decide
            expected = bridge.predicted_error(fitted, r, 20, n, factor)
            assert error == pytest.approx(expected, rel=0.25)


def test_top_k_wins_alone_and_r_top_k_in_company():
    truth, gradients = synthetic(64, 3)
    target, drawn = torch.from_numpy(truth).float(), torch.from_numpy(gradients).float()
    verdicts = bridge.judge("w", drawn[:16], drawn[16:], target, (0.005,), (1, 32))
    assert [(v.forecast, v.winner) for v in verdicts] == [("top-k", "top-k"), ("rTop-k", "rTop-k")]


@pytest.mark.parametrize("gradients", [np.ones((1, 4)), np.zeros((3, 4)), np.full((3, 4), np.nan)])
def test_gradients_that_tell_nothing_are_refused(gradients):
    with pytest.raises(OptionError, match="at least 2 workers"):
        bridge.fit(gradients)


def test_the_report_holds_all_parts(tmp_path, monkeypatch, capsys):
    from analysis.estimation import figures, study

    draw_risk = figures._risk_figure
    monkeypatch.setattr(figures, "risk_figures", lambda found: [draw_risk(found, "d")])
    monkeypatch.setattr(study, "_TRIALS", 2)
    few = list(itertools.islice(study.gaussian_rows(0), 2))
    monkeypatch.setattr(study, "gaussian_rows", lambda seed: iter(few))
    monkeypatch.setattr(study, "CASES", study.CASES[:1])
    monkeypatch.setattr("analysis.estimation.__main__.CASES", study.CASES)
    for slow in ("finite_rows", "risk_rows", "rtop_k_rows"):
        monkeypatch.setattr(study, slow, lambda seed: iter(()))
    monkeypatch.setattr(study, "information_curves", lambda: {"panel": {"curve": (np.arange(3), np.arange(1.0, 4.0))}})
    options = ["--data", "mnist5k", "--model", "fc:hidden=10", "--workers", "1", "2", "--shares", "0.01"]
    main([*options, "--configurations", "12", "--steps", "1", "--out", str(tmp_path)])
    report = load(tmp_path)
    assert report.command.startswith("python -m analysis.estimation --data mnist5k")
    names = [table.name for table in report.tables]
    assert names == ["reproduced", "risk", "protocols", "configurations", "bridge"]
    assert [figure.name for figure in report.figures] == ["information_1", "risk_d", "bridge_1"]
    for line in report.table("reproduced").records():
        assert line["deviations"] == pytest.approx((line["measured"] - line["closed_form"]) / line["error"])
    for line in report.table("risk").records():
        assert line["ratio"] == line["risk"] / line["bound"] > 1
    assert sum(line["configurations"] for line in report.table("configurations").records()) == 12
    assert {(line["n"], line["k"]) for line in report.table("bridge").records()} == {(1, 78), (2, 78)}
    assert "12 random configurations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nothing"], "unknown data set"),
        (["--workers", "0"], "at least 1"),
        (["--shares", "2"], r"in \(0, 1\]"),
        (["--data", "mnist5k", "--model", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert re.search(message, capsys.readouterr().err)
