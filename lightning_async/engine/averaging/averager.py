"""The training thread's side of averaging: count work, pack, merge, meet at gates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Collectives
from lightning_async.engine.averaging.ballot import Kind
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.gate import Gates
from lightning_async.engine.averaging.loop import RoundServer
from lightning_async.engine.averaging.mailbox import Mailbox, Message, Work
from lightning_async.engine.averaging.merge import Merger
from lightning_async.engine.averaging.report import RoundReport, RunSummary
from lightning_async.engine.averaging.reports import Reports
from lightning_async.engine.calls import Calls, Recovery
from lightning_async.engine.digest import finite_later
from lightning_async.engine.header import Arrival, Gate
from lightning_async.engine.replica import Replica
from lightning_async.errors import CollectiveError
from lightning_async.rules.averaging.protocol import AveragingRule
from lightning_async.rules.schedules.protocol import Action, Clock, Schedule

__all__ = ["BackgroundAverager"]

log = logging.getLogger(__name__)
S = TypeVar("S")


class BackgroundAverager(Gates, Generic[S]):
    """Averages one replica with its peers while it trains.

    The training thread calls `plan` before and `tick` after every optimizer step (or once per batch, where
    several optimizers step), `rendezvous` wherever all ranks must hold one model, and `resume` when it trains
    on. A thread of the engine's serves the rounds meanwhile. All ranks must start with equal parameters.

    Args:
        collectives: a communicator for CPU tensors, off which the engine forks its own.
        payload: a communicator for the device of the replica's buckets. Default: ``collectives``.
        membership: started and closed by its owner.
        replica: the tensors.
        rule: how replicas become one model.
        schedule: when they do.
        config: the rest.
        now: a monotonic clock, in seconds.
        calls: further calls of the training thread's over all ranks, which the engine carries over to new groups.

    Raises:
        ValueError: a rule that ``config`` cannot carry out, see `AveragerConfig.check_rule`.
    """

    def __init__(
        self,
        collectives: Collectives,
        membership: Membership,
        replica: Replica,
        rule: AveragingRule[S],
        schedule: Schedule,
        config: AveragerConfig | None = None,
        *,
        payload: Collectives | None = None,
        now: Callable[[], float] = time.monotonic,
        calls: Calls | None = None,
    ) -> None:
        self.config = config or AveragerConfig()
        self.config.check_rule(type(self).__name__, rule)
        self.replica, self.rule, self.schedule = replica, rule, schedule
        self.summary = RunSummary(rank=collectives.rank, world_size=collectives.world_size)
        self.step = self.first_step = 0
        self.epoch = 0
        self._now = now
        self._box = Mailbox()
        self._reports = Reports(self.summary)
        self.on_healed: Callable[[], None] = lambda: None
        """Called when this replica was not finite and has taken over the others' model."""
        self._resumed = False
        self._step_s = self._since_commit_s = self.started_at = self._last_tick = 0.0
        replica.pack_(replica.received)
        self._server = RoundServer(
            collectives, payload or collectives, membership, replica, rule, self._box, self.config, now, calls
        )
        self._calls = calls
        exact = self.config.compression == "none"
        self._merger = Merger(replica, rule, self._server.commits, self._box, exact)

    # ---- life ----

    def start(self) -> None:
        """Begin: every replica's parameters are equal now."""
        self.started_at = self._last_tick = self._box.last_seen = self._now()
        self._box.last_commit = self.started_at - self._since_commit_s
        self.first_step = self.step
        self._box.last_round = self._server.commits.next_round
        if not self.step and not self._resumed:  # so that a rank without data, too, knows how training begins
            self._box.fresh = self.schedule.next(Clock(0, 0, 0, 0.0)) is Action.GRADIENTS
            self._box.synchronous = self._box.fresh
        self.replica.settle(self._server.payload.registered)
        if self._calls is not None:
            self._calls.recovery = Recovery(self._report_trouble, super().resume)
        self._server.start()

    def _report_trouble(self, error: CollectiveError) -> None:
        with self._box.changed:
            self._box.trouble = error
            self._box.changed.notify_all()

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the engine's thread. Waits for no peer; idempotent."""
        with self._box.changed:
            self._box.closing = True
            self._box.changed.notify_all()
        if not self._server.join(timeout):
            log.warning("The engine's thread of rank %d did not end within %s.", self.summary.rank, timeout)

    def wake(self) -> None:
        """Called by the membership when something has changed."""
        self._server.wake()

    # ---- stepping ----

    def plan(self, meet: Callable[[Gate], Arrival] | None = None) -> Action:
        """What to do with the step that the training thread is about to take; ``meet`` is called for `rendezvous`."""
        box = self._box
        with box.changed:
            self._see()
            committed = box.last_commit
            since = box.since_round - (box.message.steps if box.message is not None else 0.0)
        action = self.schedule.next(
            Clock(
                step=self.step,
                epoch=self.epoch,
                steps_since_round=int(since),
                seconds_since_round=self._now() - committed,
                step_s=self._step_s,
                round_s=self._reports.round_s,
            )
        )
        apart = not box.synchronous or box.agreed_votes.synchronise
        if action is Action.GRADIENTS and apart and (meet or self.rendezvous)(Gate.SYNCHRONISE) is not Arrival.OPEN:
            action = Action.LOCAL  # others ask for a validation, or to stop: first that, at the end of this batch
        synchronous = action is Action.GRADIENTS
        if box.synchronous and not synchronous:
            self._leave_synchronous()
        with box.changed:
            box.synchronous = synchronous
        return action

    def resume(self) -> None:
        """The training thread starts a batch: it is alive, and may have unfrozen parameters since the last gate."""
        super().resume()
        self._merger.restore_local()
        self._leave_gate()

    def _follow_layout(self) -> None:
        """Parameters were unfrozen at a gate: they travel with the others from now on."""
        replica, followed = self.replica, False
        replica.tensors.check_unchanged(thawed_too=False)
        if not (thawed := replica.tensors.thawed()):
            return
        while not followed:
            self._take()
            with self._using_buckets(alone=True):
                if followed := self._box.arrived is None:  # nothing of the old layout is left
                    before = replica.layout
                    replica.take_thawed()
                    replica.settle(self._server.payload.registered)
                    replica.pack_(replica.received)
                    self._server.follow_layout(before)
        log.info("Rank %d: %d parameters were unfrozen and are averaged from now on.", self.summary.rank, len(thawed))

    def _leave_synchronous(self) -> None:
        """Replicas part from here: this is where they come from, should one miss the next round."""
        with self._using_buckets(alone=True):
            self.replica.pack_(self.replica.received)
        self._box.work, self._box.since_round, self._box.at_target = Work(), 0.0, True

    def reduce_gradients_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their sample-weighted mean over all replicas; stands still until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        Args:
            samples: samples behind the gradients of this replica.
            scale: this replica's loss scale (mixed precision); replicas may have different ones.
        """
        box, replica = self._box, self.replica
        self._wait(lambda: box.arrived is None and box.message is None)
        message = Message(Kind.GRADIENTS, Work(samples, 1.0), self.step, steps=1.0, used=replica.used())
        with self._using_buckets(message, alone=True):
            replica.pack_gradients_(replica.sent, 1.0 / scale)
        self._wait(lambda: box.message is None)
        arrived = box.arrived
        if arrived is not None and arrived.used is not None:  # None: no replica had samples
            replica.to_training.take()
            replica.unpack_gradients_(arrived.target, arrived.used, scale)
        with box.changed:
            box.arrived = None
        self.summary.synchronous_steps += 1

    def tick(self, action: Action, samples: float, *, stepped: bool = True, lr: float = 0.0) -> RoundReport | None:
        """Count a step, take what arrived, and start a round if that was planned.

        Args:
            action: what `plan` said.
            samples: samples behind the step.
            stepped: False if no parameter moved (a step skipped because of infinite gradients).
            lr: the inner learning rate, for rules that need it.

        Returns:
            The round that was merged, if one was.
        """
        box, now = self._box, self._now()
        self._step_s = 0.9 * self._step_s + 0.1 * (now - self._last_tick) if self._step_s else now - self._last_tick
        self._last_tick = now
        with box.changed:
            self._see()
            if stepped:
                self.step += 1
                box.at_target = False
                box.total = Work(box.total.samples + samples, float(self.step))
                self.summary.samples += samples
                self.summary.steps += 1
                if action is not Action.GRADIENTS:
                    box.work = Work(box.work.samples + samples, box.work.steps + 1)
                    box.since_round += 1
        report = self._take()
        if action is Action.ROUND:
            if self.config.overlap:
                self._pack(lr)
            else:
                report = self._average_now(lr) or report
        return report

    def _average_now(self, lr: float) -> RoundReport | None:
        """One round, for which the training thread stands still."""
        box, started = self._box, self._now()
        report = self._take()
        while not self._pack(lr):
            if not self._has_news():
                return report
            self._wait(lambda: not box.claimed and box.message is None)
            report = self._take() or report
        self._wait(lambda: box.message is None)
        self._reports.blocked_s = self._now() - started
        return self._take() or report

    def _has_news(self) -> bool:
        """Whether this replica did anything that no round holds."""
        return self.config.weigh(self._box.work) > 0.0 or self._box.since_round > 0.0

    def _pack(self, lr: float = 0.0, due: bool = True) -> bool:
        """Snapshot the parameters as this rank's message, if the buckets are free; whether it did."""
        box, started = self._box, self._now()
        with box.changed:
            message = Message(Kind.ROUND, box.work.copy(), self.step, box.since_round, due, lr)
            taken = box.message is not None or box.arrived is not None or box.claimed or box.showing
            opened = not due and box.gate is Gate.NONE
            if taken or opened or not self._has_news():
                return False
            box.in_use = True
        with self._using_buckets(message):
            self.replica.tensors.check_unchanged()
            self.replica.pack_(self.replica.sent, for_round=True)
            message.state_is_finite = finite_later(self.replica.watched())
        self._reports.merge_s += self._now() - started
        return True

    def _take(self) -> RoundReport | None:
        """Move the parameters by what arrived."""
        box = self._box
        with box.changed:
            arrived = box.arrived
            if arrived is None:
                return None
            box.in_use = True
        started = self._now()
        with self._using_buckets():
            self._merger.merge(arrived, self.step)
            with box.changed:
                box.arrived = None
        self._reports.merge_s += self._now() - started
        if arrived.healed:
            self.on_healed()
        return self._reports.add(arrived, self.step, box.failed_rounds, box.samples_by_rank)

    def global_step(self) -> int:
        """Optimizer steps per replica: the mean over all at the last header, and since then at the same pace."""
        box = self._box
        pace = box.mean_steps / box.steps_then if box.steps_then else 1.0
        return int(box.mean_steps + pace * (self.step - box.steps_then))

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """The rule's state and the round, equal on all replicas where it is taken at a rendezvous; a copy."""
        return self._server.commits.state_dict()

    def clocks(self) -> dict[str, Any]:
        """What is this replica's own."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "synchronous": self._box.synchronous,
            "fresh": self._box.fresh,
            "steps_since_round": self._box.since_round,
            "seconds_since_round": self._now() - self._box.last_commit,
            "rule_state": self._server.commits.rule_state_dict(own=True),
            "summary": self.summary.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], clocks: dict[str, Any]) -> None:
        """Go on from `state_dict` and `clocks`; before `start`. What ``clocks`` lacks of the rule's state begins anew.

        Raises:
            ValueError: the state is another rule's.
        """
        self._server.commits.load_state_dict(saved, clocks["rule_state"])
        box = self._box
        self.step, self.epoch = int(clocks["step"]), int(clocks["epoch"])
        box.synchronous, box.fresh = bool(clocks["synchronous"]), bool(clocks["fresh"])
        box.since_round = float(clocks.get("steps_since_round", 0.0))
        self._resumed = True
        self._since_commit_s = float(clocks.get("seconds_since_round", 0.0))
        self.summary.load_state_dict(clocks["summary"])
        box.steps_then = box.mean_steps = float(self.step)
        box.total = Work(self.summary.samples, float(self.step))
