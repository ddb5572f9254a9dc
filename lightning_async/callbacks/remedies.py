"""What a remedy does to a Trainer, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_async.rules.schedules.denser import Denser

__all__ = ["RollsBack", "call_unfit", "cut_learning_rates", "drop_gradients", "rollback_of", "sync_more"]

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What schedulers keep in groups."""


@runtime_checkable
class RollsBack(Protocol):
    """Something, such as a callback on the same Trainer, that holds the last good state."""

    def roll_back(self, trainer: Any) -> int | None:
        """Put the last good state in place: parameters, buffers, optimizers, scaler, schedulers; the data goes on.

        All ranks call it together, between two batches, and all get the same state. Returns the step that it is of;
        None where there is none, then nothing has changed.
        """
        ...


def rollback_of(callbacks: Iterable[Any]) -> RollsBack | None:
    """The first of these that can roll back."""
    return next((callback for callback in callbacks if isinstance(callback, RollsBack)), None)


def drop_gradients(optimizer: Any) -> None:
    """This step moves no parameter, and no optimizer's state: it has no gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def cut_learning_rates(trainer: Any, factor: float) -> float:
    """Multiply all learning rates, those that schedulers begin and end with too; the first one, now."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in _RATES:
                if isinstance(group.get(name), (float, torch.Tensor)):
                    group[name] = group[name] * factor
    for config in trainer.lr_scheduler_configs:
        _cut(config.scheduler, factor)
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return float(next(groups, {}).get("lr", math.nan))


def _cut(scheduler: Any, factor: float) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _cut(inner, factor)
    for name in ("base_lrs", "min_lrs", "max_lrs"):
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    if isinstance(least := getattr(scheduler, "eta_min", None), float):
        scheduler.eta_min = least * factor


def sync_more(averager: Any) -> Callable[[], None]:
    """Rounds twice as often; returns what makes them as rare as they were."""
    schedule = averager.schedule
    averager.schedule = Denser(schedule)

    def undo() -> None:
        if isinstance(averager.schedule, Denser):
            averager.schedule = schedule

    return undo


def call_unfit(replica: Any) -> Callable[[], None]:
    """This replica holds nothing that others may take over: at the next gate it takes over theirs, and its optimizers
    begin anew. Returns what takes it back."""
    watched, verdict = replica.watched, torch.tensor(math.nan)
    replica.watched = lambda: [*watched(), verdict]

    def undo() -> None:
        replica.watched = watched

    return undo
