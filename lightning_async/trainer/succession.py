"""Rank 0 is lost: the next one logs where it did, and shows the progress bar."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any

from lightning_async.engine.world import World
from lightning_async.trainer.loggers import keep_whole, kinds, places, take_places, unknown
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo, replace, take_back

__all__ = ["Succession"]

log = logging.getLogger(__name__)


class Succession:
    """Whether this rank is rank 0, from batch to batch of one fit.

    Loggers know where to write before that: from the moment in which its number is another one the training thread may
    log. All else waits for the next batch.

    Args:
        trainer: its loggers, its progress bar, and its strategy, which is patched.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._leads = trainer, trainer.is_global_zero
        self._told: dict[str, Any] = {"loggers": [], "kinds": [], "bar": False}
        self._undo: list[Undo] = []

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [
            replace(self._trainer.strategy, "on_train_batch_start", self._begin_batch),
            partial(take_back, self._undo),
        ]

    def begin(self, world: World) -> None:
        """Training begins, or begins anew; all ranks call this together."""
        told = world.broadcast(self.told())
        if not self._leads:
            self.take(told)
        elif not self._undo:
            self._undo += keep_whole(self._trainer)

    def told(self) -> dict[str, Any]:
        """On rank 0, what the others must know: plain values."""
        bar = self._trainer.progress_bar_callback
        return {
            "loggers": places(self._trainer),
            "kinds": kinds(self._trainer),
            "bar": bar is not None and (self._told["bar"] or bool(getattr(bar, "is_enabled", True))),
        }

    def take(self, told: dict[str, Any]) -> None:
        """On another rank: be ready to be rank 0."""
        self._told = told
        take_places(self._trainer, told["loggers"])

    def _begin_batch(self, original: Any) -> Any:
        def on_train_batch_start(batch: Any, batch_idx: int) -> None:
            if not self._leads and self._trainer.is_global_zero:
                self._leads = True
                self._tell_of_loggers()
                if self._told["bar"]:
                    self._show_bar(batch_idx)
            original(batch, batch_idx)

        return on_train_batch_start

    def _tell_of_loggers(self) -> None:
        """Of those that may do something else than the user expects."""
        if names := unknown(self._trainer):
            log.warning(
                "This rank is rank 0 from here, and logs with %s. How that goes on with what the lost one logged is "
                "not known: it may begin a run of its own. Where it can go on with one, give it that one's id or name, "
                "on every rank.", " and ".join(names),
            )  # fmt: skip
        if self._told["kinds"] != (own := kinds(self._trainer)):
            log.warning(
                "This rank is rank 0 from here. The lost one had the loggers %s, and this one has %s: give every rank "
                "the same, they write on rank 0 only.", self._told["kinds"], own,
            )  # fmt: skip

    def _show_bar(self, batches: int) -> None:
        """As it were, had it been there from the beginning; so many batches of the epoch are done."""
        trainer, bar = self._trainer, self._trainer.progress_bar_callback
        if bar is None:
            return
        try:
            if callable(bar.enable):
                bar.enable()
            else:  # as in the example of Lightning's own documentation
                bar.enable = True
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)
            _advance(bar, batches)
        except Exception as error:  # the user's class, perhaps: that is no reason to end training
            log.warning("Rank 0 goes on without its progress bar: %s: %s", type(error).__name__, error)
            with contextlib.suppress(Exception):
                bar.disable()


def _advance(bar: Any, batches: int) -> None:
    """Of Lightning's bars, and what inherits from them; others hear of it at the end of the batch."""
    callbacks = pytorch("callbacks")
    if isinstance(bar, callbacks.TQDMProgressBar):
        shown = bar.train_progress_bar
        shown.n = shown.initial = batches  # its rate is that of what follows
        if not shown.disable:
            shown.refresh()
    elif isinstance(bar, callbacks.RichProgressBar):
        bar._update(bar.train_progress_bar_id, batches)
