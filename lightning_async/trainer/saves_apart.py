"""When to save, and what, of replicas that drift.

A save belongs to a round. The rank on which one is due has the next round marked; of what that makes, each rank that
takes part keeps a share, and with it, at its own next batch boundary, its own state. Nobody waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightning_async.engine.checkpoint.process import SaveBusy
from lightning_async.engine.checkpoint.saver import Saver
from lightning_async.engine.header import Mark
from lightning_async.rules.schedules.fixed import Synchronous
from lightning_async.trainer.due import Clock, Settings, manifest_of
from lightning_async.trainer.names import names_of
from lightning_async.trainer.preemption import Preemption
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.saves import FAILED_S, batches, refuse
from lightning_async.trainer.saves_met import Met, end
from lightning_async.trainer.whole_state import REPLICAS, collect

__all__ = ["Apart"]

log = logging.getLogger(__name__)


class Apart:
    """Saves of replicas that drift.

    Args:
        trainer: in training.
        saver: of this rank.
        settings: what the user has asked for.
        number: of the last save in the directory.
        group: the ranks that see this rank's directory. All must, unless every step is synchronous: then each
            directory has all that is needed.
        resume: knows this rank's place, from its first batch on: it may wait at a gate before its first boundary.

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
        self._trainer, self._saver, self._settings, self._group = trainer, saver, settings, group
        self._known, self._asked = number, False
        self._averager: Any = None
        self._left = left
        self._attach()
        self._clock = Clock(settings.save, saver.costs, self._averager.global_step())
        self._resume = resume
        self._began = batches(trainer)

    @property
    def known(self) -> int:
        """The last save that all ranks know of."""
        return max(self._known, self._averager.marks.saved)

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
        self._averager.marks.settle = self._take
        self._averager.gates.add(self)
        self._survivors = self._trainer.strategy.survivors
        if set(self._left) <= set(self._group):  # then whoever comes has found the directory, too
            self._group = sorted({*self._group, *names_of(self._trainer).left})
        self._asked = False

    def expect(self, resume: Resume) -> None:
        """Optimizers have stepped, and have their state now: have memory for saves of it, and of what was agreed on."""
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
        """A safe point of this rank's; a signal is a vote, by which all leave."""
        if resume.where == "validation":
            return
        self._attach()
        self._take()
        self._follow()
        step, at_end = self._averager.global_step(), resume.where == "epoch"
        ahead = int(self._averager.ledger.synchronous)  # the next step is a round, after which all save
        if not self._asked and self._clock.asks(self._settings, self._saver.busy, step, ahead, at_end):
            self._asked = True
            self._averager.marks.ask()

    def _follow(self) -> None:
        """Hear of saves, and of ranks that are lost: what these had asked for may be lost with them."""
        left, saved = names_of(self._trainer).left, self._averager.marks.saved
        if left != self._left:
            self._left, self._known, self._asked = left, saved, False
        if saved != self._known:
            self._saved(saved)
        if self._saver.gave_up:
            self._saver.gave_up = False
            self._clock.put_off()

    def _saved(self, number: int) -> None:
        self._known, self._asked = number, False
        self._clock.saved(self._averager.global_step())

    def give_up(self) -> None:
        """Training is over: nobody waits for this rank's part of a round that was marked meanwhile."""
        self._give_up(self._averager.marks.lost(all=True), "its training ended before its next batch boundary")

    def _give_up(
        self, marks: list[Mark], why: str = "another round had come before this replica's next batch boundary"
    ) -> None:
        """Nobody waits for this rank's part of these."""
        for number, step, members in marks:
            log.warning("Rank %d comes too late for its part of save %d.", names_of(self._trainer).mine, number)
            self._saver.give_up(number, step, why, self._ranks(members))

    def _take(self) -> None:
        """Save this rank's part of a marked round."""
        self._give_up(self._averager.marks.lost())
        marked = self._averager.marks.take()
        if marked is None:
            return
        (number, step, members), queue = marked.mark, self._settings.busy != "wait"
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
        """Who is to save, of those that take part in a mark, by their names for life."""
        names = members if self._survivors is None else tuple(map(self._survivors.called, members))
        return [rank for rank in map(int, names) if rank in self._group]

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save this replica alone, whatever the others do; all go on from its model. Whether that was done."""
        trainer, averager = self._trainer, self._averager
        if batches(trainer) == self._began:
            return False
        with resume.points.as_it_was(ending=True) as state:
            if state is None:
                return refuse(trainer, resume)
            shared, checkpoint = collect(trainer, REPLICAS, state.callbacks, self._saver.pickles)
            shared["averaging"] = averager.state_dict()
            own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
            number, step = max(self._known, averager.marks.saved) + 1, averager.global_step()
            manifest = manifest_of(trainer, reason, exception)
            return self._saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def end(self, reason: str = "the end") -> None:
        """All ranks are here, with one model."""
        end(Met(self._trainer, self._saver, self._resume, self._group), reason)

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
