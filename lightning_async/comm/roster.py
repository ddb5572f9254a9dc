"""What ranks publish about themselves, and what one rank makes of another's records."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["ABSENT", "FAILED", "LEFT", "PREFIX", "UP", "Peer", "Record", "describe", "dump", "key", "load"]

PREFIX = "lightning_async/membership"

ABSENT, UP, LEFT, FAILED = "absent", "up", "left", "failed"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank publishes. ``wanted`` is the generation it waits to enter, or is in."""

    life: str = ""  # differs between processes that use the same rank one after the other
    beat: int = 0
    wanted: int = 0
    bell: int = 0
    state: str = ABSENT
    text: str = ""


@dataclass
class Peer:
    """What this rank knows of another one. ``silent_s`` counts only time in which the store was read."""

    record: Record
    confirmed: bool = False  # has been seen to change, or to appear, since this rank started
    read: bool = False
    restarted: bool = False  # a new life under the old number: its groups are gone, it waits to be taken in
    silent_s: float = 0.0
    limit_s: float = 0.0
    lost: bool = False

    @property
    def up(self) -> bool:
        return self.record.state == UP and self.confirmed and not self.lost

    @property
    def has_left(self) -> bool:
        return self.record.state == LEFT and self.confirmed

    def judge(self, record: Record, passed_s: float, dead_s: float, start_s: float) -> None:
        """Take in a reading, ``passed_s`` after the last one."""
        if record != self.record:
            # What the first reading finds may be of a life that ended before this one began.
            self.restarted = self.restarted or (self.confirmed and record.life != self.record.life)
            self.confirmed = self.confirmed or self.read
            self.record = record
            self.silent_s = 0.0
        else:
            self.silent_s += passed_s
        self.read = True
        self.limit_s = dead_s if self.confirmed else start_s
        failed = record.state == FAILED and self.confirmed
        expected = record.state == UP or not self.confirmed
        self.lost = failed or (expected and self.silent_s >= self.limit_s)

    def describe(self, rank: int) -> str:
        """Why the peer is lost, for messages."""
        if self.record.state == FAILED and self.confirmed:
            return f"rank {rank} failed: {self.record.text}"
        if not self.lost:
            return f"rank {rank} was restarted"
        if not self.confirmed:
            return f"rank {rank} has not come within {self.limit_s:g} s"
        return f"rank {rank} was last seen {self.silent_s:.1f} s ago"


def describe(lost: dict[int, Peer]) -> str:
    """Why the peers are lost, and what to do about it."""
    reasons = "; ".join(peer.describe(rank) for rank, peer in lost.items())
    return (
        f"{reasons}. See the log of rank(s) {sorted(lost)}. next_generation() goes on without; else start again from "
        "the last checkpoint."
    )


def key(rank: int) -> str:
    """Where a rank's record lies in the store."""
    return f"{PREFIX}/{rank}"


def dump(record: Record) -> str:
    return json.dumps(vars(record))


def load(value: bytes) -> Record:
    return Record(**json.loads(value))
