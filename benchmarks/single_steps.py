"""What methods do to single gradients: bits and error, who should win, and which way each gradient takes."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import data
import isgq
from analysis.estimation.bridge import METHODS, Verdict, judge
from analysis.gradients import LayerGradient, capture_batches, weight_numel
from analysis.measure import measure
from analysis.plans import Config as PlanConfig
from analysis.plans import inputs, loss
from analysis.report import Cell, Report, Table
from data.dataset import Dataset
from training import task
from training.config import Config, Run


def errors(nets: Mapping[str, tuple[str, int]], specs: Sequence[str], batch: int, seed: int) -> Report:
    """Bits and error of codecs on the gradients of one batch of one worker.

    Args:
        nets: model -> data set (``"random"`` for AlexNet's kind of images) and training steps before.
        specs: the codecs.
        batch: images.
        seed: of random images.
    """
    rows: list[Sequence[Cell]] = []
    for model, (name, steps) in nets.items():
        dataset = random_images(batch, seed) if name == "random" else data.load(name)
        [layers] = capture_batches(model, dataset, steps=steps, batch=batch, batches=[batch])
        dense = [layer for layer in layers if layer.gradient.dim() == 2]
        for spec in specs:
            rows.append([model, name, steps, spec, *_quality(dense, spec)])
    columns = {
        "model": "the network",
        "data": "where the images come from",
        "step": "training steps before, SGD with momentum 0.9, rate 0.05",
        "codec": "on factors where it is one of pairs, on gradients else; without any memory",
        "bits": "bits a weight, of packed messages with all headers",
        "gain": "32 over these",
        "nmse": "mean over keys of squared error over squared gradient",
    }
    caption = f"Dense layers' gradients of {batch} images"
    note = "AlexNet is at its full size, on random images: bytes and error alone mean something there."
    return Report("ISGQ on single gradients", _fewest(rows), [Table("errors", caption, columns, rows)], [], [note])


def random_images(count: int, seed: int) -> Dataset:
    """Noise in ImageNet's form: 3 x 224 x 224, 1000 classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 224, 224, generator=generator)
    y = torch.randint(1000, (count,), generator=generator)
    return Dataset(x, y, x, y, 1000, "random", "random images")


def _quality(layers: Sequence[LayerGradient], spec: str) -> tuple[float, float, float]:
    """Bits a weight, gain, and relative squared error of all layers together."""
    found = [measure(spec, layer, 2) for layer in layers]
    bits = 8 * sum(each.size for each in found) / weight_numel(layers)
    return bits, 32 / bits, sum(each.error for each in found) / sum(each.norm for each in found)


def _fewest(rows: Sequence[Sequence[Cell]]) -> list[str]:
    sentences = []
    for model in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == model and isinstance(row[-1], float) and row[-1] <= 1]
        gains = sorted(mine, key=lambda row: -float(row[5] or 0))
        if gains:
            _, _, _, spec, _, gain, nmse = gains[0]
            sentences.append(f"{model}: of those with an error below 1, {spec} gains most, x{gain:.0f} at {nmse:.3g}.")
    return sentences


def prediction(config: Config, workers: int, shares: Sequence[float], groups: int, least: int = 1000) -> Report:
    """Who of top-k, random-k and rTop-k has the least error of the mean: by a fitted model, and measured.

    Args:
        config: a short run of one worker with plain gradients, after which those of many are taken.
        workers: whose mean it is.
        shares: k as shares of a gradient.
        groups: of so many workers, to fit the model to and to measure on; five times as many are the true gradient.
        least: parameters of fewer entries are left out.
    """
    count = groups * workers
    gradients = worker_gradients(config, count, least)
    rows: list[Sequence[Cell]] = []
    verdicts: list[Verdict] = []
    for name, (fitting, measuring, true) in gradients.items():
        verdicts += judge(name, fitting, measuring, true, shares, [workers])
    for verdict in verdicts:
        found = [verdict.measured[method] for method in METHODS]
        rows.append([verdict.layer, verdict.size, verdict.k, verdict.forecast, verdict.winner, verdict.regret, *found])
    right = sum(v.forecast == v.winner for v in verdicts)
    winners = Counter(v.winner for v in verdicts)
    summary = [
        f"The forecast is right in {right} of {len(verdicts)} cases; where it is not, the error is "
        f"{max(100 * v.regret for v in verdicts):.1f} % larger at most.",
        "Least error of one step's mean, without memory: " + ", ".join(f"{n} {c}" for n, c in winners.items()) + ".",
    ]
    columns = {
        "layer": "parameter",
        "size": "its entries",
        "k": "entries kept",
        "forecast": "who should have the least error of the mean, by the fitted sparse model",
        "winner": "who has",
        "regret": "how much larger the error of the forecast is, relatively",
        **dict.fromkeys(METHODS, "measured error of its best choice, over the squared true gradient"),
    }
    table = Table("prediction", f"{workers} workers, one step, no memory", columns, rows)
    return Report("Who of top-k, random-k and rTop-k should win", summary, [table])


def worker_gradients(config: Config, count: int, least: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of many workers at one state of a model in training, each on the first step of its own samples.

    Args:
        config: the training.
        count: of workers.
        least: parameters of fewer entries are left out.

    Returns:
        Parameter name -> gradients ``[count, d]``, those of as many others, and the mean of five times as many.
    """
    source, batch = task.load(config), config.batch_of_each(1)
    model = task.build(config, source)
    optimizer, own = task.optimizer_of(model, config), task.task_of(source, config, Run("dense", 1, batch), 0)
    for step in range(own.epoch_steps):
        own.loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    kept: dict[str, list[Tensor]] = {name: [] for name, p in model.named_parameters() if p.numel() >= least}
    true = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    every = Run("dense", 7 * count, batch)
    for rank in range(every.workers):
        task.task_of(source, config, every, rank).loss(model, 0).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            flat = parameter.grad.reshape(-1)
            if rank >= 2 * count:
                true[name] += flat / (5 * count)
            elif name in kept:
                kept[name].append(flat)
        model.zero_grad()
    stacked = {name: torch.stack(gradients) for name, gradients in kept.items()}
    return {name: (own[:count], own[count:], true[name]) for name, own in stacked.items()}


def plans(cases: Sequence[tuple[str, PlanConfig]], workers: int) -> Report:
    """What ``auto`` does with each model, by bytes alone.

    Args:
        cases: models, and how many samples of what length a worker has.
        workers: how many.
    """
    rows: list[Sequence[Cell]] = []
    summary = []
    for spec, config in cases:
        model, x = inputs(config, spec)
        forecast = isgq.plan(model, (x, None), workers=workers, link="100Mbit/s+1ms", timed=False, loss=loss)
        ways = Counter(each.way for each in forecast.decision.chosen)
        said = ", ".join(f"{n} {way}" for way, n in ways.most_common())
        moved, count = forecast.moved, x.numel() if x.dim() == 2 else len(x)
        rows.append([spec, count, said, forecast.dense_size, moved.sent, moved.received, forecast.error])
        pairs = sum(n for way, n in ways.items() if way.partition(":")[0] in {"isgq", "balanced", "rotated"})
        summary.append(
            f"{spec}, {count} rows: {pairs} of {sum(ways.values())} gradients by factors, "
            f"x{forecast.dense_size / moved.sent:.0f} in all at an error of {forecast.error:.2g}."
        )
    columns = {
        "model": "the network, new, on random images, or texts of random tokens",
        "rows": "images or tokens of a worker in a step",
        "plan": "how many gradients take which way",
        "dense": "bytes of the gradients",
        "sent": "predicted bytes that a worker sends in a step",
        "received": "predicted bytes that it receives",
        "error": "expected squared error of the mean, over one worker's squared gradient; 0.25 is allowed",
    }
    table = Table("plans", f"Plans of auto for {workers} workers, by bytes alone", columns, rows)
    return Report("What auto plans", summary, [table])
