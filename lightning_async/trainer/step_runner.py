"""The base class of an object that runs a replica's batches: backward passes and optimizer steps, under a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer


class StepRunner:
    """The steps of one replica in one session. This base class takes each step at once, and exchanges nothing.

    The training thread calls, for each batch: `start_batch`; within `batch`, for each backward pass, `backward` as a
    context and then `after_backward`; `step` for each optimizer step; `after_batch`. Before a sync point it calls
    `finish_batch`, and `close` at the end of the session.
    """

    recent: Sequence[Any] = ()
    """The last batches, if BatchNorm's statistics are to be recomputed."""
    between_windows = True
    """Whether this replica may join others' validations: it holds no batches of a step that others have taken."""
    stops_here = True
    """Whether this replica may leave training at this batch, once all know that a rank was told to stop.

    If False, the replica still has to step with a mean of gradients. The others take that step before they leave, one
    batch later.
    """
    accumulates: bool | None = None
    """Whether gradients of trained batches wait for a step and are not passed on to it yet; None: ask Lightning."""
    missed_steps: int | None = None
    """Number of the others' synchronous steps that this replica has missed; None if it takes none."""
    called = False
    """Whether a replica has called all ranks together with the step that this replica has just taken."""

    def start_batch(self, batch: Any) -> None:
        """Begin a batch, before its forward pass."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager that is entered around the batch's forward and backward passes."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for one backward pass."""
        return nullcontext()

    def after_backward(self) -> None:
        """Use the gradients that a backward pass has computed."""

    def skip_batch(self) -> None:
        """Do not count the batch, because `training_step` has returned None in automatic optimization."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take one optimizer step.

        Args:
            optimizer: Optimizer that asks for the step.
            closure: Function that computes the loss and the gradients; in manual optimization, whatever the user
                passed.
            run: Function that takes Lightning's optimizer step, given a closure.

        Returns:
            The result of ``run`` or ``closure``.
        """
        return run(closure)

    def after_batch(self) -> None:
        """End a batch: do what is due after its forward and backward passes, such as a delayed optimizer step."""

    def finish_batch(self) -> None:
        """Take the steps that were postponed to the end of the batch. Idempotent."""

    def call_all(self) -> bool:
        """Ask all ranks, with this rank's next message, to come to a sync point after the same step.

        Returns False if that is impossible. Then the caller asks in another way, and each rank comes to the sync point
        at the batch boundary after it has learned of it.
        """
        return False

    def complete_summary(self) -> None:
        """Add counts that other processes hold, such as servers, to the run's summary, at the last sync point."""

    def close(self) -> None:
        """Undo the changes that were made to optimizers, without waiting for other ranks."""
