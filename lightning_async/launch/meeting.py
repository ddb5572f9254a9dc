"""Where the launchers of all nodes meet: the first node's side, which hears all of them, and whose host decides.

    a launcher --- connects, shows that it knows the secret ---> join: its host, its ranks, its settings
    enough have come, or the last call is over ----------------> each gets its place, and ranks are started
    a connection ends, or nothing is heard of it --------------> its ranks have ended; its place is empty
    another one joins, that node once more for instance -------> it takes the place, and its ranks can be started again

Strangers have a short time, and are few at once, of whom the oldest goes when another one comes: they cannot keep
launchers of the job from being heard.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_async.launch.loop import Loop
from lightning_async.launch.node import Hears
from lightning_async.launch.places import Place, Wanted, places
from lightning_async.launch.remote import Remote

__all__ = ["Host", "Meeting"]

_STRANGERS = 32
_FAILURES_TOLD = 10
_AGAIN_S = 1.0
_FLUSH_S = 2.0


class Host(Hears, Protocol):
    """Who decides, and is told what becomes of nodes."""

    @property
    def takes_back(self) -> bool:
        """Whether ranks can be started again, those that are lost or all of them."""
        ...

    def meet(self, place: Place) -> None:
        """All are there, and have their places; this one is the host's own."""

    def gone(self, ranks: frozenset[int], why: str) -> None:
        """A node is lost, with these ranks."""

    def here(self, ranks: frozenset[int]) -> None:
        """Another one has its place."""

    def alone(self, why: str) -> None:
        """Too few have come."""

    def signalled(self, number: int, where: str, spared: frozenset[int] = frozenset()) -> None:
        """Another launcher was sent a signal; ``spared`` are its ranks, where there are enough nodes without it."""

    def say(self, text: str) -> None:
        """To people, here and at all other nodes."""


@dataclass
class _Seat:
    """A place, and who has it; nobody, where the node is lost."""

    place: Place
    host: str
    remote: Remote | None


def _unequal(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """In what two launchers differ, in words; None where they do not."""
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} is {theirs.get(name)!r} here, and {value!r} on the first node"
    return None


class Meeting:
    """The endpoint of the first node, and the nodes that have come to it.

    Args:
        listener: the socket that listens there.
        wanted: how many nodes there are to be.
        secret, name: of the job.
        settings: which have to be the same on all nodes.
        ranks: how many the own node has.
    """

    def __init__(
        self,
        listener: socket.socket,
        wanted: Wanted,
        secret: str,
        name: str,
        settings: Mapping[str, object],
        ranks: int,
    ) -> None:
        self._listener, self._wanted, self._secret, self._name = listener, wanted, secret, name
        self._settings, self._ranks = dict(settings), ranks
        self.address: str = listener.getsockname()[0]
        """At which others reach this host."""
        self._strangers: list[Remote] = []
        self._waiting: list[Remote] = []
        self._seats: list[_Seat] = []
        self._gathers = False
        self._failures: set[str] = set()

    def open(self, loop: Loop, host: Host) -> None:
        """Hear who comes."""
        self._loop, self._host = loop, host
        self._listener.setblocking(False)
        self._listen()

    def gather(self) -> None:
        """Wait for all nodes, and then have the host `meet` them."""
        self._gathers = True
        self._count()

    @property
    def remotes(self) -> list[Remote]:
        """The nodes that have a place, but the own one."""
        return [seat.remote for seat in self._seats if seat.remote is not None]

    def where(self, rank: int) -> str:
        """The node of a rank, in words."""
        found = [f"node {seat.place.node} ({seat.host})" for seat in self._seats if rank in seat.place.all]
        return found[0] if found else ""

    def say(self, text: str) -> None:
        """To people at all other nodes."""
        for remote in (*self.remotes, *self._waiting):
            remote.wire.send("say", text=text)

    def close(self, code: int | None) -> None:
        """All other nodes end with this code; None: without a word, by which they hear that this one is lost."""
        remotes = [*self.remotes, *self._waiting]
        if code is not None:
            for remote in remotes:
                remote.wire.send("finish", code=code)
            for remote in remotes:
                remote.wire.conclude(_FLUSH_S)
        for remote in (*remotes, *self._strangers):
            remote.wire.close()
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    # ---- who comes ----

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            channel, (address, *_) = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left: who connects meanwhile waits
            self._loop.forget(self._listener.fileno())
            self._loop.after(_AGAIN_S, (self, "accept"), self._listen)
            return
        if len(self._strangers) == _STRANGERS:  # who knows the secret has shown it before so many others come
            self._strangers[0].wire.close()
            del self._strangers[0]
        self._strangers.append(Remote(self._loop, channel, self._secret, address, self, self._host))

    def joined(self, remote: Remote, settings: dict[str, Any]) -> None:
        """See `Meets`."""
        self._strangers.remove(remote)
        difference = _unequal(self._settings, settings)
        if difference is None and len(self._waiting) >= self._wanted.most:
            difference = f"{len(self._waiting)} nodes wait already"
        elif difference is None and not self._gathers and not self._host.takes_back:
            difference = "the job runs, and no restarts are left with which it could be joined"
        if difference is not None:
            self._host.say(f"A node ({remote.host}) is refused: {difference}.")
            remote.wire.send("refused", why=difference)  # it ends the connection when it has read that
            return
        self._waiting.append(remote)
        if self._gathers:
            self._count()
        elif not self._fill():
            self._tell_why_it_waits(remote)

    def left(self, remote: Remote, why: str) -> None:
        """See `Meets`."""
        if remote in self._strangers:
            self._strangers.remove(remote)
            if remote.address not in self._failures and len(self._failures) < _FAILURES_TOLD:
                self._failures.add(remote.address)
                self._host.say(f"Somebody at {remote.address} is not listened to: {why}.")
        elif remote in self._waiting:
            self._waiting.remove(remote)
            self._host.say(f"A node ({remote.host}) is there no more: {why}.")
            self._count()
        for seat in self._seats:
            if seat.remote is remote:
                seat.remote = None
                self._host.gone(frozenset(seat.place.all), why)
                if not self._fill() and not self._gathers:
                    for each in self._waiting:
                        self._tell_why_it_waits(each)
                self._count()

    # ---- places ----

    def _fill(self) -> bool:
        """Whether somebody who has waited has got a place that was empty."""
        for seat in [] if self._gathers else [seat for seat in self._seats[1:] if seat.remote is None]:
            fits = [remote for remote in self._waiting if remote.ranks == seat.place.ranks]
            for remote in sorted(fits, key=lambda remote: remote.host != seat.host)[:1]:
                self._waiting.remove(remote)
                seat.remote, seat.host = remote, remote.host
                remote.take(seat.place, self.address, self._name)
                self._host.say(f"node {seat.place.node} ({seat.host}) is there again.")
                self._host.here(frozenset(seat.place.all))
                return True
        return False

    def _tell_why_it_waits(self, remote: Remote) -> None:
        """It may be one of those that have a place, and whose end nobody has noticed yet."""
        empty = [seat for seat in self._seats[1:] if seat.remote is None]
        why = "".join(f"The place of node {each.place.node} is empty, for -n {each.place.ranks}. " for each in empty)
        text = f"{why}This one has -n {remote.ranks}, and" if empty else "All places are taken: this node"
        remote.wire.send("say", text=f"{text} waits until it is needed.")

    def _count(self) -> None:
        """Somebody has come or gone."""
        if not self._gathers:
            return
        here, wanted = 1 + len(self.remotes) + len(self._waiting), self._wanted
        complete = bool(self._seats) and len(self.remotes) == len(self._seats) - 1
        seconds = 0.0 if complete else wanted.wait_s(here)
        if seconds:
            self._host.say(f"{here} of {wanted.text} nodes are there; others have {seconds:g} s to come.")
        self._loop.after(seconds, (self, "gather"), self._assign)

    def _assign(self) -> None:
        nodes = [*self.remotes, *self._waiting][: self._wanted.most - 1]
        if 1 + len(nodes) < self._wanted.least:
            self._host.alone(f"{1 + len(nodes)} of {self._wanted.text} nodes have come")
            return
        self._gathers = False
        own, *others = places([self._ranks, *[remote.ranks for remote in nodes]])
        self._waiting = [remote for remote in self._waiting if remote not in nodes]
        self._seats = [_Seat(own, socket.gethostname(), None)]
        for place, remote in zip(others, nodes, strict=True):
            self._seats.append(_Seat(place, remote.host, remote))
            remote.take(place, self.address, self._name)
        self._host.meet(own)

    def signalled(self, number: int, remote: Remote) -> None:
        """See `Meets`."""
        if (place := remote.place) is None:
            return
        left = 1 + sum(not each.goes for each in self.remotes if each is not remote)
        spared = number == signal.SIGTERM and left >= self._wanted.least
        self._host.signalled(number, self.where(place.first), frozenset(place.all if spared else ()))
