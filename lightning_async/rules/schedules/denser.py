"""Another schedule's rounds, more often."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_int, check_protocol
from lightning_async.rules.schedules.protocol import Clock, Schedule, Step

__all__ = ["Denser"]


@dataclass(frozen=True)
class Denser(Schedule):
    r"""Rounds ``times`` as often as another schedule has them.

    .. math:: \text{next}(h, t) = \text{schedule.next}(k h + k - 1, k t)

    :math:`h` and :math:`t` are the steps and the seconds since the last round, :math:`k` is ``times``. What is counted
    over the whole of training is left as it is.

    Args:
        schedule: the other one.
        times: how many times as often. Default 2.

    Raises:
        TypeError: ``schedule`` is no schedule, or ``times`` no int.
        ValueError: ``times`` is less than 1.

    >>> from lightning_async.rules.schedules.fixed import EveryNSteps
    >>> clock = Clock(step=15, epoch=0, steps_since_round=15, seconds_since_round=0.0)
    >>> EveryNSteps(32).next(clock).action.name, Denser(EveryNSteps(32)).next(clock).action.name
    ('LOCAL', 'ROUND')
    """

    schedule: Schedule
    times: int = 2

    def __post_init__(self) -> None:
        check_protocol("Denser", "schedule", self.schedule, Schedule, "a schedule")
        check_int(self, "times", at_least=1)

    def next(self, clock: Clock) -> Step:
        return self.schedule.next(
            clock._replace(
                steps_since_round=self.times * clock.steps_since_round + self.times - 1,
                seconds_since_round=self.times * clock.seconds_since_round,
            )
        )
