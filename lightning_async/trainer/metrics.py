"""Ranks are lost while metrics are computed: each is one of the same ranks, not a sum of three and a count of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_async.engine.world import World
from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.protocols import Drifting

__all__ = ["WholeMetrics"]


class WholeMetrics:
    """What `self.log` and torchmetrics compute by several collectives is computed again where not all answer all.

    Args:
        strategy: where all ranks meet.
        trainer: its loops' results are patched, and its module's metrics.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        if not self._strategy.shrinks:
            return []
        from torchmetrics import Metric

        loop = self._trainer.fit_loop.epoch_loop
        metrics = [child for child in self._trainer.lightning_module.modules() if isinstance(child, Metric)]
        return [
            *(replace(results, "_get_cache", self._cache) for results in (loop._results, loop.val_loop._results)),
            *(replace(metric, "compute", lambda original, m=metric: self._compute(original, m)) for metric in metrics),
        ]

    def _cache(self, original: Any) -> Any:
        return lambda logged, on_step: whole(self._strategy.world, lambda: original(logged, on_step), logged)

    def _compute(self, original: Any, metric: Any) -> Any:
        return lambda *args, **kwargs: whole(self._strategy.world, lambda: original(*args, **kwargs), metric)


def whole(world: World | None, compute: Callable[[], Any], metric: Any) -> Any:
    """What ``compute`` makes of a metric, by answers of the same ranks."""
    if world is None or world.drifting:
        return compute()
    again = False

    def operation() -> Any:
        nonlocal again
        if again:
            metric._computed = None
        again = True
        return compute()

    return world.in_one_generation(operation)
