"""Patches of Lightning's loops for asynchronous replicas, and the sync points at which all ranks wait.

Lightning assumes that every rank reaches validations and ends of epochs after the same number of batches. Each patch
replaces one method of one object of one Trainer, and is undone at tear-down.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lightning_async.engine.collectives import LightningCollectives, StepsInterrupted
from lightning_async.engine.shared_state import SyncPointKind, Vote
from lightning_async.trainer.configuration_checks import FitCheck
from lightning_async.trainer.data.epoch_data import (
    EmptyShards,
    EpochAssignment,
    JoinerData,
    LostRankData,
    report_failure,
)
from lightning_async.trainer.data.samplers import ConsistentMetrics, SamplerResize
from lightning_async.trainer.loops.loggers import LoggingFailover
from lightning_async.trainer.loops.lr_schedules import LearningRates, StepState
from lightning_async.trainer.loops.model_checkpoint import Saving
from lightning_async.trainer.loops.sync_points import (
    CollectiveActions,
    FitSyncPoints,
    Stopping,
    UnscheduledValidation,
    WaitForReplicas,
)
from lightning_async.trainer.loops.updates import updates_of
from lightning_async.trainer.namespace import (
    Undo,
    fabric,
    override,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)


class Validation:
    """Patches of Lightning's loops with which all ranks validate together and end each epoch together."""

    def __init__(
        self, view: StrategyView, trainer: Any, meeting: FitSyncPoints, lost_rank_data: LostRankData, saving: Saving
    ) -> None:
        self._view = view
        self._trainer = trainer
        self._meeting = meeting
        self._lost_rank_data = lost_rank_data
        self._saving = saving
        self._unscheduled = UnscheduledValidation(trainer)
        self.sync_points_epochs = True
        """Whether all ranks wait for one another at the end of each epoch."""
        self._due = self._held = 0
        """Numbers of this epoch's validations: how many this rank's interval has requested, and how many were run."""
        self._due_at_end = False
        self._missed = 0
        """Number of validations that this rank misses because its data has ended early."""
        self._validated = False
        """Whether the model is the one that was validated last."""

    def install(self) -> list[Undo]:
        fit = self._trainer.fit_loop
        if (updates := updates_of(self._trainer)) is not None:
            updates.rates.epochs_meet = lambda: self._meets_at_end
        self._saving.validates_at_end = lambda: self._is_due_at_end
        return [
            override(fit.epoch_loop, "on_run_start", self._begin_epoch),
            override(fit.epoch_loop, "_should_check_val_fx", self._should_validate),
            override(fit.epoch_loop.val_loop, "run", self._validate),
            override(fit, "on_advance_end", self._end_epoch),
            *ShortEpochs(self._trainer, self._end_early).install(),
        ]

    @property
    def _meets_at_end(self) -> bool:
        return self.sync_points_epochs and self._view.sync_points is not None

    @property
    def _is_due_at_end(self) -> bool:
        """Whether this rank asks for a validation at the end of the epoch.

        Another rank may have reached a validation that this rank has missed, and this rank has taken part in it.
        """
        return self._due_at_end or (self._missed > 0 and self._due + self._missed > self._held)

    def start_over(self) -> None:
        """Reset all counters, because training begins again within this fit."""
        self._due = self._held = self._missed = 0
        self._due_at_end = self._validated = False

    def model_changed(self) -> None:
        """Record that the present model has not been validated."""
        self._validated = False

    def _begin_epoch(self, original: Any, data_fetcher: Any) -> None:
        """Begin an epoch. If the fit resumes after an epoch's last batch, record the validation that is due at its end.

        The validation runs when all ranks have arrived at the epoch's end.
        """
        original(data_fetcher)
        epoch = self._trainer.fit_loop.epoch_loop
        goes_on = epoch.batch_progress.current.ready > 0 and not epoch.restarting
        if goes_on and self._meets_at_end and epoch._is_training_done:
            # This call only notes the validation, which runs once all ranks are there.
            epoch._should_check_val_fx(data_fetcher)

    def _should_validate(self, original: Any, data_fetcher: Any) -> bool:
        """Return whether to validate now, because this rank's interval or another rank asks for it.

        A validation that is due with the last batch of an epoch runs when all ranks have arrived at the epoch's end
        (`_end_epoch`), with the model of the whole epoch. At any other time, the first rank whose interval is complete
        makes all ranks validate. A rank that completes the same interval later does not validate again, unless the
        interval is a time.
        """
        sync_points = self._view.sync_points
        epoch = self._trainer.fit_loop.epoch_loop
        if sync_points is None or epoch.restarting:
            return original(data_fetcher)
        due = original(data_fetcher)
        stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        if due and self.sync_points_epochs and (epoch._is_training_done or stops):
            self._due_at_end = True
            return False
        # By time, each rank's clock runs by itself, and requests cannot be counted against each other.
        if due and not isinstance(validation_interval(self._trainer), timedelta):
            self._due += 1
            due = self._due > self._held
        asked = Vote.VALIDATE in sync_points.agreed and self._view.step_runner.between_windows
        return due or (asked and not self._comes() and self._trainer.enable_validation)

    def _comes(self) -> bool:
        """Return whether ranks step together and this rank's validation interval ends within this epoch.

        If so, this rank need not answer another rank's request for a validation: it validates with its own interval.
        """
        trainer = self._trainer
        fit = self._trainer.fit_loop
        every = trainer.val_check_batch
        count = fit.epoch_loop.batch_progress
        by_number = not isinstance(validation_interval(trainer), timedelta) and not math.isinf(every)
        if not self._view.in_step or not by_number or self._due != self._held:
            return False
        clock = count.total if trainer.check_val_every_n_epoch is None else count.current
        return count.current.ready + every - clock.ready % every <= fit.max_batches

    def _end_early(self, missed: int) -> None:
        """Record or run the ``missed`` validations, because this rank's epoch ends before its announced length.

        They are recorded if a sync point ends the epoch: the ranks validate there. Otherwise one validation runs now.
        """
        if self._meets_at_end:
            self._missed += missed
        else:
            self._unscheduled.run_at_end(missed)

    def _validate(self, original: Any) -> Any:
        # The sanity check runs before training, and before there are sync points.
        is_training = self._view.sync_points is not None
        if is_training:
            self._meeting.rendezvous(SyncPointKind.VALIDATE)
            self._meeting.begin_validation()
            self._held += 1
        try:
            output = original()
            self._validated = is_training
            return output
        except StepsInterrupted:
            self._meeting.leave(self._view.sync_points)

    def _end_epoch(self, original: Any) -> None:
        self._view.begin_again()
        world = self._view.world
        updates = updates_of(self._trainer)
        follow_rates = None
        if self._meets_at_end and world is not None:
            # Redistribution comes first: a rank that joins meanwhile finds all others here.
            self._meet()
            while self._lost_rank_data.rest():
                self._meet()
            # The averager may have begun again meanwhile, with another world.
            world = self._view.world or world
            if updates is not None:
                follow_rates = updates.rates.end_epoch(world)
            mine = [float(self._is_due_at_end), float(self._is_last())]
            due, last = world.reduce(torch.tensor(mine), "max").tolist()
            if due > 0.0 and not self._validated:
                self._unscheduled.run_at_end()
            # Another rank has taken its last step, and no rank goes on without that one.
            if last > mine[1]:
                self._trainer.should_stop = True
            self._due_at_end = False
            self._due = self._held = self._missed = 0
            self._saving.catch_up()
        original()
        if follow_rates is not None:
            follow_rates()
        self._view.end_epoch()
        self._lost_rank_data.epoch.end()

    def _meet(self) -> None:
        with self._unscheduled.at_last_step():
            self._meeting.rendezvous(SyncPointKind.EPOCH_END, self._trainer.current_epoch)

    def _is_last(self) -> bool:
        """Return whether this is this rank's last epoch.

        If the strategy cannot lose ranks, all ranks have the same last epoch, and the result is always False.
        """
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed + 1
        steps = fit.epoch_loop.global_step
        return self._view.shrinks and (epochs == fit.max_epochs or -1 < fit.epoch_loop.max_steps <= steps)


class ShortEpochs:
    """Patches for an epoch whose data is shorter than its loader's length, and ends with a ``StopIteration``.

    Lightning then skips all that it does at an epoch's last batch, because it did not know which batch was the last.
    These patches step the schedulers with interval "epoch". They also count the validations that were due after the
    missing batches, and call ``end_early`` with their number. Without ``end_early``, they validate once if that number
    is positive.
    """

    def __init__(self, trainer: Any, end_early: Callable[[int], None] | None = None) -> None:
        self._trainer = trainer
        self._end_early = end_early or UnscheduledValidation(trainer).run_at_end
        self._warned = False

    def install(self) -> list[Undo]:
        return [override(self._trainer.fit_loop.epoch_loop, "advance", self._advance)]

    def _advance(self, original: Any, data_fetcher: Any) -> None:
        try:
            original(data_fetcher)
        except StopIteration as ended:
            fit = self._trainer.fit_loop
            has_data = not math.isinf(fit.max_batches) or self._completed > 0  # see `EmptyShards`
            # If `on_train_batch_start` returns -1, the user ends the epoch, and Lightning handles that as a last batch.
            if has_data and not fit.epoch_loop._num_ready_batches_reached():
                self._end()
            # An exception from a loader's worker is part of a reference cycle, which would keep the workers alive.
            ended.__traceback__ = None
            raise StopIteration from None
        except Exception as exception:
            report_failure(self._trainer, exception)
            raise

    def _end(self) -> None:
        trainer = self._trainer
        epoch = trainer.fit_loop.epoch_loop
        self._warn()
        missed = self._missed_validations()
        # Schedulers follow an optimizer's step. Without a batch there was none.
        if self._completed > 0:
            epoch.batch_progress.is_last_batch = True
            if trainer.lr_scheduler_configs:
                epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._end_early(missed)

    @property
    def _completed(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.completed

    def _missed_validations(self) -> int:
        """Return how many validations would have been due at the batches that this rank's epoch lacks."""
        trainer = self._trainer
        fit = trainer.fit_loop
        every = trainer.val_check_batch
        by_time = isinstance(validation_interval(trainer), timedelta)
        # Without `check_val_every_n_epoch` the count of batches continues in the next epoch, so none is missed.
        if by_time or trainer.check_val_every_n_epoch is None or not fit.epoch_loop._should_check_val_epoch():
            return 0
        # The validation is due at the end of the epoch.
        if math.isinf(every):
            return 1
        return 0 if math.isinf(fit.max_batches) else int(fit.max_batches // every - self._completed // every)

    def _warn(self) -> None:
        trainer = self._trainer
        fit = self._trainer.fit_loop
        sized_len = fabric("utilities.data").sized_len
        promised = any(sized_len(loader) is not None for loader in fit._combined_loader.flattened)
        # A stream without a length may end before `limit_train_batches`.
        if self._warned or not promised:
            return
        self._warned = True
        log.warning(
            "Rank %d: epoch %d has ended after %d of %d batches, which is the length of the train dataloader (or "
            "`limit_train_batches`): its dataset or sampler yields fewer samples than its length says, or has raised "
            "StopIteration. Validation and schedulers follow as at the end of any epoch; gradients that "
            "`accumulate_grad_batches` has not stepped with by then are dropped. Correct the length, or what has "
            "raised. Later epochs are not named.",
            trainer.global_rank, trainer.current_epoch, self._completed, fit.max_batches,
        )  # fmt: skip


class LoopPatches:
    """All patches on one Trainer: on its loops, its signal connector, and some of its callbacks.

    Each part is an object whose ``install`` makes patches and returns functions that undo them. `install` calls
    ``install`` of all parts, and `remove` undoes the patches in reverse order.
    """

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        stopping = Stopping(view, trainer)
        self.sync_points = FitSyncPoints(view, trainer, stopping)
        self.rates = LearningRates(view, trainer)
        epoch = EpochAssignment(trainer)
        self._lost_rank_data = LostRankData(epoch, self.rates)
        self.joiner_data = JoinerData(epoch, self.rates)
        self._saving = saving = Saving(view, trainer)
        self._validation = Validation(view, trainer, self.sync_points, self._lost_rank_data, saving)
        self.sync_points.on_met = StepState(view, trainer, self.rates).make_equal
        self.sync_points.on_model_changed += [
            self._validation.model_changed,
            saving.model_changed,
            view.on_model_changed,
        ]
        collective_actions = CollectiveActions(view, trainer, self.sync_points, saving, view.host)
        shortage = WaitForReplicas(view, collective_actions, stopping)
        self._after_batch = (stopping.after_batch, collective_actions.after_batch, shortage.after_batch)
        self._logging_failover = LoggingFailover(trainer)
        self._parts = (
            stopping, collective_actions, self.rates, self._validation, saving,
            EmptyShards(trainer), SamplerResize(view, trainer), self._lost_rank_data, self.joiner_data,
            ConsistentMetrics(view, trainer), self._logging_failover,
        )  # fmt: skip
        self._undo: list[Undo] = []

    def install(self) -> None:
        self._undo.append(override(self._trainer.fit_loop.epoch_loop, "on_advance_end", self._end_batch))
        for part in self._parts:
            self._undo += part.install()
        self._undo.append(override(self._trainer.fit_loop, "on_run_end", self._end_training))
        self._undo.append(lambda: vars(self._trainer.strategy).pop("averaged_models", None))

    def remove(self) -> None:
        take_back(self._undo)

    def begin(self, world: LightningCollectives) -> None:
        """Run `FitCheck` on all ranks, then prepare the patches that need the ranks' collectives ``world``.

        All ranks call this together, when training begins or begins again.
        """
        self.rates.begin(world)
        self._validation.sync_points_epochs = FitCheck(self._trainer, world, self.rates.share()).run()
        self._logging_failover.begin(world)
        self.sync_points.begin(world)

    def for_joining_ranks(self) -> dict[str, Any]:
        """Return the values about this fit that a joining rank needs for `go_on`."""
        return {
            "sync_points_epochs": self._validation.sync_points_epochs,
            "epoch": self.joiner_data.told(),
            "succession": self._logging_failover.describe(),
        }

    def go_on(
        self, world: LightningCollectives, name: str, places: list[list[Any]], told: dict[str, Any] | None = None
    ) -> None:
        """Continue with the collectives of a larger set of ranks, after a rank has joined.

        Args:
            world: Collectives of all ranks, including the one that has joined.
            name: Stable id of this rank.
            places: Each rank's situation, from which the rest of the epoch is divided; see `JoinerData.place`.
            told: On the joining rank, the result of `for_joining_ranks` on a live rank. On live ranks, None.
        """
        if told is not None:
            self._validation.sync_points_epochs = bool(told["sync_points_epochs"])
            self._logging_failover.take(told["succession"])
            self.rates.number_schedulers()
        self.sync_points.begin(world)
        self.joiner_data.deal(name, places, None if told is None else told["epoch"])

    def after_batch_start(self) -> None:
        """Announce this rank's position to the other ranks as a batch begins, unless gradients are accumulating."""
        # Within an accumulation, the batch's gradients are in no step yet, so the position stays.
        if self._view.shrinks and not self._trainer.fit_loop.epoch_loop._should_accumulate():
            self.tell_place()

    def tell_place(self) -> None:
        """Record, for the other ranks, that this rank has used all batches of its part up to the current one.

        The next header carries this position. Does nothing if the strategy cannot lose ranks.
        """
        if self._view.shrinks and self._view.sync_points is not None:
            self._lost_rank_data.tell_place(self._view.sync_points)

    def start_over(self) -> None:
        """Reset the state of the patches, because training begins again within this fit."""
        self._validation.start_over()
        self._lost_rank_data.start_over()
        self.rates.start_over()

    def begin_batch(self, batch_idx: int) -> None:
        """Prepare logging and saving for a batch. The strategy calls this before everything else in the batch.

        If this rank has become rank 0, it takes over logging. Before the first batch, record which saves are already
        made.
        """
        self._logging_failover.begin_batch(batch_idx)
        self._saving.begin_batch()

    def _end_batch(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        for follow in self._after_batch:
            follow()

    # All ranks meet once more, so that they end with one model.
    def _end_training(self, original: Any) -> None:
        self.sync_points.rendezvous(SyncPointKind.TRAIN_END)
        self._saving.catch_up()
        self._view.summarise()
        original()
