"""The state that the training thread and the engine's thread of one rank share, beside the buckets, under one lock.

`Header` is what a rank says of it to all others, whichever component it is for.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_async.errors import CollectiveError, PeerLost


class SyncPointKind(enum.IntEnum):
    """The place where a rank's training thread stands."""

    NONE = 0  # nowhere: it trains
    VALIDATE = 1
    EPOCH_END = 2
    TRAIN_END = 3
    STOP = 4  # it leaves training early, because a rank was told to
    SYNCHRONISE = 5  # it goes from local steps back to synchronous ones, for which all replicas must be equal
    DECIDE = 6  # it has called all together: something is to be decided on one model


class Arrival(enum.Enum):
    """The outcome of waiting at a sync point."""

    OPEN = "open"  # every rank is here and holds the same model
    VALIDATE = "validate"  # a rank asks for a validation: go to `SyncPointKind.VALIDATE`, then come back
    DECIDE = "decide"  # a rank has called all together: go to `SyncPointKind.DECIDE`, then come back
    STOP = "stop"  # a rank was asked to stop: go to `SyncPointKind.STOP`


class Vote(enum.Flag):
    """A request of one rank to all. All learn of it with the next header, and act from their next batch boundary on."""

    NONE = 0
    STOP = enum.auto()  # leave training: this rank was told to
    END = enum.auto()  # end training as after its last epoch: a time limit, `trainer.should_stop`
    VALIDATE = enum.auto()  # come to a validation: this rank waits there
    SYNCHRONISE = enum.auto()  # become equal: this rank is to take synchronous steps
    SAVE = enum.auto()
    """Mark the next round: a checkpoint is due. The engine's threads do it, so nobody else hears of it."""
    DECIDE = enum.auto()  # come together: this rank waits there
    EPOCH = enum.auto()  # whoever has no end of the epoch of its own comes to it: this rank waits there

    @property
    def lasting(self) -> Vote:
        """The votes that remain once a sync point has opened: all but those that ask for one."""
        return self & ~(Vote.VALIDATE | Vote.SYNCHRONISE | Vote.DECIDE | Vote.EPOCH)


class Mark(NamedTuple):
    """A checkpoint that belongs to an exchange: one model, one rule state, and what each rank has of its own."""

    number: int  # of the save, the same on all ranks
    step: int  # optimizer steps per replica, the mean over all
    members: tuple[str, ...]  # the stable names of those that have a message or stand at a sync point


class Header(NamedTuple):
    """The common part."""

    exchange: int = 1  # id of the exchange that this rank would commit next
    ready: int = 0  # priority of the kind of round that it has a message for; 0 for none
    votes: Vote = Vote.NONE  # what it asks of all
    excused: bool = False  # nobody need wait for its message: it stands at a sync point, or is silent for long
    sync_point: SyncPointKind = SyncPointKind.NONE  # where its training thread stands
    sync_point_index: int = 0  # which of the sync points of that kind (the epoch)
    layout: int = 0  # fingerprint of what its buckets hold
    version: int = 0  # how often that has changed since training began
    clock: float = 0.0  # optimizer steps that it has taken in all
    samples: float = 0.0  # samples that it has seen in all
    opened: int = 0  # sync points that have opened for it
    last_sync_point: SyncPointKind = SyncPointKind.NONE  # the last of them
    last_moved: bool = False  # whether the model had changed when that one opened
    last_clock: float = 0.0  # steps of all ranks at that time
    last_exchange: int = 1  # its `exchange` at that time
    saved: int = 0  # the last save that it knows of, by number
    loss: float = math.inf  # of its last batch; infinite where that is not known, or not finite
    place: float = 0.0  # how far it is in its data: with what its message holds, or, without one, with its last step
    held: int = 0  # the exchange whose payload it has, where others may not; 0 for none
    in_step: bool = False  # it takes synchronous steps
    pace: tuple[float, ...] = (0.0,) * 4  # seconds of a batch: data, compute, communication; samples; a tuple is last


_ASKED_FOR = {
    SyncPointKind.VALIDATE: Vote.VALIDATE,
    SyncPointKind.DECIDE: Vote.DECIDE,
    SyncPointKind.EPOCH_END: Vote.EPOCH,
}


@dataclass
class SharedState:
    """The shared state of one rank; every field is read and written under `changed`.

    The training thread says where it stands and what it asks for; the engine's thread says what all have agreed on.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    committing: threading.Lock = field(default_factory=threading.Lock)
    """Held while what all replicas have committed changes, or is read whole. May be taken within `changed`, never the
    other way round."""

    sync_point: SyncPointKind = SyncPointKind.NONE
    sync_point_index: int = 0
    asked: Vote = Vote.NONE
    samples: float = 0.0  # what this replica has seen since training began
    steps: float = 0.0  # optimizer steps that it has taken
    loss: float = math.inf  # of the last batch; infinite where it is not known
    place: float = 0.0  # how far it is in its data, with the batches that its steps are of: a number that only grows
    pace: tuple[float, ...] = (0.0,) * 4  # as in `Header`
    speed: float = 1.0  # its batches per second, over those of the fastest; 1.0 while some are not known
    last_seen: float = 0.0  # when the training thread was last heard of
    in_step: bool = False  # it takes synchronous steps, so that all ranks act on a vote behind the same one
    stop_requested: bool = False  # set by a signal handler, which may touch nothing else: a vote for stopping follows
    closing: bool = False
    trouble: PeerLost | CollectiveError | None = None
    """A call of the training thread's has failed: the groups are to be formed anew."""

    composed: int = 0  # number of the last header composed: what changes now is heard of with the next one
    agreed: Vote = Vote.NONE
    opened: bool = False  # the sync point at which the training thread stands has opened
    num_opened: int = 0
    last_sync_point: SyncPointKind = SyncPointKind.NONE
    """The sync point that opened last, on whichever ranks stood there."""
    last_clock: float = 0.0  # steps of all ranks when it did
    last_exchange: int = 1  # the exchange that was to come next
    moved: bool = False  # whether the model had changed, on any rank, since the sync point before
    next_exchange: int = 1  # the exchange that comes next; equal on all ranks, but for one that lost the last answer
    saved: int = 0  # the last save, by number, that all ranks have agreed on
    marked: Any = None  # what was copied for it; until the training thread takes it, or another exchange follows
    lost: list[Any] = field(default_factory=list)  # what was copied, and not taken before another exchange followed
    samples_by_rank: tuple[float, ...] = ()  # samples that every replica had seen at the last header
    losses: tuple[float, ...] = ()  # every replica's, at the last header
    paces: tuple[tuple[float, ...], ...] = ()  # every replica's, at the last header
    mean_steps: float = 0.0  # optimizer steps per replica, on average over all, at the last header
    steps_then: float = 0.0  # the same, of this replica, at the last header
    places: dict[str, float] = field(default_factory=dict)
    """By name, how far each rank was in its data with what all have committed; equal on all ranks at a sync point."""
    failed: int = 0  # exchanges that failed and were repeated
    error: BaseException | None = None  # what has ended the engine's thread

    def wait(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Wait on the training thread for ``condition``; ``see`` raises if it cannot come. Under the lock."""
        while not condition():
            see()
            self.changed.wait(0.5)

    def stands_at(self, sync_point: SyncPointKind) -> bool:
        """Return whether the training thread goes on when that sync point opens. Under the lock."""
        return sync_point is not SyncPointKind.SYNCHRONISE or self.sync_point is sync_point

    def open_sync_point(self, sync_point: SyncPointKind, now: float) -> None:
        """Let the training thread go on, if it stands there. Under the lock."""
        if sync_point is SyncPointKind.SYNCHRONISE:
            self.agreed &= ~Vote.SYNCHRONISE
        if not self.stands_at(sync_point):
            return
        self.agreed &= ~_ASKED_FOR.get(self.sync_point, Vote.NONE)
        self.opened = True
        self.sync_point = SyncPointKind.NONE
        self.last_seen = now
        self.changed.notify_all()
