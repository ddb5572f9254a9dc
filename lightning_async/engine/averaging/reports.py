"""What the training thread tells of each round that it has merged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_async.engine.averaging.mailbox import Arrived
from lightning_async.engine.averaging.report import RoundReport, RunSummary

__all__ = ["Reports"]

log = logging.getLogger(__name__)


class Reports:
    """Makes reports and adds them to a summary.

    Args:
        summary: of the run.
    """

    def __init__(self, summary: RunSummary) -> None:
        self.summary = summary
        self.merge_s = 0.0
        """Packing and merging since the last report."""
        self.blocked_s = 0.0
        """Standing still for the round under way."""
        self.round_s = 0.0
        """What the last round's exchange took."""

    def add(self, arrived: Arrived, step: int, failed_rounds: int, samples_by_rank: Sequence[float]) -> RoundReport:
        """The report of a round that was merged at ``step``."""
        report = RoundReport(
            id=arrived.round.id,
            kind=arrived.kind,
            share=arrived.share,
            num_present=arrived.num_present,
            staleness_steps=step - arrived.message.step if arrived.message is not None else 0,
            payload_bytes=arrived.message_bytes,
            header_s=arrived.header_s,
            exchange_s=arrived.exchange_s,
            blocked_s=min(self.blocked_s, arrived.exchange_s),
            merge_s=self.merge_s,
            spread=arrived.spread,
            healed=arrived.healed,
        )
        if report.healed:
            self._warn_of_healing(step, report.id)
        self.blocked_s = self.merge_s = 0.0
        self.round_s = arrived.exchange_s
        self.summary.add(report)
        self.summary.failed_rounds = failed_rounds
        self.summary.samples_by_rank = list(samples_by_rank)
        return report

    def _warn_of_healing(self, step: int, round_id: int) -> None:
        """Once as a warning; a replica that is healed again and again has a cause that averaging cannot mend."""
        again = self.summary.healed
        log.log(
            logging.ERROR if again else logging.WARNING,
            "Rank %d: its parameters, buffers or optimizer state are not finite at step %d; it takes part in round %d "
            "with weight zero, takes over the other replicas' model, and its optimizer state begins anew.%s Lower its "
            "learning rate or clip its gradients.",
            self.summary.rank, step, round_id,
            f" That was needed {again} time(s) before: the cause goes on." if again else "",
        )  # fmt: skip
