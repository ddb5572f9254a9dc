"""All that one server's process holds: a table for each group of parameters, each with its own memory and engine."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.loop import HELLO_S, Server
from lightning_async.engine.server.plan import TABLES
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.refused import Refused
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
        memories: `TABLES` descriptors of anonymous files, one for each table, see `Store`; its own from now on.
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
        self._servers: dict[int, Server] = {}
        for table, memory in enumerate(self._memories):
            if os.fstat(memory).st_size or table == 0:
                self._server(table)

    @property
    def connected(self) -> int:
        """Connections of workers, to all tables."""
        return sum(server.connected for server in self._all)

    def serve(self, channel: Channel) -> None:
        """Answer one worker, of the table that it names, until it is gone; on a thread of its own."""
        try:
            header, size = channel.receive(HELLO_S)
            try:
                _check_first(header)
                if header.get("do") == "over":
                    self.over = True
                    channel.send({})
                    raise PeerLost("nothing more is said.")
                server = self._called(header)
                if header.get("do") == "forget":
                    for each in self._all:
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
        for server in self._all:
            if server.snapshots is not None:
                server.snapshots.take(last=True)

    @property
    def _all(self) -> list[Server]:
        return list(self._servers.values())

    def _called(self, header: Mapping[str, Any]) -> Server:
        """The server of the table that a first message names."""
        table = header.get("table", 0)
        if type(table) is not int or not 0 <= table < TABLES:
            raise Refused("settings", f"there is no table {table!r}: the server has {TABLES}.")
        return self._server(table)

    def _server(self, table: int) -> Server:
        with self._making:
            if (found := self._servers.get(table)) is None:
                found = self._servers[table] = self._make(table)
            return found

    def _make(self, table: int) -> Server:
        folder, server, every_s = self._keeping
        shelf = None if folder is None else Shelf(folder, server, table)
        found = Server(Store(self._memories[table], self._threads), self._terms, shelf, every_s)
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
    if not whole:
        raise Refused("request", f"{header} is nothing that a server is told first."[:300])
