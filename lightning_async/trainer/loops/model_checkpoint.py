"""Patches of `ModelCheckpoint`, which assumes equal steps and metrics on all ranks, and that no training is killed.

A callback that saves by steps or by time would save between two sync points, when there is no model on which all agree.
Instead, the first replica on which a save is due calls all ranks to a sync point. `WrittenFiles` deletes what a killed
training has written after the checkpoint from which it resumes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_async.checkpoint.storage import seal, unseal
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import DamagedCheckpoint
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Undo, callbacks_of, override_for_users, set_for_now
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)

FILES = "model_checkpoint_files"
"""Key of the list of files in the state of `FaultTolerantCheckpoint`."""


class Saving(CollectiveCallback):
    """Patches of a Trainer's `ModelCheckpoint` callbacks, so that all ranks save together at a sync point."""

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        self._saves: dict[int, int] = {}
        """For each callback's `id`: how many intervals of steps the leading replica had completed at the last save."""

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
        """Save if a save is due on any rank. All ranks call this at a sync point, where they have one model."""
        timed = [each for each in self._checkpoints() if each._every_n_train_steps or each._train_time_interval]
        if not timed:
            return False
        # A save is collective, so all ranks save if one of them is due.
        told = world.gather_objects([[self._is_due(checkpoint), self._turns(checkpoint)] for checkpoint in timed])
        for checkpoint, said in zip(timed, zip(*told, strict=True), strict=True):
            self._saves[id(checkpoint)] = max(turns for _, turns in said)
            if any(due for due, _ in said):
                self._save(checkpoint)
        return False

    def catch_up(self) -> None:
        """Make the saves that are due when training ends, because there is no later batch at which to make them."""
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


class WrittenFiles:
    """The list of the files that a Trainer's `ModelCheckpoint` callbacks have written in this training.

    Each checkpoint of this package contains the list. The newest one is in a file of the checkpoints' directory.

    A killed training leaves files that are newer than the checkpoint from which it resumes. Their steps are trained
    again, so `resume` deletes them: Lightning would keep them, and name the new files ``last-v1.ckpt`` and so on.

    Args:
        trainer: The Trainer.
        store: The checkpoints of this package.
        gather: Function that returns a value of each rank, in rank order.
    """

    def __init__(self, trainer: Any, store: CheckpointStore, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer = trainer
        self._store = store
        self._gather = gather
        self._path = f"{store.dirpath}/model-checkpoints.json"
        self._callbacks = callbacks_of(trainer, "ModelCheckpoint")
        self.paths: list[str] = []

    def install(self) -> list[Undo]:
        calls = {"_save_checkpoint": self._write, "_link_checkpoint": self._write, "_remove_checkpoint": self._remove}
        return [override_for_users(callback, *call) for callback in self._callbacks for call in calls.items()]

    def _write(self, original: Any, *args: Any) -> None:
        # The file is listed before it is written, because this process may be killed in between. A link stands behind
        # the file that it names.
        self.paths = [*(path for path in self.paths if path != args[-1]), args[-1]]
        self.publish()
        original(*args)

    def _remove(self, original: Any, *args: Any) -> None:
        original(*args)
        self.paths = [path for path in self.paths if path != args[-1]]
        self.publish()

    def publish(self, ended: bool = False) -> None:
        """Write the list; ``ended`` says that training has ended, so that the next one from scratch is another one."""
        if self._callbacks and self._trainer.is_global_zero:
            content = {"paths": self.paths, "resumable": ended or bool(self._store.entries())}
            self._store.publish(self._path, seal(content))

    def resume(self, states: dict[str, Any], is_chosen: bool) -> None:
        """Delete the files that are newer than the loaded checkpoint; remove deleted ones from the callbacks' states.

        All ranks call this together, before Lightning restores the callbacks.

        Args:
            states: States of the callbacks in the loaded checkpoint; empty if training begins from scratch.
            is_chosen: Whether this package has chosen the checkpoint. If the user has, nothing is deleted.
        """
        self.paths = next((state[FILES] for state in states.values() if FILES in state), [])
        if is_chosen and self._callbacks:
            saved = [(each, states[each.state_key]) for each in self._callbacks if each.state_key in states]
            told = self._tidy(saved, not states) if self._trainer.is_global_zero else None
            missing, directories = self._gather(told)[0]
            for callback, state in saved:
                callback.dirpath = directories.get(callback.state_key, callback.dirpath)
                # Otherwise the end of training would write the last file again.
                callback._last_checkpoint_saved = state["last_model_path"]
                _forget(state, missing, min if callback.mode == "min" else max)
        self.publish()

    def _tidy(self, saved: list[tuple[Any, dict[str, Any]]], is_new: bool) -> list[Any]:
        """Delete newer files; return those of the best that do not exist, and directories to use again, by state key.

        ``is_new`` says that no checkpoint was loaded.
        """
        directories = {}
        for callback, state in saved:
            # Without a directory from the user, Lightning takes one of the logger's new version.
            restore = set_for_now(callback, "dirpath", None)
            default = callback._ModelCheckpoint__resolve_ckpt_dir(self._trainer)
            restore()
            if default == callback.dirpath and callback._fs.exists(state["dirpath"]):
                directories[callback.state_key] = state["dirpath"]
        listed: dict[str, Any] = {"paths": []}
        with contextlib.suppress(OSError, DamagedCheckpoint):
            listed = unseal(self._store.files.read(self._path), self._path)
        # Whoever may write into the checkpoints' directory must not choose which other files are deleted.
        places = tuple(f"{place}/" for place in [*(each.dirpath for each in self._callbacks), *directories.values()])
        newer = [
            path
            for path in reversed(listed["paths"])
            if path not in self.paths and path.startswith(places) and path.endswith(".ckpt") and "/../" not in path
        ]
        # A training that has lost its checkpoints is another one. One that never had any was killed before the first.
        if newer and not (is_new and listed["resumable"]):
            log.warning("Files of `ModelCheckpoint` from steps that are trained again are deleted: %s.", newer)
            for path in newer:
                self._trainer.strategy.remove_checkpoint(path)
        missing = [path for each, state in saved for path in state["best_k_models"] if not each._fs.exists(path)]
        return [missing, directories]


def _forget(state: dict[str, Any], missing: list[str], best: Callable[..., str]) -> None:
    """Remove deleted files from the state of a `ModelCheckpoint`: files that were among the best when it was saved."""
    models = state["best_k_models"] = {path: x for path, x in state["best_k_models"].items() if path not in missing}
    if state["best_model_path"] in missing:
        state["best_model_path"] = best(models, key=models.__getitem__, default="")
        state["best_model_score"] = models.get(state["best_model_path"])
