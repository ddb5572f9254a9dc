"""The training thread's side of averaging: counting work, packing messages, and merging results.

Strategies use `BackgroundAverager`. `Merger` carries out the last step of a round: it moves the parameters by the
round's result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.schedules import Action, ReplicaClock, Schedule
from lightning_async.engine.averaging.report import Reports, RoundReport, RunSummary
from lightning_async.engine.averaging.rounds import ROUND, AveragingComponent, CheckpointMarkers, LocalMessage, Merge
from lightning_async.engine.averaging.rule_state import AveragerConfig, RuleState, Work, WorkLedger
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.fingerprint import all_finite
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPointParticipant, SyncPoints

log = logging.getLogger(__name__)


class BackgroundAverager(SyncPointParticipant):
    """An averager of one replica with the other replicas, in the background of training.

    The training thread calls `plan` before every optimizer step, and `tick` after it (or both once per batch, where
    several optimizers step). It calls `sync_points.rendezvous` wherever all ranks must hold one model, and
    `sync_points.resume` when training continues. The engine's thread carries out the rounds; `close` ends that thread.
    All ranks must start with equal parameters. Raises ValueError if ``rule`` does not work with the options in
    ``config``.
    """

    def __init__(
        self, control: ControlPlane, rule: AveragingRule, schedule: Schedule, config: AveragerConfig | None = None
    ) -> None:
        self.config = config or AveragerConfig()
        self.config.check_rule(type(self).__name__, rule)
        self.control = control
        self.schedule = schedule
        self._box = control.shared_state
        self._buckets = control.buckets
        self._now = control.now
        self.replica = control.buckets.replica
        self.ledger = WorkLedger(self._now, self.replica.num_fragments)
        self.agreed = RuleState(rule, self._buckets, self._box)
        self.component = AveragingComponent(control, self.agreed, self.ledger, self.config)
        control.register(self.component)
        self.marks = CheckpointMarkers(control, self.agreed, self.ledger, self.component.average)
        self.sync_points = SyncPoints(control, self)
        self.summary = RunSummary(
            rank=control.rank, world_size=control.transfer.small.world_size, fragments=self.replica.num_fragments
        )
        self._reports = Reports(self.summary)
        exact = self.config.compression == "none" or rule.keeps_residual
        self._merger = Merger(self._buckets, self.agreed, self.component, exact)
        self.meet: Callable[[SyncPointKind], Arrival] = self.sync_points.rendezvous
        """A function that waits at a sync point; `plan` calls it before synchronous steps begin."""
        self.on_healed: Callable[[], None] = lambda: None
        """A function that is called after this replica, which was not finite, has taken over the others' model."""
        # Both are for checkpoints.
        self.gathered: Callable[[], Any] = lambda: None  # returns what is gathered for the next step
        self.alike: Callable[[], Any] = lambda: None  # returns further state that is equal on all replicas
        self.step = self.first_step = self.epoch = 0
        self._resumed = self._in_flight = False
        self._loss_sum: Tensor | float = 0.0  # sum of the losses of local steps since the last message that was due
        self._num_losses = 0
        self._step_s = self.started_at = self._last_tick = self._stood_at = 0.0

    def start(self) -> None:
        """Start the engine's thread and the measurement of times; all replicas must hold equal parameters."""
        ledger = self.ledger
        self._last_tick = self._now()
        self.started_at = self._last_tick - self.summary.elapsed_s  # the time before a checkpoint counts
        ledger.start()
        self.first_step = self.step
        if not self.step and not self._resumed:  # asked here, as a rank without data takes no step
            ledger.fresh = ledger.synchronous = self._ask(ReplicaClock(0, 0, 0, 0.0)) is Action.GRADIENTS
        self.control.start()

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the engine's thread, without waiting for other ranks. Idempotent."""
        if not self.control.close(timeout):
            log.warning("The engine's thread of rank %d did not end within %s.", self.summary.rank, timeout)

    def plan(self) -> Action:
        """Return the action that the schedule chooses for the next step, and prepare the model for that step.

        Before synchronous steps begin (``Action.GRADIENTS``), wait at a sync point, so that all replicas start these
        steps with one model. If another rank asks for a validation or a stop during the wait, return ``Action.LOCAL``
        instead. Before a local step, restore this replica's own model if the module shows that of a sync point.
        """
        box = self._box
        ledger = self.ledger
        with box.changed:
            self.control.see()
            committed = ledger.last_round
            message = self._buckets.message
            since = list(ledger.since_round)
            spread = ledger.spread.relative
            loss_variance = ledger.loss_variance.relative
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
        if action is Action.GRADIENTS and apart and self.meet(SyncPointKind.SYNCHRONISE) is not Arrival.OPEN:
            action = Action.LOCAL  # others ask for a validation or a stop, which comes first
        synchronous = action is Action.GRADIENTS
        if synchronous:
            self._merger.go_on_from(None)
        else:
            if ledger.synchronous:
                self._leave_synchronous()
            self._merger.restore_local()  # a sync point that did not open may still have shown its model
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

    def synchronous_step(self, samples: float | None) -> None:
        """Count a step with averaged gradients; ``samples`` is this replica's number of samples in that step.

        ``samples`` is None if this replica had no gradients in the step. An averaging message that a header has already
        announced is dropped. The caller holds `SharedState.changed`.
        """
        self.ledger.synchronous_step(None if samples is None else Work(samples, 1.0))
        message = self._buckets.message
        if isinstance(message, LocalMessage) and message.announced:
            self.component.average.abandon()  # it was made with the old rule state; the work goes into another message

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
        box = self._box
        now = self._now()
        self._step_s = 0.9 * self._step_s + 0.1 * (now - self._last_tick) if self._step_s else now - self._last_tick
        self._last_tick = now
        self.summary.synchronous_steps += action is Action.GRADIENTS
        with box.changed:
            self.control.see()
            if stepped:
                self.step += 1
                self._buckets.at_target = False
                box.samples = box.samples + samples
                box.steps = float(self.step)
                self.summary.samples += samples
                self.summary.steps += 1
                if action is not Action.GRADIENTS:
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
        fragment = self.agreed.next_fragment
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
            fragment = self.agreed.next_fragment  # no round is under way where a message may be packed
            since = ledger.since_round[fragment]
            message = LocalMessage(ROUND, self.step, ledger.work[fragment], since, due, lr, fragment)
            opened = not due and box.sync_point is SyncPointKind.NONE
            if opened or self.component.showing or not buckets.can_pack() or not self._has_news():
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

    def _take(self) -> RoundReport | None:
        buckets = self._buckets
        with self._box.changed:
            self._count_unmerged()
            arrived = buckets.arrived
            if not isinstance(arrived, Merge):
                return None
            buckets.take()
        started = self._now()
        with buckets.used():
            self._merger.merge(arrived, self.step)
            with self._box.changed:
                buckets.arrived = None
        self._reports.merge_s += self._now() - started
        if arrived.healed:
            with self._box.changed:
                self.ledger.agree()  # this replica's work is lost: its parameters were overwritten
            self.on_healed()
        message = arrived.message
        # A round that a sync point asked for ends no whole period; with several fragments, nor does the first of each.
        whole = arrived.round.past > 0 or self.replica.num_fragments == 1
        if isinstance(message, LocalMessage) and message.due and whole and not arrived.is_consensus:
            chosen = self.agreed.rule.chosen(arrived.round)
            self.summary.settings = {"period_steps": message.steps, "step_s": self._step_s, **chosen}
        return self._reports.add(arrived, self.step, self._box.failed, self._box.samples_by_name.values())

    def _count_unmerged(self) -> None:
        """Add the rounds that were not merged on their own (`UnmergedRound`) to the summary.

        The caller holds `SharedState.changed`.
        """
        unmerged = self.component.average.unmerged
        while unmerged:
            self.summary.add_unmerged(unmerged.pop(0))

    def global_step(self) -> int:
        """Return an estimate of the number of optimizer steps per replica.

        The estimate is the mean over all replicas when headers were last exchanged, plus this replica's steps since
        then. If this replica was ahead of the mean, its later steps count less, in proportion.
        """
        box = self._box
        pace = min(1.0, box.mean_steps / box.steps_then) if box.steps_then else 1.0
        return int(box.mean_steps + pace * (self.step - box.steps_then))

    def before_sync_point(self) -> None:
        self.replica.tensors.check_unchanged()
        self._buckets.to_engine.give()
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
        self.summary.idle_s += waited_s

    def before_batch(self) -> None:
        self._merger.restore_local()

    def leave_sync_point(self) -> None:
        """Start the time of the next step; from now on, average parameters that were unfrozen at the sync point."""
        self._last_tick = self._now()  # the time at the sync point is no part of a step
        replica = self.replica
        buckets = self._buckets
        followed = False
        replica.tensors.check_unchanged(thawed_too=False)
        if not (thawed := replica.tensors.thawed()):
            return
        self._merger.restore_local()  # the replica's own model is a bucket of the old layout
        while not followed:
            self._take()
            with buckets.alone(self.control.see):
                if followed := buckets.arrived is None:  # no result of the old layout is left
                    before = replica.layout
                    replica.take_thawed()
                    buckets.lay_out(self.control.transfer.registered)
                    self.agreed.follow_layout(before)
                    self.component.average.follow_layout()
                    self.control.forget()
        log.info("Rank %d: %d parameters were unfrozen and are averaged from now on.", self.summary.rank, len(thawed))

    def state_dict(self) -> dict[str, Any]:
        """Copy the rule's state and the counts of rounds, which are equal on all replicas at a sync point."""
        return self.agreed.state_dict()

    def clocks(self) -> dict[str, Any]:
        with self._box.changed:
            self._count_unmerged()  # the round that a save belongs to may be one of them
            self.summary.lost_samples = self._box.lost_samples
        self.summary.elapsed_s = self.started_at and self._now() - self.started_at
        return {
            "step": self.step, "epoch": self.epoch, "summary": self.summary.state_dict(), **self.ledger.state_dict(),
            "rule_state": self.agreed.rule_state_dict(own=True), "local": self._local_state(),
            "gathered": self.gathered(), "alike": self.alike(), "losses": [float(self._loss_sum), self._num_losses],
        }  # fmt: skip

    def _local_state(self) -> dict[str, Any] | None:
        """Return this replica's own model and its work while the module shows the model of a sync point; else None."""
        if (model := self._merger.local) is None:
            return None
        return {"model": model, "work": self.ledger.work_dict()}

    def _load_local(self, saved: dict[str, Any]) -> None:
        model = saved["model"].to(self.replica.device)
        if model.shape != self._buckets.received.shape:
            log.warning(
                "Rank %d goes on from the model that the checkpoint shows, not from its own, because other parameters "
                "or buffers are averaged now.", self.summary.rank,
            )  # fmt: skip
            return
        self._merger.go_on_from(model)
        self.ledger.load_work(saved["work"])

    def load_state_dict(self, saved: dict[str, Any], clocks: dict[str, Any]) -> None:
        """Load a saved state, before `start`. Raises ValueError if it was saved with another averaging rule.

        Args:
            saved: State that is equal on all replicas, from `state_dict`.
            clocks: This replica's own state, from the method `clocks`: its steps, its work, and the fields of the
                rule's state that differ between replicas. Fields that are missing keep their initial values.
        """
        self.agreed.load_state_dict(saved, clocks["rule_state"])
        box = self._box
        self.step = int(clocks["step"])
        self.epoch = int(clocks["epoch"])
        self._resumed = True
        self.ledger.load_state_dict(clocks)
        self._loss_sum, self._num_losses = clocks.get("losses", (0.0, 0))
        if (local := clocks.get("local")) is not None:
            self._load_local(local)
        self.summary.load_state_dict(clocks["summary"])
        box.steps_then = box.steps = float(self.step)
        box.mean_steps = float(clocks.get("mean_steps", self.step))
        box.samples = self.summary.samples
        box.lost_samples = self.summary.lost_samples


class Merger:
    """A merger of committed rounds into one replica's parameters, on the training thread.

    ``exact`` is False if messages are compressed and the rule keeps no residual. Then a message's compression error
    remains in the parameters, so a replica does not copy a round's target over them, even if it has taken no step.
    """

    def __init__(self, buckets: Buckets, agreed: RuleState, component: AveragingComponent, exact: bool = True) -> None:
        self._buckets = buckets
        self._agreed = agreed
        self._component = component
        self._replica = buckets.replica
        self._exact = exact
        self._local: Tensor | None = None
        """The replica's own parameters, in a bucket, while the module shows the model of a sync point; else None."""

    def merge(self, arrived: Merge, step: int) -> None:
        replica = self._replica
        rule = self._agreed.rule
        message = arrived.message
        consensus = arrived.is_consensus
        self._buckets.to_training.take(*(bucket for bucket in (arrived.target, arrived.base) if bucket is not None))
        if message is not None:  # the snapshot holds one fragment: it tells nothing of others
            stood_still = message.step == step and self._exact and len(arrived.fragments) == 1
        else:
            stood_still = self._buckets.at_target
        base = None if consensus else arrived.base
        takes_all = base is None
        rest = message if isinstance(message, LocalMessage) and message.fragment == replica.last_fragment else None
        # Buffers change without a step, too (accumulated batches), so their own counters tell how far they have moved.
        if rest is not None and base is not None:
            replica.merge_late_(arrived.target, base, rest.updates, arrived.plan.source is not None)
        target = arrived.target
        if stood_still:
            base = None
        if consensus and arrived.plan.fresh:
            self._local = None  # after synchronous steps all replicas are one
        elif consensus and self._local is None and self._component.keeps_own_model():
            self._local = torch.empty_like(target)
            replica.pack_(self._local)
        if base is not None and rule.mixes and (message is None or message.step != step):
            target = self._mix(arrived, base)
            base = None
        replica.merge_(
            target,
            base,
            with_state=consensus or (message is not None and arrived.base is None),
            buffers_too=arrived.plan.source is not None and (consensus or rest is not None),
            still=stood_still and not takes_all,
            of_round=not consensus,
            fragments=None if takes_all else arrived.fragments,
        )
        is_whole = replica.num_fragments == 1 or self._buckets.at_target
        self._buckets.at_target = takes_all or (stood_still and is_whole)
        if consensus:
            replica.tensors.set_apart(arrived.apart)
            self._component.showing = self._local is not None

    def _mix(self, arrived: Merge, base: Tensor) -> Tensor:
        """Return a bucket with the target, plus the part of this replica's progress since ``base`` that the rule keeps.

        This may also change those fields of the rule's state that differ between replicas.
        """
        replica = self._replica
        mixed = arrived.target.clone()
        replica.pack_parameters_(mixed, arrived.fragments)
        for fragment in arrived.fragments:
            live, snapshot, target = (replica.of_rule(each, fragment) for each in (mixed, base, arrived.target))
            self._agreed.mix_(live, snapshot, target, arrived.round._replace(fragment=fragment))
        return mixed

    def restore_local(self) -> bool:
        """Restore this replica's own parameters if the module shows a sync point's model; return whether it did so."""
        if self._local is None:
            return False
        self._replica.merge_(self._local, None, with_state=True)
        self.go_on_from(None)
        self._buckets.at_target = False
        return True

    @property
    def local(self) -> Tensor | None:
        """This replica's own model in a bucket, while the module shows the model of a sync point; else None."""
        return self._local

    def go_on_from(self, local: Tensor | None) -> None:
        """Set ``local``, a bucket with this replica's own model, which `restore_local` copies into the module.

        With None, `restore_local` does nothing, and training continues with the model that the module holds.
        """
        self._local = local
        self._component.showing = local is not None
