"""Optimizer steps that are taken when a gradient has arrived, and not with the batch that Lightning trains on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.loops.accumulation import AccumulationWindows
from lightning_async.trainer.namespace import Undo, callbacks_of, override, pytorch, scaled_zero, set_for_now
from lightning_async.trainer.strategy_view import view_of


class SharedLearningRates:
    """Patches of the schedulers' steps for replicas that take every step together, with one learning rate.

    Lightning steps schedulers with interval "epoch" at this rank's last batch, and other schedulers by the number of
    the batch. Here ranks have unequal numbers of batches, and a step may be taken at a sync point, from other ranks'
    batches alone. So schedulers with interval "step" follow the number of steps, and an epoch ends for the other
    schedulers when all ranks have arrived at its end.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._original: Callable[..., None] = self._loop._update_learning_rates
        self.epochs_meet: Callable[[], bool] = lambda: False
        """Function that returns whether all ranks wait for one another at the end of the present epoch."""
        self.ends_epoch = False
        """Whether this rank has finished its part of the epoch, and the sync point that ends the epoch is not over."""
        self._watched = False
        self._joined_after: int | None = None
        """Number of steps before the present epoch, on a rank that has joined within it; None on other ranks."""

    def install(self) -> list[Undo]:
        self._original = self._loop._update_learning_rates
        return [override(self._loop, "_update_learning_rates", self._update)]

    def _update(self, original: Any, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step":
            self._step(update_plateau_schedulers)
        elif update_plateau_schedulers:
            self._watched = True
            original(interval, True)
        elif self.epochs_meet():
            # Wait with the step for the sync point: other ranks may still take steps of this epoch.
            self.ends_epoch = True
        else:
            original(interval, False)

    def _step(self, watching: bool) -> None:
        """Step the schedulers with interval "step" whose frequency divides the epoch's number of batches so far.

        That number follows from the epoch's steps, so it is equal on all ranks. Where ranks do not wait for one another
        at an epoch's end, all steps of training count. If ``watching``, step those of the schedulers that watch a
        metric; otherwise step the others.
        """
        strategy = self._trainer.strategy
        step = self._loop.global_step
        if self.epochs_meet():
            step = self._steps_of_epoch if self._joined_after is None else step - self._joined_after
        configs = strategy.lr_scheduler_configs
        due = [each for each in configs if each.interval == "step" and step % self.steps_between(each) == 0]
        # Lightning compares frequencies with the number of the batch, so only due schedulers are shown to it.
        strategy.lr_scheduler_configs = [dataclasses.replace(each, frequency=1) for each in due]
        try:
            self._original("step", watching)
        finally:
            strategy.lr_scheduler_configs = configs

    @property
    def _steps_of_epoch(self) -> int:
        return self._loop.automatic_optimization.optim_progress.optimizer.step.current.completed

    def join(self) -> None:
        """Keep the epoch's number of steps, which was received from a live rank; Lightning begins it anew."""
        self._joined_after = self._loop.global_step - self._steps_of_epoch

    def steps_between(self, config: Any) -> int:
        """Return the number of optimizer steps from one step of this scheduler to the next.

        Lightning's ``frequency`` is a number of batches, and takes effect only with an optimizer step.
        """
        return config.frequency // math.gcd(config.frequency, self._trainer.accumulate_grad_batches)

    def end_epoch(self, world: LightningCollectives) -> Callable[[], None]:
        """Step the schedulers with interval "epoch", if the epoch has ended on any rank. All ranks call this together.

        Returns a function to call at the very end of the epoch. On a rank where Lightning has not stepped the
        schedulers that watch a metric, because the rank had no batches, this function steps them. Elsewhere it does
        nothing.
        """
        mine = self.ends_epoch
        self.ends_epoch = False
        # Ranks have unequal numbers of batches, and the epoch has ended for all if it has ended for one.
        ended = float(world.reduce(torch.tensor(float(mine)), "max")) > 0.0
        if ended:
            self._joined_after = None
            self._original("epoch", False)
        self._watched = self._trainer.fit_loop.restarting

        def watch() -> None:
            if ended and not self._watched:
                self._original("epoch", True)

        return watch


class ExternalWindowSize(AccumulationWindows):
    """The sizes of accumulation windows for `AsyncGradientStrategy`.

    No loop is patched: the strategy itself weights the gradients, averages them and takes the optimizer steps. The
    arguments are those of `AccumulationWindows`.
    """

    even = True
    """Whether all batches of this epoch had equal size, so that ranks reach each step after equally many batches."""

    def install(self) -> list[Undo]:
        trainer: Any = self._trainer
        return [
            set_for_now(trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches),
            set_for_now(trainer.strategy, "sizes", self),
        ]

    @property
    def size(self) -> int:
        """The smallest number of batches of the current window, or of the next one if none is open."""
        return 1 if self.planned.by_samples else self.planned.batches

    @property
    def least(self) -> float:
        """The smallest number of samples of the current window, or of the next one if none is open."""
        return self.planned.samples if self.planned.by_samples else 0.0

    @property
    def ends(self) -> bool:
        last = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        return last or (self.batches >= self.size and self.samples >= self.least)

    def begin_batch(self, batch: Any) -> None:
        if self.away:
            return
        samples = self._count(batch)
        if self._trainer.strategy.step_runner.between_windows:
            self.planned = self._plan(samples)
            self.batches = 0
            self.samples = 0.0
            self.is_open = True
            self.show()
        self.batches = self.batches + 1
        self.samples = self.samples + samples
        begins = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1
        self.even = (begins or self.even) and samples * self.planned.batches == self.planned.samples

    def end_batch(self) -> bool:
        if self.away or not self.is_open or not self._trainer.strategy.step_runner.between_windows:
            return False
        self.is_open = False
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "even": self.even}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.even = state["even"]


def updates_of(trainer: Any) -> OptimizerUpdates | None:
    """Return the fit's `OptimizerUpdates`, which takes optimizer steps outside of Lightning's batches.

    Returns None if each step belongs to the batch that Lightning trains on.
    """
    return view_of(trainer.strategy).updates


class OptimizerUpdates:
    """Optimizer steps outside of Lightning's batches, with all its hooks, clipping, mixed precision and schedulers.

    `take` makes Lightning's loop take a step. A batch itself takes no step: it only adds its gradients. ``global_step``
    counts the steps.

    Args:
        trainer: The Trainer, whose loop is patched.
        after_backward: Function that is called when a batch's gradients are computed; it may take steps.
        batch: Function that returns a context manager for a batch's forward and backward pass.
    """

    def __init__(
        self,
        trainer: Any,
        after_backward: Callable[[], None],
        batch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._trainer = trainer
        self._after_backward = after_backward
        self._batch = batch
        self._loop = trainer.fit_loop.epoch_loop
        manual = self._loop.manual_optimization
        self._begin_step = manual._on_before_step
        self._end_step = manual._on_after_step
        self._within_batch = False
        self._started_at = -1
        """The loggers' step number when the last batch started."""
        self.rates = SharedLearningRates(trainer)
        self.each = 1
        """Number of steps that are taken at once: one for each of several optimizers."""
        self.taken = False
        """Whether a step was taken in the batch under way or, until its end, in the last one."""
        self.on_gathered: Callable[[], None] = lambda: None
        """Called when the gradients of a batch have been gathered."""
        self.on_step_between: Callable[[], None] = lambda: None
        """Called when a step was taken outside of a batch."""

    def install(self) -> list[Undo]:
        return [
            set_for_now(self._loop, "_should_accumulate", lambda: not self.taken),
            override(self._loop.automatic_optimization, "run", self._run),
            override(self._loop.manual_optimization, "run", self._run),
            set_for_now(self._loop.manual_optimization, "_on_before_step", lambda: None),
            set_for_now(self._loop.manual_optimization, "_on_after_step", lambda: None),
            override(self._loop, "_save_loggers_on_train_batch_end", self._end_batch),
            *self.rates.install(),
        ]

    @property
    def left(self) -> float:
        limit = self._loop.max_steps
        return float("inf") if limit == -1 else math.ceil((limit - self._loop.global_step) / self.each)

    @property
    def ends_epoch(self) -> bool:
        """Whether the batch under way is the last of its epoch."""
        return self._loop._num_ready_batches_reached()

    def _run(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.taken = False
        self._started_at = self._loop._batches_that_stepped
        with self._batch():
            output = original(*args, **kwargs)
        self._within_batch = True
        try:
            self._after_backward()
        finally:
            # A failed step must not make later steps count as steps of this batch.
            self._within_batch = False
        return output

    def _end_batch(self, original: Any) -> None:
        self.taken = False
        original()

    def take(self, put: Callable[[], None]) -> None:
        """Take an optimizer step with the gradients that ``put`` writes to the parameters.

        Afterwards, update the schedulers and the loggers' step count.
        """

        def closure() -> Tensor:
            put()
            # A gradient scaler must have seen a loss before it can unscale gradients.
            scaled_zero(self._trainer.precision_plugin, self._trainer.strategy.root_device)
            return torch.zeros(())

        self._take(lambda: self._loop.automatic_optimization._optimizer_step(max(self._loop.batch_idx, 0), closure))

    def take_each(self, steps: Iterable[Callable[[], object]]) -> None:
        """Take a step of manual optimization by calling all ``steps``: one for each optimizer that has gradients."""

        def run() -> None:
            scaled_zero(self._trainer.precision_plugin, self._trainer.strategy.root_device)
            for step in steps:
                self._begin_step()
                step()
                self._end_step()

        self._take(run)

    def _take(self, step: Callable[[], object]) -> None:
        # The loop follows the last step of a batch only. An earlier step of this batch is followed here.
        if self._within_batch and self.taken:
            self._follow()
        before = self.taken
        self.taken = True
        step()
        if not self._within_batch:
            self._follow()
            self.taken = before
            self.on_step_between()

    def _follow(self) -> None:
        """Update logs, schedulers and Lightning's running averages after a step, as Lightning does after a batch."""
        self._log()
        for callback in callbacks_of(self._trainer, "WeightAveraging"):
            # Call Lightning's own method, because a user's override may need a batch.
            pytorch("callbacks").WeightAveraging.on_train_batch_end(
                callback, self._trainer, self._trainer.lightning_module, None, None, -1
            )
        self._loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        self._loop._batches_that_stepped += 1

    def _log(self) -> None:
        """Log the last batch's values and the learning rates, if this step is one at which Lightning's loggers log.

        Lightning logs values at the end of a batch that steps, and rates at the start of a batch. Rates are logged here
        only if no batch has started since the previous step.
        """
        trainer = self._trainer
        n = self._loop._batches_that_stepped
        every = trainer.log_every_n_steps
        # The same condition as Lightning's loggers have.
        if every == 0 or not ((n + 1) % every == 0 or trainer.should_stop):
            return
        trainer._logger_connector.log_metrics(self._loop._results.metrics(on_step=True)["log"])
        if n == self._started_at:
            return
        for monitor in callbacks_of(trainer, "LearningRateMonitor"):
            if monitor.logging_interval != "epoch":
                rates = monitor._extract_stats(trainer, "step" if monitor.logging_interval is None else "any")
                trainer._logger_connector.log_metrics(rates)
