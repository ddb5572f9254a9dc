"""Decisions on which ranks are live, which are lost and which generation comes next, from the ranks' published records.

`Record` is what one rank publishes, `Peer` is another rank's knowledge of it, and `FailureDetector` decides. It has no
threads, store or clock: its owner reads the records, holds a lock, and passes the time that has gone by.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_async.errors import START_AGAIN
from lightning_async.membership.generation import Generation, in_order, listed

PREFIX = "lightning_async/membership"

ABSENT = "absent"
UP = "up"
VISITING = "visiting"
LEFT = "left"
FAILED = "failed"
# The value of `Record.since` before a rank's first generation.
OUTSIDE = -1
_MAX_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Record:
    """The published state of one rank.

    ``wanted`` is the generation that the rank waits to enter, or is in. ``since`` is the generation from which on the
    rank has been in all; `OUTSIDE` before its first one.
    """

    life: str = ""  # an id of the process; differs between processes of one rank name
    place: str = ""  # where the process can be watched; see `process_liveness.place_of`
    line: str = ""  # where the process accepts calls; see `LivenessPort`
    beat: int = 0
    wanted: int = 0
    since: int = OUTSIDE
    bell: int = 0
    state: str = ABSENT
    text: str = ""


@dataclass
class Peer:
    """The knowledge of one rank about another one; ``silent_s`` counts only time in which the store was read."""

    record: Record = Record()
    fresh: bool = False  # the store holds no records of earlier processes, so every record in it is a live one's
    confirmed: bool = False  # the peer lives, or has lived, since this rank started
    read: bool = False
    restarted: bool = False  # a new process has the name: its old groups are gone, and it waits to be admitted
    silent_s: float = 0.0
    limit_s: float = 0.0
    lost: bool = False
    death: tuple[int, str] | None = None  # an ended process of this name, and how it ended

    @property
    def up(self) -> bool:
        return self.record.state == UP and self.confirmed and not self.lost

    @property
    def visits(self) -> bool:
        return self.record.state == VISITING and self.confirmed and not self.lost

    @property
    def has_left(self) -> bool:
        return self.record.state == LEFT and self.confirmed

    @property
    def failure(self) -> str | None:
        """The reason of the peer's end, if it did not end in order."""
        if self.record.state == FAILED and self.confirmed:
            return f"failed: {self.record.text}"
        if self.death is None or self.record.state == LEFT:
            return None
        # Another process may live under the name by now, which this death is not of.
        process, text = self.death
        return text if not self.record.life or self.record.life.startswith(f"process {process} on ") else None

    def judge(self, record: Record | None, passed_s: float, dead_s: float, start_s: float) -> None:
        """Take in a reading of the peer's record, ``passed_s`` after the last one; None if it was no record."""
        # A late write may put an earlier record of the same process in place again.
        older = record is not None and record.life == self.record.life and record.beat < self.record.beat
        if record is not None and record != self.record and not older:
            # The first reading may find a record of a process that ended before this rank began, so it confirms
            # nothing.
            self.restarted = self.restarted or (self.confirmed and record.life != self.record.life)
            self.confirmed = self.confirmed or self.read or self.fresh
            self.record = record
            self.silent_s = 0.0
        else:
            self.silent_s += passed_s
        self.read = True
        self.limit_s = dead_s if self.confirmed else start_s
        expected = self.record.state in (UP, VISITING) or not self.confirmed
        self.lost = self.failure is not None or (expected and self.silent_s >= self.limit_s)

    def describe(self, rank: str) -> str:
        if self.failure is not None:
            return f"rank {rank} {self.failure}"
        if self.restarted and not self.lost:
            return f"rank {rank} was restarted"
        if not self.lost:
            given_up = f"rank {rank} was last seen {self.silent_s:.1f} s ago, and another rank has given it up"
            return f"rank {rank} has left" if self.has_left else given_up
        if not self.confirmed:
            return f"rank {rank} has not come within {self.limit_s:g} s"
        return f"rank {rank} was last seen {self.silent_s:.1f} s ago"


def describe(lost: dict[str, Peer]) -> str:
    reasons = "; ".join(peer.describe(rank) for rank, peer in lost.items()).rstrip(".")
    return f"{reasons}. See the log of rank(s) {listed(in_order(lost))}{START_AGAIN}."


def new_life() -> str:
    """Return an id for this process that no other process ever has."""
    return f"process {os.getpid()} on {socket.gethostname()} ({os.urandom(8).hex()})"


def key(name: str) -> str:
    return f"{PREFIX}/{name}"


def dump(record: Record) -> bytes:
    return json.dumps(vars(record)).encode()


def load(value: bytes) -> Record | None:
    """Return the record in ``value``; None if there is no record of this version."""
    try:
        fields = json.loads(value) if len(value) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        # A stranger may have written anything, even deeply nested JSON.
        return None
    known = vars(Record())
    if not isinstance(fields, dict) or not fields.keys() <= known.keys():
        return None
    if any(type(value) is not type(known[name]) for name, value in fields.items()):
        return None
    record = Record(**fields)
    counts = (record.beat, record.wanted, record.bell, record.since - OUTSIDE)
    return record if record.state in (ABSENT, UP, VISITING, LEFT, FAILED) and min(counts) >= 0 else None


# After a failure, silence of a tenth of `dead_s` is a death, but a beat may always be late by this time.
_MIN_SUSPICION_S = 1.0


class FailureDetector:
    """The failure detector of one rank: its peers by name, and the generation that the rank is in.

    Args:
        generation: The first generation; a joining rank is alone in its first one.
        fresh: Whether the store is as new as the job; see `Membership`.
        dead_s: Silence in seconds after which a peer that was seen is lost.
        start_s: Silence in seconds after which a peer that was never seen is lost.
        elastic: Whether ranks may join. Then ranks are ordered by the time that they have been in; otherwise all keep
            their order.
        readmit: Whether a rank may come back that a generation was formed without.
    """

    def __init__(
        self,
        generation: Generation,
        fresh: bool,
        dead_s: float,
        start_s: float,
        elastic: bool = True,
        readmit: bool = True,
    ) -> None:
        self.generation = generation
        self.me = generation.name
        self.peers: dict[str, Peer] = {}
        self._fresh = fresh
        self._dead_s = dead_s
        self._start_s = start_s
        self._elastic = elastic
        self._soon_s = max(dead_s / 10, _MIN_SUSPICION_S)
        self._silent_before: dict[str, float] = {}
        """The silence of each peer, in seconds, when something broke; empty if nothing has."""
        self.readmit = readmit
        # Fewer live ranks than this do not continue, and so decide nothing for the others.
        self.fewest = 0
        self._evicted: set[str] = set()
        self.hear_of(generation.members)

    def hear_of(self, names: Iterable[str]) -> None:
        """Begin to track these names, unless they are known."""
        for name in names:
            if name != self.me and name not in self.peers:
                self.peers[name] = Peer(fresh=self._fresh)

    def judge(self, records: Mapping[str, Record | None], passed_s: float) -> None:
        """Take in one reading of all records, ``passed_s`` after the last one."""
        self.hear_of(records)
        for name, record in records.items():
            before_s = self._silent_before.get(name, self._dead_s)
            self.peers[name].judge(record, passed_s, min(self._dead_s, before_s + self._soon_s), self._start_s)

    def hear_death(self, name: str, process: int, text: str) -> None:
        """Note that a process of a peer has ended; the next reading says whether the peer is lost with it."""
        if name in self.peers:
            self.peers[name].death = process, text

    def suspect(self) -> None:
        """Shorten the silence that counts as death to a tenth, but at least a second, until the next generation.

        This is called when something broke. Live ranks have noticed that, too, and publish a beat soon. A rank whose
        process is found to have ended is lost without it; see `LocalProcessWatch`.
        """
        self._silent_before = self._silent_before or {name: peer.silent_s for name, peer in self.peers.items()}

    def lost(self) -> frozenset[str]:
        return frozenset(name for name, peer in self.peers.items() if peer.lost)

    def gone(self, known: frozenset[str] = frozenset(), restarts: bool = False) -> dict[str, Peer]:
        """Return the lost members of this generation, except those that were ``known`` to be lost.

        With ``restarts``, include members that live again as another process.
        """
        others = {name: self.peers[name] for name in self.generation.members if name != self.me and name not in known}
        return {name: peer for name, peer in others.items() if peer.lost or (restarts and peer.restarted)}

    @property
    def enough(self) -> bool:
        return self.generation.world_size - len(self.gone()) >= self.fewest

    def visitors(self) -> list[str]:
        """Return the joining ranks that wait for an invitation and were heard of just now."""
        return in_order(name for name, peer in self.peers.items() if peer.visits and peer.silent_s < self._soon_s)

    def bell(self) -> int:
        return max([peer.record.bell for peer in self._heard().values()], default=0)

    def view(self) -> object:
        """Return a value that changes whenever listeners must be called."""
        return [
            (name, peer.record.bell, peer.record.wanted, peer.record.state, peer.record.life, peer.lost)
            for name, peer in self.peers.items()
        ]

    def newest(self) -> int:
        """Return the newest generation that a live peer is in, or waits for.

        If no rank may come back, no generation is skipped. The next one may have been decided without this rank, which
        must learn that, and not propose itself for a later one.
        """
        newest = max([peer.record.wanted for peer in self._heard().values() if peer.up], default=0)
        return newest if self.readmit else min(newest, self.generation.number + 1)

    def ahead(self) -> list[str]:
        number = self.generation.number
        return in_order(name for name, peer in self._heard().items() if peer.up and peer.record.wanted > number)

    def awaited(self, wanted: int) -> list[str]:
        """Return the ranks that must publish before the wanted generation can be decided."""
        return in_order(
            name
            for name, peer in self._heard().items()
            if not peer.lost
            and ((peer.up and peer.record.wanted != wanted) or (not peer.confirmed and name in self.generation.members))
        )

    def proposal(self, mine: Record) -> list[str] | None:
        """Return the members of the generation that ``mine`` wants, in rank order; None while it is too early.

        If ranks may join, those that have been in longest come first, because rank 0 must have seen what joining ranks
        have not. Otherwise the order stays, even of a rank that heard late of a generation. A joining rank proposes
        nothing, because it may not know all ranks yet.
        """
        if not self.enough or self.generation.number < 0 or self.awaited(mine.wanted):
            return None
        since = {name: peer.record.since for name, peer in self._heard().items() if peer.up} | {self.me: mine.since}
        if not self._elastic:
            return in_order(since)
        return sorted(in_order(since), key=lambda name: mine.wanted if since[name] == OUTSIDE else since[name])

    def enter(self, number: int, members: tuple[str, ...]) -> None:
        self.hear_of(members)
        if not self.readmit:
            self._evicted |= {*self.generation.members} - {*members}
        self._silent_before = {}
        self.generation = Generation(number, members, members.index(self.me))
        for peer in self.peers.values():
            peer.restarted = False

    def _heard(self) -> dict[str, Peer]:
        """Return the peers whose records count; an evicted rank may wake up and publish outdated ones."""
        return {name: peer for name, peer in self.peers.items() if name not in self._evicted}

    def left_behind(self, by: Iterable[str]) -> str:
        return f"rank {self.me}: rank(s) {listed(by)} left generation {self.generation.number}."

    def overdue(self, wanted: int, waited_s: float) -> str:
        return (
            f"rank {self.me}: generation {wanted} did not come about within {waited_s:g} s: rank(s) "
            f"{listed(self.awaited(wanted))} live but have not left their generation. Are they in a long computation "
            "that never calls check()?"
        )

    def evicted(self, number: int, members: Iterable[str]) -> str:
        return (
            f"rank {self.me}: rank(s) {listed(members)} heard nothing of it for too long, or that it had failed, and "
            f"have gone on without it in generation {number}. What it did since is lost. Was its process or its host "
            "stopped, or too busy for a heartbeat? Then raise `Timeouts(dead_after=...)`."
        )
