"""When to save, and what, of workers whose weights are on servers.

The rank on which a save is due calls all together, see `Convening`. Where they meet no push is under way, and all have
the servers' weights of one version: each writes its part of these and of the optimizer's state, and what is its own.
They train on while it is written. In synchronous mode the call goes with a step, and all meet behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning_async.engine.checkpoint.saver import Saver
from lightning_async.engine.header import Gate
from lightning_async.trainer.due import Clock, Settings, manifest_of
from lightning_async.trainer.names import names_of
from lightning_async.trainer.preemption import Preemption
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.saves import FAILED_S, batches, refuse
from lightning_async.trainer.saves_met import Met, end, save
from lightning_async.trainer.whole_state import collect

__all__ = ["Called"]

log = logging.getLogger(__name__)


class Called:
    """Saves of workers of a parameter server.

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
        self._trainer, self._saver, self._settings, self._group = trainer, saver, settings, group
        self._resume, self._call, self._known = resume, call, number
        self._asked, self._waited_s = False, 0.0
        self._averager: Any = None
        self._attach()
        self._clock = Clock(settings.save, saver.costs, self._step)
        self._began = batches(trainer)

    @property
    def known(self) -> int:
        """The last save that all ranks know of."""
        return max(self._known, self._averager.marks.saved)

    @property
    def _step(self) -> int:
        """In synchronous mode equal on all ranks that have data, so that what is due by steps is due on all."""
        return self._averager.step if self._in_step else self._averager.global_step()

    @property
    def _in_step(self) -> bool:
        return self._trainer.strategy.mode == "sync"

    def _attach(self) -> None:
        """Training may have begun anew, or with others."""
        before, self._averager = self._averager, self._trainer.strategy.averager
        if before is self._averager:
            return
        if before is not None:
            self._known = max(self._known, before.marks.saved)
            self._clock.saved(self._step)
        self._averager.marks.begin(self._known)
        self._averager.gates.add(self)
        self._group = sorted({*self._group, *names_of(self._trainer).left})
        self._asked = False

    def expect(self, resume: Resume) -> None:
        """Optimizers have stepped, and have their state now: have memory for saves of it."""
        strategy = self._trainer.strategy
        with strategy.states_here():
            shared, checkpoint = collect(self._trainer, strategy.alike, pickles=self._saver.pickles)
            own = {"checkpoint": checkpoint, "resume": resume.capture()}
            self._saver.expect(self._trainer.global_step, self._group, shared, own)

    def boundary(self, resume: Resume, preempted: Preemption) -> None:
        """A safe point of this rank's; a signal is a vote, by which all leave."""
        if resume.where == "validation":
            return
        self._attach()
        self._follow()
        ahead, at_end = int(self._in_step), resume.where == "epoch"
        if not self._asked and self._clock.asks(self._settings, self._saver.busy, self._step, ahead, at_end):
            self._asked = True
            self._call()

    def _follow(self) -> None:
        """Ranks may be lost, and saves with them."""
        left = names_of(self._trainer).left
        if left != self._left:
            self._left, self._asked = left, False
        if self._saver.gave_up:
            self._saver.gave_up = False
            self._clock.put_off()

    def save(self) -> None:
        """All ranks are at a gate, with one model: save, if that is due on any of them."""
        self._attach()
        if save(self._met, "due", self._asked, queue=self._settings.busy != "wait") is None:
            return
        self._saver.costs.stalled_s += self._waited_s
        self._asked, self._waited_s = False, 0.0
        self._clock.saved(self._step)

    @property
    def _met(self) -> Met:
        return Met(self._trainer, self._saver, self._resume, self._group)

    def fail(self, resume: Resume, exception: BaseException, reason: str = "exception") -> bool:
        """Save what the servers have, and this worker's place, whatever the others do. Whether that was done."""
        trainer, averager = self._trainer, self._averager
        if batches(trainer) == self._began:
            return False
        with resume.points.as_it_was(ending=True) as state:
            if state is None:
                return refuse(trainer, resume)
            with trainer.strategy.states_here(alone_s=FAILED_S):
                shared, checkpoint = collect(trainer, trainer.strategy.alike, state.callbacks, self._saver.pickles)
                shared["averaging"] = averager.state_dict()
                own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
                number, step = self.known + 1, averager.global_step()
                manifest = manifest_of(trainer, reason, exception)
                return self._saver.save_alone(number, step, shared, own, manifest, FAILED_S)

    def end(self, reason: str = "the end") -> None:
        """All ranks are here, with one model."""
        self._attach()
        end(self._met, reason)

    def give_up(self) -> None:
        """Training is over: there is nothing that others wait for."""

    def close(self) -> None:
        """Nothing to let go of."""

    # ---- at gates, see `Visitor` ----

    def come(self) -> None: ...

    def stand(self) -> None: ...

    def go(self, waited_s: float) -> None:
        """What a save costs, where the gate was for it."""
        if self._averager.gates.coming is Gate.DECIDE:
            self._waited_s = waited_s

    def leave(self) -> None: ...

    def resume(self) -> None: ...
