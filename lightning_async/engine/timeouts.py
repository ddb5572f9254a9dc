"""The engine's timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightning_async._checks import check_int
from lightning_async.membership.membership import HEARTBEAT


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The engine's timeouts.

    Args:
        payload: for each part of a payload. Default 60 s; the header before it has no deadline, because a late
            rank is no failure.
        grace: after this long without a step, a rank's engine answers rounds without it. Default 10 s.
        dead_after: a rank that sent no heartbeat for so long is lost; at least four heartbeats. Default 30 s.
        reform: for all ranks to meet again after a failure. Default 300 s.
        replicas: where fewer than `min_replicas` are left, those stand for so long until others have come (back), and
            go on with these. Default 0: training ends.
        attempts: failed rounds in a row before training ends with an error. Default 10.

    Raises:
        TypeError: a time that is no timedelta, or ``attempts`` is no int.
        ValueError: a time that is not positive (of `replicas`: that is negative), or a `dead_after` that is too short.
    """

    payload: timedelta = timedelta(seconds=60)
    grace: timedelta = timedelta(seconds=10)
    dead_after: timedelta = timedelta(seconds=30)
    reform: timedelta = timedelta(seconds=300)
    replicas: timedelta = timedelta(0)
    attempts: int = 10

    @staticmethod
    def or_default(given: Timeouts | None) -> Timeouts:
        """Return the given argument, whatever it is; the default where that is None."""
        return Timeouts() if given is None else given

    def __post_init__(self) -> None:
        for name in ("payload", "grace", "dead_after", "reform", "replicas"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise TypeError(f"`Timeouts({name}={value!r})` must be a datetime.timedelta.")
            if value <= timedelta(0) and name != "replicas":
                raise ValueError(f"`Timeouts({name}={value!r})` must be longer than zero.")
        if self.replicas < timedelta(0):
            raise ValueError(f"`Timeouts(replicas={self.replicas!r})` must not be negative.")
        if self.dead_after < 4 * HEARTBEAT:
            raise ValueError(
                f"`Timeouts(dead_after={self.dead_after!r})` must be at least {4 * HEARTBEAT!r}: four heartbeats."
            )
        check_int(self, "attempts", at_least=1)
