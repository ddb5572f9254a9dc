"""Measurement of a replica's batch time, divided into data, compute and communication, and a warning of slow replicas.

    next(loader)                    data
    the rest of the batch           compute, except for
      packing and merging             communication
      waiting at sync points          not counted: a fast replica waits, a slow one is waited for

Each rank sends its times to all others in its headers. On a GPU, they are times of the host. When the host has queued
enough work, it waits for the GPU, so the times include the GPU's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lightning_async.algorithms.schedules import Pace, Reason, straggler
from lightning_async.events import tell
from lightning_async.trainer.namespace import Undo, override, searches_lr
from lightning_async.trainer.strategy_view import StrategyView

_FIRST = 20
"""Number of batches to measure before the pace is sent, because the first ones load, compile and allocate."""
_WARM = 3
"""Number of first batches that are not measured at all."""
_DECAY = 0.95
_EVERY_S = 5.0
_CAUSES: dict[Reason, str] = {
    "data": "its data comes late: give its loader more workers, or look at its disk or network",
    "compute": "it computes more slowly: look at its device, its clock rate, and what else runs there",
    "communication": "it packs and merges more slowly: look at its memory and processors",
}


class Pacing:
    """The measured pace of this replica, and a single warning if one of the replicas is slow.

    ``communicated_s`` returns the seconds that this replica has spent on packing and merging so far. ``now`` is a
    monotonic clock.
    """

    def __init__(
        self,
        view: StrategyView,
        trainer: Any,
        communicated_s: Callable[[], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._trainer = trainer
        self._communicated_s = communicated_s
        self.now = now
        self._fetching = self._data_s = 0.0
        self._batches = 0
        self._looked = now()
        self._warned = False
        self.pace = Pace()
        """An exponential mean over the last batches."""
        self.mean = Pace()
        """The mean over all batches that were measured."""
        self.batches = 0
        self.samples = 1.0
        """Number of samples in the batch under way, which the strategy sets."""

    def install(self) -> list[Undo]:
        loop = self._trainer.fit_loop.epoch_loop
        return [
            override(loop, "_on_before_fetch", self._before_fetch),
            override(loop, "_on_after_fetch", self._after_fetch),
            override(loop, "advance", self._advance),
        ]

    def _before_fetch(self, original: Any) -> None:
        original()
        self._fetching = self.now()

    def _after_fetch(self, original: Any) -> None:
        self._data_s += self.now() - self._fetching
        original()

    def _advance(self, original: Any, data_fetcher: Any) -> None:
        started = self.now()
        self._data_s = 0.0
        waited_s = self._waited_s
        communicated_s = self._communicated_s()
        original(data_fetcher)
        if searches_lr(self._trainer):
            return
        data_s = self._data_s
        # Packing and waiting happen within the batch, so their shares are subtracted from its time.
        communicated_s = max(0.0, self._communicated_s() - communicated_s)
        rest_s = self.now() - started - data_s - communicated_s - max(0.0, self._waited_s - waited_s)
        self._add(Pace(data_s, max(0.0, rest_s), communicated_s, self.samples))

    @property
    def _waited_s(self) -> float:
        sync_points = self._view.sync_points
        return 0.0 if sync_points is None else sync_points.waited_s

    def _add(self, batch: Pace) -> None:
        self._batches += 1
        if self._batches <= _WARM:
            return
        self.batches += 1
        self.mean = _towards(self.mean, batch, 1.0 / self.batches)
        self.pace = _towards(self.pace, batch, max(1.0 - _DECAY, 1.0 / self.batches))
        if self.batches >= _FIRST and (sync_points := self._view.sync_points) is not None:
            sync_points.tell_pace(self.pace)
            if not self._warned and self.now() - self._looked >= _EVERY_S:
                self._looked = self.now()
                self._look({name: Pace(*pace) for name, pace in sync_points.paces.items()})

    def _look(self, paces: dict[str, Pace]) -> None:
        """Warn, on rank 0, of a replica that is slower than the others."""
        found = straggler(paces)
        if found is None or self._trainer.global_rank:
            return
        self._warned = True
        tell(
            "straggler", logging.WARNING, f"{found}: {_CAUSES[found.reason]}.", rank=found.name,
            slower=round(found.slower, 2), reason=found.reason,
        )  # fmt: skip


def _towards(mean: Pace, batch: Pace, weight: float) -> Pace:
    return Pace(*(old + weight * (new - old) for old, new in zip(mean, batch, strict=True)))
