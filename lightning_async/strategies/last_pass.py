"""The last backward pass of a window whose step has no delay: gradients leave as it makes them.

the training thread                                    the engine's thread
the last batch's backward pass begins: what the window
holds goes into `sent`, and the message is ready  ---> headers meet
the pass makes gradients, from the tail on  ---------> of each part, that in `sent` and that of the pass are summed
the batch ends: the window is empty  ----------------> the rest, and the commit
its step is taken
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.gradients.window import Window
from lightning_async.strategies.gathered import Windows
from lightning_async.strategies.terms import Terms
from lightning_async.trainer.batch import pulls
from lightning_async.trainer.own_gradients import changes_gradients

__all__ = ["LastPass"]


class LastPass:
    """Of one replica, on its training thread. Until the pass is over the window holds what it has held.

    A window leaves as a whole, behind the pass, where its gradients may change without a trace, a module takes its
    batches by itself, in manual optimization, compressed, and on GPUs.

    Args:
        strategy: whose windows these are.
        terms: of these.
        gradients: by which they leave.
        window: the open one.
    """

    def __init__(self, strategy: Windows, terms: Terms, gradients: SynchronousGradients, window: Window) -> None:
        self._strategy, self._terms, self._gradients, self._window = strategy, terms, gradients, window
        module = strategy.module
        self._possible = module.automatic_optimization and not pulls(module) and not changes_gradients(module)
        self._samples = 0.0
        self.under_way = False
        """The window is on its way, and its pass, or the batch that it is of, is not over."""

    def begin(self, samples: float, size: float, step: int) -> None:
        """A backward pass begins, of a batch of so many samples.

        Args:
            samples: of the batch.
            size: batches that the window is to have.
            step: steps that were taken before.
        """
        window, terms = self._window, self._terms
        if self.under_way or not self._possible or samples <= 0.0 or terms.late or not terms.in_turn:
            return
        full = terms.fills(window.batches + 1, window.samples + samples, size)
        if not (full or terms.updates.ends_epoch) or terms.updates.left <= 0:
            return
        self._samples = window.samples + samples
        self._strategy.tell_place()
        self.under_way = window.leave_with(samples, terms.batch_scale, step)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """The pass, or all of its batch: where that fails nobody waits for its gradients."""
        try:
            yield
        except BaseException:
            if self.under_way:
                self.under_way = False
                self._gradients.withdraw()
            raise

    def finish(self) -> float:
        """The batch is over: it is in the window, which has left. Returns the samples behind that."""
        self.under_way = False
        self._window.clear()
        self._gradients.finish_last()
        return self._samples
