"""The save coordinators: they decide when the ranks of a fit save, and which part of the state each rank writes."""

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
"""Seconds to wait for unfinished saves after a failure. The writer process needs no trainer to complete them."""
_TOGETHER = timedelta(seconds=5)
"""Time for all ranks to notice a failure that a signal to all of them has caused; the sender kills them soon."""
_PLACES = 2.0
"""The smallest code of a safe point at which a rank has failed; 0 and 1 say whether a rank was told to stop."""
_WHERE = ("batch", "batch end", "validation", "epoch")
"""The kinds of safe points, as `Resume.where` names them, and ``"batch end"``."""
# Number of characters of an exception that a manifest keeps.
_LONGEST = 1000


@dataclass(frozen=True)
class SavedFit:
    """One fit, with all that a save coordinator needs of it.

    Args:
        trainer: The Trainer.
        saver: Manager of this rank's saves, which writes the files.
        settings: The user's settings.
        number: Number of the last save in the directory.
        group: Ranks that see the same directory as this rank. A checkpoint in it has a part of each of them.
        resume: Captures this rank's position in the fit. It can do so even before the first batch boundary, because a
            save may be made at an earlier sync point.
        state: Captures the Trainer's state.
        call: Function that asks all ranks to come to a sync point at their next batch boundary; see
            `CollectiveActions`.
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
    """A base of the classes that decide when one rank saves.

    `LockstepSaves` is for ranks that take every step together, `AsyncSaves` for replicas that are asynchronous between
    sync points, and `ServerSaves` for weights on parameter servers.
    """

    def __init__(self, fit: SavedFit) -> None:
        self._fit = fit
        self._known = fit.number
        self._group = fit.group
        self._batches = self._trained()

    @property
    def known(self) -> int:
        """The number of the newest save that this rank knows of."""
        return self._known

    @property
    def group(self) -> Sequence[int]:
        """The ranks that save into this rank's directory."""
        return self._group

    @abstractmethod
    def expect(self) -> None:
        """Allocate memory for saves, after the first optimizer step has given the optimizers' state its final size."""

    @abstractmethod
    def boundary(self, preempted: Preemption) -> None:
        """Save at this safe point if a save is due.

        ``preempted.told`` says whether a signal has told this rank to stop.
        """

    @abstractmethod
    def fail(self, exception: BaseException, reason: str = "exception") -> bool:
        """Save this rank's training when an exception ends it; return whether a save was made.

        Args:
            exception: The exception, for the manifest.
            reason: Reason of the save, for the manifest. Default: ``"exception"``.
        """

    @abstractmethod
    def end(self, reason: str = "the end") -> None:
        """Make the last save of the training, or wait until it is written. All ranks call this together."""

    def give_up(self) -> None:  # noqa: B027
        """Report to the other ranks that this rank will not write its part of a save, because training is over."""

    def close(self) -> None:  # noqa: B027
        """Close the communicator for agreeing on saves, if this coordinator has one."""

    def _capture(self, alike: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that is equal on all ranks, and this rank's own state, at this safe point.

        ``alike`` has the names of the parts that are equal on all ranks, see `TrainerState.capture`.
        """
        shared, checkpoint = self._fit.state.capture(alike)
        return shared, {"checkpoint": checkpoint, "resume": self._fit.resume.capture()}

    def _manifest(self, reason: str, exception: BaseException | None = None) -> dict[str, Any]:
        """Return the fields that a save adds to its manifest.

        Args:
            reason: Reason of the save.
            exception: Exception that has ended training. With it, no metric is computed, because that may wait for
                other ranks. Default: None.
        """
        trainer = self._fit.trainer
        # The property computes metrics, which is collective. Within a validation, they would be of a part of it.
        is_partial = exception is not None or trainer.validating
        known = trainer._logger_connector._callback_metrics if is_partial else trainer.callback_metrics
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
        """Return the number of batches that were trained on, including a batch whose last hooks may still run."""
        return self._fit.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _finish(self) -> None:
        """Wait until all ranks have written their parts of the last save. All ranks call this together.

        Without this wait, a launcher may kill the live ranks as soon as one rank exits.
        """
        self._fit.saver.wait(PATIENCE_S, settled=True)
        # No rank leaves before all have written.
        self._fit.trainer.strategy.barrier("the checkpoint is written")

    def _refuse(self) -> bool:
        """Log why the fit cannot be saved at this moment; return False, the result of `fail` if no save was made."""
        phase = self._fit.resume.points.step_position.within.value
        log.warning("Rank %d: there is no checkpoint of this moment: %s.", self._fit.trainer.global_rank, phase)
        return False


class LockstepSaves(SaveCoordinator):
    """A coordinator of saves for ranks that take every step together, and for a single rank.

    All ranks save after the same batch. A save that is due by time may be due on one rank only. All ranks learn of it
    one step later, and save then. A save that is due by the number of steps is due on all ranks, and begins at once.
    """

    def __init__(self, fit: SavedFit) -> None:
        super().__init__(fit)
        self._clock = SaveClock(fit.settings.save, fit.saver.costs, fit.trainer.global_step)
        self._lagged = lagged_of("FaultTolerantCheckpoint", fit.trainer)
        self._failed = False
        """Whether any rank has failed, as its row in the last gather has said."""
        self._stale = False
        """Whether the rows received next were sent before the last save, and may request that same save again."""

    def expect(self) -> None:
        shared, own = self._capture(ALIKE)
        self._fit.saver.expect(self._fit.trainer.global_step, self._group, shared, own)

    def boundary(self, preempted: Preemption) -> None:
        """Save at this safe point if a save is due; all ranks call this together, and all save.

        Within a validation nothing is saved, except by a single rank that was told to stop. If any rank was told to
        stop, save and end this process. ``preempted.told`` says whether this rank was.
        """
        trainer = self._fit.trainer
        clock = self._clock
        # Ranks validate unequal numbers of batches, so several ranks cannot save together here.
        if self._fit.resume.where == "validation":
            if trainer.world_size == 1 and preempted.told:
                preempted.act()
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
        # All ranks know this without an exchange, so they can agree at once whether one of them is busy.
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
        """Send this rank's requests, and return the requests that any rank has sent one step ago.

        ``mine`` has one flag for each kind of request: a save is due, the saver is busy, this rank was told to stop. A
        single rank gets ``mine`` back.
        """
        if self._lagged is None:
            return mine
        rows = self._lagged.receive() or [[0.0] * len(mine)]
        self._failed = _failed(rows)
        # After a failure, nobody answers any more.
        if not self._failed:
            self._lagged.send([float(x) for x in mine])
        return [max(column) > 0.0 for column in zip(*rows, strict=True)]

    def _stop(self, preempted: Preemption) -> NoReturn:
        """Save and end this process: with all ranks, or alone if another rank has failed before this safe point.

        While ranks exchange nothing, for example while gradients accumulate, a failure of one rank goes unnoticed. That
        rank does not reach this safe point.
        """
        if self._lagged is not None and not self._failed:
            # These rows were sent at this safe point. A rank that has failed has sent its place of failure instead.
            try:
                self._failed = _failed(self._lagged.receive())
            except CollectiveError:
                # The exchange itself has failed, so another rank is not here.
                self._failed = True
        preempted.act()
        self._save("preemption", alone=self._failed)
        if not self._failed:
            preempted.leave(self._finish)
        log.warning(
            "Rank %d: ranks were told to stop, and one has failed before it came to this batch. This one saves alone.",
            self._fit.trainer.global_rank,
        )
        # Without a barrier, because the failed rank would not come.
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
        """Save alone after an exception; return whether a save was made.

        The state that all ranks share is complete on this rank, so the save of one rank is enough. This rank makes none
        if another rank has already begun the same save. If ``reason`` is ``"preemption"`` and all ranks are at the same
        safe point, all ranks save together instead.
        """
        trainer = self._fit.trainer
        # Nothing was trained since the last save, and that save was written.
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
        """Return whether all ranks have failed at the same safe point; all ranks get the same answer.

        The ranks gather one row of numbers from each rank. In the row of a failed rank, the last number is the code of
        the safe point at which the rank has failed. A rank that has not failed takes part with its usual row. The last
        number of a usual row is 0 or 1, for whether the rank was told to stop. Codes of safe points are larger than 1,
        so the two kinds of row cannot be confused. ``resume`` is this rank's resume state at the safe point.
        """
        if self._lagged is None:
            return False
        place = _PLACES + len(_WHERE) * self._trained() + _WHERE.index(resume["where"])
        rows = self._lagged.ask([0.0, 0.0, place], _TOGETHER)
        return bool(rows) and all(row[-1] == place for row in rows)

    def end(self, reason: str = "the end") -> None:
        """Wait until all ranks have written the save at the end of the last epoch, so that a later program finds it."""
        self._finish()

    def close(self) -> None:
        if self._lagged is not None:
            self._lagged.close()


def _failed(rows: Sequence[Sequence[float]]) -> bool:
    return any(row[-1] >= _PLACES for row in rows)


class _SyncPointSaves(SaveCoordinator, SyncPointParticipant):
    """A base of the coordinators for replicas that are asynchronous between sync points.

    A signal to stop is sent to all ranks as a vote, and all ranks end training together. All ranks must see one
    directory. Only if every step is synchronous and no weights are on servers, there may be several directories, each
    with a complete checkpoint.

    Raises:
        ValueError: The ranks see different directories, although they must see one.
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
        # Ranks that have joined have found the directory, too.
        return sorted({*self._group, *names_of(self._fit.trainer).left})

    @property
    def _step(self) -> int:
        return self._averager.global_step()

    @property
    @abstractmethod
    def _in_step(self) -> bool:
        """Whether a request to save from one rank makes all ranks save after the same step, which is the next one."""

    @abstractmethod
    def _ask(self) -> None:
        """Ask all ranks to save soon."""

    def _attach(self) -> None:
        """Attach to the strategy's present averager.

        The strategy replaces its averager when training begins again or when ranks have joined.
        """
        before = self._averager
        self._averager = self._fit.trainer.strategy.averager
        if before is self._averager:
            return
        # The new averager counts steps from 0 again.
        if before is not None:
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
        """If a save has failed because a rank was lost, make it due again.

        A request for a save may be lost together with a rank, so after a loss this rank may request the save again. A
        save that has begun fails if a lost rank has not written its part.
        """
        left = names_of(self._fit.trainer).left
        if left != self._left:
            self._left = left
            self._asked = False
        if self._fit.saver.gave_up:
            self._fit.saver.gave_up = False
            self._clock.put_off()

    def _agreed(self, averager: Any, state: LastSafeState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all ranks agree on, and this rank's own state with the resume state of ``state``."""
        strategy = self._fit.trainer.strategy
        alike = strategy.alike if strategy.served else REPLICAS
        shared, checkpoint = self._fit.state.capture(alike, state.callbacks)
        shared["averaging"] = averager.state_dict()
        return shared, {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}

    def fail(self, exception: BaseException, reason: str = "exception") -> bool:
        """Save this replica alone after an exception; return whether a save was made.

        With parameter servers, the save has the servers' state. All ranks can resume from this save.
        """
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
        """Save at a sync point if any rank wants a save.

        All ranks call this together, and agree on one number and step.

        Args:
            reason: Reason of the save, for the manifest.
            wanted: Whether this rank wants a save. Default: True.
            queue: Whether the copy may begin while an earlier save is being written. If then no buffer is free, this
                rank logs a warning and writes no part of the save. Default: False, wait for the earlier save.

        Returns:
            The number of the save, its step, and the ranks that save into this directory; None if no rank wants a save.
        """
        strategy = self._fit.trainer.strategy
        averager = strategy.averager
        names = names_of(self._fit.trainer)
        mine = [wanted, averager.marks.saved, int(averager.global_step()), names.mine]
        # All ranks must use one number and step, and each knows only its own.
        wishes, known, steps, ranks = zip(*strategy.world.gather_objects(mine), strict=True)
        if not any(wishes):
            return None
        # A lost rank may have saved alone at this very step, with the next number, so that number is skipped.
        alone = len(ranks) < names.started
        number = max(known) + 1 + alone
        step = max(steps)
        averager.marks.begin(number)
        ranks = [rank for rank in sorted(ranks) if rank in self._group]
        before = strategy.world.asynchronous
        # While replicas count as asynchronous, metrics are computed of this rank alone, without a collective.
        strategy.world.asynchronous = True
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
        """Make the last save; repeat it if a rank is lost meanwhile. All ranks call this together at a sync point."""
        while not self._is_whole(reason):
            rank = names_of(self._fit.trainer).mine
            log.warning("Rank %d: ranks were lost during the last save: the live ranks save once more.", rank)

    def _is_whole(self, reason: str) -> bool:
        """Save together with all ranks, wait for the save, and return whether it counts as the last save.

        Return False, on all ranks, if a rank of the save was lost and the save was not committed. The caller then saves
        again. ``reason`` is the reason in the manifest.
        """
        saved = self._save_together(reason)
        assert saved is not None
        number, _, ranks = saved
        self._finish()
        whole = self._fit.saver.is_committed(number) or not names_of(self._fit.trainer).lost.intersection(ranks)
        # Ranks may differ in what they know of lost ones, but all must repeat the save or none.
        return all(self._fit.trainer.strategy.world.gather_objects(whole))


class AsyncSaves(_SyncPointSaves):
    """A coordinator of saves for asynchronous replicas.

    A save belongs to a round. If a save is due on a rank, this rank asks all ranks to mark the next round. Each rank
    that takes part in the marked round keeps a share of the round's result. At its next batch boundary, the rank writes
    this share together with its own state. No rank waits for another.
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
            # Marks of the old averager's rounds can no longer be completed.
            self._give_up(before.marks.lost(all=True))
        self._averager.marks.settle = self._take
        self._live_ranks = self._fit.trainer.strategy.live_ranks

    # The share of the agreed state has a fixed size, so it is reserved before the first round.
    def expect(self) -> None:
        _, own = self._capture(frozenset())
        own["replica"] = self._averager.marks.replica()
        state = self._averager.state_dict()["rule_state"]
        rule = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        agreed = (rule + 4 * self._averager.replica.layout.numel) // self._fit.trainer.world_size
        self._fit.saver.expect(self._fit.trainer.global_step, [names_of(self._fit.trainer).mine], {}, own, agreed)

    def _ask(self) -> None:
        self._averager.marks.ask()

    # Take the mark before lost ranks are looked for, which resets requests.
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
        """Report to the other ranks that this rank will not write its part of a save, because training is over.

        The marked round of such a save has completed since this rank's last batch boundary.
        """
        self._give_up(self._averager.marks.lost(all=True), "its training ended before its next batch boundary")

    def _give_up(
        self, marks: list[Mark], why: str = "another round had come before this replica's next batch boundary"
    ) -> None:
        """Report to the other ranks that this rank will not write its part of the marked saves.

        Args:
            marks: Marks of these saves: number, step and members of each.
            why: Reason, for the other ranks.
        """
        for number, step, members in marks:
            log.warning("Rank %d comes too late for its part of save %d.", names_of(self._fit.trainer).mine, number)
            self._fit.saver.give_up(number, step, why, self._ranks(members))

    def _take(self) -> None:
        """Write this rank's part of a save, if a round that was marked for a save has completed since the last call."""
        self._give_up(self._averager.marks.lost())
        # A round that this rank has marked or taken part in, and whose share it still has to write.
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
        """Return those ranks among ``members`` that save into this directory, as stable ids."""
        names = members if self._live_ranks is None else tuple(map(self._live_ranks.called, members))
        return [rank for rank in map(int, names) if rank in self._group]

    def at_sync_point(self) -> None:
        """Write this rank's part of a save while this rank waits at a sync point.

        A marked round may complete during this wait.
        """
        self._take()


class ServerSaves(_SyncPointSaves):
    """A coordinator of saves for the workers of parameter servers.

    If a save is due on a rank, this rank asks all ranks to come to a sync point at their next batch boundary
    (`SavedFit.call`). At the sync point no push is under way, and all ranks have one version of the servers' weights.
    Each rank writes a part of the weights and of the optimizer's state, and its own state. In synchronous mode the
    request travels with a step, and all ranks come to the sync point after that step.
    """

    # Duration of the sync point that was called for the save, which counts as its cost.
    _waited_s = 0.0

    @property
    def _step(self) -> int:
        """The step number. In synchronous mode it is equal on all ranks with data.

        Saves that are due by the number of steps require equal step numbers.
        """
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
        """Save if a save is due on any rank. All ranks call this at a sync point, where they have the same model."""
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
        """Record how long this rank has waited, if the sync point was called for a common decision, such as a save."""
        if self._averager.sync_points.coming is SyncPointKind.DECIDE:
            self._waited_s = waited_s
