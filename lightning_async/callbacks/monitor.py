"""Metrics of averaging, in every logger and in `trainer.callback_metrics`."""

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
    """A callback that logs the strategy's running totals after every round.

    Two of them are in ``trainer.callback_metrics``, too: the number of rounds (of windows, with
    `AsyncGradientStrategy`) and the hidden share; with parameter servers, the version of the weights and the lag of
    pushes. For each fit, the strategy adds this callback to a Trainer that has none. The names of the metrics are:

    - ``averaging/rounds``, ``/failed_rounds`` and ``/round_s``: number of rounds, number of failed rounds, and seconds
      per round;
    - ``/staleness_steps``: mean number of local steps between snapshot and merge;
    - ``/bytes``: bytes sent by this replica;
    - ``/hidden_share``: share of communication that is hidden behind training;
    - ``/spread``: root of the work-weighted mean squared distance of the replicas from their mean, at the last round;
    - ``/samples/own``: samples of this replica; ``/samples/rank_0`` and so on: samples of each replica, as its last
      message's header said;
    - ``/idle_s``: seconds of waiting at sync points;
    - ``/dropped_gradients``: gradients of this replica that were not finite.

    Values about rounds appear from the first round on. With parameter servers, headers are exchanged at sync points
    only. All values are those of rank 0. The summary at the end of training lists all replicas' samples. Between rounds
    the callback costs nothing, while `LightningModule.log` would process every metric at every step.
    """

    def __init__(self) -> None:
        self._logged = 0
        self._before: dict[str, float] = {}
        self._told: dict[str, float] = {}
        # Number of rounds when the settings were last logged.
        self._told_at = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        summary = view_of(trainer.strategy).summary
        if summary is None or not self._is_due(summary, trainer.log_every_n_steps):
            return
        metrics = summary.metrics()
        # The same step number as of Lightning's own metrics.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        show(trainer._logger_connector, summary.shown())
        if summary.automatic and summary.settings and self.is_news(summary):
            rank_zero_info(f"Set from measurements ({', '.join(summary.automatic)}): {summary.in_words()}.")

    def _is_due(self, summary: Any, every: int) -> bool:
        """Return whether to log now: after each round, or after each ``every`` exchanges of gradients.

        Strategies that exchange windows of gradients, or push gradients to servers, do so at nearly every step. To log
        each exchange would be too often.
        """
        number = summary.exchanges + summary.consensuses
        if number == self._logged or (summary.totals is not None and 0 < number - max(0, self._logged) < every):
            return False
        self._logged = number
        return True

    def is_news(self, summary: Any) -> bool:
        """Return whether to log the settings of rounds.

        The settings are logged once they have stopped changing, if one of them differs by a third or more from its last
        logged value. Between two log lines the number of rounds at least doubles, so there are few lines.
        """
        settles = not _differ(self._before, summary.settings)
        self._before = summary.settings
        if not settles or summary.exchanges < 2 * self._told_at or not _differ(self._told, summary.settings):
            return False
        self._told = summary.settings
        self._told_at = summary.exchanges
        return True

    def attach(self, trainer: Any) -> Callable[[], None]:
        """Add this callback to a Trainer that has no `AveragingMonitor`; return a function that removes it again."""
        if any(isinstance(callback, AveragingMonitor) for callback in trainer.callbacks):
            return lambda: None
        # Lightning profiles every call of a hook, even of an empty one, so the empty ones are removed.
        for hook in _EMPTY:
            setattr(self, hook, None)
        trainer.callbacks.insert(0, self)
        return lambda: trainer.callbacks.remove(self) if self in trainer.callbacks else None


def _differ(before: dict[str, float], now: dict[str, float]) -> bool:
    """Return whether one of the settings has changed by a third or more."""
    pairs = [(before.get(name, 0.0), value) for name, value in now.items() if name != "step_s"]
    return any(max(pair) > 4 / 3 * min(pair) for pair in pairs)
