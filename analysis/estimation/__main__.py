"""The report: ``python -m analysis.estimation``."""

import argparse
import itertools
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import scipy
import torch
from tqdm import tqdm

import data
import isgq
from analysis.estimation import bridge, figures, study
from analysis.estimation.cases import CASES, Point, points
from analysis.estimation.output import Plot, Table, write_report
from isgq.core.errors import OptionError
from models import ModelError

_TITLE = "Estimation from k bits a node: information, risk, and what it says of sparsifiers"
_FITTED = 16  # workers that the bridge's model is fitted to
_BATCH = 64


def _summary(
    reproduced: Table, configurations: Table, risk: Sequence[Point], judged: Sequence[bridge.Verdict]
) -> list[str]:
    deviations = [abs(float(row[4])) for row in reproduced.rows if row[4] is not None]
    tested, broken = (sum(int(row[i] or 0) for row in configurations.rows) for i in (2, 3))
    right = sum(v.forecast == v.winner for v in judged)
    regret = max(v.regret for v in judged)
    wins = ", ".join(f"{name} {sum(v.winner == name for v in judged)}" for name in bridge.METHODS)
    useful = [v for v in judged if min(v.measured.values()) < 1]
    return [
        f"{len(deviations)} Monte Carlo numbers agree with their closed forms: the farthest is "
        f"{max(deviations):.1f} standard errors away.",
        f"{broken} of {tested} random configurations lie beyond their bound.",
        f"The schemes stay within factors {min(p.risk / p.bound.value for p in risk):.2g} to "
        f"{max(p.risk / p.bound.value for p in risk):.2g} of van Trees' bound on every protocol.",
        f"On real gradients the fitted model names the best of top-k, random-k and rTop-k in {right} of {len(judged)} "
        f"cases; where it is wrong its choice has at most {100 * regret:.1f} % more error. Winners: {wins}.",
        f"In {len(judged) - len(useful)} cases no method beats sending nothing (relative error 1): one batch's noise "
        "is larger than the gradient.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m analysis.estimation", description="Information, risk, sparsifiers")
    parser.add_argument("--out", type=Path, default=Path("runs/estimation"), help="folder (default: %(default)s)")
    parser.add_argument("--configurations", type=int, default=1000, help="random ones to try (default: %(default)s)")
    parser.add_argument("--model", default="fc", help="network whose gradients are taken (default: %(default)s)")
    parser.add_argument("--data", default="fashion", help="a data set by name (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=48, help="training steps before (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 32], help="numbers n (default: 1 4 16 32)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="k / d, in (0, 1]")
    parser.add_argument("--seed", type=int, default=0, help="of all but the network (default: %(default)s)")
    options = parser.parse_args(given)
    least = min(options.configurations, *options.workers)
    if least < 1 or options.steps < 0 or options.seed < 0 or not all(0 < share <= 1 for share in options.shares):
        parser.error("--configurations and --workers must be at least 1, --steps and --seed 0, --shares in (0, 1]")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    try:
        dataset = data.load(options.data).standardized()
        bar = tqdm(total=5 + len(CASES), unit="part", file=sys.stderr)
        gradients = bridge.worker_gradients(
            *(options.model, dataset),
            steps=options.steps,
            workers=_FITTED + max(options.workers),
            batch=_BATCH,
            target_batch=8192,
        )
    except (OptionError, data.DataError, ModelError) as error:
        parser.error(str(error))
    bar.update()
    judged = []
    for name, (drawn, target) in gradients.items():
        judged += bridge.judge(name, drawn[:_FITTED], drawn[_FITTED:], target, options.shares, options.workers)
    bar.update()
    parts = (study.gaussian_rows, study.finite_rows, study.risk_rows, study.rtop_k_rows)
    reproduced = study.reproduced(list(itertools.chain.from_iterable(part(options.seed) for part in parts)))
    bar.update()
    found: list[Point] = []
    for case in CASES:
        found += points(case)
        bar.update()
    protocols = study.protocols_table(options.seed)
    bar.update()
    configurations = study.configurations_table(options.configurations, options.seed)
    bar.update()
    bar.close()
    tables = [reproduced, study.risk_table(found), protocols, configurations, study.bridge_table(judged)]
    plots = [
        Plot(
            "information",
            "Information of a message against its bits",
            figures.information_figure(study.information_curves()),
        ),
        *(Plot(f"risk_{axis}", f"Squared error against {axis}", figures.risk_figure(found, axis)) for axis in "kn"),
        Plot("risk_d", "Squared error against d", figures.risk_figure(found, "d")),
        Plot("bridge", "Sparsifiers on real gradients: predicted and measured", figures.bridge_figure(judged)),
    ]
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "matplotlib": matplotlib.__version__,
        "isgq": isgq.__version__,
    }
    summary = _summary(reproduced, configurations, found, judged)
    command = shlex.join(["python", "-m", "analysis.estimation", *given])
    write_report(options.out, _TITLE, summary, tables, plots, command, versions)
    print("\n".join(f"- {line}" for line in summary))
    print(f"\nwrote {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
