"""The moving of bytes between ranks: every wait has a deadline, and ends with deaths, closing, and new generations."""

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


class Closed(Exception):
    """The end of the engine, by the training thread."""


class Transfer:
    """The engine's headers and payloads on their way.

    ``small`` moves CPU tensors of a few numbers, ``large`` the buckets, in parts of at most ``part_bytes``, each within
    ``deadline``. ``shared_state`` and ``membership`` end waits.
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
        """Raise `Closed`, `PeerLost`, or a `CollectiveError` to form the groups anew for, where there is cause."""
        if self._shared_state.closing:
            raise Closed
        self._membership.check()
        if self._shared_state.trouble is not None:
            raise self._shared_state.trouble

    def result(self, pending: Pending[T]) -> T:
        """Return the result of one part of a payload; raise CollectiveTimeout after the deadline."""
        return self._wait(pending, self._deadline, None)

    def _wait(
        self, pending: Pending[T], deadline: timedelta | None, every: tuple[timedelta, Callable[[], None]] | None
    ) -> T:
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

    def meet(self, row: Tensor, every: tuple[timedelta, Callable[[], None]] | None = None) -> Tensor:
        """Gather all ranks' rows; wait for as long as all of them live, because a late rank is no failure.

        ``every``: a function to call each time that so much has passed.
        """
        return self._wait(self.small.all_gather(row), None, every)

    def all_have(self, tally: float, doubt: bool) -> float | None:
        """Wait until all ranks have a payload; return the sum of their tallies, None where any has doubts."""
        rows = self.meet(torch.tensor([tally, doubt], dtype=torch.float64))
        total, doubts = rows.sum(dim=0).tolist()
        return None if doubts else total

    def gather(self, row: Tensor) -> Tensor:
        return self.result(self.small.all_gather(row))

    def largest_(self, flat: Tensor) -> None:
        """Take the largest of all ranks' numbers on the CPU, element by element."""
        for part in FlatLayout.parts(flat, self.part_bytes):
            self.result(self.small.all_reduce(part, ReduceOp.MAX))

    def sum_(self, bucket: Tensor) -> None:
        for part in FlatLayout.parts(bucket, self.part_bytes):
            self.result(self.large.all_reduce(part))

    def broadcast_(self, bucket: Tensor, source: int) -> None:
        for part in FlatLayout.parts(bucket, self.part_bytes):
            self.result(self.large.broadcast(part, source))

    def registered(self, buffer: Tensor) -> Tensor:
        """Return a copy of a bucket in memory that the transport moves best, or the bucket itself."""
        return self.large.registered(buffer)


class UncommittedRound:
    """An exchange that others may have committed, or may lack.

    two steps    all say that they have the payload, then each commits: a rank that loses the last answer is `behind`,
                 with the payload, and commits when it learns of that
    at once      each commits when it has the payload: a rank that is `behind` may lack it, and gets it from one that
                 is `ahead`, which keeps it where it landed until a header has met everyone beyond it

    Nobody is behind by more than one exchange: a header meets all before the next begins.
    """

    def __init__(self, buckets: Buckets, transfer: Transfer) -> None:
        self._buckets = buckets
        self._transfer = transfer
        self.behind: InFlightRound | None = None
        """Not committed here; others may have. In two steps: the payload is there."""
        self.ahead: InFlightRound | None = None  # committed here, at once; others may lack it

    @property
    def id(self) -> int:
        """The exchange whose payload this rank has; 0: there is none that others could need."""
        if self.behind is not None and not self.behind.at_once:
            return self.behind.id
        return 0 if self.ahead is None else self.ahead.id

    def all_have(self, exchange: InFlightRound) -> bool:
        """Ask all ranks for the payload until none has doubts; return whether to commit."""
        self.behind = exchange
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
        """Copy what others may lack; for the training thread, which uses the buckets."""
        if self.ahead is not None:
            self.ahead.target = self.ahead.target.clone()

    def forget(self) -> None:
        self.behind = self.ahead = None

    def catch_up(self, id: int, source: int | None, is_behind: bool) -> InFlightRound | None:
        """Return what this rank is to commit, where some committed exchange ``id`` and others did not.

        All call this together; ``source``: see `source_of`; ``is_behind``: this rank did not commit it.
        """
        mine = self.behind if is_behind else self.ahead
        if mine is not None and mine.id != id:
            mine = None
        if is_behind and mine is None:
            raise RuntimeError(f"Rank {self._transfer.rank} is told to commit round {id}, but holds none prepared.")
        if source is not None:
            if is_behind:
                self._buckets.claim()
            bucket = torch.empty_like(self._buckets.sent) if mine is None else mine.target  # all ranks are to call
            self._transfer.broadcast_(self._buckets.replica.of_rule(bucket), source)
        return mine if is_behind else None


def source_of(headers: Sequence[Header], id: int) -> int | None:
    """Return the rank that gives all others a payload which some have yet to commit; None: nobody lacks it.

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
