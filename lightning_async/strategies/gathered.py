"""What a replica has gathered towards steps to come, in checkpoints: the open window, and what compression owes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from lightning_async.engine.gates import Gates
from lightning_async.engine.gradients.feedback import GradientCompression
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.gradients.window import Window
from lightning_async.rules.balance import BalancedWindows
from lightning_async.rules.delays import DelayCorrection
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.stepping import Steps
from lightning_async.trainer.lent_windows import LentWindows
from lightning_async.trainer.updates import Updates

__all__ = ["Windows", "put", "size_of", "take"]


class Windows(Steps, Protocol):
    """What a strategy has whose windows these are."""

    accumulate: int | BalancedWindows | Literal["until_reduced"]
    sizes: LentWindows | None
    delay: int
    warmup_steps: int
    correction: DelayCorrection | None
    compression: GradientCompression
    updates: Updates | None
    saved: SavedState

    def tell_place(self) -> None: ...

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any: ...


def size_of(accumulate: int | BalancedWindows | Literal["until_reduced"], gates: Gates) -> int:
    """Batches in the window that begins, at the least."""
    if isinstance(accumulate, BalancedWindows):
        speeds, name = gates.speeds, gates.name
        if name not in speeds:
            return accumulate.batches
        return accumulate.size(list(speeds.values()), list(speeds).index(name))
    return 1 if accumulate == "until_reduced" else accumulate


def take(window: Window, gradients: SynchronousGradients, size: float, ends_epoch: bool) -> dict[str, Any] | None:
    """With what has left the window and is in no step yet, where training ends between the two.

    Args:
        window: that is open.
        gradients: by which it leaves.
        size: that it is to have.
        ends_epoch: see `CommonRates.ends_epoch`.
    """
    owed = gradients.owed()
    held: dict[str, Any] = {} if owed is None else {"compression": owed}
    if ends_epoch:
        held["ends_epoch"] = True
    if window.batches or gradients.unstepped() is not None:
        held |= {"size": size, "asks": list(gradients.asks), "window": window.state_dict()}
    return held or None


def put(saved: dict[str, Any], window: Window, gradients: SynchronousGradients) -> float | None:
    """Go on with it; the size that the window is to have, where one is open."""
    if gradients.rounds.feedback is not None and "compression" in saved:
        gradients.rounds.feedback.load_state_dict(saved["compression"])
    if "window" not in saved:
        return None
    window.load_state_dict(saved["window"])
    if "asks" in saved:  # it may leave at a gate, before a batch begins that says so
        gradients.asks = saved["asks"][0], saved["asks"][1]
    return float(saved["size"])
