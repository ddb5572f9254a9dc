"""Decisions on which ranks are live, which are lost and which generation comes next, from the ranks' published records.

`Record` is what one rank publishes, `Peer` is what this rank knows about another one, and `FailureDetector` decides.
The detector has no threads, store, clock or lock: its owner, `Membership`, reads the records from the store, holds a
lock during each call, and passes the elapsed time as an argument.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_async._checks import parse_json
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

    ``wanted`` is the generation that the rank is in, or waits to enter. ``since`` is the number of a generation: the
    rank has been a member of this one and of all later ones. It is `OUTSIDE` before the rank's first generation.
    """

    life: str = ""  # an id of the process; differs between processes of one rank name
    place: str = ""  # where the process can be watched; see `process_liveness.place_of`
    line: str = ""  # where the process accepts calls; see `LivenessPort`
    beat: int = 0
    wanted: int = 0
    since: int = OUTSIDE
    bell: int = 0
    operations: dict[str, int] = field(default_factory=dict)  # the newest of each kind to which the rank has come
    state: str = ABSENT
    text: str = ""


@dataclass
class Peer:
    """The state of another rank as this rank sees it.

    ``silent_s`` is the time without a new record, added up at each reading of the store.
    """

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
        """How the peer has failed, by its own record or by a report of its process's death; None if it has not."""
        if self.record.state == FAILED and self.confirmed:
            return f"failed: {self.record.text}"
        if self.death is None or self.record.state == LEFT:
            return None
        # Another process may live under the name by now, which this death is not of.
        process, text = self.death
        return text if not self.record.life or self.record.life.startswith(f"process {process} on ") else None

    def judge(self, record: Record | None, passed_s: float, dead_s: float, start_s: float) -> None:
        """Update the peer from a reading of its record, made ``passed_s`` seconds after the previous reading.

        Args:
            record: The peer's record; None if the store had no valid record.
            passed_s: Seconds since the previous reading.
            dead_s: Silence in seconds after which the peer is lost if it was seen before.
            start_s: Silence in seconds after which the peer is lost if it was never seen.
        """
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
    """Return the record that ``value`` encodes; None if it is no valid record of this version of the package."""
    fields = parse_json(value if len(value) <= _MAX_BYTES else None)
    known = vars(Record())
    if not isinstance(fields, dict) or not fields.keys() <= known.keys():
        return None
    if any(type(value) is not type(known[name]) for name, value in fields.items()):
        return None
    record = Record(**fields)
    counts = (record.beat, record.wanted, record.bell, record.since - OUTSIDE, *record.operations.values())
    valid = all(type(count) is int and count >= 0 for count in counts)
    return record if valid and record.state in (ABSENT, UP, VISITING, LEFT, FAILED) else None


# After a failure, silence of a tenth of `dead_s` is a death, but a beat may always be late by this time.
_MIN_SUSPICION_S = 1.0


class FailureDetector:
    """The failure detector of one rank: its peers by name, and the generation that the rank is in.

    Args:
        generation: The rank's first generation. A joining rank is the only member of its first generation.
        fresh: Whether the store was started with this job, so that it contains no older records; see `Membership`.
        dead_s: Silence in seconds after which a peer that was seen is lost.
        start_s: Silence in seconds after which a peer that was never seen is lost.
        elastic: Whether ranks may join. If True, the members of a new generation are ordered by how long they have been
            members, longest first; if False, by name.
        readmit: Whether a rank may come back after a generation was formed without it.
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
        """Begin to track the peers with these names, except those that are tracked already."""
        for name in names:
            if name != self.me and name not in self.peers:
                self.peers[name] = Peer(fresh=self._fresh)

    def judge(self, records: Mapping[str, Record | None], passed_s: float) -> None:
        """Update all peers from one reading of their records, made ``passed_s`` seconds after the previous reading."""
        self.hear_of(records)
        for name, record in records.items():
            before_s = self._silent_before.get(name, self._dead_s)
            self.peers[name].judge(record, passed_s, min(self._dead_s, before_s + self._soon_s), self._start_s)

    def hear_death(self, name: str, process: int, text: str) -> None:
        """Note that the peer's process with this id has ended; the next `judge` decides whether the peer is lost.

        A peer that this rank has not heard of is lost until a record of another process has its name.
        """
        if name != self.me:
            peer = self.peers.setdefault(name, Peer(fresh=self._fresh, lost=True))
            peer.death = process, text

    def suspect(self) -> None:
        """Count peers as lost if they stay silent for a tenth of ``dead_s`` from now on, but at least for a second.

        This is called when a connection broke, and lasts until the next generation. Live ranks notice the broken
        connection, too, and publish a record soon, so a peer that stays silent is dead. A rank whose process is known
        to have ended is lost without this; see `LocalProcessWatch`.
        """
        self._silent_before = self._silent_before or {name: peer.silent_s for name, peer in self.peers.items()}

    def lost(self) -> frozenset[str]:
        return frozenset(name for name, peer in self.peers.items() if peer.lost)

    def gone(self, known: frozenset[str] = frozenset(), restarts: bool = False) -> dict[str, Peer]:
        """Return the lost members of this generation, except those whose names are in ``known``.

        With ``restarts``, include members whose process was replaced by a new one.
        """
        others = {name: self.peers[name] for name in self.generation.members if name != self.me and name not in known}
        return {name: peer for name, peer in others.items() if peer.lost or (restarts and peer.restarted)}

    @property
    def enough(self) -> bool:
        return self.generation.world_size - len(self.gone()) >= self.fewest

    def visitors(self) -> list[str]:
        """Return the joining ranks that wait for an invitation, and whose records have changed recently."""
        return in_order(name for name, peer in self.peers.items() if peer.visits and peer.silent_s < self._soon_s)

    def bell(self) -> int:
        return max([peer.record.bell for peer in self._heard().values()], default=0)

    def view(self) -> object:
        """Return a value to compare with an earlier one: if they differ, `Membership.on_change` must be called."""
        return [
            (name, peer.record.bell, peer.record.wanted, peer.record.state, peer.record.life, peer.lost)
            for name, peer in self.peers.items()
        ]

    def newest(self) -> int:
        """Return the number of the newest generation that a live peer is in, or waits for.

        If lost ranks are not allowed to come back, the result is at most this rank's generation plus one. The other
        ranks may have formed that generation without this rank. Then this rank must find out that it is not a member,
        instead of asking for a later generation.
        """
        newest = max([peer.record.wanted for peer in self._heard().values() if peer.up], default=0)
        return newest if self.readmit else min(newest, self.generation.number + 1)

    def ahead(self) -> list[str]:
        number = self.generation.number
        return in_order(name for name, peer in self._heard().items() if peer.up and peer.record.wanted > number)

    def awaited(self, wanted: int) -> list[str]:
        """Return the ranks that must still ask for generation ``wanted`` before its members can be decided."""
        return in_order(
            name
            for name, peer in self._heard().items()
            if not peer.lost
            and ((peer.up and peer.record.wanted != wanted) or (not peer.confirmed and name in self.generation.members))
        )

    def proposal(self, mine: Record) -> list[str] | None:
        """Return the members of generation ``mine.wanted``, in rank order; None if this rank cannot propose them yet.

        If ranks may join, the members are ordered by how long they have been members, longest first. A rank that has
        just joined lacks the others' state, so it must not become rank 0. If ranks may not join, members are ordered by
        name, so that a rank that entered a generation late keeps its number. A joining rank proposes nothing, because
        it may not know all ranks yet.
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
        """Return all peers except evicted ones, which may wake up and publish outdated records."""
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
