"""Windows of accumulation that a strategy gathers by itself, and a callback says the size of."""

from __future__ import annotations

from typing import Any

from lightning_async.trainer.patches import Undo, set_for_now
from lightning_async.trainer.windows import Windows

__all__ = ["LentWindows"]


class LentWindows(Windows):
    """Those of `AsyncGradientStrategy`, which weighs batches, averages, and steps with a window when it has arrived.

    Args:
        trainer, plan, mean, count: see `Windows`; nothing is patched.
    """

    even = True
    """All batches of this epoch were of equal size: ranks come to each step after as many of them."""

    def install(self) -> list[Undo]:
        trainer: Any = self._trainer
        return [
            set_for_now(trainer, "accumulate_grad_batches", trainer.accumulate_grad_batches),
            set_for_now(trainer.strategy, "sizes", self),
        ]

    @property
    def size(self) -> int:
        """Batches in the window under way, or that comes, at the least."""
        return 1 if self.planned.by_samples else self.planned.batches

    @property
    def least(self) -> float:
        """Samples in it, at the least."""
        return self.planned.samples if self.planned.by_samples else 0.0

    @property
    def ends(self) -> bool:
        """The batch under way, or just done with, is the last one of a window."""
        last = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        return last or (self.batches >= self.size and self.samples >= self.least)

    def show(self) -> None:
        self._trainer.accumulate_grad_batches = self.planned.batches

    def begin_batch(self, batch: Any) -> None:
        if self.away:
            return
        samples = self._count(batch)
        if self._trainer.strategy.between_windows:
            self.planned, self.batches, self.samples = self._plan(samples), 0, 0.0
            self.is_open = True
            self.show()
        self.batches, self.samples = self.batches + 1, self.samples + samples
        begins = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1
        self.even = (begins or self.even) and samples * self.planned.batches == self.planned.samples

    def end_batch(self) -> bool:
        if self.away or not self.is_open or not self._trainer.strategy.between_windows:
            return False
        self.is_open = False
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "even": self.even}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.even = state.get("even", True)
