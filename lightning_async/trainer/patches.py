"""Small changes to Lightning and torchmetrics that more than one strategy needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_async.engine.world import World
from lightning_async.trainer.namespace import pytorch

__all__ = [
    "Undo",
    "callbacks_of",
    "in_words",
    "rank_zero_info",
    "replace",
    "searches_lr",
    "set_for_now",
    "shorten",
    "sync_metrics_through",
    "take_back",
]

log = logging.getLogger(__name__)
Undo = Callable[[], None]


def rank_zero_info(text: str) -> None:
    """One INFO line, on rank 0, by Lightning's logger."""
    pytorch("utilities.rank_zero").rank_zero_info(text)


def searches_lr(trainer: Any) -> bool:
    """Whether a search for a learning rate runs, which is no training of the user's."""
    callback = pytorch("tuner.lr_finder")._LRCallback
    return trainer is not None and any(isinstance(c, callback) for c in trainer.callbacks)


def in_words(exception: BaseException) -> str:
    """What the other ranks are told of this rank's end."""
    if isinstance(exception, KeyboardInterrupt):
        return "it was interrupted by hand (KeyboardInterrupt), which is no error of the program"
    try:
        return f"{type(exception).__name__}: {exception}"
    except Exception:  # of its own class
        return f"{type(exception).__name__}, which does not say why"


def shorten(exception: BaseException) -> None:
    """Leave the message, without the places in Lightning and in this package that it came through; they are logged."""
    log.debug("Where it was noticed:", exc_info=exception)
    exception.__cause__ = exception.__context__ = None
    exception.__suppress_context__ = True
    exception.__traceback__ = None


def set_for_now(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute; returns what sets it back."""
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if had else delattr(owner, name)


def take_back(undo: list[Undo]) -> None:
    """Call what sets things back, the last first; the list is empty then."""
    while undo:
        undo.pop()()


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Put what ``wrap`` makes of a method in its place; returns what sets it back."""
    return set_for_now(owner, name, wrap(getattr(owner, name)))


def callbacks_of(trainer: Any, kind: str) -> list[Any]:
    """The Trainer's callbacks of one of Lightning's classes; none where this Lightning has no such class."""
    wanted = getattr(pytorch("callbacks"), kind, ())
    return [callback for callback in trainer.callbacks if isinstance(callback, wanted)]


def validation_interval(trainer: Any) -> int | float | timedelta:
    """``val_check_interval``: batches, a share of an epoch, or a time, of which the Trainer has no such attribute."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    return trainer.val_check_interval if seconds is None else timedelta(seconds=seconds)


def sync_metrics_through(world: Callable[[], World | None], module: Any) -> list[Undo]:
    """Torchmetrics' own collectives go through ``world()``, and wait for nobody while replicas drift."""
    from torchmetrics import Metric

    def available() -> bool:
        there = world()
        return there is not None and not there.drifting

    def gather(tensor: Any, group: Any = None) -> Any:
        there = world()
        return there.gather_uneven(tensor) if there is not None else [tensor]

    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    undo = [set_for_now(metric, "dist_sync_fn", gather) for metric in metrics]
    return undo + [set_for_now(metric, "distributed_available_fn", available) for metric in metrics]
