"""All that one server's process holds: a table for each group of parameters, each with its own memory and engine."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.loop import HELLO_S, Server
from lightning_async.engine.server.plan import TABLES
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.refused import Refused
from lightning_async.engine.server.seat import Seat
from lightning_async.engine.server.snapshots import Shelf
from lightning_async.engine.server.store import Store
from lightning_async.errors import PeerLost

__all__ = ["Hosting", "Keeping"]


class Keeping(NamedTuple):
    """How snapshots are kept.

    Args:
        folder: of all servers' snapshots. Default: none are taken.
        server: the number of this one. Default: 0.
        every_s: seconds between two. Default: they are taken when a worker asks.
    """

    folder: str | None = None
    server: int = 0
    every_s: float = math.inf


class Hosting:
    """The tables of one server; those that its memory holds, and each other one from when a worker first names it.

    Args:
        memories: `MEMORIES` descriptors: two for each table of its own, and two for each of the copy that it has of
            another server's; see `Seat`.
        terms: how workers are treated.
        threads: that work on a large shard. Default: 1.
        keeping: of snapshots. Default: none.
    """

    def __init__(self, memories: Sequence[int], terms: Terms, threads: int = 1, keeping: Keeping | None = None) -> None:
        self._memories, self._terms, self._threads = list(memories), terms, threads
        self._keeping = keeping or Keeping()
        self._making = threading.Lock()
        self.over = False
        """A worker has said that the training is."""
        self._seats: dict[tuple[bool, int], Seat] = {}
        self._neighbour: int | None = None
        """The shard of another server that this one has a copy of."""
        for table in range(TABLES):
            for home in (True, False):
                if any(os.fstat(each).st_size for each in self._of(home, table)) or (home and table == 0):
                    self._seat(home, table).take()

    @property
    def connected(self) -> int:
        """Connections of workers, to all tables."""
        return sum(server.connected for server in self._servers)

    def serve(self, channel: Channel) -> None:
        """Answer one worker, of the table that it names, until it is gone; or another server, whose shard has its copy
        here. On a thread of its own."""
        try:
            header, size = channel.receive(HELLO_S)
            try:
                _check_first(header)
                if header.get("do") == "over":
                    self.over = True
                    channel.send({})
                    raise PeerLost("nothing more is said.")
                seat = self._called(header)
                if header.get("do") == "replicate":
                    seat.replicate(channel, header)
                    return
                if header.get("do") == "stands":
                    channel.send(seat.stands(header))
                    raise PeerLost("it has asked.")
                server = seat.lead(header)
                if header.get("do") == "forget":
                    for each in self._servers:
                        each.forget(header["workers"])
            except Refused as refused:
                channel.send({"refused": refused.kind, "why": str(refused)})
                raise PeerLost(str(refused)) from refused
        except PeerLost:
            channel.close()
            return
        server.serve(channel, (header, size))

    def take_last(self) -> None:
        """A last snapshot of each table, where any are taken; nothing is applied after it."""
        for server in self._servers:
            if server.snapshots is not None:
                server.snapshots.take(last=True)

    @property
    def _servers(self) -> list[Server]:
        return [seat.server for seat in list(self._seats.values()) if seat.server is not None]

    def _called(self, header: Mapping[str, Any]) -> Seat:
        """The seat that a first message names."""
        table, shard = header.get("table", 0), header.get("shard", self._keeping.server)
        if type(table) is not int or not 0 <= table < TABLES:
            raise Refused("settings", f"there is no table {table!r}: the server has {TABLES}.")
        if home := shard == self._keeping.server:
            return self._seat(home, table)
        if self._neighbour not in (None, shard):
            raise Refused("settings", f"shard {shard} is not this server's, which has {self._neighbour}'s copy.")
        self._neighbour = shard
        return self._seat(home, table)

    def _of(self, home: bool, table: int) -> list[int]:
        first = 0 if home else 2 * TABLES
        return self._memories[first + table : first + 2 * TABLES : TABLES]

    def _seat(self, home: bool, table: int) -> Seat:
        with self._making:
            if (found := self._seats.get((home, table))) is None:
                serve = partial(self._serve_store, home, table)
                found = self._seats[home, table] = Seat(self._of(home, table), serve, home, self._threads)
            return found

    def _serve_store(self, home: bool, table: int, store: Store) -> Server:
        folder, server, every_s = self._keeping
        shelf = Shelf(folder, server, table) if home and folder is not None else None
        found = Server(store, self._terms, shelf, every_s)
        if found.snapshots is not None:
            found.snapshots.begin()
        return found


def _check_first(header: Mapping[str, Any]) -> None:
    """Whether a first message is whole, so that whoever says something else harms no server.

    >>> _check_first({"do": "hello"})
    Traceback (most recent call last):
    lightning_async.engine.server.refused.Refused: {'do': 'hello'} is nothing that a server is told first.
    """
    whole = True
    if header.get("do") == "forget":
        names = header.get("workers")
        whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
    elif header.get("do") == "hello":
        texts = [header.get(name) for name in ("worker", "client", "fingerprint")]
        numbers = [header.get(name, "") for name in ("life", "said")]
        whole = all(isinstance(text, str) for text in texts) and all(isinstance(n, int | None) for n in numbers)
    elif header.get("do") in ("replicate", "stands"):
        whole = isinstance(header.get("generation"), int)
    if not whole:
        raise Refused("request", f"{header} is nothing that a server is told first."[:300])
