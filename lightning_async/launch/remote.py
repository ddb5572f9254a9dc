"""A launcher on another host, as the first node has it: what it is told, and what is heard from it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, Protocol

from lightning_async.comm.launched import Death
from lightning_async.launch.loop import Loop
from lightning_async.launch.node import Hears
from lightning_async.launch.places import Place
from lightning_async.launch.summary import Ending
from lightning_async.launch.wire import Wire

__all__ = ["Meets", "Remote"]


class Meets(Protocol):
    """Who is told what becomes of a launcher."""

    def joined(self, remote: Remote, settings: dict[str, Any]) -> None:
        """It wants to take part."""

    def left(self, remote: Remote, why: str) -> None:
        """Nothing is heard from it any more."""

    def signalled(self, number: int, remote: Remote) -> None:
        """It was sent a signal."""


class Remote:
    """A launcher that has connected; see `Ranks` for what it can do once it has a place.

    Args:
        loop: that reads and writes.
        channel: the connection.
        secret: of the job.
        address: where it comes from.
        meets: who is told what becomes of it.
        hears: who is told what happens to its ranks.
    """

    def __init__(
        self, loop: Loop, channel: socket.socket, secret: str, address: str, meets: Meets, hears: Hears
    ) -> None:
        self._meets, self._hears = meets, hears
        self.address = self.host = address
        """Its host's address, and its name, once it has said it."""
        self.ranks = 0
        """How many it has; 0 until it has joined."""
        self.place: Place | None = None
        self.goes = False
        """It was told to go."""
        self.wire = Wire(loop, channel, secret, True, self._hear, lambda why: meets.left(self, why))

    def take(self, place: Place, address: str, job: str) -> None:
        """It is one of the job's nodes.

        Args:
            place: of its ranks.
            address: of the store.
            job: its name.
        """
        self.place = place
        self.wire.send("place", place=asdict(place), address=address, job=job)

    def start(self, rank: int, port: int, attempt: int, rejoins: int = 0) -> None:
        """See `Ranks`."""
        self.wire.send("start", rank=rank, port=port, attempt=attempt, rejoins=rejoins)

    def send(self, number: int, ranks: Collection[int]) -> None:
        """See `Ranks`."""
        if here := self._here(ranks):
            self.wire.send("send", number=int(number), ranks=here)

    def tell(self, death: Death, ranks: Collection[int]) -> None:
        """See `Ranks`."""
        if here := self._here(ranks):
            self.wire.send("dead", death=list(death[:3]), ranks=here)

    def prepare(self, wanted: int) -> None:
        """See `Ranks`."""
        self.wire.send("prepare", wanted=wanted)

    def go(self, going: Collection[int]) -> None:
        """Its ranks end, and so does it; those that are not ``going``, too, train on."""
        self.goes = True
        self.wire.send("go", ranks=sorted(going))

    def _here(self, ranks: Collection[int]) -> list[int]:
        return sorted(set(ranks) & set(self.place.all if self.place is not None else ()))

    def _hear(self, said: dict[str, Any]) -> None:
        try:
            told = self._read(said)
        except (LookupError, TypeError, ValueError) as error:
            self.wire.end(f"it has sent what is no message ({type(error).__name__}: {error})")
        else:
            told()

    def _read(self, said: dict[str, Any]) -> Callable[[], None]:
        """What to call because of a message."""
        what, meets, hears = said["what"], self._meets, self._hears
        if what == "join" and not self.ranks:
            settings, ranks = dict(said["settings"]), int(said["ranks"])
            if ranks < 1:
                raise ValueError(f"{ranks} ranks")
            self.host, self.ranks = str(said["host"]), ranks
            return lambda: meets.joined(self, settings)
        if not self.ranks:
            raise ValueError(f"{what!r} before it has joined")
        if what == "leave":
            why = str(said["why"])
            return lambda: self.wire.end(why)
        if what == "signal":
            number = int(said["number"])
            return lambda: meets.signalled(number, self)
        rank = int(said["rank"])
        if not self._here([rank]):
            raise ValueError(f"rank {rank} is not its own")
        if what == "started":
            pid = int(said["pid"])
            return lambda: hears.started(rank, pid)
        if what == "told":
            number, members = int(said["number"]), tuple(map(str, said["members"]))
            return lambda: hears.told(rank, number, members)
        if what == "ended":
            tail = tuple(str(line).encode() for line in said["tail"])
            pid, status, seconds, error = int(said["pid"]), int(said["status"]), float(said["seconds"]), said["error"]
            ending = Ending(rank, pid, status, seconds, tail=tail, error=str(error))
            return lambda: hears.ended(ending)
        raise ValueError(f"{what!r}")
