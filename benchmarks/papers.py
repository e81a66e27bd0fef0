"""The papers' comparisons on images and texts: one table and its figures for each, all remade by one command.

    python -m benchmarks.papers [--only STUDY ...] [--seeds S ...] [--processes N]     # rewrites docs/results.md
    python -m benchmarks.papers --quick                                                # all of it very small, in CI

    transformer     the frontier's codecs and PowerSGD on a transformer language model
    rtop_k_text     top-k, random-k, rTop-k on an LSTM language model, at every step and federated
    rtop_k_images   the same on images, at two sparsities and at equal bytes
    prediction      whether the sparse model of analysis.estimation predicts who of these wins
    double_squeeze  1-bit and top-k in two passes against MEM-SGD, QSGD, top-k without memory
    cifarnet        the frontier's codecs on a convolutional network
    isgq            ISGQ's variants, 1-bit, TernGrad, QSGD, on 1 to 8 workers
    isgq_errors     the same on single gradients: bits and error, AlexNet among them
    plans           what ``auto`` would do with each model

Workers are simulated in one process, messages are real (:mod:`benchmarks.simulation`). Every finished run is a file
under ``runs/papers/runs`` and is not made again; without that folder all is made anew. Reports with figures are under
``runs/papers``.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from analysis import reproduce
from analysis.plans import Config as PlanConfig
from analysis.report import Report, ReportError
from benchmarks import single_steps
from benchmarks.comparison import Study, compare
from data import DataError
from isgq.core.errors import IsgqError
from models import ModelError
from training.config import Config

OUT = Path("runs/papers")
_QUICK_TEXT = "the union and the states of the union and the people of the states\n"

_TEXT = Config(data="sotu", clip=1.0, epochs=1)
_IMAGES = Config(data="fashion", standardize=True, epochs=1)


def _sparse(*shares: str) -> list[str]:
    """Top-k, random-k, and rTop-k at several r / k, all with memory, at these k."""
    ratios = {"0.01": ("0.04",), "0.001": ("0.002", "0.004", "0.016")}
    return [
        f"error_feedback({codec})"
        for k in shares
        for codec in (f"top_k:k={k}", f"random_k:k={k}", *(f"rtop_k:r={r},k={k}" for r in ratios[k]))
    ]


_FEW = ["isgq", "minimum_variance:levels=2", "error_feedback(one_bit)", "qsgd:levels=1", "rotated:ratio=400"]
_SQUEEZED = ["one_bit:bucket=256", "top_k:k=0.01"]
_FEDERATED = ["powersgd:rank=2", "subspace:rank=4,step=1"]
STUDIES: Mapping[str, Study] = {
    "transformer": Study(
        "A transformer language model",
        replace(_TEXT, model="transformer_lm:width=32,heads=2", workers=(4,), batch_per_worker=8, epoch_steps=200),
        [
            *("powersgd:rank=1", "powersgd:rank=4", "error_feedback(top_k:k=0.001)", "subspace:rank=4,step=1"),
            *("dithered:levels=1,bucket=row,mode=half", "rotated:ratio=400", "rotated:ratio=400,bases=learned"),
        ],
        (0.3, 1.0),
    ),
    "rtop_k_text": Study(
        "rTop-k on a language model",
        replace(_TEXT, model="lstm_lm:width=32", workers=(5,), batch_per_worker=4, epoch_steps=120),
        [*_sparse("0.01", "0.001"), "powersgd:rank=2", "subspace:rank=4,step=1", "rotated:ratio=200,bases=learned"],
        (1.0, 3.0),
        {"every step": {}, "federated, 8 steps": {"local_steps": 8}},
        {"federated, 8 steps": [*_sparse("0.01", "0.001"), *_FEDERATED]},
        notes=["Federated: bytes are those of a round, divided by its steps; changes of models have no factors."],
    ),
    "rtop_k_images": Study(
        "rTop-k on images",
        replace(_IMAGES, model="fc", workers=(5,), batch_per_worker=16, epoch_steps=200),
        [
            *(*_sparse("0.01", "0.001"), "error_feedback(top_k:k=0.002)"),
            *("powersgd:rank=2", "subspace:rank=4,step=1", "rotated:ratio=400", "rotated:ratio=1500,bases=learned"),
        ],
        (0.05, 0.1),
        {"every step": {}, "federated, 8 steps": {"local_steps": 8}},
        {"federated, 8 steps": [*_sparse("0.01", "0.001"), *_FEDERATED]},
        notes=["Federated: bytes are those of a round, divided by its steps; changes of models have no factors."],
    ),
    "double_squeeze": Study(
        "DoubleSqueeze",
        Config(
            data="patches",
            standardize=True,
            model="resnet18:width=16",
            workers=(8,),
            batch_per_worker=16,
            epochs=4,
            epoch_steps=30,
            momentum=0.0,
        ),
        [
            *("rotated:ratio=100,bases=learned", "powersgd:rank=2"),
            *(f"two_pass({codec};{codec}):scope=model" for codec in _SQUEEZED),
            *(f"two_pass({codec};dense):memory=worker,scope=model" for codec in _SQUEEZED),
            "two_pass(qsgd:levels=4;dense):memory=none,scope=model",
            "two_pass(top_k:k=0.01;dense):memory=none,scope=model",
        ],
        (0.1, 0.2),
        links=("10Mbit/s+1ms", "100Mbit/s+1ms", "1Gbit/s+0.1ms", "10Gbit/s+0.1ms"),
        notes=["MEM-SGD is two_pass(...;dense):memory=worker; an epoch is 30 steps."],
    ),
    "cifarnet": Study(
        "CifarNet on patches of photographs",
        Config(
            data="patches",
            standardize=True,
            model="cifarnet",
            workers=(4,),
            batch_per_worker=16,
            epochs=1,
            epoch_steps=150,
        ),
        [
            *("powersgd:rank=2", "error_feedback(top_k:k=0.01)", "error_feedback(one_bit)"),
            *("rotated:ratio=100", "rotated:ratio=400,bases=learned", "subspace:rank=4,step=1"),
            "isgq + qsgd:levels=1",
        ],
        (0.02, 0.05),
    ),
    "isgq": Study(
        "ISGQ and its rivals, on 1 to 8 workers",
        Config(data="fashion", model="fc", workers=(4,), total_batch=64, epochs=1, epoch_steps=200),
        [
            *("isgq", "dithered:levels=3,bucket=row", "naive:levels=2", "minimum_variance:levels=2"),
            *("minimum_variance_unbiased:levels=2", "minimum_variance:levels=4"),
            *("error_feedback(one_bit)", "terngrad", "qsgd:levels=1", "qsgd:levels=4"),
            *("powersgd:rank=2", "subspace:rank=4,step=1", "rotated:ratio=400", "rotated:ratio=400,bases=learned"),
        ],
        (0.05, 0.1),
        {
            "4 workers": {},
            "1 worker": {"workers": (1,)},
            **{f"{n} workers": {"workers": (n,)} for n in (2, 8)},
            "LeNet, 4 workers, 100 steps": {"model": "lenet", "epoch_steps": 100},
        },
        {
            **dict.fromkeys(("1 worker", "2 workers", "8 workers"), _FEW),
            "LeNet, 4 workers, 100 steps": [method for method in _FEW if not method.startswith("minimum")],
        },
        notes=["A total batch of 64, shared equally; levels=2 has the symbols -, 0, +, levels=4 two of each sign."],
    ),
}


def _errors(options: argparse.Namespace) -> Report:
    nets = {"fc": ("fashion", 100), "lenet": ("fashion", 100), "cifarnet": ("patches", 100), "alexnet": ("random", 0)}
    specs = [
        *("isgq", "dithered:levels=3,bucket=row", "naive:levels=2", "minimum_variance:levels=2"),
        *("minimum_variance_unbiased:levels=2", "minimum_variance:levels=4"),
        *("one_bit", "terngrad", "qsgd:levels=1", "qsgd:levels=4", "rotated"),
    ]
    if options.quick:
        nets = {"fc:hidden=8": ("mnist5k", 1)}
    specs = [f"separate({spec})" if spec.startswith("dithered") else spec for spec in specs]
    return single_steps.errors(nets, specs, batch=16, seed=0)


def _prediction(options: argparse.Namespace) -> Report:
    base = STUDIES["rtop_k_text"].base
    config = replace(base, workers=(1,), lr=1.0)
    if options.quick:
        return single_steps.prediction(_small(config), 2, [0.1], 1, least=64)
    return single_steps.prediction(config, base.workers[0], [0.01, 0.001], 4)


def _plans(options: argparse.Namespace) -> Report:
    if options.quick:
        return single_steps.plans([("fc:hidden=8", PlanConfig(batch=4))], 2)
    models = ["fc", "lenet", "cifarnet", "resnet18:width=16", "lstm_lm:width=64", "transformer_lm:width=64"]
    long = PlanConfig(batch=32, steps=64, vocabulary=2000)
    return single_steps.plans([*((m, PlanConfig()) for m in models), *((m, long) for m in models[-2:])], 4)


def _small(config: Config) -> Config:
    """The same in a second or two."""
    text = config.data == "sotu"
    model = "transformer_lm:width=8,heads=2,layers=1" if text else "fc:hidden=8"
    if text and config.model.startswith("lstm"):
        model = "lstm_lm:width=8,layers=1"
    name = f"ptb:{OUT / 'quick' / 'text'}" if text else "mnist5k"
    return replace(config, model=model, data=name, epochs=min(config.epochs, 2), epoch_steps=2)


def quick_study(study: Study) -> Study:
    """The same methods, at one rate, for two steps of small models; few of them in a second setting."""
    first, *others = study.settings
    kept = {first: study.settings[first], **{name: study.settings[name] for name in others[:1]}}
    only = {name: study.only.get(name, study.methods)[:2] for name in others}
    return replace(study, base=_small(study.base), rates=study.rates[:1], settings=kept, only=only)


@dataclass(frozen=True)
class Part:
    """A part of the document.

    Attributes:
        build: makes the report, from the command's options.
        table: whose rows the document shows.
        columns: that it shows.
    """

    build: Callable[[argparse.Namespace], Report]
    table: str
    columns: Sequence[str]


def _compare(name: str, options: argparse.Namespace) -> Report:
    study = quick_study(STUDIES[name]) if options.quick else STUDIES[name]
    if options.rates:
        study = replace(study, rates=options.rates)
    if options.methods:
        only = dict.fromkeys(study.settings, options.methods)
        study = replace(study, only=only)
    seeds, processes = (options.seeds[:1], 1) if options.quick else (options.seeds, options.processes)
    return compare(study, seeds, OUT / ("quick" if options.quick else "runs"), processes)


_COLUMNS = ("setting", "method", "rate", "seeds", "sent", "compression", "accuracy", "loss", "deviation", "to_dense")
_ERRORS = ("model", "codec", "bits", "gain", "nmse")
_PREDICTION = ("layer", "size", "k", "forecast", "winner", "regret", "top-k", "random-k", "rTop-k")
_PLANS = ("model", "rows", "plan", "dense", "sent", "received", "error")
PARTS: Mapping[str, Part] = {
    **{n: Part(partial(_compare, n), "methods", _COLUMNS[len(s.settings) == 1 :]) for n, s in STUDIES.items()},
    "prediction": Part(_prediction, "prediction", _PREDICTION),
    "isgq_errors": Part(_errors, "errors", _ERRORS),
    "plans": Part(_plans, "plans", _PLANS),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the reports, and rewrite their parts of the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="STUDY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, help="the grid of learning rates, instead of a study's own")
    parser.add_argument("--methods", nargs="+", help="instead of a study's own")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("--quick", action="store_true", help="all of it very small; the document stays as it is")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        for name in options.only:
            make(name, options)
    except (IsgqError, DataError, ModelError, ReportError, OSError) as error:
        parser.error(str(error))


def make(name: str, options: argparse.Namespace) -> None:
    """One part."""
    if options.quick:
        _write_text(OUT / "quick" / "text")
    part, folder = PARTS[name], OUT / ("quick" if options.quick else "") / name
    report, command = part.build(options), _command(name, options)
    replace(report, command=f"python {command}").save(folder)
    print(f"{report.title}\n", *(f"- {sentence}" for sentence in report.summary), f"written to {folder}/", sep="\n")
    if not options.quick:
        entry = reproduce.Entry([command], part.table, part.columns)
        reproduce.rewrite(f"papers_{name}", reproduce.block(entry, [command], report))


def _command(name: str, options: argparse.Namespace) -> str:
    """What makes this part alone."""
    words = ["-m", "benchmarks.papers", "--only", name]
    if name in STUDIES:
        words += ["--seeds", *options.seeds] if options.seeds != [0, 1, 2] else []
        words += ["--rates", *(f"{rate:g}" for rate in options.rates)] if options.rates else []
        words += ["--methods", *options.methods] if options.methods else []
    return shlex.join(map(str, words))


def _write_text(folder: Path) -> None:
    """A text in the form of WikiText, for quick runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 200), ("valid", 10), ("test", 10)):
        (folder / f"wiki.{part}.tokens").write_text(_QUICK_TEXT * count)


if __name__ == "__main__":
    main()
