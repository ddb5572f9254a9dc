"""Replicas that take every step together have one learning rate: schedulers follow these steps, and epochs of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lightning_async.engine.world import World
from lightning_async.trainer.patches import Undo, replace

__all__ = ["CommonRates"]


class CommonRates:
    """Patches when schedulers step.

    Lightning steps those of epochs with the last batch of this rank, and others by the number of the batch that a step
    is taken in. Here a step may be taken at a gate, with others' batches only, and ranks have unequal numbers of them.

    Args:
        trainer: its schedulers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self._original: Callable[..., None] = self._loop._update_learning_rates
        self.epochs_meet: Callable[[], bool] = lambda: False
        """Whether all ranks meet at the end of the epoch under way."""
        self.ends_epoch = False
        """This rank has come to the end of its part of the epoch, and the gate there is yet to open."""
        self._watched = False

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [replace(self._loop, "_update_learning_rates", self._update)]

    def _update(self, original: Any) -> Any:
        self._original = original

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            if interval == "step":
                self._step(update_plateau_schedulers)
            elif update_plateau_schedulers:
                self._watched = True
                original(interval, True)
            elif self.epochs_meet():
                self.ends_epoch = True
            else:
                original(interval, False)

        return update

    def _step(self, watching: bool) -> None:
        """Those whose turn it is after so many steps."""
        strategy, step = self._trainer.strategy, self._loop.global_step
        configs = strategy.lr_scheduler_configs
        due = [each for each in configs if each.interval == "step" and step % each.frequency == 0]
        strategy.lr_scheduler_configs = [dataclasses.replace(each, frequency=1) for each in due]
        try:
            self._original("step", watching)
        finally:
            strategy.lr_scheduler_configs = configs

    def end_epoch(self, world: World) -> Callable[[], None]:
        """All ranks have taken all steps of the epoch: schedulers step where one has come to its last batch.

        What lost ranks had left of it lies behind, too: who came meanwhile calls this once, as all do.

        Returns:
            What is called behind the end of the epoch: those that watch a metric have stepped by then where there were
            batches, and do so now where there were none.
        """
        mine, self.ends_epoch = self.ends_epoch, False
        ended = float(world.reduce(torch.tensor(float(mine)), "max")) > 0.0
        if ended:
            self._original("epoch", False)
        self._watched = self._trainer.fit_loop.restarting

        def watch() -> None:
            if ended and not self._watched:
                self._original("epoch", True)

        return watch
