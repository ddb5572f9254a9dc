"""What a user has asked of checkpoints, and whether one is due."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_async.engine.checkpoint.costs import Costs
from lightning_async.rules.saving import Best, KeepPolicy, Progress, SavePolicy
from lightning_async.trainer.names import names_of
from lightning_async.trainer.patches import in_words
from lightning_async.trainer.settings import version
from lightning_async.trainer.unsaved import limits_of

__all__ = ["Clock", "Settings", "is_last", "manifest_of", "was_stopped"]

_LONGEST = 1000  # characters of an exception


@dataclass(frozen=True)
class Settings:
    """What a user has asked for; equal on all ranks.

    Args:
        dirpath: where checkpoints are.
        save: when.
        keep: which.
        recover: which one to go on from; None: none, by itself.
        busy: what becomes of a save that is due while the one before is written: "latest", "wait" or "skip".
        buffers: copies of the state.
        max_failures: failed saves in a row that end training.
        good_after: steps without harm, after which a checkpoint is good.
        best: what "best" means.
        on_exception: whether to save when training ends by an exception.
        objects: what becomes of objects in the state, "refuse" or "pickle".
    """

    dirpath: str
    save: SavePolicy
    keep: KeepPolicy
    recover: str | None
    busy: str
    buffers: int
    max_failures: int
    good_after: int
    best: Best | None
    on_exception: bool
    objects: str

    def compared(self) -> str:
        """What must be equal on all ranks, in words; directories of hosts may have different names."""
        words = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "dirpath")
        return re.sub(r" at 0x[0-9a-f]+", "", words)  # objects that say no more of themselves are taken for equal


class Clock:
    """What is due, and when the last save was.

    Args:
        policy: says when to save.
        costs: what saves cost.
        step: that training begins at.
    """

    def __init__(self, policy: SavePolicy, costs: Costs, step: int) -> None:
        self._policy, self._costs = policy, costs
        self.saved_step, self._saved_at = step, time.monotonic()
        self._put_off = False

    def due_by_steps(self, step: int, epoch_end: bool) -> bool:
        """Whether a save is due on every rank, whatever the time."""
        return self._put_off or self._policy.due(Progress(step, self.saved_step, 0.0, math.inf, epoch_end))

    def due(self, step: int, epoch_end: bool) -> bool:
        """Whether a save is due on this rank."""
        since = time.monotonic() - self._saved_at
        progress = Progress(step, self.saved_step, since, self._costs.of_one, epoch_end)
        return self._put_off or self._policy.due(progress)

    def asks(self, settings: Settings, busy: bool, step: int, ahead: int, epoch_end: bool) -> bool:
        """Whether a save is due and to begin; one that shall not wait for the one before is put off, or left out.

        Args:
            busy: the one before is still being written.
            step: now.
            ahead: so many steps until it would be made.
        """
        if not self.due(step + ahead, epoch_end):
            return False
        if not busy or settings.busy == "wait":
            return True
        if settings.busy == "skip":
            self.saved(step)
        else:
            self.put_off()
        return False

    def put_off(self) -> None:
        """One is due while another is being written: it stays so, also where the end of an epoch is over by then."""
        self._put_off = True

    def saved(self, step: int) -> None:
        """A save has begun, or one that was due is left out."""
        self.saved_step, self._saved_at, self._put_off = step, time.monotonic(), False


def manifest_of(trainer: Any, reason: str, exception: BaseException | None = None) -> dict[str, Any]:
    """What the manifest of a save tells; after an ``exception`` no metric is computed, which may wait for others."""
    metrics, known = {}, trainer.callback_metrics if exception is None else trainer._logger_connector._callback_metrics
    for name, value in known.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            metrics[name] = float(value)
    return {
        "epoch": trainer.current_epoch,
        "world_size": names_of(trainer).started,
        "reason": reason,
        "metrics": metrics,
        "notes": _notes(trainer, exception),
        "versions": {"torch": str(torch.__version__), "lightning-async": version()},
    }


def _notes(trainer: Any, exception: BaseException | None) -> dict[str, Any]:
    if exception is not None:
        return {"exception": in_words(exception)[:_LONGEST]}
    return {"stopped": limits_of(trainer)} if trainer.should_stop else {}


def was_stopped(trainer: Any, notes: Mapping[str, Any]) -> bool:
    """Whether a callback had stopped the training that has left these notes, and its limits are the same now."""
    return notes.get("stopped") == limits_of(trainer)


def is_last(trainer: Any) -> bool:
    """Whether training ends with this epoch."""
    fit = trainer.fit_loop
    epochs = fit.max_epochs is not None and 0 <= fit.max_epochs <= fit.epoch_progress.current.processed
    steps = 0 <= fit.max_steps <= trainer.global_step
    return epochs or steps or (trainer.should_stop and fit._can_stop_early)  # else `min_epochs` have yet to come
