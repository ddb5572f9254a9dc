"""Decisions on who lives, who is lost and what comes next, from what ranks publish about themselves.

`Record` is what one rank publishes, `Peer` what another one knows of it, and `FailureDetector` decides. It has no
threads, store or clock: its owner reads the records, holds a lock, and says how much time has passed.
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
OUTSIDE = -1
_MAX_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Record:
    """A rank's published state. ``wanted`` is the generation it waits to enter, or is in.

    ``since`` is the generation from which on it has been in all; `OUTSIDE` before its first one.
    """

    life: str = ""  # differs between processes that use the same name
    place: str = ""  # where this one is found, see `neighbours`
    line: str = ""  # where it is reached, see `lifeline`
    beat: int = 0
    wanted: int = 0
    since: int = OUTSIDE
    bell: int = 0
    state: str = ABSENT
    text: str = ""


@dataclass
class Peer:
    """A rank's knowledge of another one. ``silent_s`` counts only time in which the store was read."""

    record: Record = Record()
    fresh: bool = False  # the store holds nothing of earlier lives, so what is found there is of this one
    confirmed: bool = False  # lives, or has lived, since this rank started
    read: bool = False
    restarted: bool = False  # a new life under the old name: its groups are gone, it waits to be taken in
    silent_s: float = 0.0
    limit_s: float = 0.0
    lost: bool = False
    death: tuple[int, str] | None = None  # a process of this name that has ended, and how, by whoever started it

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
        """The reason of its end, if that was none in order."""
        if self.record.state == FAILED and self.confirmed:
            return f"failed: {self.record.text}"
        if self.death is None or self.record.state == LEFT:
            return None
        process, text = self.death  # another process may live under the name by now
        return text if not self.record.life or self.record.life.startswith(f"process {process} on ") else None

    def judge(self, record: Record | None, passed_s: float, dead_s: float, start_s: float) -> None:
        """Take in a reading, ``passed_s`` after the last one; None where it was no record."""
        # Somebody may have written an earlier record of the same life again.
        older = record is not None and record.life == self.record.life and record.beat < self.record.beat
        if record is not None and record != self.record and not older:
            # What the first reading finds may be of a life that ended before this one began.
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
    """Return a name for this process, and no other, for good."""
    return f"process {os.getpid()} on {socket.gethostname()} ({os.urandom(8).hex()})"


def key(name: str) -> str:
    return f"{PREFIX}/{name}"


def dump(record: Record) -> bytes:
    return json.dumps(vars(record)).encode()


def load(value: bytes) -> Record | None:
    """Return the record, or None where that is no record of this version."""
    try:
        fields = json.loads(value) if len(value) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    known = vars(Record())
    if not isinstance(fields, dict) or not fields.keys() <= known.keys():
        return None
    if any(type(value) is not type(known[name]) for name, value in fields.items()):
        return None
    record = Record(**fields)
    counts = (record.beat, record.wanted, record.bell, record.since - OUTSIDE)
    return record if record.state in (ABSENT, UP, VISITING, LEFT, FAILED) and min(counts) >= 0 else None


_MIN_SUSPICION_S = 1.0


class FailureDetector:
    """The others by name, and the generation this rank is in.

    Args:
        generation: the first; of a joining rank, itself alone.
        fresh: see `Membership`.
        dead_s, start_s: the silence that is death, of a peer that was seen and of one that was not yet.
        elastic: whether ranks may join: then who has been in longest comes first; else all keep their order.
        readmit: whether a rank that a generation was formed without may come back.
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
        """Seconds that each peer was silent for when something broke; empty where nothing has."""
        self.readmit = readmit
        self.fewest = 0  # fewer do not go on, so they decide nothing for the others
        self._evicted: set[str] = set()
        self.hear_of(generation.members)

    def hear_of(self, names: Iterable[str]) -> None:
        for name in names:
            if name != self.me and name not in self.peers:
                self.peers[name] = Peer(fresh=self._fresh)

    def judge(self, records: Mapping[str, Record | None], passed_s: float) -> None:
        self.hear_of(records)
        for name, record in records.items():
            before_s = self._silent_before.get(name, self._dead_s)
            self.peers[name].judge(record, passed_s, min(self._dead_s, before_s + self._soon_s), self._start_s)

    def hear_death(self, name: str, process: int, text: str) -> None:
        """Note that a process of a peer has ended; the next reading says what that means for the peer."""
        if name in self.peers:
            self.peers[name].death = process, text

    def suspect(self) -> None:
        """Take a tenth of the silence, a second at least, for death until the next generation: something broke.

        Who lives has heard of it, too, and says so within a few beats. Whose process is found to have ended is lost
        without it, see `LocalProcessWatch`.
        """
        self._silent_before = self._silent_before or {name: peer.silent_s for name, peer in self.peers.items()}

    def lost(self) -> frozenset[str]:
        return frozenset(name for name, peer in self.peers.items() if peer.lost)

    def gone(self, known: frozenset[str] = frozenset(), restarts: bool = False) -> dict[str, Peer]:
        """Return the members of this generation that are lost, but for those that were ``known`` to be.

        With ``restarts``, also those that live again, as another process.
        """
        others = {name: self.peers[name] for name in self.generation.members if name != self.me and name not in known}
        return {name: peer for name, peer in others.items() if peer.lost or (restarts and peer.restarted)}

    @property
    def enough(self) -> bool:
        return self.generation.world_size - len(self.gone()) >= self.fewest

    def visitors(self) -> list[str]:
        """Return the joining ranks that wait to be invited, and were heard of just now; nobody waits for them."""
        return in_order(name for name, peer in self.peers.items() if peer.visits and peer.silent_s < self._soon_s)

    def bell(self) -> int:
        return max([peer.record.bell for peer in self._heard().values()], default=0)

    def view(self) -> object:
        """Return a value that changes whenever listeners are to be called."""
        return [
            (name, peer.record.bell, peer.record.wanted, peer.record.state, peer.record.life, peer.lost)
            for name, peer in self.peers.items()
        ]

    def newest(self) -> int:
        """Return the newest generation that a living peer is in, or waits for.

        Where nobody may come back, none is passed over: the next one may have been decided without this rank, which
        then would propose itself for a later one.
        """
        newest = max([peer.record.wanted for peer in self._heard().values() if peer.up], default=0)
        return newest if self.readmit else min(newest, self.generation.number + 1)

    def ahead(self) -> list[str]:
        number = self.generation.number
        return in_order(name for name, peer in self._heard().items() if peer.up and peer.record.wanted > number)

    def awaited(self, wanted: int) -> list[str]:
        """Return the ranks without which the generation that is wanted cannot be decided."""
        return in_order(
            name
            for name, peer in self._heard().items()
            if not peer.lost
            and ((peer.up and peer.record.wanted != wanted) or (not peer.confirmed and name in self.generation.members))
        )

    def proposal(self, mine: Record) -> list[str] | None:
        """Return the members of the generation that ``mine`` wants, by rank; None while it is too early.

        Where ranks may join, who has been in longest comes first: rank 0 has lived through what joining ranks have not.
        Else a rank that only heard too late of a generation with it keeps its number, too. A joining rank decides
        nothing, as it may not have heard of all.
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
        """Return the peers whose word counts: one that was left out may wake up, and speaks of the past."""
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
