"""Windows of gradients in manual optimization, where each of several optimizers asks for steps of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.header import Arrival, Gate
from lightning_async.strategies.accumulating import Accumulating
from lightning_async.strategies.behind import Behind
from lightning_async.strategies.gathered import Windows

__all__ = ["ManualWindows", "check_apart"]


def check_apart(owner: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Whether each parameter is of one optimizer at most.

    Raises:
        ValueError: one is of two; names it.
    """
    names = {p: name for name, p in module.named_parameters()}
    seen: dict[Any, int] = {}
    for number, optimizer in enumerate(optimizers):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if seen.setdefault(p, number) != number:
                raise ValueError(
                    f"Optimizers {seen[p]} and {number} both have {names.get(p, 'a parameter')!r}: `{owner}` gathers "
                    "gradients by optimizer. Give each parameter to one of them."
                )


class ManualWindows(Accumulating):
    """``optimizer.step()`` in `training_step` moves the gradients of that optimizer's parameters into the window.

    A batch in which an optimizer has asked for a step counts for the window's size. What an optimizer steps with, when
    the window has arrived, is the mean over the samples whose gradients were there when it asked: those of the batch,
    and of batches since `zero_grad` has set them to None. Where no replica has asked for a step of an optimizer, it
    takes none.

    Args:
        strategy, averager, gradients, meet: see `Accumulating`.
    """

    def __init__(
        self,
        strategy: Windows,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
        meet: Callable[[Gate], Arrival],
    ) -> None:
        gradients.rounds.apart = True
        self.steps = False
        """An optimizer takes a step, in place of asking for one."""
        self._behind = Behind(strategy.optimizers)
        self._uncounted = 0.0
        """Samples since any optimizer has asked for a step."""
        self._asked = False
        super().__init__(strategy, averager, gradients, meet)
        self._terms.updates.each = len(self._behind.params)
        window = averager.gathered
        averager.gathered = lambda: self._pending() | (window() or {}) or None

    def _pending(self) -> dict[str, Any]:
        behind = self._behind.samples
        return {"behind": list(behind), "uncounted": self._uncounted} if any(behind) else {}

    def _load(self, saved: dict[str, Any], alike: Any) -> None:
        super()._load(saved, alike)
        if len(saved.get("behind", ())) == len(self._behind.samples):
            self._behind.samples, self._uncounted = list(saved["behind"]), float(saved["uncounted"])

    # ---- batches ----

    def start_batch(self, batch: Any) -> None:
        super().start_batch(batch)
        self._behind.start_batch()
        self._asked = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward pass: its samples are behind all gradients that are there after it."""
        self._behind.begin_pass()
        yield
        self._batches.see()
        self._behind.end_pass(self._batch_samples)

    def after_backward(self) -> None:
        """Gradients stay where they are, until their optimizer asks for a step."""

    def gather(self, optimizer: Optimizer) -> None:
        """This optimizer asks for a step."""
        self._batches.see()
        number = self._strategy.optimizers.index(optimizer)
        if not self._window.batches:
            self._size = self._terms.size
        samples = self._behind.take(number) or self._batch_samples
        self._window.add_(samples, self._terms.scale, self._averager.step, self._behind.params[number])
        self._asked = True

    def after_batch(self) -> None:
        self._batches.see()
        if self._asked:
            self._window.count(self._uncounted + self._batch_samples)
            self._uncounted = 0.0
            self._terms.updates.on_gathered()
        else:
            self._uncounted += self._batch_samples
        if self._asked or self._terms.updates.ends_epoch:
            super().after_batch()

    # ---- steps ----

    def _take(self) -> None:
        """As always, beside gradients that wait for their optimizer to ask."""
        if self._gradients.arrived is None:
            return
        kept = [(p, p.grad) for p in self._gradients.replica.tensors.trained.values()]
        for p, _ in kept:
            p.grad = None
        try:
            super()._take()
        finally:
            for p, gradient in kept:
                p.grad = gradient

    def _step(self) -> None:
        self._terms.updates.take_each(self._each())

    def _each(self) -> Iterator[Callable[[], None]]:
        arrived, scale, replica = self._gradients.arrived, self._terms.scale, self._gradients.replica
        assert arrived is not None
        self._gradients.take_(scale, self._correcting.change_)
        used = {
            p for p, any_used in zip(replica.tensors.trained.values(), arrived.used.tolist(), strict=True) if any_used
        }
        for optimizer, params in zip(self._strategy.optimizers, self._behind.params, strict=True):
            if mine := used & params:
                yield partial(self._step_with, optimizer, mine, scale)

    def _step_with(self, optimizer: Optimizer, params: set[Any], scale: float) -> None:
        def closure() -> None:
            if (now := self._terms.scale) != scale:  # the scaler has changed it with another optimizer's step
                for p in params:
                    p.grad.mul_(now / scale)

        self.steps = True
        try:
            self._strategy.optimizer_step(optimizer, closure)
        finally:
            self.steps = False
