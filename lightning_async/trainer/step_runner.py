"""`StepRunner`: the base of what a strategy does with a replica's batches, backward passes and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer


class StepRunner:
    """The steps of one replica in one session. This base takes them as they come, and exchanges nothing.

    The training thread calls, for each batch: `start_batch`; within `batch`, for each backward pass, `backward` around
    it and `after_backward`; `step` for each optimizer step; `after_batch`. Before a sync point it calls `finish_batch`,
    and `close` at the end of the session.
    """

    recent: Sequence[Any] = ()
    """The last batches, if BatchNorm's statistics are to be recomputed."""
    between_windows = True
    """Whether this replica has no batches of a step that other replicas have whole: it may join their validation."""
    stops_here = True
    """Whether this replica leaves training here, once all have heard that one was told to stop, or with a later batch:
    it has a mean to step with, and the others step with that before they leave, with one batch more."""
    accumulates: bool | None = None
    """Whether there are gradients of batches that are in no step, and not on their way to one; None: as in Lightning's
    loop, which accumulates them."""
    missed_steps: int | None = None
    """Number of the others' synchronous steps that this replica has not taken; None where it takes none."""
    called = False
    """Whether a replica has called all ranks together with the step that this replica has just taken."""

    def start_batch(self, batch: Any) -> None:
        """Begin a batch."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context for the forward and backward passes of the batch."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for one backward pass."""
        return nullcontext()

    def after_backward(self) -> None:
        """Use the gradients that a backward pass has made."""

    def skip_batch(self) -> None:
        """Do not count the batch: in automatic optimization, `training_step` has returned None."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take one optimizer step.

        Args:
            optimizer: asks for the step.
            closure: computes the loss and the gradients; in manual optimization, whatever the user passed.
            run: takes Lightning's optimizer step with a closure.

        Returns:
            the result of ``run`` or ``closure``.
        """
        return run(closure)

    def after_batch(self) -> None:
        """End the passes of a batch."""

    def finish_batch(self) -> None:
        """Take what is put off to the end of a batch; idempotent."""

    def call_all(self) -> bool:
        """Have the next message call all ranks together, after the same step; return False if it cannot: each rank
        comes when it learns of the call."""
        return False

    def complete_summary(self) -> None:
        """Add what is counted elsewhere to the summary of the run, at the last sync point."""

    def close(self) -> None:
        """Restore the optimizers; wait for no other rank."""
