"""What must change in Lightning's loops so that replicas may run at their own pace, and where they meet.

Lightning 2.6 broadcasts a SIGTERM flag before every batch, which is a hidden lockstep; and it assumes that every rank
comes to validation and to the end of an epoch after the same number of batches. Each patch here replaces one method of
one object of one Trainer, and is taken back at tear-down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.header import Arrival, Gate
from lightning_async.trainer.namespace import pytorch

if TYPE_CHECKING:
    from lightning_async.strategies.averaging import AsyncAveragingStrategy
from lightning_async.trainer.patches import set_for_now, sync_metrics_through
from lightning_async.trainer.spikes import Spikes

__all__ = ["DriftPatches"]


class DriftPatches:
    """The patches on one Trainer.

    Args:
        strategy: opens the gates and hears the votes.
        trainer: its loops, its signal connector, and some of its callbacks are patched.
    """

    def __init__(self, strategy: AsyncAveragingStrategy, trainer: Any) -> None:
        self.gates_epochs = True
        """Whether all ranks meet at the end of each epoch."""
        self._strategy, self._trainer = strategy, trainer
        self._due = self._held = 0
        """Validations within this epoch: that this rank's clock has asked for, and that all have run."""
        self._due_at_end = False
        self._validated = False
        """The model has not changed since it was validated."""
        self._stepped: dict[int, int] = {}
        self._spikes = Spikes(trainer, self._vote_for_stopping)
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Patch."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        epoch, signals = fit.epoch_loop, trainer._signal_connector
        if hasattr(epoch, "_broadcast_sigterm_tensor"):
            self._replace(epoch, "_broadcast_sigterm_tensor", lambda original: lambda: None)
        self._replace(signals, "_sigterm_notifier_fn", self._on_sigterm)
        self._replace(epoch, "_should_check_val_fx", self._should_validate)
        self._replace(epoch, "on_advance_end", self._after_batch)
        self._replace(epoch, "_update_learning_rates", self._update_learning_rates)
        self._replace(epoch.val_loop, "run", self._validate)
        self._replace(fit, "setup_data", self._setup_data)
        self._replace(fit, "on_advance_end", self._end_epoch)
        self._replace(fit, "on_run_end", self._end_training)
        for checkpoint in self._callbacks("ModelCheckpoint"):
            self._replace(checkpoint, "_monitor_candidates", self._from_rank_zero)
        for timer in self._callbacks("Timer"):
            self._replace(timer, "_check_time_remaining", self._time_remaining(timer))
        self._undo += self._spikes.install()
        module = trainer.lightning_module
        self._set(module, "allow_zero_length_dataloader_with_multiple_devices", True)
        self._undo += sync_metrics_through(lambda: self._strategy.world, module)

    def remove(self) -> None:
        """Take every patch back."""
        while self._undo:
            self._undo.pop()()

    def start_over(self) -> None:
        """Training begins anew within this fit."""
        self._due = self._held = 0
        self._due_at_end = self._validated = False
        self._stepped.clear()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(set_for_now(owner, name, value))

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._set(owner, name, wrap(getattr(owner, name)))

    def _callbacks(self, kind: str) -> list[Any]:
        wanted = getattr(pytorch("callbacks"), kind)
        return [callback for callback in self._trainer.callbacks if isinstance(callback, wanted)]

    # ---- gates ----

    def rendezvous(self, gate: Gate, index: int = 0) -> None:
        """Wait until every rank is at this gate with the same model; join what others ask for meanwhile."""
        strategy = self._strategy
        strategy.begin_again()
        averager = strategy.averager
        if averager is None or strategy.world is None or strategy.failed:
            return
        assert strategy.averaged_models is not None
        strategy.finish_batch()
        share_averages = strategy.averaged_models.before_gate()
        while (arrival := averager.rendezvous(gate, index)) is not Arrival.OPEN:
            if arrival is Arrival.STOP:
                self._stop(averager)
            self._join_validation()
        strategy.world.drifting = False
        if averager.end_agreed:
            self._trainer.should_stop = True
        if averager.moved_at_gate:
            self._validated = False
            self._forget_saved()
            strategy.on_model_changed()
        share_averages()

    def _stop(self, averager: BackgroundAverager) -> None:
        """A rank was told to stop: all leave from here, with one model."""
        averager.rendezvous(Gate.STOP)
        if self._strategy.world is not None:
            self._strategy.world.drifting = False
            self._spikes.raise_agreed(self._strategy.world)
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException

    # ---- stopping ----

    def _vote_for_stopping(self) -> None:
        if self._strategy.averager is not None:
            self._strategy.averager.vote(stop=True)

    def _on_sigterm(self, original: Any) -> Any:
        def notify(signum: int, frame: Any) -> None:
            averager = self._strategy.averager
            if averager is None:
                self._trainer._signal_connector.received_sigterm = True
            else:
                averager.stop_requested = True

        return notify

    def _after_batch(self, original: Any) -> Any:
        def on_advance_end(data_fetcher: Any) -> None:
            original(data_fetcher)
            averager = self._strategy.averager
            if averager is None:
                return
            averager.resume()
            if averager.stop_agreed:
                self._strategy.finish_batch()
                self._stop(averager)
            if averager.end_agreed:
                self._trainer.should_stop = True
            elif self._trainer.should_stop:  # on this rank alone: it asks the others
                averager.vote(end=True)

        return on_advance_end

    def _time_remaining(self, timer: Any) -> Callable[[Any], Any]:
        """A time limit is checked on this rank's clock; when it is up, all ranks end."""

        def wrap(original: Any) -> Any:
            def check(trainer: Any) -> None:
                averager = self._strategy.averager
                if averager is None:
                    original(trainer)
                elif timer.time_elapsed() >= timer._duration:
                    averager.vote(end=True)

            return check

        return wrap

    # ---- what all ranks do together ----

    def _should_validate(self, original: Any) -> Any:
        """When to validate: on this rank's clock, or because another rank asks.

        One that is due with the last batch of an epoch waits until all ranks are there (`_end_epoch`), so that it sees
        the model of the whole epoch. Else the rank that comes first asks all, and what the others' clocks say
        about the same validation, sooner or later, is done with it.
        """

        def should_check_val_fx(data_fetcher: Any) -> bool:
            averager, epoch = self._strategy.averager, self._trainer.fit_loop.epoch_loop
            if averager is None or epoch.restarting:
                return original(data_fetcher)
            due = original(data_fetcher)
            stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
            if due and self.gates_epochs and (epoch._is_training_done or stops):
                self._due_at_end = True
                return False
            if due and self._trainer._val_check_time_interval is None:
                self._due += 1
                due = self._due > self._held
            return due or (averager.validation_asked and self._trainer.enable_validation)

        return should_check_val_fx

    def _validate(self, original: Any) -> Any:
        def run() -> Any:
            if self._strategy.averager is None:  # the sanity check, before training
                return original()
            self.rendezvous(Gate.VALIDATE)
            self._held += 1
            output = original()
            self._validated = True
            return output

        return run

    def _join_validation(self) -> None:
        """Validate because another rank asks for it, while this one waits at the end of its epoch or of its training.

        As in Lightning's `_TrainingEpochLoop.on_advance_end`.
        """
        trainer = self._trainer
        was_training = trainer.training
        first_loop_iter = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = was_training
        trainer._logger_connector._first_loop_iter = first_loop_iter

    def _end_epoch(self, original: Any) -> Any:
        def on_advance_end() -> None:
            self._strategy.begin_again()
            averager, world = self._strategy.averager, self._strategy.world
            if self.gates_epochs and averager is not None and world is not None:
                self.rendezvous(Gate.EPOCH_END, self._trainer.current_epoch)
                due = torch.tensor(float(self._due_at_end))
                if world.reduce(due, "max") > 0.0 and not self._validated:
                    self._join_validation()
                self._due_at_end = False
                self._due = self._held = 0
            original()
            if averager is not None:
                averager.epoch += 1

        return on_advance_end

    def _end_training(self, original: Any) -> Any:
        def on_run_end() -> None:
            self.rendezvous(Gate.TRAIN_END)
            self._strategy.summarise()
            original()

        return on_run_end

    def _forget_saved(self) -> None:
        """The model has changed at a gate: no checkpoint holds it, whatever this rank's step count says.

        `ModelCheckpoint` skips a save at a step count that it has saved before. A rank that waits at a gate keeps its
        count, others do not, and then some would save, with collectives, and some would not.
        """
        for callback in self._callbacks("ModelCheckpoint"):
            callback._last_global_step_saved = -1

    def _from_rank_zero(self, original: Any) -> Any:
        """`ModelCheckpoint` names files by the step and by metrics, and compares names between collectives: names must
        be equal on all ranks, and steps are not."""

        def monitor_candidates(trainer: Any) -> dict[str, Any]:
            candidates, world = original(trainer), self._strategy.world
            if world is None or world.drifting:
                return candidates
            return world.broadcast({name: value.cpu() for name, value in candidates.items()})

        return monitor_candidates

    # ---- the rest ----

    def _update_learning_rates(self, original: Any) -> Any:
        """With ``lr_clock="global"``, schedulers that step per batch follow the mean over all replicas."""

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            averager, trainer = self._strategy.averager, self._trainer
            if (
                averager is None
                or self._strategy.lr_clock == "local"
                or interval != "step"
                or update_plateau_schedulers
            ):
                original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
                return
            first, now = averager.first_step, averager.global_step()
            for i, config in enumerate(trainer.lr_scheduler_configs):
                if config.interval != "step" or config.reduce_on_plateau:
                    continue
                every = config.frequency or 1
                taken, due = self._stepped.get(i, first // every), now // every
                for _ in range(taken, due):
                    trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
                self._stepped[i] = max(taken, due)

        return update

    def _setup_data(self, original: Any) -> Any:
        """An empty shard trains for no batch, but goes through every epoch: its callbacks take part in gates."""

        def setup_data() -> None:
            original()
            fit, trainer, world = self._trainer.fit_loop, self._trainer, self._strategy.world
            loader = fit._combined_loader
            if loader is None or loader is self._seen_loader or world is None:
                return
            self._seen_loader = loader
            lengths = world.gather_objects(fit.max_batches)
            if fit.max_batches == 0 and any(lengths):
                fit.max_batches = float("inf")
                trainer.val_check_batch = float("inf")
                fit._last_train_dl_reload_epoch = trainer.current_epoch

        return setup_data

    _seen_loader: Any = None
