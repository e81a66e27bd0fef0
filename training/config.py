"""The command line as one dataclass, and one run of it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from analysis.runs import run_name
from isgq.core.errors import OptionError


@dataclass(frozen=True)
class Config:
    """Train a model over one or several workers, with plain or with compressed gradients."""

    workers: tuple[int, ...] = (4,)
    """numbers of workers, a run for each; under torchrun its number of processes counts instead"""
    codecs: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--codec"])] = ("isgq",)
    """codecs, a run for each, e.g. isgq, dithered:levels=2,bucket=row, error_feedback(top_k:k=0.01); dense is the
    uncompressed baseline"""
    dense: str | None = None
    """codec for the parameters whose gradients have no factors; plain all-reduce if not given"""
    aggregate: Literal["gather", "two_pass", "server", "async"] = "gather"
    """who averages: every worker for itself, each worker a shard (DoubleSqueeze), the first worker all, or a further
    process that serves the workers as they come, each gradient with lr / workers"""
    down: str | None = None
    """codec of the averages, or of what an asynchronous server replies; plain if not given"""
    memory: Literal["both", "worker", "none"] = "both"
    """who remembers what biased codecs leave out, unless --aggregate is gather: workers and servers, workers, nobody"""
    max_staleness: int | None = None
    """how many updates old an asynchronous gradient may get before fast workers have to wait"""
    routes: Literal["auto", "factors", "dense"] = "auto"
    """auto sends factors where they are fewer bytes, factors wherever there are any"""
    bucket_cap_mb: float | None = None
    """send while backward goes on, as soon as so many MiB of gradients are there; when backward ends if not given"""
    inline_bytes: int | Literal["auto"] = 0
    """of each message so many bytes travel with the step's header: messages that fit wait for the link only once; auto:
    a little more than the longest message of the step before"""
    local_steps: int | None = None
    """federated rounds: each worker takes so many steps by itself, then the changes of the models are averaged; the
    codec is for those"""
    model: str = "fc"
    """fc, fc:hidden=1000-300-100, lenet, cifarnet, alexnet or resnet18:width=16 for images, lstm_lm:width=200 or
    transformer_lm:width=128,layers=2,heads=4 for texts"""
    data: str = "mnist5k"
    """images: mnist5k, fashion, patches, idx:DIR or cifar10:DIR; texts: sotu or ptb:DIR"""
    standardize: bool = False
    """shift and scale the pixels to mean 0 and deviation 1; the raw ones, in [0, 1], make sparser factors"""
    sequence: int | None = None
    """tokens of a text's sample in a step; 32 if not given"""
    total_batch: int | None = None
    """samples of all workers together in a step; 128 if neither batch is given"""
    batch_per_worker: int | None = None
    """samples of each worker in a step, instead of --total-batch"""
    epochs: int = 6
    """passes over the training data, unless --epoch-steps is given"""
    epoch_steps: int | None = None
    """steps of an epoch, after each of which there is an evaluation and a checkpoint"""
    lr: float = 0.2
    """learning rate of SGD"""
    momentum: float = 0.9
    """momentum of SGD"""
    clip: float | None = None
    """largest norm of the gradient of the whole model; longer ones are shortened to it"""
    schedule: Literal["constant", "cosine"] = "cosine"
    """whether the learning rate stays or falls to 0 over the run"""
    seed: int = 0
    """of weights, order of the samples and dither"""
    out: Path = Path("runs/latest")
    """folder for results; those of an earlier command are replaced"""
    resume: bool = False
    """go on from the checkpoints in --out"""
    telemetry: int | None = None
    """every so many steps, write what compression does to each parameter; isgq.watch shows it"""
    timeout: float = 60.0
    """seconds to wait for a missing worker"""

    def batch_of_each(self, workers: int) -> int:
        """Samples of each worker in a step.

        Raises:
            OptionError: both batch sizes are given, or the total cannot be shared equally.
        """
        if self.batch_per_worker is None:
            total = 128 if self.total_batch is None else self.total_batch
            each, rest = divmod(total, workers)
            if rest:
                raise OptionError(f"--total-batch {total} cannot be shared equally by {workers} workers")
            return each
        if self.total_batch is not None:
            raise OptionError("give --total-batch or --batch-per-worker, not both")
        return self.batch_per_worker


@dataclass(frozen=True)
class Run:
    """One combination of codec and workers; ``batch`` is each worker's."""

    codec: str
    workers: int
    batch: int
    aggregate: str = "gather"
    down: str = "dense"
    local_steps: int | None = None

    @property
    def name(self) -> str:
        """Names its files and its lines in the metrics."""
        return run_name(self.codec, self.workers, self.batch, self.aggregate, self.down, self.local_steps)

    @property
    def processes(self) -> int:
        """An asynchronous server is a further process."""
        return self.workers + (self.aggregate == "async")


def learning_rate(config: Config, done: float) -> float:
    """The schedule's value when ``done``, in [0, 1), of the run is over."""
    return config.lr * (0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0)
