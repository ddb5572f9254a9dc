"""All that one server's process holds: a table for each group of parameters, each with its own memory and engine."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.loop import HELLO_S, Server
from lightning_async.engine.server.quorum import Terms
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
        memories: descriptors, of the tables' memory; see `Store`.
        terms: how workers are treated.
        threads: that work on a large shard. Default: 1.
        keeping: of snapshots. Default: none.
    """

    def __init__(self, memories: Sequence[int], terms: Terms, threads: int = 1, keeping: Keeping | None = None) -> None:
        self._memories, self._terms, self._threads = list(memories), terms, threads
        self._keeping = keeping or Keeping()
        self._making = threading.Lock()
        self._tables: dict[int, Server] = {}
        self.over = False
        """A worker has said that the training is."""
        for table, memory in enumerate(self._memories):
            if table == 0 or os.fstat(memory).st_size:
                self._table(table)

    @property
    def connected(self) -> int:
        """Connections of workers, to all tables."""
        return sum(table.connected for table in list(self._tables.values()))

    def serve(self, channel: Channel) -> None:
        """Answer one worker, of the table that it names, until it is gone; on a thread of its own."""
        try:
            header, size = channel.receive(HELLO_S)
            table = header.get("table", 0)
            if type(table) is not int or not 0 <= table < len(self._memories):
                why = f"there is no table {table!r}: the server has {len(self._memories)}."
                channel.send({"refused": "settings", "why": why})
                raise PeerLost(why)
            if not _says_who(header):
                channel.send({"refused": "request", "why": f"{header} is nothing that a server is told first."[:300]})
                raise PeerLost("nothing more is said.")
            if header.get("do") == "over":
                self.over = True
                channel.send({})
                raise PeerLost("nothing more is said.")
        except PeerLost:
            channel.close()
            return
        if header.get("do") == "forget":
            for each in list(self._tables.values()):
                each.forget(header["workers"])
        self._table(table).serve(channel, (header, size))

    def take_last(self) -> None:
        """A last snapshot of each table, where any are taken; nothing is applied after it."""
        for table in list(self._tables.values()):
            if table.snapshots is not None:
                table.snapshots.take(last=True)

    def _table(self, number: int) -> Server:
        with self._making:
            if (found := self._tables.get(number)) is None:
                folder, server, every_s = self._keeping
                shelf = None if folder is None else Shelf(folder, server, number)
                store = Store(self._memories[number], self._threads)
                found = self._tables[number] = Server(store, self._terms, shelf, every_s)
                if found.snapshots is not None:
                    found.snapshots.begin()
            return found


def _says_who(header: Mapping[str, Any]) -> bool:
    """Whether a first message is whole, so that whoever says something else harms no server.

    >>> _says_who({"do": "forget", "workers": ["a"]}), _says_who({"do": "hello"})
    (True, False)
    """
    if header.get("do") == "forget":
        names = header.get("workers")
        return isinstance(names, list) and all(isinstance(name, str) for name in names)
    if header.get("do") == "hello":
        texts = [header.get(name) for name in ("worker", "client", "fingerprint")]
        numbers = [header.get(name, "") for name in ("life", "said")]
        return all(isinstance(text, str) for text in texts) and all(isinstance(n, int | None) for n in numbers)
    return True
