"""A fit that had taken its last step, but had not come to its end: Lightning would take it for one that has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["Limits"]


class Limits:
    """Raises a fit's ``max_steps`` and ``max_epochs`` for a moment, so that its loop begins and finds nothing to train.

    What is left are the ends of the epoch and of training. Where replicas drift, the others may still have steps to
    take, and this rank takes part in all they do together.

    Args:
        trainer: whose fit it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._given: tuple[int, int] | None = None
        self._expected = False

    def expect(self) -> None:
        """The next fit begins where a checkpoint was made; all ranks know."""
        self._expected = True

    def lift(self, epoch_is_open: bool) -> None:
        """The fit has its data. Where it begins at a checkpoint, all ranks find out together who has steps to take.

        Args:
            epoch_is_open: the end of this rank's epoch was yet to come.
        """
        expected, self._expected, fit = self._expected, False, self._trainer.fit_loop
        if not expected:
            return
        step, epoch = fit.epoch_loop.global_step, fit.epoch_progress.current.processed
        done = _reached(step, fit.max_steps) or _reached(epoch, fit.max_epochs)
        others = self._trainer.strategy.reduce_boolean_decision(not done, all=False)
        if done and (others or (epoch_is_open and step == fit.max_steps)):
            self._given = fit.max_steps, fit.max_epochs
            self._raise()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """As they were given, to whoever looks at them meanwhile."""
        given = self._given
        self.put_back()
        yield
        if given is not None:
            self._given = given
            self._raise()

    def put_back(self) -> None:
        """As they were given."""
        if self._given is not None:
            fit, (steps, epochs) = self._trainer.fit_loop, self._given
            fit.epoch_loop.max_steps, fit.max_epochs, self._given = steps, epochs, None

    def _raise(self) -> None:
        assert self._given is not None
        fit, (steps, epochs) = self._trainer.fit_loop, self._given
        if steps != -1:  # with another -1, Lightning's loops would take the epoch's number for another one
            fit.epoch_loop.max_steps = max(steps, fit.epoch_loop.global_step + 1)
        if epochs != -1:
            fit.max_epochs = max(epochs, fit.epoch_progress.current.processed + 1)


def _reached(now: int, limit: int) -> bool:
    return limit != -1 and now >= limit
