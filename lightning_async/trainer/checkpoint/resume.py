"""Going on in the middle of an epoch as if nothing had happened: what Lightning's own checkpoint does not hold."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lightning_async.data.random_states import reseed
from lightning_async.data.stateful_loader import begin_at, recounted, sources_of
from lightning_async.trainer.checkpoint.safe_points import LastSafeState, SafePoints, keep_weight, put_unsaved
from lightning_async.trainer.data.epoch_data import lost_rank_data_of
from lightning_async.trainer.data.samplers import batches_left
from lightning_async.trainer.loops.loop_state import LoggedValues
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


class Resume:
    """Follows a fit, so that its state can be taken at each batch boundary, and puts another fit there.

    Beside it travels Lightning's checkpoint (`dump_checkpoint`), taken at the same moment and restored by Lightning.
    Here are the random states, where the loaders stand as of the last batch that was trained on, gradients in
    accumulation, and the loops' places in their own code. What follows is then bit-equal with a fit that was never
    interrupted.

    The last safe point is one of three, `where`:

    - ``"batch"``: a batch is done with, its validation included;
    - ``"validation"``: the batch is done with and its validation under way; a resume validates from the beginning;
    - ``"epoch"``: an epoch is done with, its hooks included.

    After a failure between them, `points` has a state, too.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._limits = Limits(trainer)
        self.on_boundary: Callable[[], None] = lambda: None
        self.where: str | None = None
        """The safe point at which the fit is; None elsewhere."""
        self.told: Callable[[], bool] = lambda: False
        self.points = SafePoints(trainer)
        self._pending: dict[str, Any] | None = None
        self._longer: list[Undo] = []
        """Takes back that the epoch under way has more batches than its loader has now."""
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
        """Return what keeps this fit from being resumed exactly, one line for each, with what to do."""
        found = [problem for source in self.points.sources for problem in source.problems()]
        if type(self._trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            found.append(
                "`training_step(dataloader_iter)` fetches batches itself, so nobody knows which of them were trained "
                "on: take `batch` instead, or exactly one batch per step"
            )
        return found

    def capture(self) -> dict[str, Any]:
        """Return the state at this safe point, from `on_boundary`: plain values, and gradients by reference."""
        if self.where is None:
            raise RuntimeError("Resume.capture() works at safe points only: call it from `on_boundary`.")
        return self.points.capture(self.where)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[LastSafeState]:
        """Give the state to go on from, here or as it was at the last safe point."""
        if self.where is not None:
            yield LastSafeState(self.capture(), None)
        elif self._active and self._in_batch_end:  # a batch is done with, and its validation is yet to begin
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
        """Go on from ``state`` when fit starts, once Lightning has restored its own checkpoint; see `resized`, too."""
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
        if not self._active:
            return
        self.points.reach(where)
        self.where = where
        try:
            self.on_boundary()
        finally:
            self.where = None

    def _end_batch(self, original: Any, data_fetcher: Any) -> None:
        self._in_batch_end = True
        try:
            original(data_fetcher)
        finally:
            self._in_batch_end = False
        self._boundary("batch")

    def _end_epoch(self, original: Any) -> None:
        original()
        take_back(self._longer)
        self._boundary("epoch")

    def _validate(self, original: Any) -> Any:
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
        """Ask for the loaders of the epoch in which they were made (``reload_dataloaders_every_n_epochs``)."""
        made = self._pending["unsaved"][of_epoch] if self._active and self._pending is not None else -math.inf
        if loop._combined_loader is not None or math.isinf(made):
            original()
            return
        epoch = self._trainer.fit_loop.epoch_progress.current
        now = epoch.completed
        epoch.completed = made  # what `trainer.current_epoch` says
        try:
            original()
        finally:
            epoch.completed = now

    def _load_loaders(self, original: Any) -> None:
        if not self._active:
            original()
            return
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
        self._trainer.fit_loop._combined_loader_states_to_load = []
        if (lost_rank_data := lost_rank_data_of(self._trainer)) is not None:
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
        # And once more when hooks have set it anew.
        self.points.modes.put_trained(pending["modes"] if pending else {})
        with self._limits.shown():
            original()
        self.points.modes.begin()
        if pending is not None:
            for source in self.points.sources:
                source.idle = False
            if pending["where"] == "epoch":
                self._limits.put_back()
                self._trainer.fit_loop._resuming_from_checkpoint = False  # so that the loaders begin the next epoch
                self._go_on_averaging()
                self._go_on()

    def _reset_epoch(self, original: Any) -> None:
        with warnings.catch_warnings():
            if self._active and self._pending is not None:
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
            # The epoch has another number of batches now, and this rank is so many before its end.
            total = len(self.points.sources[0].loader) if self._pending.get("recounted") else most
            done = min(most, max(0, total - left))
        elif self._pending.get("recounted"):
            done = min(most, self._pending["loaders"][0]["taken"])
        elif self._pending.get("resized") and self._pending["loaders"][0].get("ended") is False:
            done = 0  # its data begins again
        else:
            return
        current.ready = current.started = current.processed = current.completed = done
        self._pending["unsaved"]["is_last_batch"] = left == 0 or done == most

    def _lengthen(self, left: int) -> None:
        """Let the epoch last for all that is left of it, in batches that may be smaller, unless the user limits it."""
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
        # From here on Lightning would guess from its counters what was done: skip validations, repeat schedulers.
        self._set_restarting(False)
        epoch.batch_progress.is_last_batch = self._pending["unsaved"]["is_last_batch"]
        if not self._pending.get("resized"):
            vars(self._trainer.fit_loop._combined_loader._iterator).update(self._pending["combined"])
        self._start_epoch_again()
        if not self._pending.get("resized") or self._pending.get("recounted"):
            keep_weight(self._trainer, self._pending["unsaved"])
        self._go_on()
        if where in ("validation", "batch end"):
            self._validation_is_due = where == "validation"
            epoch.on_advance_end(data_fetcher)

    def _start_epoch_again(self) -> None:
        """Have Lightning's callbacks repeat, in the middle of an epoch, what they did at its start."""
        trainer = self._trainer
        for kind in ("GradientAccumulationScheduler", "TQDMProgressBar"):
            for callback in callbacks_of(trainer, kind):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)
        self._go_on_averaging(in_epoch=True)

    def _go_on_averaging(self, in_epoch: bool = False) -> None:
        """Have `StochasticWeightAveraging` make its scheduler now, as at the start of an epoch, but keep the learning
        rates and BatchNorm's statistics, which that sets."""
        trainer = self._trainer
        module = trainer.lightning_module
        epoch = trainer.current_epoch
        for callback in callbacks_of(trainer, "StochasticWeightAveraging"):
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
        fit._restarting = restarting  # its setter knows better where there is a `max_steps`
        fit.epoch_loop.restarting = restarting

    def _go_on(self) -> None:
        state = self._pending
        self._pending = None
        assert state is not None
        self.points.modes.put(state["modes"])
        put_unsaved(self._trainer, state["unsaved"])
        LoggedValues(self._trainer).put(state["logged"])
        if "seed" in state["random"]:  # a rank that was not there
            reseed(state["random"]["seed"])
        else:
            self.points.generators().put(state["random"])


class Limits:
    """The limits of a fit that had taken its last step, but had not come to its end.

    Lightning would take it for one that has ended. Here ``max_steps`` and ``max_epochs`` are raised for a moment, so
    that its loop begins and finds nothing to train but the ends of the epoch and of training. Other replicas may still
    have steps to take, and this rank takes part in what they do together.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._given: tuple[int, int] | None = None
        self._expected = False

    def expect(self) -> None:
        self._expected = True

    def lift(self, epoch_is_open: bool) -> None:
        """Raise them, if this rank has no step to take, but others, or the end of its epoch; all ranks call this."""
        expected = self._expected
        self._expected = False
        fit = self._trainer.fit_loop
        if not expected:
            return
        step = fit.epoch_loop.global_step
        epoch = fit.epoch_progress.current.processed
        done = _reached(step, fit.max_steps) or _reached(epoch, fit.max_epochs)
        others = self._trainer.strategy.reduce_boolean_decision(not done, all=False)
        if done and (others or (epoch_is_open and step == fit.max_steps)):
            self._given = fit.max_steps, fit.max_epochs
            self._raise()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        given = self._given
        self.put_back()
        yield
        if given is not None:
            self._given = given
            self._raise()

    def put_back(self) -> None:
        if self._given is not None:
            fit = self._trainer.fit_loop
            (steps, epochs) = self._given
            fit.epoch_loop.max_steps = steps
            fit.max_epochs = epochs
            self._given = None

    def _raise(self) -> None:
        assert self._given is not None
        fit = self._trainer.fit_loop
        (steps, epochs) = self._given
        if steps != -1:  # with another -1, Lightning's loops would take the epoch's number for another one
            fit.epoch_loop.max_steps = max(steps, fit.epoch_loop.global_step + 1)
        if epochs != -1:
            fit.max_epochs = max(epochs, fit.epoch_progress.current.processed + 1)


def _reached(now: int, limit: int) -> bool:
    return limit != -1 and now >= limit
