"""What unequal batches cannot go together with is refused, by name."""

from __future__ import annotations

from typing import Any

from lightning_async.rules import Synchronous
from lightning_async.trainer.patches import callbacks_of

__all__ = ["check_bounds", "check_trainer", "steps_together"]


def steps_together(strategy: Any) -> bool:
    """Whether each rank comes to each step after as many batches of its own as all others."""
    return strategy.in_step if hasattr(strategy, "accumulate") else isinstance(strategy.schedule, Synchronous)


def check_trainer(callback: Any, trainer: Any) -> None:
    """Whether batches may be of unequal size.

    Raises:
        ValueError: they may not; says why, and what to do.
    """
    owner, strategy = type(callback).__name__, trainer.strategy
    name = type(strategy).__name__
    if not hasattr(type(strategy), "averager") or getattr(strategy, "served", False):
        raise ValueError(
            f"`{owner}` is for strategies that weight what ranks exchange by samples, and `{name}` does not: use "
            "`AsyncAveragingStrategy(schedule=Synchronous())`, which steps as DDP does, or `AsyncGradientStrategy`."
        )
    if (weighting := strategy.config.weighting) != "samples":
        raise ValueError(f"`{name}(weighting={weighting!r})` beside `{owner}`: take 'samples', or leave `{owner}` out.")
    if any(hasattr(each, "accumulation_steps") for each in trainer.callbacks):
        raise ValueError(
            f"`AdaptiveGradientAccumulation` beside `{owner}`: both say how many samples a step has. Leave it out, and "
            f"take `{owner}(global_batch_size=...)`."
        )
    if callbacks_of(trainer, "GradientAccumulationScheduler"):
        raise ValueError(
            f"The Trainer has a `GradientAccumulationScheduler` beside `{owner}`: leave it out, and take "
            "`Trainer(accumulate_grad_batches=...)`, which stays."
        )
    if trainer.overfit_batches:
        raise ValueError(f"`Trainer(overfit_batches={trainer.overfit_batches})` beside `{owner}`: leave one out.")


def check_bounds(callback: Any, ranks: int, total: int) -> None:
    """Whether there is room for the samples of a step.

    Raises:
        ValueError: there is not.
    """
    least, most = callback.minimum * ranks, None if callback.maximum is None else callback.maximum * ranks
    if least > total or (most is not None and most < total):
        raise ValueError(
            f"`{type(callback).__name__}(minimum={callback.minimum}, maximum={callback.maximum})`: {ranks} ranks are "
            f"to take {total} samples in a step, {total / ranks:g} each on average."
        )
