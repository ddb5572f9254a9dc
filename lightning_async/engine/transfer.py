"""Waiting for data from other ranks. A wait ends if a rank dies, if the engine closes, or if new groups are formed.

`Transfer` waits for headers and payloads. `UncommittedRound` keeps an exchange that some ranks have committed and
others have not, so that all can commit it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import Collectives, Pending, ReduceOp
from lightning_async.engine.buckets import Buckets, InFlightRound
from lightning_async.engine.shared_state import Header, SharedState
from lightning_async.flat import FlatLayout
from lightning_async.membership.membership import Membership

T = TypeVar("T")
_BEAT = timedelta(seconds=0.1)
# Longest time between two looks that counts for a deadline.
_LONGEST_LOOK_S = 5.0


class Closed(Exception):
    """The signal that the training thread has closed the engine; it ends every wait of the engine's thread."""


class Transfer:
    """The engine's operations on headers and payloads; the engine's thread calls all of them.

    The communicator ``small`` moves CPU tensors of a few numbers. The communicator ``large`` moves the buckets, in
    parts of at most ``part_bytes``, each within ``deadline``. Every wait looks at ``shared_state`` and ``membership``
    ten times a second, see `check`.
    """

    def __init__(
        self,
        small: Collectives,
        large: Collectives,
        shared_state: SharedState,
        membership: Membership,
        deadline: timedelta,
        part_bytes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.small = small
        self.large = large
        self.part_bytes = part_bytes
        self._shared_state = shared_state
        self._membership = membership
        self._deadline = deadline
        self._now = now

    @property
    def rank(self) -> int:
        return self.small.rank

    def check(self) -> None:
        """Raise `Closed` if the engine was closed, PeerLost if a rank was lost, or the error of a collective call."""
        if self._shared_state.closing:
            raise Closed
        self._membership.check()
        if self._shared_state.trouble is not None:
            raise self._shared_state.trouble

    def result(self, pending: Pending[T]) -> T:
        """Wait for one part of a payload and return it; raise CollectiveTimeout after the deadline."""
        return self._wait(pending, self._deadline)

    def _wait(self, pending: Pending[T], deadline: timedelta, look: Callable[[float], bool] = lambda now: True) -> T:
        """Wait until the result is there, and return it.

        Args:
            pending: Operation to wait for.
            deadline: Longest wait from the moment on at which ``look`` returns True.
            look: Called with the time, ten times a second. Default: the deadline counts from the beginning.

        Raises:
            CollectiveTimeout: The deadline is over.
        """
        last = self._now()
        waited_s = 0.0
        while waited_s <= deadline.total_seconds() and not pending.wait(_BEAT):
            self.check()
            now = self._now()
            # Where this process was stopped meanwhile, the result may be there already.
            waited_s += min(now - last, _LONGEST_LOOK_S) * look(now)
            last = now
        return pending.result(timedelta(0))

    def meet(self, row: Tensor, seq: int, every: tuple[timedelta, Callable[[], None]] | None = None) -> Tensor:
        """Gather header ``seq`` from every rank.

        A late rank is no failure, so there is no deadline until all ranks have sent their header. From then on, a
        header that does not arrive is a broken link, although the heartbeats of all ranks reach the store.

        Args:
            row: Numbers of this rank's header.
            seq: Number of the header.
            every: Interval and a function, which is called each time that the wait has lasted for another interval.
                Default: None, nothing is called.
        """
        last = self._now()

        def look(now: float) -> bool:
            nonlocal last
            if every is not None and now - last > every[0].total_seconds():
                every[1]()
                last = now
            return not self._membership.behind("header", seq)

        return self._wait(self.small.all_gather(row), self._deadline, look)

    def all_have(self, tally: float, doubt: bool) -> float | None:
        """Wait until all ranks have the payload; return the sum of the ranks' ``tally``, such as their samples.

        Returns None if any rank has a ``doubt``: it does not know yet whether it can use what it has received.
        """
        row = torch.tensor([tally, doubt], dtype=torch.float64)
        # A rank may be behind by the last part of the payload, which has the same deadline.
        rows = self._wait(self.small.all_gather(row), 2 * self._deadline)
        total, doubts = rows.sum(dim=0).tolist()
        return None if doubts else total

    def gather(self, row: Tensor) -> Tensor:
        return self.result(self.small.all_gather(row))

    def largest_(self, flat: Tensor) -> None:
        """Replace each number of a CPU tensor by the largest of all ranks' numbers at the same position."""
        for part in FlatLayout.parts(flat, self.part_bytes):
            self.result(self.small.all_reduce(part, ReduceOp.MAX))

    def sum_(self, bucket: Tensor) -> None:
        for part in FlatLayout.parts(bucket, self.part_bytes):
            self.result(self.large.all_reduce(part))

    def broadcast_(self, bucket: Tensor, source: int) -> None:
        for part in FlatLayout.parts(bucket, self.part_bytes):
            self.result(self.large.broadcast(part, source))

    def registered(self, buffer: Tensor) -> Tensor:
        """Return a copy of ``buffer`` in memory that the transport can use best, or ``buffer`` itself."""
        return self.large.registered(buffer)


class UncommittedRound:
    """The last exchange of this rank, while some ranks may have committed it and others may not.

    `behind` is the exchange if others may have committed it and this rank has not. `ahead` is the exchange if this rank
    has committed it and others may not have. There are two ways to commit; the type of the exchange says which one is
    used.

        two steps    all ranks tell each other that they have the payload, then each commits. A rank that does not hear
                     of all others is behind: it has the payload, and commits once the next header says that others did
        at once      each rank commits once it has the payload. A rank that fails to receive the payload is behind
                     without it, and gets it from a rank that is ahead. That rank keeps the payload until the next
                     header has shown that no rank lacks it

    No rank is behind by more than one exchange, because all ranks exchange headers before the next exchange begins.
    """

    def __init__(self, buckets: Buckets, transfer: Transfer) -> None:
        self._buckets = buckets
        self._transfer = transfer
        self.behind: InFlightRound | None = None
        """The exchange that this rank has not committed, and others may have; in two steps, with its payload."""
        self.ahead: InFlightRound | None = None  # committed at once by this rank; others may lack its payload

    @property
    def id(self) -> int:
        """The number of the exchange whose payload other ranks may need from this rank; 0 if there is none."""
        if self.behind is not None and not self.behind.at_once:
            return self.behind.id
        return 0 if self.ahead is None else self.ahead.id

    def all_have(self, exchange: InFlightRound) -> bool:
        """Wait until all ranks have the payload; return whether to commit the exchange.

        If a rank does not know yet whether it can use the payload, the ranks decide that together first, with
        ``exchange.settle``. Returns False if they then find that no rank can use it.
        """
        self.behind = exchange  # from here on others may commit it, even if this rank never gets their answer
        while (tally := self._transfer.all_have(exchange.tally, exchange.doubt)) is None:
            self.behind = None
            exchange.settle()
            if exchange.void:
                return False
            self.behind = exchange
        exchange.tally = tally
        exchange.tally_is_whole = True
        return True

    def committed(self, exchange: InFlightRound) -> None:
        self.behind = None
        self.ahead = exchange if exchange.at_once else None

    def keep(self) -> None:
        """Copy the payload out of the buckets, if other ranks may lack it.

        The caller is about to overwrite the buckets.
        """
        if self.ahead is not None:
            self.ahead.target = self.ahead.target.clone()

    def forget(self) -> None:
        self.behind = self.ahead = None

    def catch_up(self, id: int, source: int | None, is_behind: bool) -> InFlightRound | None:
        """Return the exchange ``id``, which some ranks have committed, so that this rank commits it, too.

        Returns None if this rank has committed it already. All ranks call this together.

        Args:
            id: Number of the exchange.
            source: Rank that broadcasts the payload, see `source_of`; None if all ranks have it.
            is_behind: Whether this rank has not committed the exchange.
        """
        mine = self.behind if is_behind else self.ahead
        if mine is not None and mine.id != id:
            mine = None
        if is_behind and mine is None:
            raise RuntimeError(f"Rank {self._transfer.rank} is told to commit round {id}, but holds none prepared.")
        if source is not None:
            if is_behind:
                self._buckets.claim()
            # A rank that needs nothing takes part in the broadcast, too, with a bucket that is thrown away.
            bucket = torch.empty_like(self._buckets.sent) if mine is None else mine.target
            self._transfer.broadcast_(self._buckets.replica.of_rule(bucket), source)
        return mine if is_behind else None


def source_of(headers: Sequence[Header], id: int) -> int | None:
    """Return the first rank that holds the payload of exchange ``id``, if another rank lacks it, else None.

    A rank lacks it if it has not committed the exchange (``Header.exchange`` is ``id``) and does not hold the payload
    (``Header.held`` is not ``id``). Raises RuntimeError if a rank lacks it and none holds it.

    In both examples rank 0 has not committed exchange 7. It holds the payload in the first one, so the result is None.

    >>> source_of([Header(exchange=7, held=7), Header(exchange=8)], 7)
    >>> source_of([Header(exchange=7), Header(exchange=8, held=7)], 7)
    1
    """
    if all(h.exchange > id or h.held == id for h in headers):
        return None
    source = next((rank for rank, h in enumerate(headers) if h.held == id), None)
    if source is None:
        raise RuntimeError(f"Round {id} was committed, and no rank that is left holds it for those that have not.")
    return source
