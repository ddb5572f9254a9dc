"""What saves cost training."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Costs", "Usual"]


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


class Usual:
    """How long steps take while nothing is written, and how much longer they do while something is.

    Args:
        now: seconds.
    """

    def __init__(self, now: float) -> None:
        self.last, self._usual_s = now, 0.0

    def step(self, now: float, writing: bool) -> float:
        """A step is done; what it took longer than usual, in seconds, while something was being written."""
        took, self.last = now - self.last, now
        if writing and self._usual_s:
            return max(0.0, took - self._usual_s)
        self._usual_s = 0.9 * self._usual_s + 0.1 * took if self._usual_s else took
        return 0.0
