"""What one worker's requests to servers add up to: `PushTotals`. `WorkerSteps` says how far a schedule is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


@dataclass
class PushTotals:
    """Totals of one worker's requests.

    Args:
        pushes, pulls: how many there were.
        version: steps of the optimizers in the weights that were pulled last.
        earlier: of these, those that servers have begun with: of a checkpoint.
        lag: of the last push.
        lag_sum, timed_pushes: of all pushes that had something in them, and how many these were.
        sent_bytes, pulled_bytes: of pushes, as they travel, and of weights.
        asked_s: how long requests took.
        waited_s: how long the training thread has stood still for them.
        lags: how late pushes were, in words, as servers tell when training ends.
    """

    pushes: int = 0
    pulls: int = 0
    version: int = 0
    earlier: int = 0
    lag: int = 0
    lag_sum: int = 0
    timed_pushes: int = 0
    sent_bytes: int = 0
    pulled_bytes: int = 0
    asked_s: float = 0.0
    waited_s: float = 0.0
    lags: Mapping[str, str] = field(default_factory=dict)

    title: ClassVar[str] = "Parameter servers"
    prefix: ClassVar[str] = "servers"
    shown: ClassVar[tuple[str, ...]] = ("version", "lag")

    def timed(self, ask: Callable[[], T]) -> T:
        """Time a request; return what it brings."""
        began = time.monotonic()
        try:
            return ask()
        finally:
            self.asked_s += time.monotonic() - began

    def begin(self) -> None:
        """Count from here: servers have begun with what this worker had."""
        self.earlier = self.version

    def pulled(self, version: int) -> None:
        """Note that weights have come, with so many steps in them since servers have begun."""
        self.pulls += 1
        self.version = self.earlier + version

    def moved(self, sent: int, pulled: int) -> None:
        """Count bytes, to servers and from them."""
        self.sent_bytes += sent
        self.pulled_bytes += pulled

    def late(self, lag: int) -> None:
        """Note that a push was applied, so many updates after the weights that it was computed at."""
        self.lag = lag
        self.lag_sum += lag
        self.timed_pushes += 1

    @property
    def number(self) -> int:
        return self.pushes

    @property
    def each_s(self) -> float:
        return self.asked_s / self.pushes if self.pushes else 0.0

    @property
    def hidden_share(self) -> float:
        return max(0.0, 1.0 - self.waited_s / self.asked_s) if self.asked_s > 0.0 else 1.0

    def rows(self) -> dict[str, str]:
        return {
            "versions": f"{self.version}, of {self.pushes} pushes of rank 0's",
            "pulls": f"{self.pulls}, {self.pulled_bytes / 2**20:.1f} MiB",
            **self.lags,
            "waiting for servers": f"{self.waited_s:.2f} s",
        }

    def metrics(self) -> dict[str, float]:
        return {
            "version": float(self.version), "pushes": float(self.pushes), "pulls": float(self.pulls),
            "lag": float(self.lag), "mean_lag": self.lag_sum / max(1, self.timed_pushes),
            "pulled_bytes": float(self.pulled_bytes), "hidden_share": self.hidden_share, "waited_s": self.waited_s,
        }  # fmt: skip


class WorkerSteps:
    r"""Steps of each worker, on average, in the weights that it has: where a schedule of learning rates is that all
    workers share. It follows the servers' version, so whoever has the same weights, slow or fast, is at the same place.

    .. math:: p = p_0 + w + \frac{K\, (v - w)}{N}

    with the version :math:`v`, of which :math:`w` are made of a push of each worker, :math:`K` pushes in each of the
    others, and :math:`N` workers; where these come and go, as many as there are while versions come.

    Args:
        steps: of each worker, that training goes on from.
        in_step: versions at first that are made of a push of each worker. Default: 0.
        pushes: in each of the others. Default: 1.

    >>> progress = WorkerSteps([10, 14], in_step=2)
    >>> progress.see(2, num_workers=2), progress.see(7, num_workers=2), progress.see(9, num_workers=1)
    (14, 16, 18)
    """

    def __init__(self, steps: Sequence[int] = (0,), in_step: int = 0, pushes: int = 1) -> None:
        self.first = self._mean = Fraction(sum(steps), len(steps))
        self._in_step = in_step
        self._pushes = pushes
        self._version = 0

    def begin(self, version: int) -> None:
        """Note that servers have weights of this version, before the first step."""
        self._version = version

    def see(self, version: int, num_workers: int) -> int:
        """Note that weights of this version have come, which so many workers make; return the steps."""
        if (new := version - self._version) > 0:
            together = max(0, min(version, self._in_step) - self._version)
            self._mean += together + Fraction((new - together) * self._pushes, num_workers)
            self._version = version
        return int(self._mean)

    @property
    def steps(self) -> tuple[int, int]:
        """Where it began, and where it is."""
        return int(self.first), int(self._mean)

    def plain(self) -> dict[str, Any]:
        """Return what a worker that joins is to `take`."""
        return {"mean": self._mean.as_integer_ratio(), "version": self._version, "rest": [self._in_step, self._pushes]}

    def take(self, told: dict[str, Any]) -> None:
        """Be where another worker was."""
        self.first = self._mean = Fraction(*told["mean"])
        self._version = told["version"]
        self._in_step, self._pushes = told["rest"]
