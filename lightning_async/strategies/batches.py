"""The batch under way: what it counts, and what is kept of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_async.engine.averaging.batch_norm import RECENT_BATCHES
from lightning_async.trainer.batch import batch_size, pulled, pulls

__all__ = ["Batches"]


class Batches:
    """Of one replica. One that `training_step` takes by itself is known once it has been taken: it is looked at where
    its gradients are, at the latest as the next one begins.

    Args:
        strategy: counts them; its module, what is done about buffers, and its `Pacing`.
        tell: called once for each batch, with its samples.
    """

    def __init__(self, strategy: Any, tell: Callable[[float], None]) -> None:
        self._strategy, self._tell = strategy, tell
        self._pulls, self._unseen = pulls(strategy.module), False
        self._taken: Any = None
        self.recent: deque[Any] = deque(maxlen=RECENT_BATCHES)
        """For recomputing BatchNorm's statistics, where that is asked for."""

    def start(self, batch: Any) -> None:
        """The training thread has a batch; or the one before, where `training_step` takes them."""
        self.see()
        self._unseen = self._pulls
        if not self._pulls:
            self._see(batch)

    def see(self) -> None:
        """Whatever batch there is has been taken by now."""
        if not self._pulls:
            return
        taken = pulled(self._strategy.module.trainer)
        if taken is not None and (self._unseen or taken is not self._taken):  # it may take several
            self._unseen, self._taken = False, taken
            self._see(taken)

    def _see(self, batch: Any) -> None:
        if self._strategy.buffers == "recompute":
            self.recent.append(batch)
        counted = self._strategy.count(batch)
        self._strategy.pacing.samples = counted if self._strategy.count is batch_size else batch_size(batch)
        self._tell(counted)
