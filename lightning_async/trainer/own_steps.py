"""What a module decides by itself: a batch without a loss, and steps of optimizers that Lightning has not wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from lightning_async.trainer.patches import Undo, replace

__all__ = ["OwnSteps"]


class OwnSteps:
    """Of one strategy, in a fit.

    A raw ``optimizer.step()`` would pass by the strategy: replicas would part, and Lightning would not count it. While
    `install` holds, the ``step`` of each optimizer is Lightning's, with all that belongs to it, unless Lightning itself
    calls it. A step that was taken from the optimizer before (``step = optimizer.step``, or a compiled one) cannot be
    led there: torch's hook sees it, and it is refused.

    Args:
        strategy: has the optimizers.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._under_way: set[int] = set()
        """Optimizers, by their `id`, of which Lightning takes a step."""
        self.skipped = False
        """`training_step` has returned None for the batch under way."""

    def install(self, trainer: Any) -> list[Undo]:
        """Patch; returns what takes it back."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        undo = [replace(loop, "_training_step", functools.partial(self._let_skip, loop))]
        for optimizer in self._strategy.optimizers:
            undo.append(optimizer.register_step_pre_hook(self._check).remove)
            undo.append(replace(optimizer, "step", functools.partial(self.led, optimizer)))
        return undo

    def _let_skip(self, loop: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Lightning refuses None where there are several ranks, as those that wait for its gradients would hang: here
        they do not."""

        def training_step(kwargs: Any) -> Any:
            self.skipped = False
            try:
                return original(kwargs)
            except RuntimeError:
                if not self.skipped:
                    raise
                return loop.output_result_cls(None)

        return training_step

    @contextmanager
    def taking(self, optimizer: Optimizer) -> Iterator[None]:
        """Lightning takes a step of this one."""
        new = {id(optimizer)} - self._under_way
        self._under_way |= new
        try:
            yield
        finally:
            self._under_way -= new

    def led(self, optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, in place of the optimizer's: where it is not Lightning that calls it, Lightning is to."""

        @functools.wraps(getattr(step, "__func__", step))
        def stepped(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if id(optimizer) in self._under_way:
                return step(*args, **kwargs)
            strategy = self._strategy
            number = next(i for i, each in enumerate(strategy.optimizers) if each is optimizer)
            return strategy._lightning_optimizers[number].step(*args, **kwargs)

        return MethodType(stepped, optimizer)  # a scheduler that is made later looks for its `__func__`

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self._under_way:
            return
        number = next(i for i, each in enumerate(self._strategy.optimizers) if each is optimizer)
        raise RuntimeError(
            f"`{type(optimizer).__name__}.step` (optimizer {number}) was called in a way that "
            f"`{type(self._strategy).__name__}` cannot see before: as a bound method that was taken from the optimizer "
            "before training, or compiled. Replicas would part without notice. Call `step()` of what "
            "`self.optimizers()` returns, or `optimizer.step()` itself."
        )
