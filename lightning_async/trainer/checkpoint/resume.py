"""Exact resume within an epoch: capture and restore the state that Lightning's own checkpoint does not hold."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lightning_async.data.stateful_loader import begin_at, recounted, sources_of
from lightning_async.trainer.checkpoint.safe_points import LastSafeState, SafePoints
from lightning_async.trainer.data.samplers import batches_left
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    fabric,
    override,
    searches_lr,
    set_for_now,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import view_of


class Resume:
    """The position of a fit, captured at each safe point, and restored in another fit.

    Lightning's checkpoint (`dump_checkpoint`) is taken at the same moment, and Lightning restores it. This class adds
    random states, the loaders' positions after the last trained batch, accumulated gradients, and the position within
    Lightning's loops. A resumed fit is then bit-equal with a fit that was never interrupted.

    The attribute `where` is the kind of safe point at which the fit is:

    - ``"batch"``: a batch is complete, including its validation;
    - ``"validation"``: a batch is complete and its validation runs; a resume repeats the validation from its beginning;
    - ``"epoch"``: an epoch is complete, including its hooks.

    After a failure between two safe points, `as_it_was` returns the last state from which the fit can resume.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.on_boundary: Callable[[], None] = lambda: None
        self.where: str | None = None
        """The kind of the safe point at which the fit is now; None elsewhere."""
        self.told: Callable[[], bool] = lambda: False
        self.points = SafePoints(trainer)
        self._limits = self.points.limits
        self._pending: dict[str, Any] | None = None
        self._longer: list[Undo] = []
        """Functions that undo `_lengthen`, which has given the present epoch more batches than its loader has now."""
        self._live = self._in_batch_end = self._validation_is_due = False

    def install(self) -> list[Undo]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        self._live = True
        return [
            self._end,
            *self.points.step_position.install(),
            override(fit, "_load_combined_loader_states", self._load_loaders),
            override(fit, "setup_data", partial(self._ask_for_loaders, fit, "reloaded")),
            override(epoch.val_loop, "setup_data", partial(self._ask_for_loaders, epoch.val_loop, "val_reloaded")),
            override(fit, "reset", self._reset_fit),
            override(fit, "on_run_start", self._start_fit),
            override(fit, "on_advance_end", self._end_epoch),
            override(epoch, "reset", self._reset_epoch),
            override(epoch, "on_run_start", self._start_epoch),
            override(epoch, "on_advance_end", self._end_batch),
            override(epoch, "_should_check_val_fx", self._should_validate),
            override(epoch.val_loop, "run", self._validate),
            override(epoch.val_loop, "_evaluation_step", self._validate_batch),
        ]

    def problems(self) -> list[str]:
        """Return the reasons why this fit cannot be resumed exactly: one line for each problem, with its remedy."""
        found = [problem for source in self.points.sources for problem in source.problems()]
        if type(self._trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            found.append(
                "`training_step(dataloader_iter)` fetches batches itself, so nobody knows which of them were trained "
                "on: take `batch` instead, or exactly one batch per step"
            )
        return found

    def capture(self) -> dict[str, Any]:
        """Return the state of the fit at this safe point: plain values, and gradients by reference.

        Raises:
            RuntimeError: The fit is not at a safe point. Call this from the function `on_boundary`.
        """
        if self.where is None:
            raise RuntimeError("Resume.capture() works at safe points only: call it from `on_boundary`.")
        return self.points.capture(self.where)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[LastSafeState]:
        """Yield the state to resume from: the present one if the fit is at a safe point, else the last safe one.

        Its ``resume`` is None if there is no such state. Use the state within the block only, see
        `SafePoints.as_it_was`.
        """
        if self.where is not None:
            yield LastSafeState(self.capture(), None)
        # The batch is complete and its validation has not begun, so the present state can be resumed as well.
        elif self._active and self._in_batch_end:
            within = self.points.step_position.within
            self.points.begin_validation()
            try:
                state = self.points.capture("validation")
            finally:
                self.points.step_position.within = within
                self.points.began = None
            yield LastSafeState(state, None)
        else:
            with self.points.as_it_was() as state:
                yield state or LastSafeState(None, None)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Resume from ``state`` when the fit starts, after Lightning has restored its own checkpoint.

        ``state`` is a result of `capture`, or of `resized` if the number of ranks has changed. None: restore nothing
        more than Lightning does.
        """
        self._pending = state
        self._limits.expect()

    def _end(self) -> None:
        self._live = False
        self._pending = None
        self.where = None
        self._limits.put_back()
        take_back(self._longer)
        for source in self.points.sources:
            source.detach()
        self.points.sources = []

    @property
    def _active(self) -> bool:
        return self._live and not searches_lr(self._trainer)

    def _boundary(self, where: str) -> None:
        """Call `on_boundary` at a safe point.

        During the call, the attribute `where` has the value of the argument ``where``.
        """
        if not self._active:
            return
        self.points.reach(where)
        self.where = where
        try:
            self.on_boundary()
        finally:
            # Outside of this call the fit is between safe points, and `capture` must refuse.
            self.where = None

    def _end_batch(self, original: Any, data_fetcher: Any) -> None:
        self._in_batch_end = True
        try:
            original(data_fetcher)
        finally:
            self._in_batch_end = False
        self._boundary("batch")

    def _end_epoch(self, original: Any) -> None:
        self.points.step_position.end_epoch()
        original()
        take_back(self._longer)
        self._boundary("epoch")

    def _validate(self, original: Any) -> Any:
        # A validation outside of a batch's end, such as the sanity check, is no safe point.
        if not self._active or not self._in_batch_end:
            return original()
        self.points.begin_validation()
        self._boundary("validation")
        output = original()
        self.points.began = None
        self._in_batch_end = False
        return output

    def _validate_batch(self, original: Any, *args: Any) -> None:
        original(*args)
        if self.points.began is not None:
            self._boundary("validation")

    def _ask_for_loaders(self, loop: Any, of_epoch: str, original: Any) -> None:
        """Call ``original``, which makes the loaders, while `trainer.current_epoch` has the value of the saved fit.

        This value is the epoch in which the saved fit made its loaders. It matters with
        ``reload_dataloaders_every_n_epochs``, because loaders may depend on `trainer.current_epoch`.

        Args:
            loop: Lightning's loop whose loaders are made.
            of_epoch: Key of the epoch's number in the resume state.
            original: Lightning's method, which this one patches.
        """
        made = self._pending["unsaved"][of_epoch] if self._active and self._pending is not None else -math.inf
        if loop._combined_loader is not None or math.isinf(made):
            original()
            return
        epoch = self._trainer.fit_loop.epoch_progress.current
        now = epoch.completed
        # Loaders may depend on `trainer.current_epoch`, which returns this value.
        epoch.completed = made
        try:
            original()
        finally:
            epoch.completed = now

    def _load_loaders(self, original: Any) -> None:
        """Replace the loaders by sources that know their position, and move the sources to the restored position.

        ``original`` is Lightning's method that loads the loaders' states. It is called only if no position is restored.
        """
        if not self._active:
            original()
            return
        # Loaders may be reloaded within a fit, and the old ones must stop counting.
        for source in self.points.sources:
            source.detach()
        combined = self._trainer.fit_loop._combined_loader
        self.points.dealt = [self._trainer.global_rank, self._trainer.world_size]
        self.points.sources = sources = sources_of(combined.flattened)
        ahead = any(fabric("utilities.data").sized_len(source.loader) is None for source in sources)
        for source in sources:
            source.ahead = ahead
            source.told = self.told
        combined.flattened = [source.stand_in for source in sources]
        self._limits.lift(self._pending is not None and self._pending["where"] != "epoch")
        if self._pending is None:
            original()
            return
        # This class restores the positions; Lightning's own states of loaders would move the loaders twice.
        self._trainer.fit_loop._combined_loader_states_to_load = []
        if (lost_rank_data := view_of(self._trainer.strategy).lost_rank_data) is not None:
            lost_rank_data.taken_up = self._pending["unsaved"].get("left", [])
        epoch = self._trainer.fit_loop.epoch_progress.current.processed
        for source in sources:
            fabric("utilities.data")._set_sampler_epoch(source.loader, epoch)
        positions = recounted(sources, self._pending["loaders"])
        if len(sources) == len(positions) == 1 and positions[0] is not self._pending["loaders"][0]:
            self._pending |= {"resized": True, "recounted": True}
        self._pending["loaders"] = positions
        begin_at(sources, positions)

    def _reset_fit(self, original: Any) -> None:
        if self._active and self._pending is not None and self._pending["where"] == "epoch":
            # With `max_steps`, Lightning takes a finished epoch for one that is under way.
            self._set_restarting(False)
        original()
        if self._active and self._pending is not None:
            self._trainer.fit_loop._last_train_dl_reload_epoch = self._pending["unsaved"]["reloaded"]

    def _start_fit(self, original: Any) -> None:
        pending = self._pending if self._active else None
        # Set `requires_grad` before the strategy reads it. `restore` sets it once more, after hooks may have changed
        # it.
        self.points.modes.put_trained(pending["modes"] if pending else {})
        with self._limits.shown():
            original()
        self.points.modes.begin()
        if pending is not None:
            for source in self.points.sources:
                source.idle = False
            if pending["where"] == "epoch":
                self._limits.put_back()
                # Otherwise the loaders would not begin the next epoch.
                self._trainer.fit_loop._resuming_from_checkpoint = False
                self._go_on_averaging()
                self._go_on()

    def _reset_epoch(self, original: Any) -> None:
        with warnings.catch_warnings():
            if self._active and self._pending is not None:
                # The warning is about loaders that keep no position, and these do.
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
            original()
        if not self._active or self._pending is None:
            return
        left = batches_left(self._pending)
        if left is not None and left > self._trainer.fit_loop.max_batches:
            self._lengthen(left)
        most = self._trainer.fit_loop.max_batches
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if left is not None:
            # The rest of the epoch was divided anew, so the epoch has another number of batches, of which `left`
            # remain.
            total = len(self.points.sources[0].loader) if self._pending.get("recounted") else most
            done = min(most, max(0, total - left))
        elif self._pending.get("recounted"):
            done = min(most, self._pending["loaders"][0]["taken"])
        # The position in the data is unknown, so the epoch's data begins again.
        elif self._pending.get("resized") and self._pending["loaders"][0].get("ended") is False:
            done = 0
        else:
            return
        current.ready = current.started = current.processed = current.completed = done
        self._pending["unsaved"]["is_last_batch"] = left == 0 or done == most

    def _lengthen(self, left: int) -> None:
        """Set the epoch's length to the ``left`` remaining batches, unless the user has set ``limit_train_batches``.

        After the rest of the epoch was divided among another number of ranks, batches may be smaller. The epoch may
        then have more of them than usual.
        """
        trainer = self._trainer
        if trainer.limit_train_batches != 1.0:
            return
        self._longer.append(set_for_now(trainer.fit_loop, "max_batches", left))
        if validation_interval(trainer) == 1.0:
            self._longer.append(set_for_now(trainer, "val_check_batch", left))
        trainer.fit_loop._data_fetcher.length = left

    def _start_epoch(self, original: Any, data_fetcher: Any) -> None:
        self._limits.put_back()
        original(data_fetcher)
        if not self._active or self._pending is None:
            return
        where = self._pending["where"]
        epoch = self._trainer.fit_loop.epoch_loop
        # From here on Lightning would infer from its counters what was done, skip validations and repeat scheduler
        # steps.
        self._set_restarting(False)
        epoch.batch_progress.is_last_batch = self._pending["unsaved"]["is_last_batch"]
        if not self._pending.get("resized"):
            vars(self._trainer.fit_loop._combined_loader._iterator).update(self._pending["combined"])
        self._start_epoch_again()
        if not self._pending.get("resized") or self._pending.get("recounted"):
            self.points.keep_weight(self._pending["unsaved"])
        self._go_on()
        # The interrupted epoch still has to validate or to end this batch before the next one begins.
        if where in ("validation", "batch end"):
            self._validation_is_due = where == "validation"
            epoch.on_advance_end(data_fetcher)

    def _start_epoch_again(self) -> None:
        """Call, in the middle of an epoch, the hooks by which Lightning's callbacks prepare an epoch."""
        trainer = self._trainer
        for kind in ("GradientAccumulationScheduler", "TQDMProgressBar"):
            for callback in callbacks_of(trainer, kind):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)
        self._go_on_averaging(in_epoch=True)

    def _go_on_averaging(self, in_epoch: bool = False) -> None:
        """Have `StochasticWeightAveraging` create its scheduler now, by calling its hook ``on_train_epoch_start``.

        The hook also resets the learning rates and BatchNorm's statistics. Their present values are restored after the
        call. ``in_epoch`` says whether the fit resumes in the middle of an epoch.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        epoch = trainer.current_epoch
        for callback in callbacks_of(trainer, "StochasticWeightAveraging"):
            # The callback's hook for an epoch's start creates the scheduler, or transfers weights after the last epoch.
            averages = callback._scheduler_state is not None and callback.swa_start <= epoch <= callback.swa_end
            if not averages and not (in_epoch and epoch == callback.swa_end + 1):
                continue
            rates = [(group, group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            callback.on_train_epoch_start(trainer, module)
            for group, rate in rates:
                group["lr"] = rate
            with torch.no_grad():
                for name, buffer in module.named_buffers():
                    buffer.copy_(buffers[name])

    def _should_validate(self, original: Any, data_fetcher: Any) -> bool:
        due = self._validation_is_due
        self._validation_is_due = False
        return due or original(data_fetcher)

    def _set_restarting(self, restarting: bool) -> None:
        fit = self._trainer.fit_loop
        # The property's setter ignores the value if `max_steps` is set.
        fit._restarting = restarting
        fit.epoch_loop.restarting = restarting

    def _go_on(self) -> None:
        state = self._pending
        self._pending = None
        assert state is not None
        self.points.restore(state)
