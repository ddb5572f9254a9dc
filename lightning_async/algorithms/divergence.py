"""Signals of training that are out of bounds, and remedies: statistics and decisions as plain values."""

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

_MAD = 1.4826  # what a median absolute deviation is multiplied by to be a normal distribution's standard deviation


_SKIPS = 3  # of batches, before something severer is tried


class Remedy(enum.IntEnum):
    """An answer to a finding, in order of severity."""

    NONE = 0
    LOG = 1  # a warning in the log
    ALERT = 2  # a call of the user's, and the loggers
    SYNC_MORE = 3  # rounds twice as often, until all is calm
    SYNC = 4  # all replicas become one model now
    CUT_LR = 5  # lower learning rates
    SKIP = 6  # drop the gradients of the batches at hand: no parameter moves
    RESET = 7  # a replica takes over the others' model and begins its optimizers' state anew
    ROLL_BACK = 8  # all go back to the last good state; the data goes on
    STOP = 9  # end training with an error


class SignalAlarm(NamedTuple):
    """A signal that is out of bounds."""

    signal: str  # its name
    value: float  # what it was
    limit: float = math.inf  # what it should not have exceeded; infinite where it should have been finite
    start: Remedy = Remedy.LOG  # the mildest remedy that can be of use

    def __str__(self) -> str:
        if math.isfinite(self.limit):
            return f"{self.signal} is {self.value:.4g}, its limit {self.limit:.4g}"
        return f"{self.signal}: not finite"


@runtime_checkable
class Threshold(Protocol):
    """A bound of a signal, as a function of its history."""

    def limit(self, median: float, deviation: float) -> float:
        """Return the largest value that is in bounds.

        Args:
            median: of its recent values; NaN while there are too few.
            deviation: their median absolute deviation, as a normal distribution's standard deviation.
        """
        ...


@dataclass(frozen=True)
class Absolute(Threshold):
    """A fixed limit.

    Args:
        value: the limit.

    Raises:
        TypeError, ValueError: it is not a finite number.

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
    r"""So many deviations above the signal's own median.

    .. math:: \text{limit} = m + k \max(\sigma, f |m|)

    :math:`m` is the median, :math:`\sigma` the deviation of the recent values.

    Args:
        times: :math:`k`. Default 10.
        floor: :math:`f`: the least deviation, as a share of the median, so that a signal that hardly moves is not
            out of bounds when it moves a little. Default 0.1.

    Raises:
        TypeError, ValueError: not positive numbers.

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
    """The part of a signal's past that counts.

    Args:
        window: values that the median is taken of; steps without a finding after which all is calm. Default 100.
        warmup: values before which nothing is out of relative bounds. Default 20.
        cooldown: steps between a remedy and the next one, for signals that are finite: time for it to help. Default 10.

    Raises:
        TypeError, ValueError: out of range.
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
    """The recent values of one signal.

    >>> track = Track(History(window=4, warmup=3))
    >>> [track.add(x, Relative(10.0)) for x in (1.0, 2.0, 3.0, 50.0)]
    [inf, inf, inf, 16.826]
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float, threshold: Threshold) -> float:
        """Add ``value``, if it is finite; return its limit, by the values before it."""
        limit = threshold.limit(*self.median_and_deviation())
        if math.isfinite(value):
            if len(self._values) == self._history.window:
                del self._sorted[bisect.bisect_left(self._sorted, self._values.popleft())]
            self._values.append(value)
            bisect.insort(self._sorted, value)
        return limit

    def median_and_deviation(self) -> tuple[float, float]:
        """Return NaN and 0 while there are too few values."""
        if len(self._sorted) < self._history.warmup:
            return math.nan, 0.0
        median = statistics.median(self._sorted)
        return median, _MAD * statistics.median(abs(x - median) for x in self._sorted)


def climb(start: Remedy, used: Mapping[Remedy, int], tries: Mapping[Remedy, int]) -> Remedy:
    """Return the mildest remedy from ``start`` on that has not been tried often enough; a message, where all have.

    Args:
        start: milder ones are of no use.
        used: how often each was tried.
        tries: how often each may be; one that is not in it is not available.

    >>> tries = {Remedy.LOG: 1, Remedy.SKIP: 2, Remedy.STOP: 1}
    >>> [climb(Remedy.LOG, used, tries).name for used in ({}, {Remedy.LOG: 1}, {Remedy.LOG: 1, Remedy.SKIP: 2})]
    ['LOG', 'SKIP', 'STOP']
    >>> climb(Remedy.ROLL_BACK, {}, {Remedy.LOG: 1, Remedy.SKIP: 2}).name
    'LOG'
    """
    left = [remedy for remedy in sorted(tries) if remedy >= start and used.get(remedy, 0) < tries[remedy]]
    words = [remedy for remedy in tries if remedy <= Remedy.ALERT]
    return left[0] if left else max(words, default=Remedy.NONE)


class Escalation:
    """A rank's remedies, step by step: each finding that comes back asks for a severer one.

    Args:
        remedies: the available ones.
        history: when all is calm again, and how long a remedy may take to help.
        max_rollbacks: in all; the others begin anew when all is calm.
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
        """Whether nothing was out of bounds for as long as counts."""
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
        # What was just done may need time to help; what was done often enough need not be said at every step.
        return Remedy.NONE if self._quiet and (start is Remedy.LOG or spent) else remedy

    def climb(self, start: Remedy) -> Remedy:
        return climb(start, self.used, self._tries)

    def has(self, remedy: Remedy) -> bool:
        return remedy in self._tries

    def note(self, remedy: Remedy) -> None:
        self.used[remedy] = self.used.get(remedy, 0) + 1
        self._quiet = self._history.cooldown + 1
        self.clean_steps = 0
