"""The control plane: where one rank's wings meet the engine's thread, and both threads what they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Collectives
from lightning_async.engine.ballot import Wing
from lightning_async.engine.buckets import Buckets, Exchange
from lightning_async.engine.calls import Calls, Recovery
from lightning_async.engine.deadlines import Deadlines
from lightning_async.engine.header import Vote
from lightning_async.engine.loop import Loop, Stage
from lightning_async.engine.mailbox import Mailbox
from lightning_async.engine.regroup import Regroup
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.errors import AsyncTrainingError, CollectiveError, PeerLost

__all__ = ["ControlPlane", "forks_of"]


def forks_of(collectives: Collectives, payload: Collectives, deadlines: Deadlines) -> tuple[Collectives, Collectives]:
    """What headers and payloads go over: forks of these."""
    return collectives.fork("header", timedelta(days=7)), payload.fork("payload", deadlines.payload)


class ControlPlane:
    """What one rank's wings share: what is shared between its two threads, what moves it, and the thread that serves.

    Args:
        collectives: the root communicator, for CPU tensors; headers go over a fork of it.
        membership: liveness, generations, and the bell that calls for a header at once; its owner starts and closes it.
        replica: what is moved. All ranks must start with equal parameters.
        deadlines: how long to wait for what.
        payload: what payloads go over a fork of: by default ``collectives``, or one for the device of the buckets.
        part_bytes: payloads move in parts of at most this size.
        now: a monotonic clock, in seconds.
        calls: of the training thread over all ranks, which go on in the new groups when these are formed anew.
        min_replicas: ranks that are lost are done without, as long as so many are left. Default: all that there are.
        forks: see `forks_of`; by default they are made here.
    """

    def __init__(
        self,
        collectives: Collectives,
        membership: Membership,
        replica: Replica,
        deadlines: Deadlines,
        *,
        payload: Collectives | None = None,
        part_bytes: int = 16 << 20,
        now: Callable[[], float] = time.monotonic,
        calls: Calls | None = None,
        min_replicas: int | None = None,
        forks: tuple[Collectives, Collectives] | None = None,
    ) -> None:
        self.mailbox = Mailbox()
        self.buckets = Buckets(replica, self.mailbox)
        self.membership, self.now, self.deadlines, self._calls = membership, now, deadlines, calls
        roots = (collectives, payload or collectives)
        small, large = forks or forks_of(*roots, deadlines)
        self.transfer = Transfer(small, large, self.mailbox, membership, deadlines.payload, part_bytes, now)
        self.wings: list[Wing] = []
        self.regroup = Regroup(roots, membership, self.mailbox, self.transfer, calls, deadlines, min_replicas, now)
        self._loop = Loop(
            self.wings, self.buckets, self.mailbox, self.transfer, membership, self.regroup, deadlines, now
        )
        self._thread = threading.Thread(target=self._loop.run, name=f"lightning_async-rounds-{self.rank}", daemon=True)

    @property
    def rank(self) -> int:
        """This rank's number in the present generation."""
        return self.transfer.rank

    @property
    def reforming(self) -> bool:
        """Whether the groups are being formed anew."""
        return self._loop.stage is Stage.FAILED

    def register(self, wing: Wing) -> None:
        """Add a wing; before `start`, in the same order on all ranks."""
        self.wings.append(wing)

    def on_mark(self, copy: Callable[[Exchange], Any]) -> None:
        """Have ``copy`` called on the engine's thread with every marked exchange, before anything overwrites it.

        What it returns is found in the mailbox once the exchange is handed over.
        """
        self._loop.on_mark = copy

    def start(self) -> None:
        """Begin to serve: every replica's parameters are equal now."""
        self.mailbox.last_seen = self.now()
        self.mailbox.last_exchange = self.mailbox.next_exchange
        self.buckets.begin(self.transfer.registered)
        if self._calls is not None:
            self._calls.recovery = Recovery(self._report_trouble, self._look, self.regroup.survives)
        self._thread.start()

    def close(self, timeout: timedelta) -> bool:
        """End the thread, which waits for no peer; whether it has ended. Idempotent."""
        with self.mailbox.changed:
            self.mailbox.closing = True
            self.mailbox.changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def see(self) -> None:
        """The training thread shows itself, hears of failures, and passes on a signal's vote. Under the lock."""
        box = self.mailbox
        box.last_seen = self.now()
        if box.error is not None:
            raise self._failure(box.error)
        if box.stop_requested and Vote.STOP not in box.asked:
            box.asked |= Vote.STOP
            self.ring()

    def _failure(self, error: BaseException) -> BaseException:
        """What has ended the engine's thread, as an error of this package."""
        if isinstance(error, AsyncTrainingError):
            return error
        box = self.mailbox
        failure = AsyncTrainingError(
            f"Rank {self.rank}: the averaging thread failed in round {box.next_exchange} at step {box.steps:.0f}: "
            f"{type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure

    def _look(self) -> None:
        with self.mailbox.changed:
            self.see()

    def _report_trouble(self, error: PeerLost | CollectiveError) -> None:
        with self.mailbox.changed:
            self.mailbox.trouble = error
            self.mailbox.changed.notify_all()

    def ring(self) -> None:
        """Ask every rank, ready or not, to answer the header that will carry what is in the mailbox now."""
        with self.mailbox.changed:
            seq = max(self._loop.seq, self.mailbox.composed + 1)
            self.mailbox.changed.notify_all()
        self.membership.ring(seq)

    def wake(self) -> None:
        """Something outside the mailbox has changed."""
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()

    def vacated(self) -> Tensor:
        """`Buckets.received`, to be overwritten while no header is under way: what others may lack is elsewhere now."""
        self._loop.held.keep()
        return self.buckets.received

    def forget(self) -> None:
        """The buckets were laid out anew: nothing of the old ones is used any more."""
        self._loop.held.forget()
