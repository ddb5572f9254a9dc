"""Bounds of training signals, such as the loss, and the choice of remedies when a signal exceeds its bound."""

from __future__ import annotations

import bisect
import enum
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from lightning_async._checks import check_int, check_real

__all__ = [
    "Absolute", "Escalation", "History", "Relative", "Remedy", "SignalAlarm", "Threshold", "Track", "climb",
]  # fmt: skip

_MAD = 1.4826  # standard deviation of a normal distribution / its median absolute deviation


_SKIPS = 3  # times that gradients are dropped before a severer remedy


class Remedy(enum.IntEnum):
    """A remedy for a signal that is out of bounds. A larger number is a more severe remedy."""

    NONE = 0
    LOG = 1  # a warning in the log
    ALERT = 2  # a call of the user's function, and a metric for the loggers
    SYNC_MORE = 3  # rounds twice as often, until all signals are calm
    SYNC = 4  # all replicas become one model now
    CUT_LR = 5  # lower learning rates
    SKIP = 6  # drop the gradients of the batches at hand: no parameter moves
    RESET = 7  # a replica takes over the others' model and begins its optimizers' state anew
    ROLL_BACK = 8  # all ranks load the last good state; the data is not rewound
    STOP = 9  # end training with an error


class SignalAlarm(NamedTuple):
    """A report (a finding) that one signal is out of bounds."""

    signal: str  # name of the signal
    value: float  # value of the signal
    limit: float = math.inf  # largest value within bounds; infinite where any finite value is
    start: Remedy = Remedy.LOG  # the mildest remedy that can help

    def __str__(self) -> str:
        if math.isfinite(self.limit):
            return f"{self.signal} is {self.value:.4g}, its limit {self.limit:.4g}"
        return f"{self.signal}: not finite"


@runtime_checkable
class Threshold(Protocol):
    """An interface for the bound of a signal, which may depend on the signal's recent values."""

    def limit(self, median: float, deviation: float) -> float:
        """Return the largest value that is within bounds.

        Args:
            median: Median of the signal's recent values; NaN while there are too few.
            deviation: Median absolute deviation of these values, scaled to the standard deviation of a normal
                distribution.
        """
        ...


@dataclass(frozen=True)
class Absolute(Threshold):
    """A fixed bound.

    Args:
        value: Largest value within bounds.

    Raises:
        TypeError: If ``value`` is not a number.
        ValueError: If ``value`` is not finite.

    >>> Absolute(3.0).limit(math.nan, 0.0)
    3.0
    """

    value: float

    def __post_init__(self) -> None:
        check_real(self, "value")

    def limit(self, median: float, deviation: float) -> float:
        return self.value


@dataclass(frozen=True)
class Relative(Threshold):
    r"""A bound that lies a number of deviations above the median of the signal.

    .. math:: \text{limit} = m + k \max(\sigma, f |m|)

    :math:`m` is the median and :math:`\sigma` the deviation of the recent values.

    Args:
        times: :math:`k`, number of deviations. Default 10.
        floor: :math:`f`, smallest deviation as a part of the median, so that a small change of a steady signal is not
            out of bounds. Default 0.1.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If ``times`` is not positive, or ``floor`` is negative.

    Source: the median absolute deviation as in Leys et al., 2013, https://doi.org/10.1016/j.jesp.2013.03.013

    >>> Relative(10.0).limit(2.0, 0.5), Relative(10.0).limit(2.0, 0.0), Relative().limit(math.nan, 0.0)
    (7.0, 4.0, inf)
    """

    times: float = 10.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_real(self, "times", above=0.0)
        check_real(self, "floor", at_least=0.0)

    def limit(self, median: float, deviation: float) -> float:
        if math.isnan(median):
            return math.inf
        return median + self.times * max(deviation, self.floor * abs(median))


@dataclass(frozen=True)
class History:
    """The numbers of recent values and steps that decide when a signal is out of bounds and when a remedy is due.

    Args:
        window: Length of the history in steps. The median of a signal is taken over this many recent values, and after
            this many steps in a row without a finding all signals count as calm. Default 100.
        warmup: Number of values of a signal before a relative bound applies to it. Default 20.
        cooldown: Number of steps that a remedy has to take effect: while all signals are finite, no further remedy is
            chosen in these steps. Default 10.

    Raises:
        TypeError: If an argument is no int.
        ValueError: If ``window`` or ``warmup`` is less than 2, ``cooldown`` is negative, or ``warmup`` exceeds
            ``window``.
    """

    window: int = 100
    warmup: int = 20
    cooldown: int = 10

    def __post_init__(self) -> None:
        check_int(self, "window", at_least=2)
        check_int(self, "warmup", at_least=2)
        check_int(self, "cooldown", at_least=0)
        if self.warmup > self.window:
            raise ValueError(f"`History(warmup={self.warmup!r})` must be <= window={self.window}.")


class Track:
    """The recent values of one signal, with their median. `add` returns the limit that a new value must not exceed.

    >>> track = Track(History(window=4, warmup=3))
    >>> [track.add(x, Relative(10.0)) for x in (1.0, 2.0, 3.0, 50.0)]  # at last: 2 + 10 * 1.4826 * 1
    [inf, inf, inf, 16.826]
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float, threshold: Threshold) -> float:
        """Add ``value`` to the recent values if it is finite; return the limit that ``value`` must not exceed.

        ``threshold`` computes the limit from the earlier values.
        """
        limit = threshold.limit(*self.median_and_deviation())
        if math.isfinite(value):
            if len(self._values) == self._history.window:
                del self._sorted[bisect.bisect_left(self._sorted, self._values.popleft())]
            self._values.append(value)
            bisect.insort(self._sorted, value)
        return limit

    def median_and_deviation(self) -> tuple[float, float]:
        """Return the median of the recent values, and their median absolute deviation times 1.4826.

        While there are fewer values than `History.warmup`, return NaN and 0.
        """
        if len(self._sorted) < self._history.warmup:
            return math.nan, 0.0
        median = statistics.median(self._sorted)
        return median, _MAD * statistics.median(abs(x - median) for x in self._sorted)


def climb(start: Remedy, used: Mapping[Remedy, int], tries: Mapping[Remedy, int]) -> Remedy:
    """Return the mildest remedy that is at least as severe as ``start`` and has tries left.

    If there is none, return the first of `ALERT` and `LOG` that ``tries`` contains, else `NONE`.

    Args:
        start: Mildest remedy that can help.
        used: Number of times that each remedy was tried.
        tries: Largest number of times that each available remedy may be tried.
    """
    left = [remedy for remedy in sorted(tries) if remedy >= start and used.get(remedy, 0) < tries[remedy]]
    words = [remedy for remedy in tries if remedy <= Remedy.ALERT]
    return left[0] if left else max(words, default=Remedy.NONE)


class Escalation:
    """A rank's choice of remedies, which become more severe while signals stay out of bounds.

    When a remedy was tried as often as allowed, the next more severe one is chosen. After `History.window` steps in
    which no signal was out of bounds, the choice starts again at the mildest remedy.

    Args:
        remedies: Available remedies.
        history: Numbers of steps: how long a remedy has to take effect, and after how many steps without an alarm the
            choice starts again.
        max_rollbacks: Largest number of rollbacks in the whole run. Unlike the counts of the other remedies, the count
            of rollbacks never starts again at 0.
    """

    def __init__(self, remedies: Collection[Remedy], history: History, max_rollbacks: int) -> None:
        more = {Remedy.SKIP: _SKIPS, Remedy.ROLL_BACK: max_rollbacks}
        self._tries = {remedy: more.get(remedy, 1) for remedy in remedies}
        self._history = history
        self.used: dict[Remedy, int] = {}
        self.clean_steps = 0  # steps since something was last out of bounds
        self._quiet = 0

    @property
    def calm(self) -> bool:
        """Whether no signal was out of bounds in the last `History.window` steps."""
        return self.clean_steps >= self._history.window

    def next(self, findings: Collection[SignalAlarm]) -> Remedy:
        self._quiet = max(0, self._quiet - 1)
        if not findings:
            self.clean_steps += 1
            if self.calm:
                self.used = {remedy: n for remedy, n in self.used.items() if remedy is Remedy.ROLL_BACK}
            return Remedy.NONE
        self.clean_steps = 0
        start = max(finding.start for finding in findings)
        remedy = self.climb(start)
        spent = self.used.get(remedy, 0) >= self._tries.get(remedy, 1)
        # A remedy that was just applied may need time to help, and one that is used up is not repeated at each step.
        return Remedy.NONE if self._quiet and (start is Remedy.LOG or spent) else remedy

    def climb(self, start: Remedy) -> Remedy:
        return climb(start, self.used, self._tries)

    def has(self, remedy: Remedy) -> bool:
        return remedy in self._tries

    def note(self, remedy: Remedy) -> None:
        self.used[remedy] = self.used.get(remedy, 0) + 1
        self._quiet = self._history.cooldown + 1
        self.clean_steps = 0
