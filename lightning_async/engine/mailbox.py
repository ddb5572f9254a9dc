"""What the training thread and the engine's thread of one rank share, beside the buckets; all under one lock."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_async.engine.header import Gate, Vote
from lightning_async.errors import CollectiveError, PeerLost

__all__ = ["Mailbox"]

_ASKED_FOR = {Gate.VALIDATE: Vote.VALIDATE, Gate.DECIDE: Vote.DECIDE, Gate.EPOCH_END: Vote.EPOCH}


@dataclass
class Mailbox:
    """The shared state of one rank; every field is read and written under `changed`.

    The training thread says where it stands and what it asks for; the engine's thread says what all have agreed on.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    committing: threading.Lock = field(default_factory=threading.Lock)
    """Held while what all replicas have committed changes, or is read whole. May be taken within `changed`, never the
    other way round."""

    # ---- of the training thread ----

    gate: Gate = Gate.NONE
    gate_index: int = 0
    asked: Vote = Vote.NONE
    samples: float = 0.0
    """What this replica has seen since training began."""
    steps: float = 0.0
    """Optimizer steps that it has taken."""
    loss: float = math.inf
    """Of the last batch; infinite where it is not known."""
    place: float = 0.0
    """How far it is in its data, with the batches that its steps are of: a number that only grows."""
    pace: tuple[float, ...] = (0.0,) * 4
    """What a batch takes of its own time of late: seconds for data, compute and communication; and its samples."""
    speed: float = 1.0
    """Its batches per second, over those of the fastest; 1.0 while some are not known."""
    last_seen: float = 0.0
    """When the training thread was last heard of."""
    in_step: bool = False
    """It takes synchronous steps, so that all ranks act on a vote behind the same one."""
    stop_requested: bool = False
    """Set by a signal handler, which may touch nothing else: a vote for stopping follows."""
    closing: bool = False
    trouble: PeerLost | CollectiveError | None = None
    """A call of the training thread's has failed: the groups are to be formed anew."""

    # ---- of the engine's thread ----

    composed: int = 0
    """Number of the last header composed: what changes now is heard of with the next one."""
    agreed: Vote = Vote.NONE
    opened: bool = False
    """The gate at which the training thread stands has opened."""
    num_opened: int = 0
    last_gate: Gate = Gate.NONE
    """The gate that opened last, on whichever ranks stood there."""
    last_clock: float = 0.0
    """Steps of all ranks when it did."""
    last_exchange: int = 1
    """The exchange that was to come next."""
    moved: bool = False
    """Whether the model had changed, on any rank, since the gate before."""
    next_exchange: int = 1
    """The exchange that comes next; equal on all ranks, but for one that lost the last answer."""
    saved: int = 0
    """The last save, by number, that all ranks have agreed on."""
    marked: Any = None
    """What was copied for it; until the training thread takes it, or another exchange follows."""
    lost: list[Any] = field(default_factory=list)
    """What was copied, and not taken before another exchange followed."""
    samples_by_rank: tuple[float, ...] = ()
    """Samples that every replica had seen at the last header."""
    losses: tuple[float, ...] = ()
    """Every replica's, at the last header."""
    paces: tuple[tuple[float, ...], ...] = ()
    """Every replica's, at the last header."""
    mean_steps: float = 0.0
    """Optimizer steps per replica, on average over all, at the last header."""
    steps_then: float = 0.0
    """The same, of this replica, at the last header."""
    places: dict[str, float] = field(default_factory=dict)
    """By name, how far each rank was in its data with what all have committed; equal on all ranks at a gate."""
    failed: int = 0
    """Exchanges that failed and were repeated."""
    error: BaseException | None = None
    """What has ended the engine's thread."""

    def wait(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Stand still on the training thread until ``condition``; ``see`` raises if it cannot come. Under the lock."""
        while not condition():
            see()
            self.changed.wait(0.5)

    def stands_at(self, gate: Gate) -> bool:
        """Whether the training thread goes on when that gate opens: where one is for synchronous steps, others stand at
        gates of their own. Under the lock."""
        return gate is not Gate.SYNCHRONISE or self.gate is gate

    def open_gate(self, gate: Gate, now: float) -> None:
        """Let the training thread go, if that is where it stands. Under the lock."""
        if gate is Gate.SYNCHRONISE:
            self.agreed &= ~Vote.SYNCHRONISE
        if not self.stands_at(gate):
            return
        self.agreed &= ~_ASKED_FOR.get(self.gate, Vote.NONE)
        self.opened, self.gate = True, Gate.NONE
        self.last_seen = now
        self.changed.notify_all()
