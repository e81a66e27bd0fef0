"""Real gradients to measure on: factors captured at some steps of training, in one process, and kept in a file."""

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import data
import isgq
from analysis.report import ReportError
from isgq.core.payload import Contract, Factors
from isgq.layers.capture import Capture, Unit, find_units
from models import build

CACHE = Path("runs/cache")
_RATE, _MOMENTUM = 0.05, 0.9
_Captured = dict[int, dict[str, Factors]]  # step -> weight's name -> factors


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The weight gradient of one layer, and what it is made of.

    Attributes:
        name: the weight's parameter name.
        gradient: float32, in the weight's shape.
        bias: gradient of the bias, zeros where there is none: ``[o]``.
        factors: the pair that they are made of.
        contract: the layer's contract.
    """

    name: str
    gradient: Tensor
    bias: Tensor
    factors: Factors
    contract: Contract

    @classmethod
    def of(cls, unit: Unit, factors: Factors) -> "LayerGradient":
        """What the factors of a layer make up."""
        gradient = unit.contract(factors.x, factors.d)
        has_bias = unit.bias_name is not None
        bias = unit.adapter.bias_grad(unit.module, factors.d) if has_bias else gradient.new_zeros(len(gradient))
        return cls(unit.name, gradient, bias, factors, unit.contract)


def weight_numel(layers: Sequence[LayerGradient]) -> int:
    """Number of weights of all layers."""
    return sum(layer.gradient.numel() for layer in layers)


@dataclass(frozen=True)
class Recipe:
    """What is captured: everything that the factors depend on.

    Attributes:
        model: spec for ``models.build``.
        data: name of a data set.
        steps: numbers of training steps before each capture.
        batch: images of a training step and of a captured one.
        standardize: shift and scale the pixels to mean 0 and deviation 1; raw ones, in [0, 1], make sparser factors.
        seed: of weights and of the order of images.
    """

    model: str = "lenet"
    data: str = "fashion"
    steps: tuple[int, ...] = (0, 100, 1000)
    batch: int = 16
    standardize: bool = False
    seed: int = 0

    def capture(self, cache: Path | None = CACHE) -> dict[int, list[LayerGradient]]:
        """Step -> the layers that have factors; from the cache, if they were captured before.

        Args:
            cache: folder of the files; None for none.

        Raises:
            ReportError: a negative step or an empty batch, or a model without factors.
        """
        if not self.steps or min(self.steps) < 0 or self.batch < 1:
            raise ReportError(f"steps {self.steps} must be 0 or more each, and the batch of {self.batch} 1 or more")
        dataset = data.load(self.data, seed=self.seed)
        dataset = dataset.standardized() if self.standardize else dataset
        network = build(self.model, classes=dataset.classes, in_shape=dataset.in_shape, seed=self.seed)
        units = _units(network, self.model)
        path = cache / f"factors-{self._digest()}.pt" if cache else None
        captured = _read(path, self.steps, units) if path and path.exists() else None
        if captured is None:
            generator = torch.Generator().manual_seed(self.seed)
            captured = {
                stage: _capture(network, units, dataset, self.batch, generator)
                for stage in _train(network, dataset, sorted(set(self.steps)), self.batch, generator)
            }
            if path:
                _write(path, captured)
        return {step: [LayerGradient.of(u, captured[step][u.name]) for u in units] for step in sorted(captured)}

    def _digest(self) -> str:
        options = json.dumps([asdict(self), str(torch.__version__), isgq.__version__])
        return blake2b(options.encode(), digest_size=8).hexdigest()


def capture_gradients(
    model: str, dataset: data.Dataset, *, steps: int, batch: int, last_batch: int
) -> list[LayerGradient]:
    """Weight gradients of every layer that has factors, after some steps of SGD with momentum.

    Args:
        model: spec for ``models.build``.
        dataset: where the images come from.
        steps: training steps before the captured one.
        batch: images of a training step, drawn with replacement.
        last_batch: images of the captured step.
    """
    [layers] = capture_batches(model, dataset, steps=steps, batch=batch, batches=[last_batch])
    return layers


def capture_batches(
    model: str, dataset: data.Dataset, *, steps: int, batch: int, batches: Iterable[int]
) -> Iterator[list[LayerGradient]]:
    """The same for several batches at one state of the network, of so many images each."""
    network = build(model, classes=dataset.classes, in_shape=dataset.in_shape)
    units = _units(network, model)
    generator = torch.Generator().manual_seed(0)
    for _ in _train(network, dataset, [steps], batch, generator):
        for images in batches:
            captured = _capture(network, units, dataset, images, generator)
            yield [LayerGradient.of(unit, captured[unit.name]) for unit in units]


def _units(network: nn.Module, name: str) -> list[Unit]:
    """The layers that have factors; ReportError if there are none."""  # noqa: DOC501
    units, reasons = find_units(network, skip=lambda name: False)
    if not units:
        why = "; ".join(f"{parameter}: {reason}" for parameter, reason in reasons.items()) or "it has no parameters"
        raise ReportError(f"model {name!r} has no layer whose gradient is made of factors ({why})")
    return units


def _train(
    network: nn.Module, dataset: data.Dataset, stages: Sequence[int], batch: int, generator: torch.Generator
) -> Iterator[int]:
    """Train, and pause at each of the increasing stages."""
    optimizer = torch.optim.SGD(network.parameters(), lr=_RATE, momentum=_MOMENTUM)
    done = 0
    with tqdm(total=stages[-1], desc="training", unit="step", disable=stages[-1] < 100) as bar:
        for stage in stages:
            for _ in range(stage - done):
                _backward(network, dataset, batch, generator)
                optimizer.step()
                optimizer.zero_grad()
                bar.update()
            done = stage
            yield stage


def _capture(
    network: nn.Module, units: Sequence[Unit], dataset: data.Dataset, batch: int, generator: torch.Generator
) -> dict[str, Factors]:
    """The factors of one more batch; leaves no gradients behind."""
    caught: dict[str, Factors] = {}
    capture = Capture(units, lambda unit, factors: caught.update({unit.name: factors}), lambda: None)
    try:
        _backward(network, dataset, batch, generator)
    finally:
        capture.close()
        network.zero_grad()
    return caught


def _backward(network: nn.Module, dataset: data.Dataset, batch: int, generator: torch.Generator) -> None:
    chosen = torch.randint(len(dataset.train_y), (batch,), generator=generator)
    loss = F.cross_entropy(network(dataset.train_x[chosen]), dataset.train_y[chosen])
    loss.backward()  # type: ignore[no-untyped-call]


def _write(path: Path, captured: _Captured) -> None:
    """A reader finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {step: {name: (f.x, f.d) for name, f in layers.items()} for step, layers in captured.items()}
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(content, partial)
    os.replace(partial, path)


def _read(path: Path, steps: Sequence[int], units: Sequence[Unit]) -> _Captured | None:
    """What :func:`_write` wrote; None where the file is damaged, so that it is made again."""
    try:
        content: Mapping[int, Mapping[str, tuple[Tensor, Tensor]]] = torch.load(path, weights_only=True)
        return {step: {u.name: Factors(*content[step][u.name]) for u in units} for step in steps}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError):
        tqdm.write(f"{path} is damaged and is made again")
        return None


def each(stages: Mapping[int, Sequence[LayerGradient]]) -> Iterator[tuple[int, LayerGradient]]:
    """Every stage with each of its layers."""
    for step, layers in stages.items():
        for layer in layers:
            yield step, layer
