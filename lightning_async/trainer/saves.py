"""When to save, and what: of ranks that take every step together, and of replicas that drift.

`Together`: what is due on one rank's clock is heard by all a step later, so that all save after the same batch. What is
due by the number of steps, as every rank knows it, is saved at once.

`Apart`: a save belongs to a round. The rank on which one is due has the next round marked; of what that makes, each
rank that takes part keeps a share, and with it, at its own next batch boundary, its own state. Nobody waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightning_async.engine.checkpoint.process import SaveBusy
from lightning_async.engine.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.engine.header import Mark
from lightning_async.rules.schedules.fixed import Synchronous
from lightning_async.trainer.due import Clock, Settings, is_last, manifest_of
from lightning_async.trainer.lagged import lagged_of
from lightning_async.trainer.preemption import Preemption
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.whole_state import ALIKE, REPLICAS, collect

__all__ = ["Apart", "Together"]

log = logging.getLogger(__name__)


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
        self._clock = Clock(settings.save, saver, trainer.global_step)
        self._lagged = lagged_of("FaultTolerantCheckpoint", trainer)
        self._stale = False
        """What is heard next was asked for before the last save."""

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """A safe point, on all ranks; within a validation of a rank alone."""
        trainer, saver, clock = self._trainer, self._saver, self._clock
        if resume.where == "validation":
            if trainer.world_size == 1 and preempted.told:
                self._save("preemption", resume)
                preempted.leave(lambda: _finish(trainer, saver))
            return
        step, epoch_end = trainer.global_step, resume.where == "epoch"
        mine = clock.due(step, epoch_end)
        due, busy, told = self._asked([mine, saver.busy, preempted.told])
        if told:
            self._save("preemption", resume)
            preempted.leave(lambda: _finish(trainer, saver))
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
            return
        self._save("the end" if last else "due", resume)

    def _asked(self, mine: list[bool]) -> list[bool]:
        """What any rank asked for a step ago; one rank alone, what it asks for now."""
        if self._lagged is None:
            return mine
        rows = self._lagged.hear() or [[0.0] * len(mine)]
        self._lagged.say([float(x) for x in mine])
        return [max(column) > 0.0 for column in zip(*rows, strict=True)]

    def _save(self, reason: str, resume: Resume) -> None:
        trainer = self._trainer
        self._number, step = self._number + 1, trainer.global_step
        shared, checkpoint = collect(trainer, ALIKE)
        own = {"checkpoint": checkpoint, "resume": resume.capture()}
        self._saver.save(self._number, step, self._group, shared, own, manifest_of(trainer, reason))
        self._clock.saved(step)
        self._stale = trainer.world_size > 1

    def end(self) -> None:
        """The last save was made at the end of the last epoch; who looks for it next finds it."""
        _finish(self._trainer, self._saver)

    def close(self) -> None:
        """Training is over."""
        if self._lagged is not None:
            self._lagged.close()


class Apart:
    """Saves of replicas that drift.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory. All must, unless every step is synchronous: then each
            directory has all that is needed.

    Raises:
        ValueError: they do not.
    """

    def __init__(self, trainer: Any, saver: Saver, settings: Settings, number: int, group: Sequence[int]) -> None:
        if len(group) < trainer.world_size and not isinstance(trainer.strategy.schedule, Synchronous):
            raise ValueError(
                f"`FaultTolerantCheckpoint(dirpath={settings.dirpath!r})` is one directory of ranks {list(group)}, and "
                "another one elsewhere: while replicas drift, all ranks must see the same."
            )
        self._trainer, self._saver, self._settings, self._group = trainer, saver, settings, group
        self._known, self._asked = number, False
        self._averager: Any = None
        self._attach()
        self._clock = Clock(settings.save, saver, self._averager.global_step())
        self._captured: tuple[int, Any] = (-1, None)
        """What `Resume` had of the last batch boundary, and after which batch that was."""
        self._resume: Resume | None = None

    def _attach(self) -> None:
        """Averaging may have begun anew."""
        before, self._averager = self._averager, self._trainer.strategy.averager
        if before is self._averager:
            return
        if before is not None:  # steps count from 0 again
            self._give_up(before.marks.lost(all=True))
            self._known = max(self._known, before.marks.saved)
            self._clock.saved(self._averager.global_step())
        self._averager.marks.begin(self._known)
        self._averager.gates.add(self)
        self._asked = False

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """A safe point of this rank's; a signal is a vote, by which all leave."""
        if resume.where == "validation":
            return
        self._attach()
        self._resume = resume
        self._captured = self._batches(), resume.capture()
        self._take()
        step, clock = self._averager.global_step(), self._clock
        if self._averager.marks.saved != self._known:
            self._known, self._asked = self._averager.marks.saved, False
            clock.saved(step)
        ahead = int(self._averager.ledger.synchronous)  # the next step is a round, after which all save
        if self._asked or not clock.due(step + ahead, resume.where == "epoch"):
            return
        if self._saver.busy and self._settings.busy == "skip":
            clock.saved(step)
        elif not self._saver.busy or self._settings.busy == "wait":
            self._asked = True
            self._averager.marks.ask()

    def _batches(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def _resume_state(self) -> Any:
        """None where this rank stands within a batch. It may wait for the batch's validation to begin."""
        batches, state = self._captured
        if batches == self._batches():
            return state
        return None if self._resume is None else self._resume.capture_before_validation()

    def _give_up(self, marks: list[Mark]) -> None:
        """Nobody waits for this rank's part of these."""
        for number, step, _ in marks:
            log.warning("Rank %d comes too late for its part of save %d.", self._trainer.global_rank, number)
            self._saver.give_up(number, step, "another round had come before this replica's next batch boundary")

    def _take(self) -> None:
        """Save this rank's part of a marked round."""
        self._give_up(self._averager.marks.lost())
        marked = self._averager.marks.take()
        if marked is None:
            return
        _, checkpoint = collect(self._trainer, frozenset())
        own = {
            "checkpoint": checkpoint,
            "resume": self._resume_state(),
            "clocks": self._averager.clocks(),
            "agreed": marked.share,
            "averaging": self._averager.state_dict() if marked.share is None else None,
            "replica": self._averager.marks.replica(),
        }
        number, step, ranks = marked.mark
        ranks = [each for each in ranks if each in self._group]
        queue = self._settings.busy != "wait"
        try:
            self._saver.save(number, step, ranks, {}, own, manifest_of(self._trainer, "due"), queue)
        except SaveBusy as error:
            log.warning("Rank %d leaves out its part of save %d: %s", self._trainer.global_rank, number, error)

    def end(self, reason: str = "the end") -> None:
        """All ranks are here, with one model."""
        trainer, strategy = self._trainer, self._trainer.strategy
        known = strategy.reduce(torch.tensor(float(self._averager.marks.saved)), reduce_op="max")
        number, step = int(known) + 1, self._averager.global_step()
        step = int(strategy.reduce(torch.tensor(float(step)), reduce_op="max"))
        shared, checkpoint = collect(trainer, REPLICAS)
        shared["averaging"] = self._averager.state_dict()
        own = {"checkpoint": checkpoint, "resume": self._resume_state(), "clocks": self._averager.clocks()}
        self._averager.marks.begin(number)
        self._saver.save(number, step, self._group, shared, own, manifest_of(trainer, reason))
        _finish(trainer, self._saver)

    def close(self) -> None:
        """Nothing to let go of."""

    # ---- at gates, see `Visitor` ----

    def come(self) -> None: ...

    def stand(self) -> None:
        """Where this rank waits, it takes part in the rounds of others."""
        self._take()

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None: ...

    def resume(self) -> None: ...


def _finish(trainer: Any, saver: Saver) -> None:
    """All are here until the last one has written: a launcher may end those that are left when one has gone."""
    saver.wait(PATIENCE_S)
    trainer.strategy.barrier("the checkpoint is written")
