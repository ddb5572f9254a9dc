"""What is out of bounds, said to the user: in the log, to the loggers, to a function of theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_async.rules.divergence import Finding, Remedy

__all__ = ["Alarm", "raise_alert"]

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
