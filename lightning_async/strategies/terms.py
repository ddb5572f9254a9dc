"""What holds for the windows of one replica just now: whether they have a size, and steps a delay."""

from __future__ import annotations

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.strategies.gathered import Windows, size_of
from lightning_async.strategies.stepping import loss_scale
from lightning_async.trainer.patches import searches_lr
from lightning_async.trainer.updates import Updates

__all__ = ["Terms"]


class Terms:
    """Asked of the strategy at any moment: callbacks may change what it says.

    Args:
        strategy: says how it accumulates.
        averager: counts the steps.
    """

    def __init__(self, strategy: Windows, averager: BackgroundAverager) -> None:
        self._strategy, self._averager = strategy, averager

    @property
    def updates(self) -> Updates:
        """Steps of this fit."""
        assert self._strategy.updates is not None
        return self._strategy.updates

    @property
    def warming_up(self) -> bool:
        """Steps have no delay yet."""
        return self._averager.step < self._strategy.warmup_steps or searches_lr(self._strategy.module.trainer)

    @property
    def in_turn(self) -> bool:
        """Windows have a size; else each lasts until the one before is reduced."""
        return self.warming_up or self._strategy.accumulate != "until_reduced"

    @property
    def late(self) -> bool:
        """Steps have a delay by now."""
        return self._strategy.delay > 0 and not self.warming_up

    @property
    def size(self) -> int:
        """Batches in the window that begins, at the least."""
        sizes = self._strategy.sizes
        return size_of(self._strategy.accumulate, self._averager.gates) if sizes is None else sizes.size

    def fills(self, batches: int, samples: float, size: float) -> bool:
        """Whether so many batches, of so many samples, are a window that is to have ``size`` batches."""
        sizes = self._strategy.sizes
        return batches >= max(1, size) and (sizes is None or samples >= sizes.least)

    @property
    def scale(self) -> float:
        """What mixed precision multiplies losses by."""
        return loss_scale(self._strategy)

    @property
    def batch_scale(self) -> float:
        """What a batch's gradients are multiplied by: Lightning divides the loss, too."""
        return self.scale / self._strategy.module.trainer.accumulate_grad_batches
