"""What a run says in the end."""

import math
from collections.abc import Mapping, Sequence

import data
from analysis.runs import Summary
from training.config import Config, Run


def diverged(config: Config, epoch: int) -> str:
    """What to say of a loss that is not finite."""
    return f"the loss is not finite after epoch {epoch + 1}: --lr {config.lr} is too large"


def summarise(
    config: Config,
    run: Run,
    result: tuple[float, float],
    each: Sequence[float],
    seconds: float,
    staleness: Mapping[int, int] | None = None,
) -> Summary:
    """The summary from test loss and accuracy; bytes sent, received and dense per step and worker; and seconds."""
    return Summary(
        model=config.model,
        data=config.data,
        codec=run.codec,
        workers=run.workers,
        batch_per_worker=run.batch,
        epochs=config.epochs,
        seed=config.seed,
        test_accuracy=result[1],
        test_loss=result[0],
        sent_bytes_per_step=each[0],
        received_bytes_per_step=each[1],
        dense_bytes_per_step=each[2],
        compression=each[2] / each[0] if each[0] else math.inf,
        seconds=seconds,
        aggregate=run.aggregate,
        down=run.down,
        perplexity=perplexity(result[0]) if data.is_text(config.data) else None,
        local_steps=run.local_steps,
        staleness={str(age): count for age, count in sorted((staleness or {}).items())},
    )


def perplexity(loss: float) -> float:
    """exp(loss): as many equally likely words would be as hard to tell."""
    return math.exp(loss) if loss < 700 else math.inf
