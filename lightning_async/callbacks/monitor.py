"""Metrics of averaging for Lightning: in every logger and in the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_async.trainer.loops.loop_state import show
from lightning_async.trainer.namespace import Callback, rank_zero_info
from lightning_async.trainer.strategy_view import view_of

_EMPTY = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
)  # fmt: skip
"""The hooks of every step in which a monitor does nothing."""


class AveragingMonitor(Callback):
    """Logs the strategy's running totals after every round, to every logger; two of them to the progress bar.

    The strategy adds one for the time of a fit, unless there is one. Names: ``averaging/rounds``, ``/staleness_steps``
    (local steps between snapshot and merge, on average), ``/bytes`` (sent by this replica), ``/hidden_share`` (of
    communication), ``/spread`` (root of the work-weighted mean squared distance from the mean, at the last round),
    ``/samples/own`` (of this replica; ``/samples/rank_0`` and so on: of each, at the last header; beside servers one
    comes at sync points only), ``/round_s``, ``/idle_s`` (waiting at sync points), ``/failed_rounds``,
    ``/dropped_gradients`` (of this replica, not finite); what is of rounds, from the first one on. They are rank 0's;
    the summary at the end of training names all replicas' samples.

    Between rounds it costs nothing: `LightningModule.log` would compute each name again at every step.
    """

    def __init__(self) -> None:
        self._logged = 0
        self._before: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._told_at = 0  # rounds

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        summary = view_of(trainer.strategy).summary
        if summary is None or not self._is_due(summary, trainer.log_every_n_steps):
            return
        metrics = summary.metrics()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning's own metrics
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        show(trainer._logger_connector, summary.shown())
        if summary.automatic and summary.settings and self.is_news(summary):
            rank_zero_info(f"Set by what is measured ({', '.join(summary.automatic)}): {summary.in_words()}.")

    def _is_due(self, summary: Any, every: int) -> bool:
        """Return whether to log. Steps that take a window of gradients, or a push, each are many: then as often as
        Lightning."""
        number = summary.exchanges + summary.consensuses
        if number == self._logged or (summary.totals is not None and 0 < number - max(0, self._logged) < every):
            return False
        self._logged = number
        return True

    def is_news(self, summary: Any) -> bool:
        """Return whether to tell how rounds are set: it has settled, and differs by a third or more from what was told.

        The next line comes after twice as many rounds at the earliest, so that there are few however long training is.
        """
        settles = not _differ(self._before, summary.settings)
        self._before = summary.settings
        if not settles or summary.exchanges < 2 * self._told_at or not _differ(self._told, summary.settings):
            return False
        self._told = summary.settings
        self._told_at = summary.exchanges
        return True

    def attach(self, trainer: Any) -> Callable[[], None]:
        """Join the Trainer's callbacks, unless it has a monitor; return what takes this one away again."""
        if any(isinstance(callback, AveragingMonitor) for callback in trainer.callbacks):
            return lambda: None
        for hook in _EMPTY:
            setattr(self, hook, None)  # Lightning profiles every call of a hook, also of an empty one
        trainer.callbacks.insert(0, self)
        return lambda: trainer.callbacks.remove(self) if self in trainer.callbacks else None


def _differ(before: dict[str, float], now: dict[str, float]) -> bool:
    """Return whether some setting has changed by a third or more."""
    pairs = [(before.get(name, 0.0), value) for name, value in now.items() if name != "step_s"]
    return any(max(pair) > 4 / 3 * min(pair) for pair in pairs)
