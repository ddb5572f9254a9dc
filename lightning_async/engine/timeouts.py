"""The timeouts of the engine: how long it waits for payloads, late ranks, dead ranks and new ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightning_async._checks import check_int
from lightning_async.membership.membership import HEARTBEAT


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """A set of timeouts for the engine.

    Args:
        payload: Longest time for each part of a payload, and for a header that all ranks have sent. Default 60 s. A
            header that a rank has not sent yet has no deadline, because a late rank is no failure.
        grace: Time without a sign of life from a rank's training thread after which no rank waits for its message: its
            engine's thread then takes part in exchanges without one. Default 10 s.
        dead_after: Time without a heartbeat after which a rank is lost, and longest time for two live ranks to
            connect; at least four heartbeats. Default 30 s.
        reform: Longest time for all live ranks to meet again, and to form their groups. Default 300 s.
        replicas: Time for which the live ranks, if they are fewer than `min_replicas`, wait for others to join or
            return before training ends. Default 0: training ends at once.
        sync_point: Longest time for which a rank waits for a live rank in a collective call at a sync point, such as a
            validation's metrics. Default None: as long as that rank lives, because rank 0 may evaluate for hours. Ranks
            log for whom they wait.
        attempts: Number of failed rounds in a row that ends training with an error. Default 10.

    Raises:
        TypeError: If a time is no timedelta, or ``attempts`` is no int.
        ValueError: If a time is not positive (``replicas`` may be 0), ``dead_after`` is shorter than four heartbeats,
            or ``attempts`` is less than 1.
    """

    payload: timedelta = timedelta(seconds=60)
    grace: timedelta = timedelta(seconds=10)
    dead_after: timedelta = timedelta(seconds=30)
    reform: timedelta = timedelta(seconds=300)
    replicas: timedelta = timedelta(0)
    sync_point: timedelta | None = None
    attempts: int = 10

    @staticmethod
    def or_default(given: Timeouts | None) -> Timeouts:
        """Return ``given``, or the default timeouts if it is None."""
        return Timeouts() if given is None else given

    def __post_init__(self) -> None:
        for name in ("payload", "grace", "dead_after", "reform", "replicas", "sync_point"):
            value = getattr(self, name)
            if value is None and name == "sync_point":
                continue
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
