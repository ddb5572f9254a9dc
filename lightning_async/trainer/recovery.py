"""The checkpoint that a fit goes on from: found, verified, agreed on by all ranks, and put in place for this one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_async.engine.checkpoint.recovery import recover
from lightning_async.engine.checkpoint.shards import load_own
from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.engine.world import World
from lightning_async.trainer.absent import among, beside, completed, has_none
from lightning_async.trainer.due import Settings, is_last, was_stopped
from lightning_async.trainer.names import names_of
from lightning_async.trainer.resized import resized
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.whole_state import whole

__all__ = ["Recovery", "gather"]

log = logging.getLogger(__name__)


def gather(trainer: Any, value: Any) -> list[Any]:
    """One plain value of every rank; all ranks call this together."""
    world = getattr(trainer.strategy, "world", None)
    if isinstance(world, World):
        return world.gather_objects(value)
    return [trainer.strategy.broadcast(value, src) for src in range(trainer.world_size)]


class Recovery:
    """What one fit goes on from.

    Args:
        trainer: whose fit it is.
        settings: what the user has asked for.
        store: the checkpoints.
        resume: puts the fit where the checkpoint was made.
    """

    def __init__(self, trainer: Any, settings: Settings, store: CheckpointStore, resume: Resume) -> None:
        self._trainer, self._settings, self._store, self._resume = trainer, settings, store, resume
        self.entry: Entry | None = None
        """The checkpoint; None where training began anew."""
        self.got_on = False
        """A safe point was reached in this fit."""
        self._verified: str | None = None

    def choose(self) -> str | None:
        """The path of the one to go on from, on which all ranks agree; None where training begins."""
        if self._settings.recover is None:
            return None
        entry = self.find(self._settings.recover)
        self._verified = None if entry is None else entry.path
        return self._verified

    def find(self, strategy: str) -> Entry | None:
        """The checkpoint that ``strategy`` asks for, whole on all ranks, which call this together."""
        found = recover(self._store, strategy, self._settings.best, partial(gather, self._trainer))
        for path, what in (found.damaged | found.unreadable).items():
            log.warning("Rank %d: the checkpoint %s is passed over: %s", self._trainer.global_rank, path, what)
        return found.entry

    def load(self, store: CheckpointStore, entry: Entry) -> dict[str, Any]:
        """This rank's Lightning checkpoint out of one of ours; in a fit, it goes on from there."""
        if entry.path != self._verified:
            store.verify(entry)
        pickles = self._settings.objects == "pickle"
        checkpoint, resume = whole(store, entry, names_of(self._trainer), pickles=pickles)
        if self._trainer.state.fn == "fit":
            reopens = self._reopens(checkpoint, resume, entry)
            if reopens:
                _reopen(checkpoint)
            self._go_on(resume, store, entry, _reopened if reopens else lambda state: state)
            self.entry = entry
        return checkpoint

    def _reopens(self, checkpoint: dict[str, Any], resume: Any, entry: Entry) -> bool:
        """Whether training had ended within an epoch, and goes on now, as its limits are others: with the rest of that
        epoch. All ranks call this together."""
        if entry.manifest is None or entry.manifest.reason != "the end":
            return False
        limit = self._trainer.max_steps
        goes_on = limit == -1 or checkpoint["global_step"] < limit
        goes_on &= not was_stopped(self._trainer, entry.manifest.notes)
        told = gather(self._trainer, [goes_on, bool(resume and resume.get("rest"))])
        return all(goes for goes, _ in told) and any(rest for _, rest in told)

    def _go_on(self, resume: Any, store: CheckpointStore, entry: Entry, opened: Callable[[Any], Any]) -> None:
        """From this rank's own state, or where there is none, from those of others, each as ``opened``."""
        assert entry.manifest is not None
        resume = opened(resume)
        rank, ranks, trained = self._trainer.global_rank, self._trainer.world_size, entry.manifest.world_size
        if resume is not None and among(resume, trained) == ranks:
            self._resume.restore(resume)
            return
        saved = _all_of(store, entry, self._settings.objects == "pickle")
        states = {name: opened(state) for name, state in saved.items()}
        alike = trained == names_of(self._trainer).started
        if not states or (alike and resume is None):
            resume = beside(states, rank, entry.path)
        if not states or (alike and among(states[min(states)], trained) == ranks):
            self._resume.restore(resume)
        else:
            self._resume.restore(resized(completed(states, trained), rank, ranks, resume))

    def end(self, original: Any) -> Any:
        """Of Lightning's `resume_end`, with a word where nothing is left to train."""

        def resume_end() -> None:
            original()
            entry = self.entry
            if entry is not None and entry.manifest is not None and entry.manifest.reason == "the end":
                self._trainer.should_stop |= was_stopped(self._trainer, entry.manifest.notes)
            if entry is not None and is_last(self._trainer):
                log.warning(
                    "Rank %d: nothing is trained, as the training in %s has ended (%s). To go on with it, raise "
                    "`max_epochs` or `max_steps`; a new training needs a directory of its own, or `recover=None`.",
                    self._trainer.global_rank, self._store.dirpath, entry.name,
                )  # fmt: skip

        return resume_end

    def explain(self, exception: BaseException) -> None:
        """What may be wrong where a fit fails before it got on."""
        if self.entry is not None and not self.got_on and isinstance(exception, Exception):
            log.error(
                "Rank %d failed at its first batch after going on from %s, or before. If this program's model, "
                "optimizers or data are not those of that training, give it a directory of its own, or `recover=None`.",
                self._trainer.global_rank, self.entry.path,
            )  # fmt: skip


def _reopen(checkpoint: dict[str, Any]) -> None:
    """The last epoch counts as one that is under way."""
    for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        count["processed"] -= 1
        count["completed"] -= 1
    if (averaging := checkpoint.get("lightning_async")) is not None:
        replicas = averaging["replicas"]
        averaging["replicas"] = [{**clocks, "epoch": clocks["epoch"] - 1} for clocks in replicas]


def _reopened(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """A state at the end of an epoch as one behind the epoch's last batch so far."""
    if state is None:
        return None
    return {**state, "where": "batch", "loaders": state.get("rest") or state["loaders"]}


def _all_of(store: CheckpointStore, entry: Entry, pickles: bool) -> dict[int, dict[str, Any]]:
    """What `Resume` has of every rank that has a state of its own, and a part of the epoch, by its name."""
    assert entry.manifest is not None
    ranks = entry.manifest.ranks
    states: dict[int, Any] = {rank: load_own(store, entry, rank, "resume", pickles=pickles) for rank in ranks}
    return {rank: state for rank, state in states.items() if state is not None and not has_none(state)}
