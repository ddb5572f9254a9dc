"""The board in the store where all ranks pin their records: what a membership reads and writes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from lightning_async.comm.membership.roster import FAILED, LEFT, PREFIX, UP, Record, dump, key, load
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.stores import Store, connect, own_client, reachable, read_all
from lightning_async.comm.protocols import Quorum
from lightning_async.comm.torch.sockets import shut_down
from lightning_async.errors import AsyncTrainingError

__all__ = ["Board", "Waiting"]

_LOOKS = 5
_PROBE = timedelta(seconds=2)


class Waiting(Exception):
    """It is too early to trouble a store again that did not answer in time."""


class Board:
    """All ranks' records, through one client that is kept for as long as it works.

    Every new client costs the store's server time, in which it answers nobody (it looks up the client's name). So one
    that is slow is waited for; when that fails, the pauses between attempts grow, and differ between ranks.

    Args:
        store: what the client is made of.
        rank, world_size: of this rank.
        seal: of the records.
        patience: how long an answer may take.
        now: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        seal: Seal,
        patience: timedelta,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._world_size, self._seal = store, rank, world_size, seal
        self._patience, self._now = patience, now
        self._peers = [other for other in range(world_size) if other != rank]
        self._sockets: dict[int, int] = {}
        self._broken = False
        self._timeouts, self._next_try = 0, 0.0

    def open(self, interval: timedelta) -> None:
        """Make a client, a record for each rank that has none, and sure that no other process lives under this rank.

        Raises:
            AsyncTrainingError: one does.
            RuntimeError: the store is out of reach.
        """
        self._connect()
        for other in range(self._world_size):
            # Reading many keys in one request blocks for missing ones. This sets only those that are missing.
            self._store.compare_set(key(other), "", self._seal.sign(key(other), dump(Record())))  # type: ignore[arg-type]
        found = self._read([self._rank])[0]
        for _ in range(_LOOKS):
            if found is None or found.state != UP:
                return
            threading.Event().wait(interval.total_seconds())
            again = self._read([self._rank])[0]
            if again is not None and again != found:
                raise AsyncTrainingError(
                    f"rank {self._rank} is taken: {again.life} lives under it, and goes on. Were two processes given "
                    "the same rank, or do two jobs use one address and port (MASTER_ADDR, MASTER_PORT)?"
                )

    def exchange(self, mine: Record) -> dict[int, Record | None]:
        """Pin the own record, and read the others'; None for what is no record.

        Raises:
            Waiting: it is too early for another attempt.
            RuntimeError, OSError: the store is out of reach.
        """
        if self._broken:
            self._reconnect()
        asked = self._now()
        try:
            self._store.set(key(self._rank), self._seal.sign(key(self._rank), dump(mine)))  # type: ignore[arg-type]
            records = self._read(self._peers)
        except (RuntimeError, OSError):
            # Not to be used again: a late answer to a request given up would be taken for the next one's.
            self._broken = True
            self._pause(self._now() - asked)
            raise
        self._timeouts = 0
        return dict(zip(self._peers, records, strict=True))

    def decide(self, wanted: int, proposal: Sequence[int] | None) -> Quorum | None:
        """The quorum of a generation, once there is one. The first proposal stands; whoever comes later takes it."""
        name = f"{PREFIX}/quorum/{wanted}"
        if proposal is not None:
            mine = self._seal.sign(name, json.dumps(list(proposal)).encode())
            value: bytes = self._store.compare_set(name, "", mine)  # type: ignore[arg-type, assignment]
            if (ranks := self._ranks(name, value)) is None:  # a stranger's
                ranks = self._ranks(name, self._store.compare_set(name, value, mine))  # type: ignore[arg-type]
        elif self._store.check([name]):
            ranks = self._ranks(name, self._store.get(name))
        else:
            return None
        return None if ranks is None else Quorum(wanted, ranks)

    def report(self, rank: int, text: str) -> None:
        """Say that a rank failed that cannot say so itself."""
        client = own_client(self._store, self._patience)  # this may be another thread
        value = self._seal.open(key(rank), client.get(key(rank)))
        record = (None if value is None else load(value)) or Record()
        if record.state not in (LEFT, FAILED):
            record = replace(record, state=FAILED, text=text)
            client.set(key(rank), self._seal.sign(key(rank), dump(record)))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """End a request that hangs; any thread may call it. No other request is possible then."""
        for fd, inode in self._sockets.items():
            shut_down(fd, inode)

    def _read(self, ranks: Sequence[int]) -> list[Record | None]:
        keys = [key(rank) for rank in ranks]
        return [self._parse(name, value) for name, value in zip(keys, read_all(self._store, keys), strict=True)]

    def _parse(self, name: str, sealed: bytes) -> Record | None:
        value = self._seal.open(name, sealed)
        if value is None:
            return None
        if (record := load(value)) is None:
            self._seal.ignore(name, "is no record of a rank, or one of another version of this package")
        return record

    def _ranks(self, name: str, sealed: bytes) -> tuple[int, ...] | None:
        value = self._seal.open(name, sealed)
        try:
            ranks = None if value is None else json.loads(value)
        except ValueError:
            ranks = ()
        if ranks is None:
            return None
        valid = isinstance(ranks, list) and ranks and all(rank in range(self._world_size) for rank in ranks)
        if not valid or sorted(set(ranks)) != ranks:
            self._seal.ignore(name, "names no quorum of this world's ranks")
            return None
        return tuple(ranks)

    def _connect(self) -> None:
        # A clone takes over the timeout: later ones, made of this one, do not try to connect for minutes.
        self._store, self._sockets = connect(self._store, self._patience)

    def _reconnect(self) -> None:
        if self._now() < self._next_try:
            raise Waiting
        if not reachable(self._store, min(_PROBE, self._patience)):
            raise ConnectionError("connection refused")  # which costs nobody anything
        asked = self._now()
        try:
            self._connect()
        except (RuntimeError, OSError):
            self._pause(self._now() - asked)
            raise
        self._broken = False

    def _pause(self, waited_s: float) -> None:
        patience_s = self._patience.total_seconds()
        if waited_s >= patience_s / 2:  # it does not refuse, it is slow
            self._timeouts += 1
            # An attempt must be under way, or begin, shortly before the store is taken for lost.
            pause_s = min(patience_s * 2.0 ** (self._timeouts - 3), patience_s / 2)
            self._next_try = self._now() + pause_s * random.uniform(0.5, 1.0)
