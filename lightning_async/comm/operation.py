"""One asynchronous operation: completed or failed by the transport, waited for by its caller.

Every transport hands out `Operation` objects. They know their own deadline, so that nobody needs to wait
on them for a late peer to be noticed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from lightning_async.comm.membership.generation import Generation
from lightning_async.errors import START_AGAIN, CollectiveError, CollectiveTimeout

__all__ = ["Operation", "Where"]

T = TypeVar("T")

_POLL_S = 0.005
_SOURCE = re.compile(r"\[[^\[\]\s]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Where in a library's source an error was raised: of no use to who reads it."""


@dataclass(frozen=True)
class Where:
    """One communicator in one generation: whose keys these are, and who speaks in messages.

    Args:
        name: of the communicator.
        generation: its members, in the order of their ranks: all that the groups have, or some.
    """

    name: str
    generation: Generation

    @property
    def rank(self) -> int:
        return self.generation.rank

    @property
    def world_size(self) -> int:
        return self.generation.world_size

    def __str__(self) -> str:
        number = self.generation.number
        return f"rank {self.rank} of {self.world_size}, communicator '{self.name}', generation {number}"


class Operation(Generic[T]):
    """A `Pending` that its transport completes or fails, once, from any thread.

    Args:
        where: the communicator, for messages.
        kind: the operation's name.
        seq: its number within the communicator.
        timeout: the deadline, counted from now.
        on_expire: called once, from whichever thread notices, when the deadline passes. The transport breaks
            the communicator off there.
        poll: called by `done`, and while waiting: completes or fails the operation when the transport has ended
            it. For transports without a completion callback.
    """

    late: type[CollectiveTimeout] = CollectiveTimeout
    remedy = f"See the logs of the other ranks{START_AGAIN}."

    def __init__(
        self,
        where: Where,
        kind: str,
        seq: int,
        timeout: timedelta,
        on_expire: Callable[[CollectiveError], None],
        poll: Callable[[], object] | None = None,
    ) -> None:
        self.where, self.kind, self.seq = where, kind, seq
        self.timeout = timeout
        self.started = time.monotonic()
        self.poll = poll
        self.poll_s = _POLL_S
        self.told = False
        """The transport completes it by itself, and `poll` is for what goes wrong: no hurry."""
        self.sleep: Callable[[float], object] = self.ended_in
        """Waits for so many seconds at most, until there is something to `poll`."""
        self._on_expire = on_expire
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: CollectiveError | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} #{self.seq}"

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def complete(self, value: T) -> bool:
        """End well. Returns False where it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._value = value
            self._ended.set()
            return True

    def fail(self, error: CollectiveError) -> bool:
        """End badly. Returns False where it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._error = error
            self._ended.set()
            return True

    def failure(self, error: Exception) -> CollectiveError:
        """The transport's own error, in words of this package."""
        kind = CollectiveTimeout if "timed out" in str(error).lower() else CollectiveError
        said = _SOURCE.sub("", str(error).split("\n", 1)[0]).rstrip(".")
        return kind(f"{self} failed after {self.elapsed_s():.2f} s: {said}. {self.remedy}")

    def ended(self) -> bool:
        """Like `done`, but neither polls nor looks at the deadline."""
        return self._ended.is_set()

    def ended_in(self, seconds: float) -> bool:
        """The same, after so many seconds at most."""
        return self._ended.wait(seconds)

    def succeeded(self) -> bool:
        return self._ended.is_set() and self._error is None

    def done(self) -> bool:
        if not self._ended.is_set() and self.poll is not None:
            self.poll()
        if not self._ended.is_set() and self.elapsed_s() >= self.timeout.total_seconds():
            self._expire(self.timeout)
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        # The own deadline may come first; waiting past it would notice a late peer later than promised.
        until = min(time.monotonic() + max(timeout.total_seconds(), 0.0), self.started + self.timeout.total_seconds())
        self._sleep_until(until)
        return self.done()

    def result(self, timeout: timedelta | None = None) -> T:
        if timeout is None:
            self.wait(self.timeout)
        elif not self.wait(timeout):
            self._expire(timeout)
        if self._error is not None:
            # A fresh exception for every caller: raising one object twice would grow its traceback.
            raise type(self._error)(*self._error.args) from self._error
        return self._value  # type: ignore[return-value]  # None is a value where T is None

    def _expire(self, limit: timedelta) -> None:
        error = self.late(
            f"{self} did not complete within {limit.total_seconds():g} s (waited {self.elapsed_s():.2f} s). A peer is "
            f"late, stopped or gone. {self.remedy}"
        )
        if self.fail(error):
            self._on_expire(error)

    def _sleep_until(self, until: float) -> None:
        if self.poll is None:
            self._ended.wait(max(until - time.monotonic(), 0.0))
            return
        if self.told:
            self.sleep(min(self.poll_s, max(until - time.monotonic(), 0.0)))
        while not self._ended.is_set():
            self.poll()
            left = until - time.monotonic()
            if self._ended.is_set() or left <= 0:
                return
            soon = self.poll_s if self.told else max(0.1 * self.elapsed_s(), self.poll_s / 25)  # a tenth late, at most
            self.sleep(min(soon, self.poll_s, left))
