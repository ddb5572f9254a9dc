"""When to save, and what, of ranks that take every step together.

What is due on one rank's clock is heard by all a step later, so that all save after the same batch. What is due by the
number of steps, as every rank knows it, is saved at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from lightning_async.engine.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.errors import CollectiveError
from lightning_async.trainer.due import Clock, Settings, is_last, manifest_of
from lightning_async.trainer.lagged import lagged_of
from lightning_async.trainer.preemption import Preemption
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.whole_state import ALIKE, collect

__all__ = ["FAILED_S", "Together", "batches", "finish", "refuse"]

log = logging.getLogger(__name__)

FAILED_S = 10.0
"""For what is still being written when training has failed: the writer goes on without its trainer."""
_TOGETHER = timedelta(seconds=5)
"""For all ranks to notice what a signal to all of them has broken; who sends it leaves them little time."""
_PLACES = 2.0
"""The first number that says where a rank has failed; less says whether one was told to stop."""
_WHERE = ("batch", "batch end", "validation", "epoch")
"""See `Resume`."""


class Together:
    """Saves of ranks that take every step together, and of a single one.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory, which holds a checkpoint of theirs.
    """

    def __init__(self, trainer: Any, saver: Saver, settings: Settings, number: int, group: Sequence[int]) -> None:
        self._trainer, self._saver, self._settings, self._number = trainer, saver, settings, number
        self._group = group
        self._clock = Clock(settings.save, saver.costs, trainer.global_step)
        self._lagged = lagged_of("FaultTolerantCheckpoint", trainer)
        self._failed = False
        """A rank was told to stop, and has failed."""
        self._stale = False
        """What is heard next was asked for before the last save."""
        self._batches = batches(trainer)
        """That the last save holds."""

    def expect(self, resume: Resume) -> None:
        """Optimizers have stepped, and have their state now: have memory for saves of it."""
        shared, checkpoint = collect(self._trainer, ALIKE, pickles=self._saver.pickles)
        own = {"checkpoint": checkpoint, "resume": resume.capture()}
        self._saver.expect(self._trainer.global_step, self._group, shared, own)

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """A safe point, on all ranks; within a validation of a rank alone."""
        trainer, saver, clock = self._trainer, self._saver, self._clock
        if resume.where == "validation":
            if trainer.world_size == 1 and preempted.told:
                self._save("preemption", resume)
                preempted.leave(lambda: finish(trainer, saver))
            return
        step, epoch_end = trainer.global_step, resume.where == "epoch"
        mine = clock.due(step, epoch_end)
        due, busy, told = self._asked([mine, saver.busy, preempted.told])
        if told:
            self._stop(resume, preempted)
        last, by_steps = epoch_end and is_last(trainer), clock.due_by_steps(step, epoch_end)
        if last or by_steps:
            due, busy = True, trainer.strategy.reduce_boolean_decision(saver.busy, all=False)
        elif self._stale:
            due = False
        self._stale = False
        if not due or (step == clock.saved_step and not (last or (epoch_end and by_steps))):
            return
        if busy and not last and self._settings.busy != "wait":
            if self._settings.busy == "skip":
                clock.saved(step)
            elif by_steps:  # which all ranks know
                clock.put_off()
            return
        self._save("the end" if last else "due", resume)

    def _asked(self, mine: list[bool]) -> list[bool]:
        """What any rank asked for a step ago; one rank alone, what it asks for now."""
        if self._lagged is None:
            return mine
        rows = self._lagged.hear() or [[0.0] * len(mine)]
        self._failed = _failed(rows)
        if not self._failed:  # else nobody answers any more
            self._lagged.say([float(x) for x in mine])
        return [max(column) > 0.0 for column in zip(*rows, strict=True)]

    def _stop(self, resume: Resume, preempted: Preemption) -> NoReturn:
        """Save with all other ranks, and end; alone, where one of them has failed on its way to this safe point.

        It may fail while ranks exchange nothing, as within an accumulation of gradients, and does not come.
        """
        trainer, saver = self._trainer, self._saver
        if self._lagged is not None and not self._failed:
            try:
                self._failed = _failed(self._lagged.hear())  # what was said here: who has failed has said so instead
            except CollectiveError:
                self._failed = True
        self._save("preemption", resume, alone=self._failed)
        if not self._failed:
            preempted.leave(lambda: finish(trainer, saver))
        log.warning(
            "Rank %d: ranks were told to stop, and one has failed before it came to this batch. This one saves alone.",
            trainer.global_rank,
        )
        preempted.leave(lambda: saver.wait(FAILED_S))

    def _save(self, reason: str, resume: Resume, alone: bool = False) -> None:
        trainer = self._trainer
        self._number, step = self._number + 1, trainer.global_step
        shared, checkpoint = collect(trainer, ALIKE, pickles=self._saver.pickles)
        own = {"checkpoint": checkpoint, "resume": resume.capture()}
        manifest = manifest_of(trainer, reason)
        if alone:
            self._saver.save_alone(self._number, step, shared, own, manifest, FAILED_S)
        else:
            self._saver.save(self._number, step, self._group, shared, own, manifest)
        self._clock.saved(step)
        self._stale, self._batches = trainer.world_size > 1, batches(trainer)

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save alone, whatever the others do: what is equal on all ranks is whole on this one. Whether that was done.

        A rank that finds another one's checkpoint of the same step leaves it at that. Where a signal has told all ranks
        to go, and broken the same of all, they save together.
        """
        trainer = self._trainer
        if batches(trainer) == self._batches and not self._saver.costs.failed_in_a_row:
            return False
        with resume.points.as_it_was(ending=True) as state:
            if state is None:
                return refuse(trainer, resume)
            shared, checkpoint = collect(trainer, ALIKE, state.callbacks, self._saver.pickles)
            own = {"checkpoint": checkpoint, "resume": state.resume}
            manifest, number, step = manifest_of(trainer, reason, exception), self._number + 1, trainer.global_step
            if reason == "preemption" and self._all_are_here(own["resume"]):
                self._saver.save(number, step, self._group, shared, own, manifest)
                return True
            return self._saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def _all_are_here(self, resume: Any) -> bool:
        """Return whether all ranks fail at this safe point, and each knows so.

        It is said in the place in which others say whether they were told: these are not here.
        """
        if self._lagged is None:
            return False
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.total
        place = _PLACES + len(_WHERE) * progress.processed + _WHERE.index(resume["where"])
        rows = self._lagged.ask([0.0, 0.0, place], _TOGETHER)
        return bool(rows) and all(row[-1] == place for row in rows)

    def end(self) -> None:
        """The last save was made at the end of the last epoch; who looks for it next finds it."""
        finish(self._trainer, self._saver)

    def give_up(self) -> None:
        """All ranks have handed over their parts, or none."""

    def close(self) -> None:
        """Training is over."""
        if self._lagged is not None:
            self._lagged.close()


def _failed(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether a rank has failed, by what all have said."""
    return any(row[-1] >= _PLACES for row in rows)


def finish(trainer: Any, saver: Saver) -> None:
    """All are here until the last one has written: a launcher may end those that are left when one has gone."""
    saver.wait(PATIENCE_S, settled=True)
    trainer.strategy.barrier("the checkpoint is written")


def batches(trainer: Any) -> int:
    """That were trained on, the one included whose hooks may still run."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def refuse(trainer: Any, resume: Resume) -> bool:
    """Say that this moment cannot be saved; False."""
    log.warning(
        "Rank %d: this moment is in no checkpoint: %s.", trainer.global_rank, resume.points.whereabouts.within.value
    )
    return False
