"""What changes in Lightning's loops so that replicas may be asynchronous, and where all ranks meet.

Lightning assumes that every rank comes to validations and ends of epochs after the same number of batches. Each patch
replaces one method of one object of one Trainer, and is taken back at tear-down.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.shared_state import SyncPointKind, Vote
from lightning_async.trainer.configuration_checks import FitCheck
from lightning_async.trainer.data.epoch_data import EmptyShards, JoinerData, LostRankData
from lightning_async.trainer.data.samplers import ConsistentMetrics, SamplerResize, ValidationTakeover
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
    sync_metrics_through,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)


class Validation:
    """Patches of when to validate, of the validation itself, and of the end of an epoch."""

    def __init__(self, view: StrategyView, trainer: Any, meeting: FitSyncPoints, lost_rank_data: LostRankData) -> None:
        self._view = view
        self._trainer = trainer
        self._meeting = meeting
        self._lost_rank_data = lost_rank_data
        self._unscheduled = UnscheduledValidation(trainer)
        self.sync_points_epochs = True
        """Whether all ranks meet at the end of each epoch."""
        self._due = self._held = 0
        """How many validations of this epoch this rank's clock has asked for, and how many all have run."""
        self._due_at_end = False
        self._missed = 0
        """Number of validations that this rank's data has ended before, ahead of its epoch."""
        self._validated = False
        """The model has not changed since it was validated."""

    def install(self) -> list[Undo]:
        fit = self._trainer.fit_loop
        if (updates := updates_of(self._trainer)) is not None:
            updates.rates.epochs_meet = lambda: self._meets_at_end
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

    def start_over(self) -> None:
        """Begin training anew within this fit."""
        self._due = self._held = self._missed = 0
        self._due_at_end = self._validated = False

    def model_changed(self) -> None:
        """Note that the model is not the one that was validated."""
        self._validated = False

    def _begin_epoch(self, original: Any, data_fetcher: Any) -> None:
        """Run the validation that is due first, in a fit that resumes after the last batch of an epoch."""
        original(data_fetcher)
        epoch = self._trainer.fit_loop.epoch_loop
        goes_on = epoch.batch_progress.current.ready > 0 and not epoch.restarting
        if goes_on and self._meets_at_end and epoch._is_training_done:
            epoch._should_check_val_fx(data_fetcher)  # which puts it off until all ranks are there

    def _should_validate(self, original: Any, data_fetcher: Any) -> bool:
        """Return whether to validate: on this rank's clock, or because another rank asks.

        A validation that is due with the last batch of an epoch waits until all ranks are there (`_end_epoch`), so that
        it sees the model of the whole epoch. Else the rank that comes first asks all, and what the others' clocks say
        about the same validation, sooner or later, is done with it.
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
        if due and not isinstance(validation_interval(self._trainer), timedelta):
            self._due += 1
            due = self._due > self._held
        asked = Vote.VALIDATE in sync_points.agreed and self._view.step_runner.between_windows
        return due or (asked and not self._comes() and self._trainer.enable_validation)

    def _comes(self) -> bool:
        """Return whether, where ranks step together, this rank's clock will ask for that validation, too."""
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
        """Count the validations that this rank's clock misses; or validate now, if no sync point ends the epoch."""
        if self._meets_at_end:
            self._missed += missed
        else:
            self._unscheduled.run_at_end(missed)

    def _validate(self, original: Any) -> Any:
        if self._view.sync_points is None:  # the sanity check, before training
            return original()
        self._meeting.rendezvous(SyncPointKind.VALIDATE)
        self._held += 1
        output = original()
        self._validated = True
        return output

    def _end_epoch(self, original: Any) -> None:
        self._view.begin_again()
        world = self._view.world
        updates = updates_of(self._trainer)
        follow_rates = None
        if self._meets_at_end and world is not None:
            self._meet()
            while self._lost_rank_data.rest():  # first: a rank that joins within the rest finds all others here
                self._meet()
            world = self._view.world or world  # another one, where averaging has begun anew meanwhile
            if updates is not None:
                follow_rates = updates.rates.end_epoch(world)
            # Others may have come to what this rank has missed: it has taken part in that.
            missed = self._missed > 0 and self._due + self._missed > self._held
            mine = [float(self._due_at_end or missed), float(self._is_last())]
            due, last = world.reduce(torch.tensor(mine), "max").tolist()
            if due > 0.0 and not self._validated:
                self._unscheduled.run_at_end()
            if last > mine[1]:  # another rank's, which has taken more steps: no rank goes on without it
                self._trainer.should_stop = True
            self._due_at_end = False
            self._due = self._held = self._missed = 0
        original()
        if follow_rates is not None:
            follow_rates()
        self._view.end_epoch()

    def _meet(self) -> None:
        with self._unscheduled.at_last_step():
            self._meeting.rendezvous(SyncPointKind.EPOCH_END, self._trainer.current_epoch)

    def _is_last(self) -> bool:
        """Return whether this rank reaches its limits with this epoch, where ranks do not reach them together."""
        fit = self._trainer.fit_loop
        epochs = fit.epoch_progress.current.processed + 1
        steps = fit.epoch_loop.global_step
        return self._view.shrinks and (epochs == fit.max_epochs or -1 < fit.epoch_loop.max_steps <= steps)


class ShortEpochs:
    """Patches of how an epoch ends whose data is shorter than the loader's length: at the ``StopIteration`` of a fetch.

    Lightning leaves out what belongs to the last batch, as no batch was known to be that one. Here schedulers that
    step with an epoch do so, and the validations run that the missing batches would have brought.
    ``end_early`` is called with the number of missed validations; by default, it validates once if that is positive.
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
            # `on_train_batch_start` that returns -1 has ended the epoch as a last batch does: that is asked for.
            if has_data and not fit.epoch_loop._num_ready_batches_reached():
                self._end()
            # One that has come from a loader's worker is a part of a cycle that holds the workers.
            ended.__traceback__ = None
            raise StopIteration from None

    def _end(self) -> None:
        trainer = self._trainer
        epoch = trainer.fit_loop.epoch_loop
        self._warn()
        missed = self._missed_validations()
        if self._completed > 0:  # else no optimizer has stepped, which schedulers follow
            epoch.batch_progress.is_last_batch = True
            if trainer.lr_scheduler_configs:
                epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._end_early(missed)

    @property
    def _completed(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.completed

    def _missed_validations(self) -> int:
        """Return how many validations are due with batches that are missing in this epoch."""
        trainer = self._trainer
        fit = trainer.fit_loop
        every = trainer.val_check_batch
        by_time = isinstance(validation_interval(trainer), timedelta)
        # Without `check_val_every_n_epoch` batches count on in the next epoch: none is missed.
        if by_time or trainer.check_val_every_n_epoch is None or not fit.epoch_loop._should_check_val_epoch():
            return 0
        if math.isinf(every):  # it is due at the end of the epoch
            return 1
        return 0 if math.isinf(fit.max_batches) else int(fit.max_batches // every - self._completed // every)

    def _warn(self) -> None:
        trainer = self._trainer
        fit = self._trainer.fit_loop
        sized_len = fabric("utilities.data").sized_len
        promised = any(sized_len(loader) is not None for loader in fit._combined_loader.flattened)
        if self._warned or not promised:  # a stream without a length may end before `limit_train_batches`
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
    """The patches on one Trainer: on its loops, its signal connector, and some of its callbacks."""

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        stopping = Stopping(view, trainer)
        self.sync_points = FitSyncPoints(view, trainer, stopping)
        self.rates = LearningRates(view, trainer)
        self._lost_rank_data = LostRankData(view, trainer, self.rates)
        self.joiner_data = JoinerData(view, trainer, self._lost_rank_data.epoch, self.rates)
        self._validation = Validation(view, trainer, self.sync_points, self._lost_rank_data)
        self._saving = saving = Saving(view, trainer)
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
            stopping, collective_actions, self._validation, saving, self.rates,
            EmptyShards(view, trainer),
            SamplerResize(view, trainer), self._lost_rank_data, self.joiner_data,
            ValidationTakeover(view, trainer), ConsistentMetrics(view, trainer), self._logging_failover,
        )  # fmt: skip
        self._undo: list[Undo] = []

    def install(self) -> None:
        self._undo.append(override(self._trainer.fit_loop.epoch_loop, "on_advance_end", self._end_batch))
        for part in self._parts:
            self._undo += part.install()
        self._undo.append(override(self._trainer.fit_loop, "on_run_end", self._end_training))
        self._undo.append(lambda: vars(self._trainer.strategy).pop("averaged_models", None))
        self._undo += sync_metrics_through(lambda: self._view.world, self._trainer.lightning_module)

    def remove(self) -> None:
        take_back(self._undo)

    def begin(self, world: LightningCollectives) -> None:
        """Begin to train, on all ranks, after `FitCheck`."""
        self._validation.sync_points_epochs = FitCheck(self._trainer, world).run()
        self._logging_failover.begin(world)
        self.sync_points.begin(world)

    def for_joining_ranks(self) -> dict[str, Any]:
        """Return what a joining rank must know of this fit, for `go_on`."""
        return {
            "sync_points_epochs": self._validation.sync_points_epochs,
            "epoch": self.joiner_data.told(),
            "succession": self._logging_failover.describe(),
        }

    def go_on(
        self, world: LightningCollectives, name: str, places: list[list[Any]], told: dict[str, Any] | None = None
    ) -> None:
        """Go on in a world that includes a joining rank: this rank, if it is ``told`` what the others know."""
        if told is not None:
            self._validation.sync_points_epochs = bool(told["sync_points_epochs"])
            self._logging_failover.take(told["succession"])
        self.sync_points.begin(world)
        self.joiner_data.deal(name, places, None if told is None else told["epoch"])

    @property
    def has_part(self) -> bool:
        """Whether this rank, which has joined within an epoch, takes part in the rest of it."""
        return self._lost_rank_data.epoch.first is not None or self._lost_rank_data.epoch.begins

    def tell_place(self) -> None:
        """Note that what is sent next holds all that this rank has done, the batch under way included."""
        if self._view.shrinks and self._view.sync_points is not None:
            self._lost_rank_data.tell_place(self._view.sync_points)

    def start_over(self) -> None:
        """Begin training anew within this fit."""
        self._validation.start_over()
        self._lost_rank_data.start_over()
        self.rates.start_over()

    def begin_batch(self, batch_idx: int) -> None:
        """Begin a batch; the strategy calls this ahead of all that it does with it."""
        self._logging_failover.begin_batch(batch_idx)
        self._saving.begin_batch()

    def _end_batch(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        for follow in self._after_batch:
            follow()

    def _end_training(self, original: Any) -> None:
        self.sync_points.rendezvous(SyncPointKind.TRAIN_END)
        self._saving.catch_up()
        self._view.summarise()
        original()
