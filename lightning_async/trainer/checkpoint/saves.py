"""When the ranks of a fit save, and what each of them writes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch

from lightning_async.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.checkpoint.writer import SaveBusy
from lightning_async.engine.shared_state import Mark, SyncPointKind
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.errors import CollectiveError
from lightning_async.trainer.checkpoint.checkpoint_state import ALIKE, REPLICAS, TrainerState
from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.checkpoint.safe_points import LastSafeState
from lightning_async.trainer.checkpoint.save_timing import SaveClock, Settings, lagged_of
from lightning_async.trainer.environment.environments import names_of
from lightning_async.trainer.environment.settings import version
from lightning_async.trainer.loops.preemption import Preemption
from lightning_async.trainer.namespace import in_words

log = logging.getLogger(__name__)

FAILED_S = 10.0
"""Time for what is still being written when training has failed: the writer goes on without its trainer."""
_TOGETHER = timedelta(seconds=5)
"""Time for all ranks to notice what a signal to all of them has broken; who sends it leaves them little time."""
_PLACES = 2.0
"""The first number that says where a rank has failed; less says whether one was told to stop."""
_WHERE = ("batch", "batch end", "validation", "epoch")
"""The safe points, as `Resume.where` names them."""
_LONGEST = 1000  # characters of an exception


@dataclass(frozen=True)
class SavedFit:
    """One fit, as its saves see it.

    Args:
        number: of the last save in the directory.
        group: the ranks that see this rank's directory, which holds a checkpoint of theirs.
        resume: knows this rank's place, from its first batch on: it may wait at a sync point before its first boundary.
        call: has all ranks come together at their next batch boundary, see `CollectiveActions`.
    """

    trainer: Any
    saver: Saver
    settings: Settings
    number: int
    group: Sequence[int]
    resume: Resume
    state: TrainerState
    call: Callable[[], None]


class SaveCoordinator(ABC):
    """The saves of one rank in training.

    One of three: `LockstepSaves`, where ranks take every step together; `AsyncSaves`, where replicas go at their own
    pace between sync points; `ServerSaves`, where weights are on servers.
    """

    def __init__(self, fit: SavedFit) -> None:
        self._fit = fit
        self._known = fit.number
        self._group = fit.group
        self._batches = self._trained()

    @property
    def known(self) -> int:
        """The last save that all ranks know of."""
        return self._known

    @property
    def group(self) -> Sequence[int]:
        """The ranks whose directory is this one."""
        return self._group

    @abstractmethod
    def expect(self) -> None:
        """Have memory for saves of the state that optimizers have, now that they have stepped."""

    @abstractmethod
    def boundary(self, preempted: Preemption) -> None:
        """Do what is due at this safe point."""

    @abstractmethod
    def fail(self, exception: BaseException, reason: str = "exception") -> bool:
        """Save alone when training ends by an exception; return whether that was done."""

    @abstractmethod
    def end(self, reason: str = "the end") -> None:
        """Make the last save, or wait for it; all ranks call this."""

    def give_up(self) -> None:  # noqa: B027
        """Tell the ranks that wait for a part of this one that it does not come: training is over."""

    def close(self) -> None:  # noqa: B027
        """Release what is held."""

    def _capture(self, alike: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is equal on all ranks, and what is this rank's own, at this safe point."""
        shared, checkpoint = self._fit.state.capture(alike)
        return shared, {"checkpoint": checkpoint, "resume": self._fit.resume.capture()}

    def _manifest(self, reason: str, exception: BaseException | None = None) -> dict[str, Any]:
        """Return what a save's manifest tells; after an ``exception`` compute no metric, which may wait for others."""
        trainer = self._fit.trainer
        known = trainer.callback_metrics if exception is None else trainer._logger_connector._callback_metrics
        tensors = {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}
        notes: dict[str, Any] = {"stopped": self._fit.resume.points.limits.now()} if trainer.should_stop else {}
        return {
            "epoch": trainer.current_epoch,
            "world_size": names_of(trainer).started,
            "reason": reason,
            "metrics": {name: float(value) for name, value in tensors.items() if value.numel() == 1},
            "notes": notes if exception is None else {"exception": in_words(exception)[:_LONGEST]},
            "versions": {"torch": str(torch.__version__), "lightning-async": version()},
        }

    def _trained(self) -> int:
        """Return how many batches were trained on, the one included whose hooks may still run."""
        return self._fit.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _finish(self) -> None:
        """Wait until the last rank has written: a launcher may end the live ranks when one has gone."""
        self._fit.saver.wait(PATIENCE_S, settled=True)
        self._fit.trainer.strategy.barrier("the checkpoint is written")

    def _refuse(self) -> bool:
        phase = self._fit.resume.points.step_position.within.value
        log.warning("Rank %d: this moment is in no checkpoint: %s.", self._fit.trainer.global_rank, phase)
        return False


class LockstepSaves(SaveCoordinator):
    """Saves of ranks that take every step together, and of a single one.

    What is due on one rank's clock is known to all a step later, so that all save after the same batch. What is due by
    the number of steps, as every rank knows it, is saved at once.
    """

    def __init__(self, fit: SavedFit) -> None:
        super().__init__(fit)
        self._clock = SaveClock(fit.settings.save, fit.saver.costs, fit.trainer.global_step)
        self._lagged = lagged_of("FaultTolerantCheckpoint", fit.trainer)
        self._failed = False
        """A rank was told to stop, and has failed."""
        self._stale = False
        """The next answers were asked for before the last save."""

    def expect(self) -> None:
        shared, own = self._capture(ALIKE)
        self._fit.saver.expect(self._fit.trainer.global_step, self._group, shared, own)

    def boundary(self, preempted: Preemption) -> None:
        """Save at this safe point if that is due: on all ranks, within a validation on a rank alone."""
        trainer = self._fit.trainer
        clock = self._clock
        if self._fit.resume.where == "validation":
            if trainer.world_size == 1 and preempted.told:
                self._save("preemption")
                preempted.leave(self._finish)
            return
        step = trainer.global_step
        epoch_end = self._fit.resume.where == "epoch"
        mine = clock.due(step, epoch_end)
        due, busy, told = self._asked([mine, self._fit.saver.busy, preempted.told])
        if told:
            self._stop(preempted)
        last = epoch_end and self._fit.resume.points.limits.are_reached
        by_steps = clock.due_by_steps(step, epoch_end)
        if last or by_steps:
            due = True
            busy = trainer.strategy.reduce_boolean_decision(self._fit.saver.busy, all=False)
        elif self._stale:
            due = False
        self._stale = False
        if not due or (step == clock.saved_step and not (last or (epoch_end and by_steps))):
            return
        if busy and not last and self._fit.settings.busy != "wait":
            if self._fit.settings.busy == "skip":
                clock.saved(step)
            elif by_steps:  # which all ranks know
                clock.put_off()
            return
        self._save("the end" if last else "due")

    def _asked(self, mine: list[bool]) -> list[bool]:
        """Return what any rank asked for a step ago; for one rank alone, what it asks for now."""
        if self._lagged is None:
            return mine
        rows = self._lagged.receive() or [[0.0] * len(mine)]
        self._failed = _failed(rows)
        if not self._failed:  # else nobody answers any more
            self._lagged.send([float(x) for x in mine])
        return [max(column) > 0.0 for column in zip(*rows, strict=True)]

    def _stop(self, preempted: Preemption) -> NoReturn:
        """Save with all other ranks, and end; alone, where one of them has failed on its way to this safe point.

        It may fail while ranks exchange nothing, as within an accumulation of gradients, and does not come.
        """
        if self._lagged is not None and not self._failed:
            try:
                self._failed = _failed(self._lagged.receive())  # what was said here: who has failed has said so instead
            except CollectiveError:
                self._failed = True
        self._save("preemption", alone=self._failed)
        if not self._failed:
            preempted.leave(self._finish)
        log.warning(
            "Rank %d: ranks were told to stop, and one has failed before it came to this batch. This one saves alone.",
            self._fit.trainer.global_rank,
        )
        preempted.leave(lambda: self._fit.saver.wait(FAILED_S))

    def _save(self, reason: str, alone: bool = False) -> None:
        trainer = self._fit.trainer
        self._known += 1
        step = trainer.global_step
        shared, own = self._capture(ALIKE)
        manifest = self._manifest(reason)
        if alone:
            self._fit.saver.save_alone(self._known, step, shared, own, manifest, FAILED_S)
        else:
            self._fit.saver.save(self._known, step, self._group, shared, own, manifest)
        self._clock.saved(step)
        self._stale = trainer.world_size > 1
        self._batches = self._trained()

    def fail(self, exception: BaseException, reason: str = "exception") -> bool:
        """Save alone, and return whether that was done: what all have equal is whole here.

        A rank that finds another one's checkpoint of the same step leaves it at that. Where a signal has told all ranks
        to go, they save together.
        """
        trainer = self._fit.trainer
        if self._trained() == self._batches and not self._fit.saver.costs.failed_in_a_row:
            return False
        with self._fit.resume.points.as_it_was(ending=True) as state:
            if state is None:
                return self._refuse()
            shared, checkpoint = self._fit.state.capture(ALIKE, state.callbacks)
            own = {"checkpoint": checkpoint, "resume": state.resume}
            manifest = self._manifest(reason, exception)
            number = self._known + 1
            step = trainer.global_step
            if reason == "preemption" and self._all_are_here(own["resume"]):
                self._fit.saver.save(number, step, self._group, shared, own, manifest)
                return True
            return self._fit.saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def _all_are_here(self, resume: Any) -> bool:
        """Return whether all ranks fail at this safe point, and each knows so.

        It is said in the place in which others say whether they were told: these are not here.
        """
        if self._lagged is None:
            return False
        place = _PLACES + len(_WHERE) * self._trained() + _WHERE.index(resume["where"])
        rows = self._lagged.ask([0.0, 0.0, place], _TOGETHER)
        return bool(rows) and all(row[-1] == place for row in rows)

    def end(self, reason: str = "the end") -> None:
        """Wait until the last save, made at the end of the last epoch, is written: who looks for it next finds it."""
        self._finish()

    def close(self) -> None:
        if self._lagged is not None:
            self._lagged.close()


def _failed(rows: Sequence[Sequence[float]]) -> bool:
    return any(row[-1] >= _PLACES for row in rows)


class _SyncPointSaves(SaveCoordinator, SyncPointParticipant):
    """Saves of replicas that are asynchronous between sync points.

    A signal is a vote, by which all leave. All ranks must see one directory, unless every step is synchronous and no
    weights are on servers: then each directory has all that is needed.
    """

    def __init__(self, fit: SavedFit) -> None:
        super().__init__(fit)
        self._left = names_of(fit.trainer).left
        strategy = fit.trainer.strategy
        if not set(self._left) <= set(fit.group) and (strategy.served or not strategy.averages_gradients):
            of_servers = "each worker writes a part of what is on the servers"
            why = of_servers if strategy.served else "replicas are asynchronous"
            raise ValueError(
                f"`FaultTolerantCheckpoint(dirpath={fit.settings.dirpath!r})` is one directory of ranks "
                f"{list(fit.group)}, and another one elsewhere: {why}, so all ranks must see the same."
            )
        self._asked = False
        self._averager: Any = None
        self._attach()
        self._clock = SaveClock(fit.settings.save, fit.saver.costs, self._step)

    @property
    def known(self) -> int:
        return max(self._known, self._averager.marks.saved)

    @property
    def group(self) -> Sequence[int]:
        if not set(self._left) <= set(self._group):
            return self._group
        return sorted({*self._group, *names_of(self._fit.trainer).left})  # whoever has come has found it, too

    @property
    def _step(self) -> int:
        return self._averager.global_step()

    @property
    @abstractmethod
    def _in_step(self) -> bool:
        """Whether all ranks save behind the next step, where a save is asked for."""

    @abstractmethod
    def _ask(self) -> None:
        """Have all ranks save soon."""

    def _attach(self) -> None:
        """Follow the strategy's averager, which is another one where training has begun anew, or with others."""
        before = self._averager
        self._averager = self._fit.trainer.strategy.averager
        if before is self._averager:
            return
        if before is not None:  # steps count from 0 again
            self._known = max(self._known, before.marks.saved)
            self._clock.saved(self._step)
        self._averager.marks.begin(self._known)
        self._averager.sync_points.add(self)
        self._group = self.group
        self._asked = False

    def boundary(self, preempted: Preemption) -> None:
        if self._fit.resume.where == "validation":
            return
        self._attach()
        self._follow()
        ahead = int(self._in_step)
        at_end = self._fit.resume.where == "epoch"
        if not self._asked and self._clock.asks(self._fit.settings, self._fit.saver.busy, self._step, ahead, at_end):
            self._asked = True
            self._ask()

    def _follow(self) -> None:
        """Notice lost ranks: what these had asked for, and saves under way, may be lost with them."""
        left = names_of(self._fit.trainer).left
        if left != self._left:
            self._left = left
            self._asked = False
        if self._fit.saver.gave_up:
            self._fit.saver.gave_up = False
            self._clock.put_off()

    def _agreed(self, averager: Any, state: LastSafeState) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = self._fit.trainer.strategy
        alike = strategy.alike if strategy.served else REPLICAS
        shared, checkpoint = self._fit.state.capture(alike, state.callbacks)
        shared["averaging"] = averager.state_dict()
        return shared, {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}

    def fail(self, exception: BaseException, reason: str = "exception") -> bool:
        """Save this replica alone, with what the servers have, and return whether that was done; all go on from it."""
        trainer = self._fit.trainer
        if self._trained() == self._batches:
            return False
        with self._fit.resume.points.as_it_was(ending=True) as state:
            if state is None:
                return self._refuse()
            with trainer.strategy.states_here(alone_s=FAILED_S) if trainer.strategy.served else nullcontext():
                shared, own = self._agreed(self._averager, state)
                step = self._averager.global_step()
                manifest = self._manifest(reason, exception)
                return self._fit.saver.save_alone(self.known + 1, step, shared, own, manifest, FAILED_S)

    def _save_together(
        self, reason: str, wanted: bool = True, queue: bool = False
    ) -> tuple[int, int, list[int]] | None:
        """Save where any rank has ``wanted`` it, and return the save's number, step and ranks; all call this together.

        With ``queue`` this rank leaves its part out where the saves before it are not written yet, rather than wait.
        """
        strategy = self._fit.trainer.strategy
        averager = strategy.averager
        names = names_of(self._fit.trainer)
        mine = [wanted, averager.marks.saved, int(averager.global_step()), names.mine]
        wishes, known, steps, ranks = zip(*strategy.world.gather_objects(mine), strict=True)
        if not any(wishes):
            return None
        alone = len(ranks) < names.started  # a lost rank may have saved alone, as the next number, at this very step
        number = max(known) + 1 + alone
        step = max(steps)
        averager.marks.begin(number)
        ranks = [rank for rank in sorted(ranks) if rank in self._group]
        before = strategy.world.asynchronous
        strategy.world.asynchronous = True  # metrics are this rank's: no other computes them
        try:
            states = strategy.states_here() if strategy.served else nullcontext()
            with self._fit.resume.as_it_was() as state, states:
                shared, own = self._agreed(averager, state)
                self._fit.saver.save(number, step, ranks, shared, own, self._manifest(reason), queue)
        except SaveBusy as error:
            log.warning("Rank %d leaves out its part of save %d: %s", names.mine, number, error)
        finally:
            strategy.world.asynchronous = before
        return number, step, ranks

    def end(self, reason: str = "the end") -> None:
        """Make the last save; all ranks are here, with one model, and repeat a save of whose ranks some were lost."""
        while not self._is_whole(reason):
            rank = names_of(self._fit.trainer).mine
            log.warning("Rank %d: ranks were lost during the last save: the live ranks save once more.", rank)

    def _is_whole(self, reason: str) -> bool:
        """Save, and return whether nobody was lost on the way, or the save is whole all the same; the same on all."""
        saved = self._save_together(reason)
        assert saved is not None
        number, _, ranks = saved
        self._finish()
        whole = self._fit.saver.is_committed(number) or not names_of(self._fit.trainer).lost.intersection(ranks)
        return all(self._fit.trainer.strategy.world.gather_objects(whole))


class AsyncSaves(_SyncPointSaves):
    """Saves of asynchronous replicas.

    A save belongs to a round. The rank on which one is due has the next round marked; of what that makes, each rank
    that takes part keeps a share, and with it, at its own next batch boundary, its own state. Nobody waits.
    """

    @property
    def _in_step(self) -> bool:
        return self._averager.ledger.synchronous

    def _attach(self) -> None:
        before = self._averager
        super()._attach()
        if before is self._averager:
            return
        if before is not None:
            self._give_up(before.marks.lost(all=True))
        self._averager.marks.settle = self._take
        self._live_ranks = self._fit.trainer.strategy.live_ranks

    def expect(self) -> None:
        _, own = self._capture(frozenset())
        own["replica"] = self._averager.marks.replica()
        state = self._averager.state_dict()["rule_state"]
        rule = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        agreed = (rule + 4 * self._averager.replica.layout.numel) // self._fit.trainer.world_size
        self._fit.saver.expect(self._fit.trainer.global_step, [names_of(self._fit.trainer).mine], {}, own, agreed)

    def _ask(self) -> None:
        self._averager.marks.ask()

    def _follow(self) -> None:
        self._take()
        saved = self._averager.marks.saved
        if names_of(self._fit.trainer).left != self._left:
            self._known = saved
        if saved != self._known:
            self._saved(saved)
        super()._follow()

    def _saved(self, number: int) -> None:
        self._known = number
        self._asked = False
        self._clock.saved(self._step)

    def give_up(self) -> None:
        """Tell that this rank's part of a round that was marked meanwhile does not come: training is over."""
        self._give_up(self._averager.marks.lost(all=True), "its training ended before its next batch boundary")

    def _give_up(
        self, marks: list[Mark], why: str = "another round had come before this replica's next batch boundary"
    ) -> None:
        """Tell that this rank's part of these does not come, so that nobody waits for it."""
        for number, step, members in marks:
            log.warning("Rank %d comes too late for its part of save %d.", names_of(self._fit.trainer).mine, number)
            self._fit.saver.give_up(number, step, why, self._ranks(members))

    def _take(self) -> None:
        self._give_up(self._averager.marks.lost())
        marked = self._averager.marks.take()
        if marked is None:
            return
        (number, step, members) = marked.mark
        queue = self._fit.settings.busy != "wait"
        ranks = self._ranks(members)
        self._saved(number)
        with self._fit.resume.as_it_was() as state:
            _, checkpoint = self._fit.state.capture(frozenset(), state.callbacks)
            own = {
                "checkpoint": checkpoint,
                "resume": state.resume,
                "clocks": self._averager.clocks(),
                "agreed": marked.share,
                "averaging": self._averager.state_dict() if marked.share is None else None,
                "replica": self._averager.marks.replica(),
            }
            try:
                self._fit.saver.save(number, step, ranks, {}, own, self._manifest("due"), queue)
            except SaveBusy as error:
                mine = names_of(self._fit.trainer).mine
                log.warning("Rank %d leaves out its part of save %d: %s", mine, number, error)

    def _ranks(self, members: Sequence[str]) -> list[int]:
        """Return the stable ids of the ranks that save, of those that take part in a mark."""
        names = members if self._live_ranks is None else tuple(map(self._live_ranks.called, members))
        return [rank for rank in map(int, names) if rank in self._group]

    def at_sync_point(self) -> None:
        """Save this rank's part of the rounds of others, in which it takes part while it waits at a sync point."""
        self._take()


class ServerSaves(_SyncPointSaves):
    """Saves of workers of a parameter server.

    The rank on which a save is due has all come together at their next batch boundary (`SavedFit.call`). Where they
    meet no push is under way, and all have the servers' weights of one version: each writes its part of these and of
    the optimizer's state, and what is its own. In synchronous mode the call goes with a step, and all meet behind it.
    """

    _waited_s = 0.0

    @property
    def _step(self) -> int:
        """The step; in synchronous mode equal on all ranks with data, so that what is due by steps is due on all."""
        return self._averager.step if self._in_step else self._averager.global_step()

    @property
    def _in_step(self) -> bool:
        return self._fit.trainer.strategy.mode == "sync"

    def expect(self) -> None:
        strategy = self._fit.trainer.strategy
        with strategy.states_here():
            shared, own = self._capture(strategy.alike)
            self._fit.saver.expect(self._fit.trainer.global_step, self._group, shared, own)

    def _ask(self) -> None:
        self._fit.call()

    def save(self) -> None:
        """Save, if that is due on any rank; all are at a sync point, with one model."""
        self._attach()
        if self._save_together("due", self._asked, queue=self._fit.settings.busy != "wait") is None:
            return
        self._fit.saver.costs.stalled_s += self._waited_s
        self._asked = False
        self._waited_s = 0.0
        self._clock.saved(self._step)

    def end(self, reason: str = "the end") -> None:
        self._attach()
        super().end(reason)

    def after_sync_point(self, waited_s: float) -> None:
        """Note what a save costs, where the sync point was for it."""
        if self._averager.sync_points.coming is SyncPointKind.DECIDE:
            self._waited_s = waited_s
