"""Lightning's `SpikeDetection` on replicas that drift: one rank sees a spike of its loss, all ranks raise.

The callback asks all ranks after every batch, which would be a lockstep. Here each looks at its own loss; a spike is a
vote for stopping, and where all have stopped every rank raises what the callback raises.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lightning_async.engine.world import World
from lightning_async.trainer.patches import callbacks_of, replace_for_users

__all__ = ["Spikes"]


class Spikes:
    """Patches every `SpikeDetection` of a Trainer.

    Args:
        trainer: its callbacks.
        vote: asks all ranks to stop.
    """

    def __init__(self, trainer: Any, vote: Callable[[], None]) -> None:
        self._trainer, self._vote = trainer, vote
        self._callbacks = callbacks_of(trainer, "SpikeDetection")  # since Lightning 2.3
        self._handlers = [callback._handle_spike for callback in self._callbacks]
        self._seen = -1
        """The first batch that this rank saw a spike in."""

    def install(self) -> list[Callable[[], None]]:
        """Patch; returns what takes it back."""
        undo = []
        for callback in self._callbacks:
            undo.append(replace_for_users(callback, "_handle_spike", lambda original: self._note))
            undo.append(replace_for_users(callback, "on_train_batch_end", self._alone))
        return undo

    def raise_agreed(self, world: World) -> None:
        """All ranks have stopped: if one has seen a spike, write down its batch and raise, on every rank."""
        if not self._callbacks:
            return
        seen = [batch for batch in world.gather_objects(self._seen) if batch >= 0]
        if seen:
            for handle in self._handlers:
                handle(self._trainer, min(seen))

    def _note(self, trainer: Any, batch_idx: int) -> None:
        if self._seen < 0:
            self._seen = batch_idx
            self._vote()

    def _alone(self, original: Callable[..., None]) -> Callable[..., None]:
        """The hook, with a Trainer of one rank."""

        def on_train_batch_end(trainer: Any, *args: Any, **kwargs: Any) -> None:
            strategy = SimpleNamespace(
                root_device=trainer.strategy.root_device,
                barrier=lambda *_: None,
                reduce_boolean_decision=lambda decision, all=True: decision,
            )
            original(SimpleNamespace(strategy=strategy, default_root_dir=trainer.default_root_dir), *args, **kwargs)

        return on_train_batch_end
