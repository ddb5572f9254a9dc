"""Small changes to Lightning and torchmetrics that more than one strategy needs."""

from __future__ import annotations

import logging
import operator
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
    "replace_for_users",
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


class _InPlaceOf:
    """What an object calls for now, in place of what it had.

    Users pickle and copy their objects in mid-fit: a pickle and a deep copy have what the object had.

    Args:
        had: what stood there.
        call: what is called.
    """

    def __init__(self, had: Any, call: Callable[..., Any]) -> None:
        self._had, self._call = had, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        # No function of this package: whoever reads the pickle need not have it.
        return operator.itemgetter(0), ((self._had,),)


class _InPlaceOfAll(_InPlaceOf):
    """The same for what says nothing of the object itself: a deep copy goes on with it, a pickle does not."""

    def __deepcopy__(self, memo: Any) -> _InPlaceOfAll:
        return self


def replace_for_users(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """`replace`, on an object that a user may pickle or copy meanwhile: a callback, a logger."""
    original = getattr(owner, name)
    return set_for_now(owner, name, _InPlaceOf(original, wrap(original)))


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

    # Modules keep metrics in their hyper-parameters, which checkpoints pickle while training runs.
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    return [
        set_for_now(metric, name, _InPlaceOfAll(getattr(metric, name), function))
        for metric in metrics
        for name, function in (("dist_sync_fn", gather), ("distributed_available_fn", available))
    ]
