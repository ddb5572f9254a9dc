"""`BackgroundAverager`: averaging rounds, as the training thread sees them; it packs messages and merges results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.schedules import Action, ReplicaClock, Schedule
from lightning_async.engine.averaging.rounds import ROUND, AveragingComponent, LocalMessage, Merge
from lightning_async.engine.averaging.rule_state import AveragerConfig, RuleState
from lightning_async.engine.buckets import ModelRound
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.fingerprint import all_finite
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.report import RoundReport
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.engine.work_ledger import WorkLedger
from lightning_async.flat import FlatLayout


class BackgroundAverager(ReplicaEngine):
    """An averager of one replica with the other replicas, in the background of training.

    The training thread calls `plan` before every optimizer step, and `tick` after it (or both once per batch, where
    several optimizers step). The engine's thread carries out the rounds.

    Args:
        control: Control plane, which is not started yet.
        rule: Averaging rule.
        schedule: Schedule of local steps and rounds.
        config: Options of averaging. Default: those of `AveragerConfig()`.
        meet: Function that waits at a sync point; `plan` calls it before synchronous steps begin. Default:
            ``sync_points.rendezvous``.

    Raises:
        ValueError: ``rule`` does not work with the options in ``config``.
    """

    def __init__(
        self,
        control: ControlPlane,
        rule: AveragingRule,
        schedule: Schedule,
        config: AveragerConfig | None = None,
        meet: Callable[[SyncPointKind], Arrival] | None = None,
    ) -> None:
        self.config = config or AveragerConfig()
        self.config.check_rule(type(self).__name__, rule)
        self.schedule = schedule
        buckets = control.buckets
        fragments = buckets.replica.num_fragments
        left = self.config.weight_of_reported(rule)
        ledger = WorkLedger(control.now, fragments, self.config.weighting, left, not rule.absent_follow)
        self.rule_state = RuleState(rule, buckets, control.shared_state)
        self.component = AveragingComponent(control, self.rule_state, ledger, self.config)
        super().__init__(
            control,
            agreed=self.rule_state,
            ledger=ledger,
            residuals=self.component.average,
            on_consensus=self.component.on_consensus,
        )
        control.register(self.component)
        self.trends = self.component.average.trends
        self._meet = meet or self.sync_points.rendezvous
        self.on_healed: Callable[[], None] = lambda: None
        """A function that is called after this replica, which was not finite, has taken over the others' model."""
        self._in_flight = False
        self._loss_sum: Tensor | float = 0.0  # sum of the losses of local steps since the last message that was due
        self._num_losses = 0
        self._step_s = self._last_tick = self._stood_at = 0.0

    def _begin(self) -> None:
        self._last_tick = self._now()
        if not self.step and not self._resumed:  # asked here, as a rank without data takes no step
            is_synchronous = self._ask(ReplicaClock(0, 0, 0, 0.0)) is Action.GRADIENTS
            self.ledger.fresh = self.ledger.synchronous = is_synchronous

    def plan(self) -> Action:
        """Return the action that the schedule chooses for the next step, and prepare the model for that step.

        Before synchronous steps begin (``Action.GRADIENTS``), wait at a sync point, so that all replicas start these
        steps with one model. If another rank asks for a validation or a stop during the wait, return ``Action.LOCAL``
        instead.
        """
        box = self._box
        ledger = self.ledger
        with box.changed:
            self.control.see()
            committed = ledger.last_round
            message = self._buckets.message
            since = list(ledger.since_round)
            spread = self.trends.spread.relative
            loss_variance = self.trends.loss_variance.relative
            if isinstance(message, LocalMessage):
                since[message.fragment] -= message.steps
        # Within one period of the schedule each fragment has a round, so the clock that it sees runs faster by their
        # number.
        times = self.replica.num_fragments
        action = self._ask(
            ReplicaClock(
                step=self.step,
                epoch=self.epoch,
                steps_since_round=times * int(min(since) + 1) - 1,
                seconds_since_round=times * (self._now() - committed),
                step_s=self._step_s,
                round_s=times * self._reports.round_s,
                speed=box.speed,
                relative_spread=spread,
                relative_loss_variance=loss_variance,
            )
        )
        apart = not ledger.synchronous or Vote.SYNCHRONISE in box.agreed
        if action is Action.GRADIENTS and apart and self._meet(SyncPointKind.SYNCHRONISE) is not Arrival.OPEN:
            action = Action.LOCAL  # others ask for a validation or a stop, which comes first
        synchronous = action is Action.GRADIENTS
        if ledger.synchronous and not synchronous:
            self._leave_synchronous()
        with box.changed:
            ledger.synchronous = box.in_step = synchronous
        return action

    def _ask(self, clock: ReplicaClock) -> Action:
        action = self.schedule.next(clock)
        if not isinstance(action, Action):
            raise TypeError(f"`schedule={self.schedule!r}` said {action!r}; `next` must return an `Action`.")
        return action

    def _leave_synchronous(self) -> None:
        """End synchronous training on this replica: pack its parameters into the bucket `received`, as the last target.

        If this replica is absent from the next round, it moves by the difference between that round's target and this
        last target. Its work and its losses are counted from zero.
        """
        with self._buckets.alone(self.control.see):
            self.replica.pack_(self.control.vacated())
        self.ledger.part()
        self._forget_losses()
        self._buckets.at_target = True

    def count_gradients(self, samples: float | None) -> None:
        """Count a step with averaged gradients, and drop an averaging message that a header has already announced."""
        super().count_gradients(samples)
        message = self._buckets.message
        if isinstance(message, LocalMessage) and message.announced:
            self._buckets.message = None  # it was made with the old rule state; the work goes into another message

    def see_loss(self, loss: Tensor) -> None:
        """Include the training loss of a backward pass in the mean loss that the next message reports.

        This does not wait for a GPU. A loss of more than one number is ignored.
        """
        if loss.numel() == 1:
            self._loss_sum = self._loss_sum + loss.detach().float().reshape(())
            self._num_losses += 1

    def tick(self, action: Action, samples: float, *, stepped: bool = True, lr: float = 0.0) -> RoundReport | None:
        """Count a step, merge a round's result if one has arrived, and start a round if ``action`` asks for one.

        With `AveragerConfig.overlap`, the new round runs in the background. Without, this call waits until the round's
        result is merged.

        Args:
            action: Result of `plan` for this step.
            samples: Number of samples in the step on this replica.
            stepped: False if no parameter moved, because gradients were not finite. Default: True.
            lr: Learning rate of the inner optimizer, for rules that need it. Default: 0.0.

        Returns:
            The report of the round that was merged, or None if no result was merged.
        """
        now = self._now()
        self._step_s = 0.9 * self._step_s + 0.1 * (now - self._last_tick) if self._step_s else now - self._last_tick
        self._last_tick = now
        self.summary.synchronous_steps += action is Action.GRADIENTS
        with self._box.changed:
            self._count(samples, stepped)
            if stepped and action is not Action.GRADIENTS:
                self.ledger.step(samples)
        report = self._take()
        if action is Action.ROUND:
            if self.config.overlap:
                self._pack(lr)
            else:
                report = self._average_now(lr) or report
        return report

    def _average_now(self, lr: float) -> RoundReport | None:
        buckets = self._buckets
        started = self._now()
        report = self._take()
        while not self._pack(lr):
            if not self._has_news():
                return report
            self.sync_points.wait(lambda: not buckets.announced and buckets.message is None)
            report = self._take() or report
        self.sync_points.wait(lambda: buckets.message is None)
        self._reports.blocked_s = self._now() - started
        return self._take() or report

    def _has_news(self) -> bool:
        fragment = self.rule_state.next_fragment
        work = self.ledger.work[fragment]
        return work.weight(self.config.weighting) > 0.0 or self.ledger.since_round[fragment] > 0.0

    def _pack(self, lr: float = 0.0, due: bool = True) -> bool:
        """Pack the parameters as this rank's message, if that is possible now; return whether they were packed.

        ``due`` is True if the schedule asked for the message, and False if this rank packs the message because it waits
        at a sync point. ``lr`` is the learning rate of the inner optimizer.
        """
        box = self._box
        buckets = self._buckets
        ledger = self.ledger
        started = self._now()
        with box.changed:
            fragment = self.rule_state.next_fragment  # no round is under way where a message may be packed
            since = ledger.since_round[fragment]
            message = LocalMessage(ROUND, self.step, ledger.work[fragment], since, due, lr, fragment)
            opened = not due and box.sync_point is SyncPointKind.NONE
            if opened or not buckets.can_pack() or not self._has_news():
                return False
            buckets.take()
        with buckets.used(message):
            self.replica.tensors.check_unchanged()
            self.replica.pack_(buckets.sent, fragment)
            if fragment == self.replica.last_fragment:
                message.updates = self.replica.updates()
            message.state_is_finite = all_finite(self.replica.watched())
            message.loss = self._mean_loss(due)
        self._reports.merge_s += self._now() - started
        return True

    def _mean_loss(self, due: bool) -> Tensor | None:
        """Return the mean training loss since the last message that the schedule asked for; None if there was no loss.

        ``due`` is True if the schedule asked for this message, too; then the losses so far do not count in later means.
        """
        mean = torch.as_tensor(self._loss_sum / self._num_losses) if self._num_losses else None
        if due:
            self._forget_losses()
        return mean

    def _forget_losses(self) -> None:
        self._loss_sum = 0.0
        self._num_losses = 0

    def _note(self, merged: ModelRound) -> None:
        if merged.healed:
            self.on_healed()
        message = merged.message
        if not isinstance(merged, Merge) or not isinstance(message, LocalMessage) or not message.due:
            return
        # A round that a sync point asked for ends no whole period; with several fragments, nor does the first of each.
        if merged.round.past > 0 or self.replica.num_fragments == 1:
            chosen = self.rule_state.rule.chosen(merged.round)
            self.summary.settings = {"period_steps": message.steps, "step_s": self._step_s, **chosen}

    def before_sync_point(self) -> None:
        super().before_sync_point()
        self._stood_at = self._now()
        self._in_flight = isinstance(self._buckets.message, LocalMessage)

    def at_sync_point(self) -> None:
        """Merge a result that has arrived, and pack this replica's local steps since the last round as a message.

        Rounds that take place while this rank waits then include these steps.
        """
        if self._in_flight:
            self._reports.blocked_s = self._now() - self._stood_at
        if self._take() is not None:
            self._in_flight = False
        if not self.ledger.synchronous:
            self._pack(due=False)

    def after_sync_point(self, waited_s: float) -> None:
        if not self._buckets.announced:
            self.component.drop_left_over()
        super().after_sync_point(waited_s)

    def leave_sync_point(self) -> None:
        self._last_tick = self._now()  # the time at the sync point is no part of a step
        super().leave_sync_point()

    def _follow_layout(self, before: FlatLayout) -> None:
        super()._follow_layout(before)
        self.component.average.follow_layout()

    def clocks(self) -> dict[str, Any]:
        return {
            **super().clocks(),
            "losses": [float(self._loss_sum), self._num_losses],
            "trends": self.trends.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], clocks: dict[str, Any]) -> None:
        super().load_state_dict(saved, clocks)
        if "losses" in clocks:  # not in those of another strategy
            self._loss_sum, self._num_losses = clocks["losses"]
            self.trends.load_state_dict(clocks["trends"])
