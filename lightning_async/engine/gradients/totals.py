"""What a run's windows of gradients add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lightning_async.engine.gates import Gates
from lightning_async.engine.gradients.records import Reduction

__all__ = ["WindowTotals"]


@dataclass
class WindowTotals:
    """Of one replica.

    Args:
        number: windows that were reduced.
        own: of these, those that this replica had a part in.
        batches: of this replica, in them.
        exchange_s: how long they travelled.
        waited_s: how long the training thread has stood still for that; at gates, for all of it.
        sent_bytes: of this replica's windows, as they travel.
        left: batches in the window that has left last, and how long this replica had stood still before.
    """

    number: int = 0
    own: int = 0
    batches: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    sent_bytes: int = 0
    left: tuple[int, float] = (0, 0.0)

    title: ClassVar[str] = "Windows of gradients"
    prefix: ClassVar[str] = "gradients"
    shown: ClassVar[tuple[str, ...]] = ("windows", "hidden_share")

    def leave(self, batches: int, gates: Gates) -> None:
        """One of so many batches is about to leave."""
        self.left = batches, gates.waited_s

    def arrive(self, arrived: Reduction, gates: Gates, message_bytes: int) -> None:
        """A reduced one is about to be stepped with, of which this replica's part has travelled in so many bytes."""
        self.number += 1
        self.exchange_s += arrived.exchange_s
        batches, before_s = self.left
        self.left = (0 if arrived.message is not None else batches), gates.waited_s
        standing_s = math.inf if gates.standing else gates.waited_s - before_s
        self.waited_s += min(standing_s, arrived.exchange_s)
        if arrived.message is not None:
            self.own, self.batches = self.own + 1, self.batches + batches
            self.sent_bytes += message_bytes

    @property
    def each_s(self) -> float:
        """See `Totals`."""
        return self.exchange_s / self.number if self.number else 0.0

    @property
    def hidden_share(self) -> float:
        """See `Totals`."""
        return max(0.0, 1.0 - self.waited_s / self.exchange_s) if self.exchange_s > 0.0 else 1.0

    @property
    def batches_each(self) -> float:
        """In a window of this replica, on average; 0.0 while there was none."""
        return self.batches / self.own if self.own else 0.0

    def rows(self) -> dict[str, str]:
        """See `Totals`."""
        return {
            "windows reduced": f"{self.number}",
            "batches in a window": f"{self.batches_each:.1f}",
            "a window travels": f"{self.each_s:.3f} s, {100 * self.hidden_share:.1f}% hidden"
            if self.number
            else "no window",
        }

    def metrics(self) -> dict[str, float]:
        """See `Totals`; what is of windows, from the first one on."""
        of_windows = {
            "window_s": self.each_s, "hidden_share": self.hidden_share, "batches_in_window": self.batches_each,
        }  # fmt: skip
        return {"windows": float(self.number), **(of_windows if self.number else {})}
