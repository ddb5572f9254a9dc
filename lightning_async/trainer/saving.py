"""`ModelCheckpoint` takes equal steps and metrics for granted on all ranks; replicas that drift have their own."""

from __future__ import annotations

from typing import Any

from lightning_async.trainer.patches import Undo, callbacks_of, replace
from lightning_async.trainer.protocols import Drifting

__all__ = ["Saving"]


class Saving:
    """Patches every `ModelCheckpoint` of a Trainer.

    Args:
        strategy: its collectives.
        trainer: its callbacks.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        checkpoints = callbacks_of(self._trainer, "ModelCheckpoint")
        return [replace(checkpoint, "_monitor_candidates", self._from_rank_zero) for checkpoint in checkpoints]

    def model_changed(self) -> None:
        """No checkpoint holds the model, whatever this rank's step count says.

        `ModelCheckpoint` skips a save at a step count that it has saved before. A rank that waits at a gate keeps its
        count, others do not, and then some would save, with collectives, and some would not.
        """
        for callback in callbacks_of(self._trainer, "ModelCheckpoint"):
            callback._last_global_step_saved = -1

    def _from_rank_zero(self, original: Any) -> Any:
        """Files are named by the step and by metrics, and names are compared between collectives: they must be equal
        on all ranks, and steps are not."""

        def monitor_candidates(trainer: Any) -> dict[str, Any]:
            candidates, world = original(trainer), self._strategy.world
            if world is None or world.drifting:
                return candidates
            return world.broadcast({name: value.cpu() for name, value in candidates.items()})

        return monitor_candidates
