"""The base class of objects that run a replica's batches, backward passes and optimizer steps for a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer


class StepRunner:
    """The steps of one replica in one session, which is a fit's training over one connection of the ranks.

    This base class takes each step at once, and exchanges nothing.

    The training thread calls, for each batch: `start_batch`; within `batch`, for each backward pass, `backward` as a
    context and then `after_backward`; `step` for each optimizer step; `after_batch`. Before a sync point it calls
    `finish_batch`, and `close` at the end of the session.
    """

    recent: Sequence[Any] = ()
    """The last batches, if BatchNorm's statistics are to be recomputed."""
    between_windows = True
    """Whether this replica may come to validations and sync points that other ranks ask for.

    False within a window, whose optimizer step the other ranks may have taken already.
    """
    stops_here = True
    """Whether this replica may leave training at this batch, once all ranks know that one was told to stop.

    If False, the replica still has to step with a mean of gradients. The other replicas take that step before they
    leave, one batch later.
    """
    accumulates: bool | None = None
    """Whether gradients of trained batches still wait for an optimizer step that has not begun; None: ask Lightning."""
    missed_steps: int | None = None
    """Number of the others' synchronous steps that this replica has missed; None if it takes none."""
    called = False
    """Whether any replica has asked, with the step just taken, that all ranks come to a sync point."""

    def start_batch(self, batch: Any) -> None:
        """Prepare for ``batch``, before its forward pass."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context manager that is entered around a batch's forward and backward passes.

        Here it does nothing. In a subclass, the passes may run at predicted parameters, and after an error it may
        withdraw gradients.
        """
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return a context manager for one backward pass."""
        return nullcontext()

    def after_backward(self) -> None:
        """Use the gradients that a backward pass has computed, for example average them or count their samples."""

    def skip_batch(self) -> None:
        """Do not count the batch, because `training_step` has returned None in automatic optimization."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take one optimizer step.

        Args:
            optimizer: Optimizer that is to take the step.
            closure: Function that computes the loss and the gradients; in manual optimization, whatever the user
                passed.
            run: Function that takes Lightning's optimizer step; its argument is the closure to use.

        Returns:
            The result of ``run`` or ``closure``.
        """
        return run(closure)

    def count_unseen_step(self) -> bool:
        """Count a step that an optimizer has taken by another method than `step`, such as the ``second_step`` of SAM.

        Returns False if this rank's peers cannot take part in such a step.
        """
        return True

    def after_batch(self) -> None:
        """Do what is due after a batch's forward and backward passes, such as a step with gradients that arrived."""

    def finish_batch(self) -> None:
        """Take the steps that were postponed to the end of the batch. Idempotent."""

    def call_all(self) -> bool:
        """Ask all ranks, with this rank's next message, to come to a sync point after the same step.

        Returns False if this runner cannot ask so. The caller then asks in another way, and each rank comes to the sync
        point at the batch boundary after it has learned of the request.
        """
        return False

    def unstepped(self) -> list[float]:
        """Return the counts of those batches that no optimizer step has used yet, for a checkpoint."""
        return []

    def restore_unstepped(self, counts: list[float]) -> None:
        """Go on with ``counts``, a result of `unstepped` at a save within an accumulation of gradients."""

    def complete_summary(self) -> None:
        """Add counts that other processes have, such as servers, to the run's summary, at the last sync point."""

    def close(self) -> None:
        """Remove the hooks and other changes that were made to optimizers, without waiting for other ranks."""
