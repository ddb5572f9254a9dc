"""Waiting for a collective operation without ever hanging."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Pending
from lightning_async.engine.averaging.mailbox import Mailbox

__all__ = ["Closed", "Waiter"]

T = TypeVar("T")
_BEAT = timedelta(seconds=0.1)


class Closed(Exception):
    """The training thread has closed the engine."""


class Waiter:
    """Waits for operations; gives up when the engine closes, a peer is lost, or the groups move on.

    Args:
        mailbox: says when the engine closes.
        membership: says when a peer is lost or has gone on to another generation.
        now: a monotonic clock, in seconds.
    """

    def __init__(self, mailbox: Mailbox, membership: Membership, now: Callable[[], float] = time.monotonic) -> None:
        self._mailbox, self._membership, self._now = mailbox, membership, now

    def result(
        self,
        pending: Pending[T],
        deadline: timedelta | None = None,
        every: tuple[timedelta, Callable[[], None]] | None = None,
    ) -> T:
        """The operation's result, once it is there.

        Args:
            pending: the operation.
            deadline: raise `CollectiveTimeout` after so long. Default: wait for as long as all ranks live.
            every: call a function each time that so much has passed.
        """
        started = last = self._now()
        while not pending.wait(_BEAT):
            self.check()
            now = self._now()
            if deadline is not None and now - started > deadline.total_seconds():
                break
            if every is not None and now - last > every[0].total_seconds():
                every[1]()
                last = now
        return pending.result(timedelta(0))

    def check(self) -> None:
        """Raise what there is to raise: `Closed`, `PeerLost`, or a `CollectiveError` to form the groups anew for."""
        box = self._mailbox
        if box.closing:
            raise Closed
        self._membership.check()
        if box.trouble is not None:
            raise box.trouble
