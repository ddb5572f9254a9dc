"""What ranks publish about themselves, and what one rank makes of another's records."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

from lightning_async.comm.membership.generation import in_order, listed
from lightning_async.errors import START_AGAIN

__all__ = [
    "ABSENT", "FAILED", "LEFT", "OUTSIDE", "PREFIX", "UP", "VISITING", "Peer", "Record", "describe", "dump",
    "key", "load", "new_life",
]  # fmt: skip

PREFIX = "lightning_async/membership"

ABSENT, UP, VISITING, LEFT, FAILED = "absent", "up", "visiting", "left", "failed"
OUTSIDE = -1
_MAX_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank publishes. ``wanted`` is the generation it waits to enter, or is in.

    ``since`` is the generation from which on it has been in all; `OUTSIDE` before its first one."""

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
    """What this rank knows of another one. ``silent_s`` counts only time in which the store was read."""

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
        """What is known of its end, if that was none in order."""
        if self.record.state == FAILED and self.confirmed:
            return f"failed: {self.record.text}"
        if self.death is None or self.record.state == LEFT:
            return None
        process, text = self.death  # another process may live under the name by now
        return text if not self.record.life or self.record.life.startswith(f"process {process} on ") else None

    def judge(self, record: Record | None, passed_s: float, dead_s: float, start_s: float) -> None:
        """Take in a reading, ``passed_s`` after the last one; None where it was no record."""
        if record is not None and record != self.record and not self._is_older(record):
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

    def _is_older(self, record: Record) -> bool:
        """Whether somebody has written an earlier record of the same life again."""
        return record.life == self.record.life and record.beat < self.record.beat

    def describe(self, rank: str) -> str:
        """Why the peer is lost, for messages."""
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
    """Why the peers are lost, and what to do about it."""
    reasons = "; ".join(peer.describe(rank) for rank, peer in lost.items()).rstrip(".")
    return f"{reasons}. See the log of rank(s) {listed(in_order(lost))}{START_AGAIN}."


def new_life() -> str:
    """Names this process, and no other, for good."""
    return f"process {os.getpid()} on {socket.gethostname()} ({os.urandom(8).hex()})"


def key(name: str) -> str:
    """Where a rank's record lies in the store."""
    return f"{PREFIX}/{name}"


def dump(record: Record) -> bytes:
    return json.dumps(vars(record)).encode()


def load(value: bytes) -> Record | None:
    """The record, or None where that is no record of this version."""
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
