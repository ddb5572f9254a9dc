"""The epoch under way goes on with other batches than those that its loaders were made for."""

from __future__ import annotations

import math
from typing import Any

from lightning_async.data.shares import Share
from lightning_async.data.source import Source, sources_of
from lightning_async.trainer.patches import Undo, callbacks_of, replace, set_for_now, take_back, validation_interval

__all__ = ["end_at", "follower", "go_on_with", "train_on"]


def follower(loader: Any) -> Source | None:
    """What follows a loader's position, for checkpoints."""
    owner = getattr(vars(loader).get("_get_iterator"), "source", None)
    return owner if isinstance(owner, Source) else None


def go_on_with(trainer: Any, share: Share, steps: int | None = None) -> list[Undo]:
    """Lightning's loop has these batches from here on; returns what undoes it, last first, at the epoch's end.

    Args:
        trainer: between two batches.
        share: begins with the number of this rank's next one.
        steps: the number behind the last batch of all ranks, which have begun the epoch together. Default: this one has
            come within it.
    """
    fit = trainer.fit_loop
    epoch, fetcher, combined = fit.epoch_loop, fit._data_fetcher, fit._combined_loader
    undo = end_at(trainer, share.end)
    interval = validation_interval(trainer)
    is_sized = not math.isinf(share.end)
    if is_sized and isinstance(interval, float):  # of an epoch; who comes within it leaves those on the way to others
        at_end = interval == 1.0 if steps is not None else share.first == 0
        every = share.end if at_end else max(1, int((steps or share.end) * interval))
        undo.append(set_for_now(trainer, "val_check_batch", every))
    for loader, (told, _) in zip(combined.flattened, share.loaders, strict=True):
        if (source := follower(loader)) is None:
            source = sources_of([loader])[0]
            undo += [source.detach, lambda loader=loader: setattr(loader, "_iterator", None)]
        loader._iterator = None  # of workers that persist
        if not is_sized:  # they have a copy of a stream, as it is for now
            undo.append(lambda loader=loader: setattr(loader, "_iterator", None))
        source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": told})
    iter(fetcher)
    fetcher.length, fetcher.done = share.end - share.first if is_sized else None, False
    epoch.batch_progress.is_last_batch = False
    return undo


def end_at(trainer: Any, end: float) -> list[Undo]:
    """The epoch has so many batches on this rank; returns what undoes it."""
    total = None if math.isinf(end) else end
    for bar in callbacks_of(trainer, "TQDMProgressBar"):
        bar.train_progress_bar.total = total
    for bar in callbacks_of(trainer, "RichProgressBar"):
        if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)
    return [set_for_now(trainer.fit_loop, "max_batches", end)]


def train_on(trainer: Any, share: Share) -> None:
    """The epoch has come to its end, and goes on, by Lightning's own loop, with these batches."""
    epoch, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    undo = [replace(epoch, "update_lr_schedulers", _within_epoch), *go_on_with(trainer, share)]
    try:
        while not epoch.done:
            try:
                epoch.advance(fetcher)
                epoch.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                epoch.on_iteration_done()
    finally:
        take_back(undo)
    epoch.batch_progress.is_last_batch = True


def _within_epoch(original: Any) -> Any:
    """Schedulers that step with an epoch have done so with the last batch of this rank's own."""

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "epoch" or update_plateau_schedulers:
            original(interval, update_plateau_schedulers)

    return update_lr_schedulers
