"""How many samples are behind gradients: of each optimizer in manual optimization, and of a worker's pushes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

__all__ = ["Behind", "Samples"]


class Behind:
    """Told of batches, and of the passes of `manual_backward` within them; of an optimizer whose gradients are taken.

    A batch counts once for what an optimizer takes, with however many passes. Gradients that `zero_grad` has set to
    None have nothing behind them.

    Args:
        optimizers: no two have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.params = [{p for group in each.param_groups for p in group["params"]} for each in optimizers]
        """Of each optimizer."""
        self.samples = [0.0] * len(self.params)
        self._counted: set[int] = set()
        """Optimizers for which the batch under way is counted."""

    def start_batch(self) -> None:
        """A batch begins."""
        self._counted.clear()

    def begin_pass(self) -> None:
        """A backward pass begins."""
        for number in range(len(self.params)):
            if not self._has_gradients(number):
                self.samples[number] = 0.0
                self._counted.discard(number)

    def end_pass(self, samples: float) -> None:
        """Its batch has so many, and they are behind all gradients that are there now."""
        for number in range(len(self.params)):
            if number not in self._counted and self._has_gradients(number):
                self.samples[number] += samples
                self._counted.add(number)

    def take(self, number: int) -> float:
        """Those of this optimizer, which has none from here on; 0.0 where nobody has told of a pass."""
        samples, self.samples[number] = self.samples[number], 0.0
        return samples

    def _has_gradients(self, number: int) -> bool:
        return any(p.grad is not None for p in self.params[number])


class Samples:
    """What a worker's pushes weigh.

    Args:
        optimizers: that are stepped with them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._behind = Behind(optimizers)
        self._batch = self._since = self._told = 0.0
        self.spent = False
        """There was a step since these samples began to be counted: the next batch begins anew."""

    def start_batch(self) -> None:
        """A batch begins."""
        if self.spent:
            self._since, self._told, self.spent = 0.0, 0.0, False
        self._behind.start_batch()

    def count(self, samples: float) -> None:
        """It has so many."""
        self._batch = samples
        self._since += samples

    def skip(self) -> None:
        """There is no loss of the batch under way."""
        self._since, self._batch = self._since - self._batch, 0.0

    def begin_pass(self) -> None:
        """See `Behind`."""
        self._behind.begin_pass()

    def end_pass(self) -> None:
        """See `Behind`."""
        self._behind.end_pass(self._batch)

    def drop(self) -> None:
        """Gradients are dropped: what no step was told with yet is in none."""
        self._told = self._since

    def take(self, number: int) -> float:
        """Those behind the gradients of this optimizer, which are pushed; where nobody has told of a pass
        (`loss.backward()`) those since the last batch with a step of any."""
        return self._behind.take(number) or self._since

    def tell(self) -> float:
        """A step is told of; those that no other was told with."""
        samples, self._told, self.spent = self._since - self._told, self._since, True
        return samples
