"""The report: ``python -m analysis.estimation``."""

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch
from tqdm import tqdm

import data
from analysis.estimation import bridge, figures, study
from analysis.estimation.cases import CASES, Point, points
from analysis.report import Report, ReportError, Table, run

_FITTED = 16  # workers that the bridge's model is fitted to
_BATCH = 64
_TARGET = 8192  # images whose gradient stands for the true one


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


def build(options: argparse.Namespace) -> Report:
    """The report of the command's options.

    Raises:
        ReportError: a number out of its range.
    """
    least = min(options.configurations, *options.workers)
    if least < 1 or options.steps < 0 or options.seed < 0 or not all(0 < share <= 1 for share in options.shares):
        raise ReportError("--configurations and --workers must be at least 1, --steps and --seed 0, --shares in (0, 1]")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    dataset = data.load(options.data).standardized()
    with tqdm(total=5 + len(CASES), unit="part", file=sys.stderr) as bar:
        gradients = bridge.worker_gradients(
            *(options.model, dataset),
            steps=options.steps,
            workers=_FITTED + max(options.workers),
            batch=_BATCH,
            target_batch=_TARGET,
        )
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
    drawings = figures.information_figures(study.information_curves())
    return Report(
        "Estimation from k bits a node: information, risk, and what it says of sparsifiers",
        _summary(reproduced, configurations, found, judged),
        [reproduced, study.risk_table(found), protocols, configurations, study.bridge_table(judged)],
        [*drawings, *figures.risk_figures(found), *figures.bridge_figures(judged)],
        [
            "Statements, assumptions and whose constants the bounds have: docs/estimation.md.",
            f"The model is fitted to gradients of {_FITTED} workers, {_BATCH} images each, of {options.model} on "
            f"{options.data} after {options.steps} steps, and judged on {max(options.workers)} others; the gradient of "
            f"{_TARGET:,} images stands for the true one.",
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(prog="python -m analysis.estimation", description="Information, risk, sparsifiers")
    parser.add_argument("--configurations", type=int, default=1000, help="random ones to try (default: %(default)s)")
    parser.add_argument("--model", default="fc", help="network whose gradients are taken (default: %(default)s)")
    parser.add_argument("--data", default="fashion", help="a data set by name (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=48, help="training steps before (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 32], help="numbers n (default: 1 4 16 32)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="k / d, in (0, 1]")
    parser.add_argument("--seed", type=int, default=0, help="of all but the network (default: %(default)s)")
    run(parser, build, arguments)


if __name__ == "__main__":
    main()
