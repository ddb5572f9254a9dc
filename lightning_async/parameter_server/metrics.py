"""Totals of one worker's requests to servers, and the progress of learning-rate schedules that follow the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


@dataclass
class PushTotals:
    """Totals of one worker's requests to servers.

    Args:
        pushes: Number of pushes.
        pulls: Number of pulls.
        version: Number of optimizer steps in the weights that were pulled last.
        earlier: Part of ``version`` that was counted before the servers were last given this worker's weights, see
            `begin`.
        lag: Lag of the last push: the number of updates since the weights at which the push was computed.
        lag_sum: Sum of the lags of all pushes that were not empty.
        timed_pushes: Number of pushes that were not empty; only these have a lag.
        sent_bytes: Bytes of pushes, after compression.
        pulled_bytes: Bytes of pulled weights.
        asked_s: Seconds that requests took.
        waited_s: Seconds for which the training thread has waited for requests.
        lags: Summary of the servers' histograms of lag, at the end of training.
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
        """Make a request, and add its seconds to the totals."""
        began = time.monotonic()
        try:
            return ask()
        finally:
            self.asked_s += time.monotonic() - began

    def begin(self) -> None:
        """Record that the servers were given this worker's weights, so that their versions count from 0 again."""
        # Servers count from zero again, while this worker's total continues.
        self.earlier = self.version

    def pulled(self, version: int) -> None:
        """Count a pull of weights; ``version`` is the servers' number of steps since `begin`."""
        self.pulls += 1
        self.version = self.earlier + version

    def moved(self, sent: int, pulled: int) -> None:
        self.sent_bytes += sent
        self.pulled_bytes += pulled

    def late(self, lag: int) -> None:
        """Count a push that was not empty, and its ``lag``: the updates since the weights at which it was computed."""
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
    r"""The mean number of steps of the workers: the progress of a learning-rate schedule that they share.

    The mean follows the servers' version, so that slow and fast workers with the same weights are at the same place of
    the schedule.

    .. math:: p = p_0 + w + \frac{K\, (v - w)}{N}

    where :math:`p_0` is the mean when training begins, and :math:`v` is the version. Each of the first :math:`w`
    versions combines one push of each worker, and each later version combines :math:`K` pushes. :math:`N` is the
    number of workers. If :math:`N` changes, each version counts with the :math:`N` of the first pull that contains
    this version.

    Args:
        steps: Number of steps of each worker when training begins. Default: one worker without steps.
        in_step: Number of first versions :math:`w`, each of which combines one push of each worker. Default: 0.
        pushes: Number of pushes :math:`K` in each later version. Default: 1.

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
        """Record the version of the servers' weights before the first step."""
        self._version = version

    def see(self, version: int, num_workers: int) -> int:
        """Record a version that was pulled, and the number of workers at this pull.

        Returns the workers' mean number of steps, rounded down.
        """
        if (new := version - self._version) > 0:
            # Versions in step hold one push of each worker, and move the mean by a whole step.
            together = max(0, min(version, self._in_step) - self._version)
            self._mean += together + Fraction((new - together) * self._pushes, num_workers)
            self._version = version
        return int(self._mean)

    @property
    def steps(self) -> tuple[int, int]:
        """The workers' mean number of steps when training began, and the mean now, both rounded down."""
        return int(self.first), int(self._mean)

    def plain(self) -> dict[str, Any]:
        """Return the state that a joining rank loads with `take`."""
        return {"mean": self._mean.as_integer_ratio(), "version": self._version, "rest": [self._in_step, self._pushes]}

    def take(self, state: dict[str, Any]) -> None:
        """Load the state of another worker."""
        self.first = self._mean = Fraction(*state["mean"])
        self._version = state["version"]
        self._in_step, self._pushes = state["rest"]
