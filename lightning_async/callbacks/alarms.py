"""What is out of bounds, said to the user: in the log, to the loggers, to a function of theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_async.errors import TrainingDiverged
from lightning_async.rules.divergence import Finding, Remedy

__all__ = ["Alarm", "diverged", "raise_alert"]

log = logging.getLogger(__name__)


class Alarm(NamedTuple):
    """What an alert is told.

    Args:
        rank: that has found something.
        step: its optimizer steps.
        epoch: of the Trainer.
        findings: what was out of bounds.
        remedy: what follows.
    """

    rank: int
    step: int
    epoch: int
    findings: tuple[Finding, ...]
    remedy: Remedy

    def __str__(self) -> str:
        found = "; ".join(map(str, self.findings))
        return f"Rank {self.rank}, epoch {self.epoch}, step {self.step}: {found}. Remedy: {self.remedy.name.lower()}."


def raise_alert(alarm: Alarm, trainer: Any, alert: Callable[[Alarm], None] | None) -> None:
    """Tell the loggers, and ``alert``, whose failure ends nothing."""
    numbers = {f"divergence/{finding.signal}": finding.value for finding in alarm.findings}
    for logger in trainer.loggers:
        logger.log_metrics({**numbers, "divergence/remedy": float(alarm.remedy)}, step=alarm.step)
    if alert is not None:
        try:
            alert(alarm)
        except Exception:
            log.exception("Rank %d: `DivergenceMonitor(alert=...)` failed; training goes on.", alarm.rank)


def diverged(trainer: Any, words: str, used: Mapping[Remedy, int]) -> TrainingDiverged:
    """The error that ends training; ``words`` say why, where this rank knows."""
    tried = ", ".join(f"{remedy.name.lower()} {n}x" for remedy, n in sorted(used.items()) if n) or "nothing"
    return TrainingDiverged(
        f"Rank {trainer.global_rank}: training has diverged at step {trainer.global_step} of epoch "
        f"{trainer.current_epoch}. {words or 'Another rank says why.'} Done so far: {tried}. Lower the learning rate, "
        "clip gradients, or look at the data of this step; then resume from the last good checkpoint "
        "(`FaultTolerantCheckpoint(recover='last_good')`)."
    )
