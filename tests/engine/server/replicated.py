"""Two servers on threads of the test's process, each with a copy of the other one's shard, and workers of one shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.stores import HashStore
from lightning_async.comm.reach import address_of, dial
from lightning_async.comm.shm import answer, listen
from lightning_async.engine.server.client import Client
from lightning_async.engine.server.hosting import Hosting, Keeping
from lightning_async.engine.server.loop import Server
from lightning_async.engine.server.places import Places
from lightning_async.engine.server.plan import MEMORIES
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.views import Views
from lightning_async.errors import PeerLost

__all__ = ["Host", "Two", "two"]


class Host:
    """A server's process and its supervisor, which has the memory.

    Args:
        number: of the server.
        terms: see there.
    """

    def __init__(self, number: int, terms: Terms) -> None:
        self.number, self._terms = number, terms
        self.crashes: list[BaseException] = []
        self.address: dict[str, Any] = {}
        self.awake = threading.Event()
        self.awake.set()
        self.begin()

    def begin(self) -> None:
        """Another one in the place of one that is lost, without its memory."""
        self.memories = [os.memfd_create("test") for _ in range(MEMORIES)]
        self._listener, name = listen(self.address.get("name"))
        self.address = address_of(name)
        self.hosting: Hosting | None = self._made()
        self._accepts = threading.Thread(target=self._accept, args=(self._listener,), name="accepts", daemon=True)
        self._accepts.start()

    def kill(self) -> None:
        """The process alone: the next one finds its memory."""
        self._end()
        self.hosting = self._made()

    def lose(self) -> None:
        """With all that it had."""
        with suppress(OSError):
            self._listener.shutdown(2)
        self._accepts.join(30)  # the name is free when nobody waits there
        self._listener.close()
        self._end()
        for memory in self.memories:
            os.close(memory)
        self.memories = []

    def server(self, home: bool = True, table: int = 0) -> Server:
        """That has this server's own shard, or the other one's."""
        assert self.hosting is not None
        found = self.hosting._seat(home, table).server
        assert found is not None
        return found

    def _made(self) -> Hosting:
        return Hosting(self.memories, self._terms, 1, Keeping(server=self.number))

    def _end(self) -> None:
        before, self.hosting = self.hosting, None
        for seat in before._seats.values() if before is not None else ():
            seat.close()
            if seat.server is not None:
                seat.server.close()

    def _accept(self, listener: Any) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock, self.hosting), name="serves", daemon=True).start()

    def _serve(self, sock: Any, hosting: Hosting | None) -> None:
        assert self.awake.wait(60)
        try:
            if hosting is None:
                sock.close()
            else:
                hosting.serve(answer(sock, "a caller"))
        except PeerLost:
            pass
        except BaseException as error:
            if hosting is self.hosting:  # one that is killed knows not what it does
                self.crashes.append(error)


class Two:
    """Both, and who of them has shard 0.

    Args:
        numel: of the shard.
        lost_after_s: see `Places`.
        terms: of both servers.
    """

    def __init__(self, numel: int, lost_after_s: float, terms: Terms) -> None:
        self.numel, self.lost_after_s = numel, lost_after_s
        self.hosts = [Host(number, terms) for number in (0, 1)]
        self.door = Door(HashStore(), Seal())
        self._opened = ExitStack()

    def views(self, table: int = 0) -> Views:
        return Views(self.door, f"test/{table}")

    def places(self, table: int = 0) -> Places:
        def way(address: Any, whole: bool) -> Any:
            size = 4 * self.numel * whole
            return dial(address, size, size)

        addresses = [host.address for host in self.hosts]
        return Places(0, table, (0, 1), addresses, way, self.views(table), self.lost_after_s)

    def worker(self, name: str, timeout_s: float = 30.0, **how: Any) -> Client:
        client = Client(name, [self.places(how.get("table", 0))], "plan", timeout_s, timeout_s, **how)
        self._opened.callback(client.close, leave=False)
        return client

    def started(self, name: str, optimizer: str = "delta", arguments: dict[str, Any] | None = None) -> Client:
        client = self.worker(name)
        client.gradients[0].zero_()
        client.start(optimizer, arguments)
        return client

    def close(self) -> None:
        self._opened.close()
        for host in self.hosts:
            if host.memories:
                host.lose()


@contextmanager
def two(numel: int = 8, lost_after_s: float = 10.0, **terms: Any) -> Iterator[Two]:
    found = Two(numel, lost_after_s, Terms(**terms))
    try:
        yield found
    finally:
        found.close()
        crashes = [crash for host in found.hosts for crash in host.crashes]
        assert not crashes, crashes
