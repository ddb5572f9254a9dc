"""Steps of the optimizer that are taken when a gradient has arrived, not with the batch that Lightning has at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_async.trainer.patches import Undo, replace

__all__ = ["Updates"]


class Updates:
    """Lightning's loop gathers gradients with every batch, and steps where `take` says so: with all its hooks,
    clipping, mixed precision and schedulers. ``global_step`` counts these steps.

    Args:
        trainer: whose loop it is, in automatic optimization.
        after_backward: called once a batch's gradients are there; it may take steps.
    """

    def __init__(self, trainer: Any, after_backward: Callable[[], None]) -> None:
        self._trainer, self._after_backward = trainer, after_backward
        self._loop = trainer.fit_loop.epoch_loop
        self._within_batch = False
        self.taken = False
        """A step was taken in the batch under way, or in the last one, until its end."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [
            replace(self._loop, "_should_accumulate", lambda original: lambda: not self.taken),
            replace(self._loop.automatic_optimization, "run", self._run),
            replace(self._loop, "_save_loggers_on_train_batch_end", self._end_batch),
        ]

    @property
    def left(self) -> float:
        """Steps that there are to take before ``max_steps``."""
        limit = self._loop.max_steps
        return float("inf") if limit == -1 else limit - self._loop.global_step

    @property
    def ends_epoch(self) -> bool:
        """The batch under way is the last of its epoch."""
        return self._loop._num_ready_batches_reached()

    def _run(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.taken = False
            output = original(*args, **kwargs)
            self._within_batch = True
            try:
                self._after_backward()
            finally:
                self._within_batch = False
            return output

        return run

    def _end_batch(self, original: Any) -> Any:
        def save_loggers() -> None:
            self.taken = False
            original()

        return save_loggers

    def take(self, put: Callable[[], None]) -> None:
        """Step with the gradients that ``put`` gives the parameters.

        Schedulers follow: within a batch the loop steps them, but for a second step of the same batch, and at gates.
        """
        if self._within_batch and self.taken:
            self._step_schedulers()

        def closure() -> Tensor:
            put()
            return torch.zeros(())

        before, self.taken = self.taken, True
        self._loop.automatic_optimization._optimizer_step(max(self._loop.batch_idx, 0), closure)
        if not self._within_batch:
            self._step_schedulers()
            self.taken = before

    def _step_schedulers(self) -> None:
        self._loop.update_lr_schedulers("step", update_plateau_schedulers=False)
