"""The engine of one replica, as its training thread uses it.

`ReplicaEngine` is all of the engine that strategies of gradients and of parameter servers need: it counts steps, brings
ranks to sync points, and makes one model of all replicas there. `BackgroundAverager` adds averaging rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_async.engine.buckets import ModelRound
from lightning_async.engine.checkpoint_markers import CheckpointMarkers, ModelState, Residuals
from lightning_async.engine.consensus import AgreedModel, Consensus
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.report import Reports, RoundReport, RunSummary, Totals
from lightning_async.engine.sync_points import SyncPointParticipant, SyncPoints
from lightning_async.engine.work_ledger import Work, WorkLedger
from lightning_async.flat import FlatLayout

log = logging.getLogger(__name__)


class ReplicaEngine(SyncPointParticipant):
    """The engine of one replica: counts of steps, sync points, consensus, and marks of checkpoints.

    The training thread calls `end_step` after every optimizer step, `sync_points.rendezvous` wherever all ranks must
    hold one model, and `sync_points.resume` when training continues. The engine's thread exchanges data with the other
    ranks; `close` ends that thread. All ranks must start with equal parameters.

    Args:
        control: Control plane, which is not started yet.
        totals: Counters of exchanges that take the place of averaging rounds, for the summary. Default: none.
        agreed: State that all replicas agree on, beside the model. Default: counts of exchanges only.
        ledger: Counts of this replica's work. Default: new counts, in samples.
        residuals: Owner of compression errors, which checkpoints hold. Default: none.
        on_consensus: Function that is called with each consensus, see `Consensus`. Default: none.
    """

    def __init__(
        self,
        control: ControlPlane,
        totals: Totals | None = None,
        *,
        agreed: ModelState | None = None,
        ledger: WorkLedger | None = None,
        residuals: Residuals | None = None,
        on_consensus: Callable[[Tensor, bool], None] = lambda target, fresh: None,
    ) -> None:
        self.control = control
        self._box = control.shared_state
        self._buckets = control.buckets
        self._now = control.now
        self.replica = control.buckets.replica
        self.ledger = ledger or WorkLedger(self._now, self.replica.num_fragments)
        self.agreed = agreed or ModelState(self._buckets, self._box)
        self.marks = CheckpointMarkers(control, self.agreed, self.ledger, residuals)
        self.consensus = Consensus(control, self.ledger, on_consensus)
        self.sync_points = SyncPoints(control, self)
        self.summary = RunSummary(
            rank=control.rank, world_size=control.transfer.small.world_size, fragments=self.replica.num_fragments,
            totals=totals,
        )  # fmt: skip
        self._reports = Reports(self.summary)
        # Both are for checkpoints.
        self.gathered: Callable[[], Any] = lambda: None  # returns what is gathered for the next step
        self.alike: Callable[[], Any] = lambda: None  # returns further state that is equal on all replicas
        self.step = self.first_step = self.epoch = 0
        self._resumed = False
        self.started_at = 0.0

    def start(self) -> None:
        """Start the engine's thread and the measurement of times; all replicas must hold equal parameters."""
        self.started_at = self._now() - self.summary.elapsed_s  # the time before a checkpoint counts
        self.ledger.start()
        self.first_step = self.step
        self._begin()
        self.control.start()

    def _begin(self) -> None:
        self.ledger.synchronous = True

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the engine's thread, without waiting for other ranks. Idempotent."""
        if not self.control.close(timeout):
            log.warning("The engine's thread of rank %d did not end within %s.", self.summary.rank, timeout)

    def count_gradients(self, samples: float | None) -> None:
        """Count a step with averaged gradients; ``samples`` is this replica's number of samples in that step.

        ``samples`` is None if this replica had no gradients in the step. The caller holds `SharedState.changed`.
        """
        self.ledger.synchronous_step(None if samples is None else Work(samples, 1.0))

    def end_step(self, samples: float, stepped: bool = True) -> RoundReport | None:
        """Count a step with averaged gradients, and merge the model of a consensus if one has arrived.

        Args:
            samples: Number of samples in the step on this replica.
            stepped: False if no parameter moved, because gradients were not finite. Default: True.

        Returns:
            The report of the consensus, or None if there was none.
        """
        self.summary.synchronous_steps += 1
        with self._box.changed:
            self._count(samples, stepped)
        return self._take()

    def _count(self, samples: float, stepped: bool) -> None:
        box = self._box
        self.control.see()
        if stepped:
            self.step += 1
            self._buckets.at_target = False
            box.samples = box.samples + samples
            box.steps = float(self.step)
            self.summary.samples += samples
            self.summary.steps += 1

    def _take(self) -> RoundReport | None:
        """Merge the result that has arrived, if any, and return its report."""
        buckets = self._buckets
        with self._box.changed:
            self._count_superseded()
            arrived = buckets.arrived
            if not isinstance(arrived, ModelRound):
                return None
            buckets.take()
        started = self._now()
        with buckets.used():
            arrived.kind.merge(arrived, self.step)
            with self._box.changed:
                buckets.arrived = None
        self._reports.merge_s += self._now() - started
        if arrived.healed:
            with self._box.changed:
                self.ledger.agree()  # this replica's work is lost: its parameters were overwritten
        self._note(arrived)
        return self._reports.add(arrived, self.step, self._box.failed, self._box.samples_by_name.values())

    def _note(self, merged: ModelRound) -> None:
        """Note a round whose result was merged. This base does nothing."""

    def _count_superseded(self) -> None:
        """Add the averaging rounds that were not merged on their own to the summary.

        The caller holds `SharedState.changed`.
        """
        superseded = self._buckets.superseded
        while superseded:
            if not isinstance(exchange := superseded.pop(0), AgreedModel):
                self.summary.add_unmerged(exchange)

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

    def at_sync_point(self) -> None:
        self._take()

    def after_sync_point(self, waited_s: float) -> None:
        self.summary.idle_s += waited_s

    def leave_sync_point(self) -> None:
        """From now on, share parameters that were unfrozen at the sync point."""
        replica = self.replica
        buckets = self._buckets
        followed = False
        replica.tensors.check_unchanged(thawed_too=False)
        if not (thawed := replica.tensors.thawed()):
            return
        while not followed:
            self._take()
            with buckets.alone(self.control.see):
                if followed := buckets.arrived is None:  # no result of the old layout is left
                    before = replica.layout
                    replica.take_thawed()
                    buckets.lay_out(self.control.transfer.registered)
                    self._follow_layout(before)
                    self.control.forget()
        log.info("Rank %d: %d parameters were unfrozen and are averaged from now on.", self.summary.rank, len(thawed))

    def _follow_layout(self, before: FlatLayout) -> None:
        self.agreed.follow_layout(before)

    def state_dict(self) -> dict[str, Any]:
        """Copy the state that all replicas agree on; it is equal on all of them at a sync point."""
        return self.agreed.state_dict()

    def clocks(self) -> dict[str, Any]:
        """Return this replica's own state for a checkpoint, beside its tensors: steps, work, and what was gathered."""
        with self._box.changed:
            self._count_superseded()  # the round that a save belongs to may be one of them
            self.summary.lost_samples = self._box.lost_samples
        self.summary.elapsed_s = self.started_at and self._now() - self.started_at
        return {
            "step": self.step, "epoch": self.epoch, "summary": self.summary.state_dict(), **self.ledger.state_dict(),
            "rule_state": self.agreed.rule_state_dict(own=True), "gathered": self.gathered(), "alike": self.alike(),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, Any], clocks: dict[str, Any]) -> None:
        """Load a saved state, before `start`. Raises ValueError if it was saved with another averaging rule.

        Args:
            saved: State that is equal on all replicas, from `state_dict`.
            clocks: This replica's own state, from the method `clocks`: its steps, its work, and the fields of the
                state that differ between replicas. Such fields that are missing keep their initial values.
        """
        self.agreed.load_state_dict(saved, clocks["rule_state"])
        box = self._box
        self.step = int(clocks["step"])
        self.epoch = int(clocks["epoch"])
        self._resumed = True
        self.ledger.load_state_dict(clocks)
        self.summary.load_state_dict(clocks["summary"])
        box.steps_then = box.steps = float(self.step)
        box.mean_steps = float(clocks.get("mean_steps", self.step))
        box.samples = self.summary.samples
        box.lost_samples = self.summary.lost_samples
