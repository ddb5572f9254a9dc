"""Patches of `ModelCheckpoint`, which assumes equal steps and metrics on all ranks.

A callback that saves by steps or by time would save between two sync points, when there is no model on which all agree.
Instead, the first replica on which a save is due calls all ranks to a sync point. If a validation is due at the same
step, a save with a monitored metric waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Undo, callbacks_of, override_for_users
from lightning_async.trainer.strategy_view import StrategyView


class Saving(CollectiveCallback):
    """Patches of a Trainer's `ModelCheckpoint` callbacks, so that all ranks save together at a sync point."""

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        self._saves: dict[int, int] = {}
        """For each callback's `id`: how many intervals of steps the leading replica had completed at the last save."""
        self._deferred: set[int] = set()
        """The `id` of each callback whose save waits for the validation at the end of the epoch."""
        self.validates_at_end: Callable[[], bool] = lambda: False
        """Function that returns whether this rank has taken its epoch's last batch and a validation is due with it."""

    def install(self) -> list[Undo]:
        undo = []
        for checkpoint in self._checkpoints():
            undo.append(override_for_users(checkpoint, "_monitor_candidates", self._monitor_candidates))
            undo.append(override_for_users(checkpoint, "on_train_batch_end", partial(self._end_batch, checkpoint)))
        return undo

    def _checkpoints(self) -> list[Any]:
        return callbacks_of(self._trainer, "ModelCheckpoint")

    def model_changed(self) -> None:
        """Record that no checkpoint has the present model, whatever this rank's step count is.

        `ModelCheckpoint` skips a save at a step count at which it has saved before. A rank that waits at a sync point
        keeps its count, and other ranks do not. So some ranks would save, with collectives, and others would not.
        """
        for callback in self._checkpoints():
            callback._last_global_step_saved = -1

    def begin_batch(self) -> None:
        """Record, before the first batch, how many save intervals an earlier training has completed.

        The saves of that training are not due again.
        """
        for checkpoint in self._checkpoints():
            self._saves.setdefault(id(checkpoint), self._turns(checkpoint))

    def _end_batch(self, checkpoint: Any, original: Any, *args: Any, **kwargs: Any) -> None:
        """Call all ranks to a sync point when a save is due, instead of saving alone."""
        if self._view.sync_points is None:
            original(*args, **kwargs)
        elif self._is_due(checkpoint) and self.call_together is not None:
            self.call_together()

    def _turns(self, checkpoint: Any) -> int:
        """Return how many intervals of ``every_n_train_steps`` this replica has completed for this callback."""
        n = checkpoint._every_n_train_steps
        return self._trainer.global_step // n if n > 0 else 0

    def _is_due(self, checkpoint: Any) -> bool:
        interval = checkpoint._train_time_interval
        before = checkpoint._last_time_checked
        by_time = interval is not None and before is not None and time.monotonic() - before >= interval.total_seconds()
        turns = self._turns(checkpoint)
        return by_time or turns > self._saves.get(id(checkpoint), turns)

    def decide(self, world: LightningCollectives) -> bool:
        """Save if a save is due on any rank. All ranks call this at a sync point, where they have one model.

        The validation that is due with an epoch's last batch runs when all ranks have arrived there. Until then its
        metric has the value of an earlier model. So a save that monitors a metric waits (`catch_up`) if such a
        validation is due on a rank on which the save is due, or on rank 0, whose step number is in the file.
        """
        timed = [each for each in self._checkpoints() if each._every_n_train_steps or each._train_time_interval]
        if not timed:
            return False
        # A save is collective, so all ranks save if one of them is due. A rank that has joined has deferred none.
        ends = self.validates_at_end()
        told = world.gather_objects(
            [[self._is_due(each), self._turns(each), ends, id(each) in self._deferred] for each in timed]
        )
        for checkpoint, said in zip(timed, zip(*told, strict=True), strict=True):
            self._saves[id(checkpoint)] = max(turns for _, turns, _, _ in said)
            is_due = any(due for due, _, _, _ in said)
            too_early = said[0][2] or any(due and ends for due, _, ends, _ in said)
            if is_due and too_early and checkpoint.monitor is not None:
                checkpoint._last_time_checked = time.monotonic()
                self._deferred.add(id(checkpoint))
            elif is_due or (any(deferred for *_, deferred in said) and not any(ends for _, _, ends, _ in said)):
                self._deferred.discard(id(checkpoint))
                self._save(checkpoint)
        return False

    def catch_up(self) -> None:
        """Make the saves that are due when an epoch or training ends, after its validation.

        These are the saves that have waited for the validation, and those for which no later batch comes.
        """
        world = self._view.world
        if world is not None and self._view.sync_points is not None and not self._view.failed:
            self.decide(world)

    def _save(self, checkpoint: Any) -> None:
        """Save under the step number of rank 0.

        Another replica may be ahead, but the file has the state of rank 0's loops.
        """
        trainer = self._trainer
        checkpoint._last_time_checked = time.monotonic()
        checkpoint._last_global_step_saved = -1
        candidates = checkpoint._monitor_candidates(trainer)
        if checkpoint.monitor is None and checkpoint.save_top_k == -1:
            # On a rank 0 that has finished, the steps stay while the model changes. Lightning would overwrite its last
            # file, and give another file a version. Without a known last file it does neither.
            checkpoint.best_model_path = ""
        if checkpoint.monitor is None or checkpoint.monitor in candidates:
            checkpoint._save_topk_checkpoint(trainer, candidates)
            checkpoint._save_last_checkpoint(trainer, candidates)

    def _monitor_candidates(self, original: Any, trainer: Any) -> dict[str, Any]:
        """Return rank 0's monitored values on every rank, because all ranks must name a file by the same values."""
        candidates = original(trainer)
        world = self._view.world
        if world is None or world.asynchronous:
            return candidates
        return world.broadcast({name: value.cpu() for name, value in candidates.items()})
