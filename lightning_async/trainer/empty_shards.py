"""A rank without data trains for no batch, but goes through every epoch: its callbacks take part in gates."""

from __future__ import annotations

from typing import Any

from lightning_async.trainer.patches import Undo, replace, set_for_now
from lightning_async.trainer.protocols import Drifting

__all__ = ["EmptyShards"]


class EmptyShards:
    """Patches how the fit loop takes its data.

    Args:
        strategy: its collectives.
        trainer: its fit loop and its module.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._seen_loader: Any = None

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [
            replace(self._trainer.fit_loop, "setup_data", self._setup_data),
            set_for_now(self._trainer.lightning_module, "allow_zero_length_dataloader_with_multiple_devices", True),
        ]

    def _setup_data(self, original: Any) -> Any:
        def setup_data() -> None:
            original()
            fit, trainer, world = self._trainer.fit_loop, self._trainer, self._strategy.world
            loader = fit._combined_loader
            if loader is None or loader is self._seen_loader or world is None:
                return
            self._seen_loader = loader
            lengths = world.gather_objects(fit.max_batches)
            if fit.max_batches == 0 and any(lengths):
                fit.max_batches = float("inf")
                trainer.val_check_batch = float("inf")
                fit._last_train_dl_reload_epoch = trainer.current_epoch

        return setup_data
