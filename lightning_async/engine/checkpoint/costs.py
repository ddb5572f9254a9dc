"""What saves cost training."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Costs"]


@dataclass
class Costs:
    """What saves have cost so far, in seconds.

    Args:
        saves: that were handed over.
        committed: of these, by this rank.
        failed: of these.
        stalled_s: training stood still for so long.
        slowed_s: steps took so much longer while a save was written.
    """

    saves: int = 0
    committed: int = 0
    failed: int = 0
    stalled_s: float = 0.0
    slowed_s: float = 0.0
    failed_in_a_row: int = field(default=0, repr=False)

    @property
    def of_one(self) -> float | None:
        """What one save costs training, its slower steps included; None before the first one is done."""
        done = self.committed + self.failed
        return (self.stalled_s + self.slowed_s) / self.saves if done else None
