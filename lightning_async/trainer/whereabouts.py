"""Where a fit is between two safe points: whether a part of a step is written, and which part is done."""

from __future__ import annotations

import enum
from typing import Any

from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.updates import updates_of

__all__ = ["Whereabouts", "Within"]


class Within(enum.Enum):
    """Where the fit is, and which state it could go on from."""

    NOTHING = "nothing was trained yet"
    BATCH = "a batch"
    ACCUMULATED = "gradients in accumulation have changed"
    GATHERED = "gradients have joined those that leave together"
    MANUAL = "the training step was within manual optimization, which may have stepped"
    STEP = "the optimizer or a scheduler had begun a step"
    STEPPED = "the optimizer has stepped, schedulers have not"
    BATCH_END = "hooks at the end of a batch"
    VALIDATION = "a validation"
    LOGGERS = "loggers are written"


class Whereabouts:
    """Of one fit, by what it calls.

    Args:
        trainer: whose fit it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.within = Within.NOTHING
        self._accumulates = False
        """The batch under way adds to gradients that are there."""
        self._steps = 0
        """Steps of optimizers under way, one within another: that of a class calls that of its base."""

    def install(self) -> list[Undo]:
        """Patch what follows the steps of a batch; returns what takes it back."""
        trainer, epoch = self._trainer, self._trainer.fit_loop.epoch_loop
        return [
            replace(trainer.strategy, "backward", self._backward),
            replace(trainer.precision_plugin, "_after_closure", self._after_closure),
            replace(epoch.manual_optimization, "run", self._step_manually),
            replace(epoch, "update_lr_schedulers", self._update_lr_schedulers),
            replace(epoch, "_save_loggers_on_train_batch_end", self._save_loggers),
            replace(self._trainer.fit_loop, "on_advance_end", self._end_epoch),
        ]

    def follow(self) -> Undo:
        """Training begins, and optimizers are there: hear of their steps; returns what ends that."""
        self.within = Within.NOTHING  # a search for a learning rate may have trained before
        optimizers = self._trainer.strategy.optimizers
        hooks = [each.register_step_pre_hook(self._begin_step) for each in optimizers]
        hooks += [each.register_step_post_hook(self._stepped) for each in optimizers]

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        return remove

    def begin_batch(self) -> None:
        """A safe point, behind which the next batch begins."""
        self.within = Within.BATCH
        self._accumulates = updates_of(self._trainer) is None and self._trainer.fit_loop._should_accumulate()
        self._steps = 0

    def gathered(self) -> None:
        """The gradients of the batch under way are gathered apart from the parameters: it need not come again."""
        self.within = Within.GATHERED

    def _backward(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self.within is Within.BATCH and self._accumulates:
                self.within = Within.ACCUMULATED
            return original(*args, **kwargs)

        return backward

    def _after_closure(self, original: Any) -> Any:
        def after_closure(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.within = Within.STEP

        return after_closure

    def _begin_step(self, *_: Any) -> None:
        self._steps += 1

    def _stepped(self, *_: Any) -> None:
        self._steps -= 1
        if self.within is Within.STEP and self._steps == 0:
            self.within = Within.STEPPED

    def _step_manually(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.within = Within.MANUAL
            return original(*args, **kwargs)

        return run

    def _update_lr_schedulers(self, original: Any) -> Any:
        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            before = self.within
            self.within = Within.STEP
            original(interval, update_plateau_schedulers)
            at_end = interval == "epoch" and before is Within.BATCH  # of an epoch, and in no batch, see `ShortEpochs`
            if before is Within.NOTHING:
                self.within = Within.NOTHING
            elif not update_plateau_schedulers and not at_end:
                self.within = Within.BATCH_END

        return update_lr_schedulers

    def _save_loggers(self, original: Any) -> Any:
        def save_loggers() -> None:
            self.within = Within.LOGGERS
            original()

        return save_loggers

    def _end_epoch(self, original: Any) -> Any:
        def on_advance_end() -> None:
            if self.within is Within.BATCH_END:  # the rest was left out: the safe point before lies far behind
                self.within = Within.STEP
            original()

        return on_advance_end
