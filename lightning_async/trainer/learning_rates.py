"""Learning rates that change per batch may follow the mean number of steps over all replicas."""

from __future__ import annotations

from typing import Any

from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.protocols import Drifting

__all__ = ["LearningRates"]


class LearningRates:
    """Patches when the schedulers step.

    Args:
        strategy: has the clock.
        trainer: its schedulers.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.stepped: dict[int, int] = {}
        """Of each scheduler: the steps that it has taken."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [replace(self._trainer.fit_loop.epoch_loop, "_update_learning_rates", self._update)]

    def start_over(self) -> None:
        """Training begins anew within this fit."""
        self.stepped.clear()

    def _update(self, original: Any) -> Any:
        def update(interval: str, update_plateau_schedulers: bool) -> None:
            if self._strategy.shared_steps is None or interval != "step" or update_plateau_schedulers:
                original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
            else:
                self.follow()

        return update

    def follow(self) -> None:
        """Schedulers that step per batch take the steps that are due by now."""
        steps = self._strategy.shared_steps
        if steps is None:
            return
        first, now = steps
        for i, config in enumerate(self._trainer.lr_scheduler_configs):
            if config.interval != "step" or config.reduce_on_plateau:
                continue
            every = config.frequency or 1
            taken, due = self.stepped.get(i, first // every), now // every
            for _ in range(taken, due):
                self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
            self.stepped[i] = max(taken, due)
