"""When the ranks of a fit save, and what each of them writes.

`Checkpointing` has one of three: `LockstepSaves`, where ranks take every step together; `AsyncSaves`, where replicas go
at their own pace between sync points; `ServerSaves`, where weights are on servers. Each answers the same calls:
`boundary` at every safe point, `fail` when training ends by an exception, `end` when it ends well. The last save of the
last two is a `BarrierSave`, which all ranks make together at a sync point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch

from lightning_async.algorithms.schedules import Synchronous
from lightning_async.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.checkpoint.writer import SaveBusy
from lightning_async.engine.shared_state import Mark, SyncPointKind
from lightning_async.errors import CollectiveError
from lightning_async.trainer.checkpoint.checkpoint_state import ALIKE, REPLICAS, collect
from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.checkpoint.save_timing import SaveClock, Settings, is_last, lagged_of, manifest_of
from lightning_async.trainer.environment.environments import names_of
from lightning_async.trainer.loops.preemption import Preemption

log = logging.getLogger(__name__)

FAILED_S = 10.0
"""Time for what is still being written when training has failed: the writer goes on without its trainer."""
_TOGETHER = timedelta(seconds=5)
"""Time for all ranks to notice what a signal to all of them has broken; who sends it leaves them little time."""
_PLACES = 2.0
"""The first number that says where a rank has failed; less says whether one was told to stop."""
_WHERE = ("batch", "batch end", "validation", "epoch")
"""The safe points, as `Resume.where` names them."""


class LockstepSaves:
    """Saves of ranks that take every step together, and of a single one.

    What is due on one rank's clock is heard by all a step later, so that all save after the same batch. What is due by
    the number of steps, as every rank knows it, is saved at once.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory, which holds a checkpoint of theirs.
    """

    def __init__(self, trainer: Any, saver: Saver, settings: Settings, number: int, group: Sequence[int]) -> None:
        self._trainer = trainer
        self._saver = saver
        self._settings = settings
        self._number = number
        self._group = group
        self._clock = SaveClock(settings.save, saver.costs, trainer.global_step)
        self._lagged = lagged_of("FaultTolerantCheckpoint", trainer)
        self._failed = False
        """A rank was told to stop, and has failed."""
        self._stale = False
        """What is heard next was asked for before the last save."""
        self._batches = batches(trainer)
        """That the last save holds."""

    def expect(self, resume: Resume) -> None:
        """Have memory for saves of the state that optimizers have, now that they have stepped."""
        shared, checkpoint = collect(self._trainer, ALIKE, pickles=self._saver.pickles)
        own = {"checkpoint": checkpoint, "resume": resume.capture()}
        self._saver.expect(self._trainer.global_step, self._group, shared, own)

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """Save at this safe point if that is due: on all ranks, within a validation on a rank alone."""
        trainer = self._trainer
        saver = self._saver
        clock = self._clock
        if resume.where == "validation":
            if trainer.world_size == 1 and preempted.told:
                self._save("preemption", resume)
                preempted.leave(lambda: finish(trainer, saver))
            return
        step = trainer.global_step
        epoch_end = resume.where == "epoch"
        mine = clock.due(step, epoch_end)
        due, busy, told = self._asked([mine, saver.busy, preempted.told])
        if told:
            self._stop(resume, preempted)
        last = epoch_end and is_last(trainer)
        by_steps = clock.due_by_steps(step, epoch_end)
        if last or by_steps:
            due = True
            busy = trainer.strategy.reduce_boolean_decision(saver.busy, all=False)
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
        """Return what any rank asked for a step ago; for one rank alone, what it asks for now."""
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
        trainer = self._trainer
        saver = self._saver
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
        self._number += 1
        step = trainer.global_step
        shared, checkpoint = collect(trainer, ALIKE, pickles=self._saver.pickles)
        own = {"checkpoint": checkpoint, "resume": resume.capture()}
        manifest = manifest_of(trainer, reason)
        if alone:
            self._saver.save_alone(self._number, step, shared, own, manifest, FAILED_S)
        else:
            self._saver.save(self._number, step, self._group, shared, own, manifest)
        self._clock.saved(step)
        self._stale = trainer.world_size > 1
        self._batches = batches(trainer)

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save alone, whatever the others do, and return whether that was done: what all have equal is whole here.

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
            manifest = manifest_of(trainer, reason, exception)
            number = self._number + 1
            step = trainer.global_step
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
        """Wait until the last save, made at the end of the last epoch, is written: who looks for it next finds it."""
        finish(self._trainer, self._saver)

    def give_up(self) -> None:
        """Do nothing: all ranks have handed over their parts, or none."""

    def close(self) -> None:
        """Close the communicator of requests."""
        if self._lagged is not None:
            self._lagged.close()


def _failed(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether a rank has failed, by what all have said."""
    return any(row[-1] >= _PLACES for row in rows)


class _SyncPointSaves:
    """What `AsyncSaves` and `ServerSaves` share; does nothing at sync points, see `SyncPointParticipant`."""

    _known: int
    _averager: Any

    @property
    def known(self) -> int:
        """The last save that all ranks know of."""
        return max(self._known, self._averager.marks.saved)

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def come(self) -> None: ...

    def stand(self) -> None: ...

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None: ...

    def resume(self) -> None: ...


class AsyncSaves(_SyncPointSaves):
    """Saves of asynchronous replicas.

    A save belongs to a round. The rank on which one is due has the next round marked; of what that makes, each rank
    that takes part keeps a share, and with it, at its own next batch boundary, its own state. Nobody waits.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory. All must, unless every step is synchronous: then each
            directory has all that is needed.
        resume: knows this rank's place, from its first batch on: it may wait at a sync point before its first boundary.

    Raises:
        ValueError: they do not.
    """

    def __init__(
        self, trainer: Any, saver: Saver, settings: Settings, number: int, group: Sequence[int], resume: Resume
    ) -> None:
        left = names_of(trainer).left
        if not set(left) <= set(group) and not isinstance(trainer.strategy.schedule, Synchronous):
            raise ValueError(
                f"`FaultTolerantCheckpoint(dirpath={settings.dirpath!r})` is one directory of ranks {list(group)}, and "
                "another one elsewhere: while replicas drift, all ranks must see the same."
            )
        self._trainer = trainer
        self._saver = saver
        self._settings = settings
        self._group = group
        self._known = number
        self._asked = False
        self._averager = None
        self._left = left
        self._attach()
        self._clock = SaveClock(settings.save, saver.costs, self._averager.global_step())
        self._resume = resume
        self._began = batches(trainer)

    def _attach(self) -> None:
        """Follow the strategy's averager, which is another one where averaging has begun anew."""
        before = self._averager
        self._averager = self._trainer.strategy.averager
        if before is self._averager:
            return
        if before is not None:  # steps count from 0 again
            self._give_up(before.marks.lost(all=True))
            self._known = max(self._known, before.marks.saved)
            self._clock.saved(self._averager.global_step())
        self._averager.marks.begin(self._known)
        self._averager.marks.settle = self._take
        self._averager.sync_points.add(self)
        self._live_ranks = self._trainer.strategy.live_ranks
        if set(self._left) <= set(self._group):  # then whoever comes has found the directory, too
            self._group = sorted({*self._group, *names_of(self._trainer).left})
        self._asked = False

    def expect(self, resume: Resume) -> None:
        """Have memory for saves of the state that optimizers have, having stepped, and of what was agreed on."""
        _, checkpoint = collect(self._trainer, frozenset(), pickles=self._saver.pickles)
        own = {"checkpoint": checkpoint, "resume": resume.capture(), "replica": self._averager.marks.replica()}
        rule = sum(
            value.nbytes
            for value in self._averager.state_dict()["rule_state"].values()
            if isinstance(value, torch.Tensor)
        )
        agreed = (rule + 4 * self._averager.replica.layout.numel) // self._trainer.world_size
        self._saver.expect(self._trainer.global_step, [names_of(self._trainer).mine], {}, own, agreed)

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """Ask for a save at this safe point if one is due; a signal is a vote, by which all leave."""
        if resume.where == "validation":
            return
        self._attach()
        self._take()
        self._follow()
        step = self._averager.global_step()
        at_end = resume.where == "epoch"
        ahead = int(self._averager.ledger.synchronous)  # the next step is a round, after which all save
        if not self._asked and self._clock.asks(self._settings, self._saver.busy, step, ahead, at_end):
            self._asked = True
            self._averager.marks.ask()

    def _follow(self) -> None:
        """Hear of saves, and of lost ranks: what these had asked for may be lost with them."""
        left = names_of(self._trainer).left
        saved = self._averager.marks.saved
        if left != self._left:
            self._left = left
            self._known = saved
            self._asked = False
        if saved != self._known:
            self._saved(saved)
        if self._saver.gave_up:
            self._saver.gave_up = False
            self._clock.put_off()

    def _saved(self, number: int) -> None:
        self._known = number
        self._asked = False
        self._clock.saved(self._averager.global_step())

    def give_up(self) -> None:
        """Tell that this rank's part of a round that was marked meanwhile does not come: training is over."""
        self._give_up(self._averager.marks.lost(all=True), "its training ended before its next batch boundary")

    def _give_up(
        self, marks: list[Mark], why: str = "another round had come before this replica's next batch boundary"
    ) -> None:
        """Tell that this rank's part of these does not come, so that nobody waits for it."""
        for number, step, members in marks:
            log.warning("Rank %d comes too late for its part of save %d.", names_of(self._trainer).mine, number)
            self._saver.give_up(number, step, why, self._ranks(members))

    def _take(self) -> None:
        """Save this rank's part of a marked round."""
        self._give_up(self._averager.marks.lost())
        marked = self._averager.marks.take()
        if marked is None:
            return
        (number, step, members) = marked.mark
        queue = self._settings.busy != "wait"
        ranks = self._ranks(members)
        self._saved(number)
        with self._resume.as_it_was() as state:
            _, checkpoint = collect(self._trainer, frozenset(), state.callbacks, self._saver.pickles)
            own = {
                "checkpoint": checkpoint,
                "resume": state.resume,
                "clocks": self._averager.clocks(),
                "agreed": marked.share,
                "averaging": self._averager.state_dict() if marked.share is None else None,
                "replica": self._averager.marks.replica(),
            }
            try:
                self._saver.save(number, step, ranks, {}, own, manifest_of(self._trainer, "due"), queue)
            except SaveBusy as error:
                log.warning("Rank %d leaves out its part of save %d: %s", names_of(self._trainer).mine, number, error)

    def _ranks(self, members: Sequence[str]) -> list[int]:
        """Return the stable ids of the ranks that save, of those that take part in a mark."""
        names = members if self._live_ranks is None else tuple(map(self._live_ranks.called, members))
        return [rank for rank in map(int, names) if rank in self._group]

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save this replica alone, and return whether that was done; all go on from its model."""
        trainer = self._trainer
        averager = self._averager
        if batches(trainer) == self._began:
            return False
        with resume.points.as_it_was(ending=True) as state:
            if state is None:
                return refuse(trainer, resume)
            shared, checkpoint = collect(trainer, REPLICAS, state.callbacks, self._saver.pickles)
            shared["averaging"] = averager.state_dict()
            own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
            number = max(self._known, averager.marks.saved) + 1
            step = averager.global_step()
            manifest = manifest_of(trainer, reason, exception)
            return self._saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def end(self, reason: str = "the end") -> None:
        """Make the last save; all ranks are here, with one model."""
        BarrierSave(self._trainer, self._saver, self._resume, self._group).end(reason)

    def stand(self) -> None:
        """Save this rank's part of the rounds of others, in which it takes part while it waits at a sync point."""
        self._take()


class ServerSaves(_SyncPointSaves):
    """Saves of workers of a parameter server.

    The rank on which a save is due calls all together, see `CollectiveActions`. Where they meet no push is under way,
    and all have the servers' weights of one version: each writes its part of these and of the optimizer's state, and
    what is its own. They train on while it is written. In synchronous mode the call goes with a step, and all meet
    behind it.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory: all.
        resume: knows this rank's place.
        call: has all come together at their next batch boundary.

    Raises:
        ValueError: not all see one directory.
    """

    def __init__(
        self,
        trainer: Any,
        saver: Saver,
        settings: Settings,
        number: int,
        group: Sequence[int],
        resume: Resume,
        call: Callable[[], None],
    ) -> None:
        self._left = names_of(trainer).left
        if not set(self._left) <= set(group):
            raise ValueError(
                f"`FaultTolerantCheckpoint(dirpath={settings.dirpath!r})` is one directory of ranks {list(group)}, and "
                "another one elsewhere: each worker writes a part of what is on the servers, so all must see the same."
            )
        self._trainer = trainer
        self._saver = saver
        self._settings = settings
        self._group = group
        self._resume = resume
        self._call = call
        self._known = number
        self._asked = False
        self._waited_s = 0.0
        self._averager = None
        self._attach()
        self._clock = SaveClock(settings.save, saver.costs, self._step)
        self._began = batches(trainer)

    @property
    def _step(self) -> int:
        """The step; in synchronous mode equal on all ranks with data, so that what is due by steps is due on all."""
        return self._averager.step if self._in_step else self._averager.global_step()

    @property
    def _in_step(self) -> bool:
        return self._trainer.strategy.mode == "sync"

    def _attach(self) -> None:
        """Follow the strategy's averager, which is another one where training has begun anew, or with others."""
        before = self._averager
        self._averager = self._trainer.strategy.averager
        if before is self._averager:
            return
        if before is not None:
            self._known = max(self._known, before.marks.saved)
            self._clock.saved(self._step)
        self._averager.marks.begin(self._known)
        self._averager.sync_points.add(self)
        self._group = sorted({*self._group, *names_of(self._trainer).left})
        self._asked = False

    def expect(self, resume: Resume) -> None:
        """Have memory for saves of the state that optimizers have, now that they have stepped."""
        strategy = self._trainer.strategy
        with strategy.states_here():
            shared, checkpoint = collect(self._trainer, strategy.alike, pickles=self._saver.pickles)
            own = {"checkpoint": checkpoint, "resume": resume.capture()}
            self._saver.expect(self._trainer.global_step, self._group, shared, own)

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """Ask for a save at this safe point if one is due; a signal is a vote, by which all leave."""
        if resume.where == "validation":
            return
        self._attach()
        self._follow()
        ahead = int(self._in_step)
        at_end = resume.where == "epoch"
        if not self._asked and self._clock.asks(self._settings, self._saver.busy, self._step, ahead, at_end):
            self._asked = True
            self._call()

    def _follow(self) -> None:
        """Hear of lost ranks, and of saves that are lost with them."""
        left = names_of(self._trainer).left
        if left != self._left:
            self._left = left
            self._asked = False
        if self._saver.gave_up:
            self._saver.gave_up = False
            self._clock.put_off()

    def save(self) -> None:
        """Save, if that is due on any rank; all are at a sync point, with one model."""
        self._attach()
        if self._together().save("due", self._asked, queue=self._settings.busy != "wait") is None:
            return
        self._saver.costs.stalled_s += self._waited_s
        self._asked = False
        self._waited_s = 0.0
        self._clock.saved(self._step)

    def _together(self) -> BarrierSave:
        return BarrierSave(self._trainer, self._saver, self._resume, self._group)

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save what the servers have, and this worker's place, and return whether that was done."""
        trainer = self._trainer
        averager = self._averager
        if batches(trainer) == self._began:
            return False
        with resume.points.as_it_was(ending=True) as state:
            if state is None:
                return refuse(trainer, resume)
            with trainer.strategy.states_here(alone_s=FAILED_S):
                shared, checkpoint = collect(trainer, trainer.strategy.alike, state.callbacks, self._saver.pickles)
                shared["averaging"] = averager.state_dict()
                own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
                number = self.known + 1
                step = averager.global_step()
                manifest = manifest_of(trainer, reason, exception)
                return self._saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def end(self, reason: str = "the end") -> None:
        """Make the last save; all ranks are here, with one model."""
        self._attach()
        self._together().end(reason)

    def give_up(self) -> None:
        """Do nothing: others wait for nothing."""

    def go(self, waited_s: float) -> None:
        """Note what a save costs, where the sync point was for it."""
        if self._averager.sync_points.coming is SyncPointKind.DECIDE:
            self._waited_s = waited_s


class BarrierSave(NamedTuple):
    """A save that all ranks make together at a sync point, with one model: what all have equal is there once.

    Args:
        trainer: its replica.
        saver: of this rank.
        resume: knows this rank's place.
        group: the ranks that see this rank's directory.
    """

    trainer: Any
    saver: Saver
    resume: Resume
    group: Sequence[int]

    def save(self, reason: str, wanted: bool = True, queue: bool = False) -> tuple[int, int, list[int]] | None:
        """Save where any rank has ``wanted`` it, and return the save's number, step and ranks; all call this together.

        Args:
            reason: for the manifest.
            wanted: this rank asks for it.
            queue: leave this rank's part out where the saves before it are not written yet, rather than wait for them.
        """
        saver = self.saver
        strategy = self.trainer.strategy
        averager = strategy.averager
        names = names_of(self.trainer)
        mine = [wanted, averager.marks.saved, int(averager.global_step()), names.mine]
        wishes, known, steps, ranks = zip(*strategy.world.gather_objects(mine), strict=True)
        if not any(wishes):
            return None
        alone = len(ranks) < names.started  # a lost rank may have saved alone, as the next number, at this very step
        number = max(known) + 1 + alone
        step = max(steps)
        averager.marks.begin(number)
        ranks = [rank for rank in sorted(ranks) if rank in self.group]
        before = strategy.world.asynchronous
        strategy.world.asynchronous = True  # metrics are this rank's: no other computes them
        try:
            states = strategy.states_here() if strategy.served else nullcontext()
            with self.resume.as_it_was() as state, states:
                alike = strategy.alike if strategy.served else REPLICAS
                shared, checkpoint = collect(self.trainer, alike, state.callbacks, saver.pickles)
                shared["averaging"] = averager.state_dict()
                own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
                saver.save(number, step, ranks, shared, own, manifest_of(self.trainer, reason), queue)
        except SaveBusy as error:
            log.warning("Rank %d leaves out its part of save %d: %s", names.mine, number, error)
        finally:
            strategy.world.asynchronous = before
        return number, step, ranks

    def end(self, reason: str) -> None:
        """Make the last save; the live ranks repeat one of whose ranks some were lost."""
        while not self._is_whole(reason):
            log.warning("Rank %d: the last save was one with ranks that are lost: those that are left save once more.",
                        names_of(self.trainer).mine)  # fmt: skip

    def _is_whole(self, reason: str) -> bool:
        """Save, and return whether nobody was lost on the way, or the save is whole all the same; the same on all."""
        saved = self.save(reason)
        assert saved is not None
        number, _, ranks = saved
        finish(self.trainer, self.saver)
        whole = self.saver.is_committed(number) or not names_of(self.trainer).lost.intersection(ranks)
        return all(self.trainer.strategy.world.gather_objects(whole))


def finish(trainer: Any, saver: Saver) -> None:
    """Wait until the last rank has written: a launcher may end the live ranks when one has gone."""
    saver.wait(PATIENCE_S, settled=True)
    trainer.strategy.barrier("the checkpoint is written")


def batches(trainer: Any) -> int:
    """Return how many batches were trained on, the one included whose hooks may still run."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def refuse(trainer: Any, resume: Resume) -> bool:
    """Warn that this moment cannot be saved, and return False."""
    log.warning(
        "Rank %d: this moment is in no checkpoint: %s.", trainer.global_rank, resume.points.step_position.within.value
    )
    return False
