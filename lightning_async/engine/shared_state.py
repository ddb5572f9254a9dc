"""The state that the training thread and the engine's thread of one rank share, under one lock.

`SharedState` holds this state, apart from the buckets. `Header` is the part of it that a rank sends to all others
before each exchange. `SyncPointKind`, `Arrival` and `Vote` say at which sync point a rank waits, how the wait ended,
and what a rank asks of all others.
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
    """The kind of sync point at which a rank's training thread waits."""

    NONE = 0  # at no sync point: it trains
    VALIDATE = 1
    EPOCH_END = 2
    TRAIN_END = 3
    STOP = 4  # all leave training early, because one rank was told to stop
    SYNCHRONISE = 5  # replicas go back from local to synchronous steps, for which they must be equal
    DECIDE = 6  # a rank has called all ranks together, to decide something on one model


class Arrival(enum.Enum):
    """The outcome of waiting at a sync point."""

    OPEN = "open"  # every rank is here and holds the same model
    VALIDATE = "validate"  # a rank asks for a validation: go to `SyncPointKind.VALIDATE`, then come back
    DECIDE = "decide"  # a rank has called all together: go to `SyncPointKind.DECIDE`, then come back
    STOP = "stop"  # a rank was asked to stop: go to `SyncPointKind.STOP`


class Vote(enum.Flag):
    """A request of one rank to all. It travels with the next header, and ranks act on it at a batch boundary."""

    NONE = 0
    STOP = enum.auto()  # leave training: this rank was told to stop
    END = enum.auto()  # end training as after the last epoch (a time limit, `trainer.should_stop`)
    VALIDATE = enum.auto()  # come to a validation: this rank waits there
    SYNCHRONISE = enum.auto()  # become one model: this rank is about to take synchronous steps
    SAVE = enum.auto()
    """Mark the next round, as a checkpoint is due. The engines' threads do that; no training thread sees this vote."""
    DECIDE = enum.auto()  # come together: this rank waits there
    EPOCH = enum.auto()  # ranks whose epochs have no end come to the end of this one: this rank waits there

    @property
    def lasting(self) -> Vote:
        """The votes that remain after a sync point: all except those that ask ranks to come to a sync point."""
        return self & ~(Vote.VALIDATE | Vote.SYNCHRONISE | Vote.DECIDE | Vote.EPOCH)


class Mark(NamedTuple):
    """A description of the checkpoint that ranks save after one exchange.

    The checkpoint consists of the common model, the common rule state, and each rank's own state.
    """

    number: int  # number of the save, the same on all ranks
    step: int  # optimizer steps per replica, on average over all
    members: tuple[str, ...]  # stable ids of the ranks that have a message or stand at a sync point


class Header(NamedTuple):
    """The common part of the header that one rank sends to all others; components add parts of their own.

    In the comments, "it" is that rank.
    """

    exchange: int = 1  # id of the exchange that this rank would commit next
    ready: int = 0  # priority of the round type that it has a message for; 0 for no message
    votes: Vote = Vote.NONE  # its requests to all ranks
    excused: bool = False  # no rank waits for its message: it stands at a sync point, or has made no step for long
    sync_point: SyncPointKind = SyncPointKind.NONE  # the sync point at which its training thread stands
    sync_point_index: int = 0  # which one of that kind: the epoch
    layout: int = 0  # fingerprint of the layout of its buckets
    version: int = 0  # how often that layout has changed since training began
    clock: float = 0.0  # optimizer steps that it has taken since training began
    samples: float = 0.0  # samples that it has seen since training began
    opened: int = 0  # sync points that have opened for it
    last_sync_point: SyncPointKind = SyncPointKind.NONE  # the kind of the last of them
    last_moved: bool = False  # whether the model had changed when that one opened
    last_clock: float = 0.0  # sum of all ranks' steps at that time
    last_exchange: int = 1  # its `exchange` at that time
    saved: int = 0  # the last save that it knows of, by number
    loss: float = math.inf  # loss of its last batch; infinite where it is unknown or not finite
    place: float = 0.0  # its place in its data after its message's batches; without a message, after its last step
    held: int = 0  # the exchange whose payload it can give to ranks that lack it; 0 for none
    in_step: bool = False  # it takes synchronous steps
    collectives: int = 0  # collectives of torch's default group that it has completed, if it stands at a sync point
    pace: tuple[float, ...] = (0.0,) * 4  # of a batch: seconds of data, compute, communication; samples. Keep it last


_ASKED_FOR = {
    SyncPointKind.VALIDATE: Vote.VALIDATE,
    SyncPointKind.DECIDE: Vote.DECIDE,
    SyncPointKind.EPOCH_END: Vote.EPOCH,
}


@dataclass
class SharedState:
    """The shared state of one rank's two threads; a thread that reads or writes a field holds the lock `changed`.

    The training thread writes its progress, its sync point and its votes; the engine's thread writes what all ranks
    have agreed on.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    committing: threading.Lock = field(default_factory=threading.Lock)
    """The lock of the committed state (rule and rule state) while it changes or is read as a whole. A thread that holds
    `changed` may take it, never the other way round: otherwise the two threads could deadlock."""

    sync_point: SyncPointKind = SyncPointKind.NONE
    sync_point_index: int = 0
    asked: Vote = Vote.NONE
    samples: float = 0.0  # samples that this replica has seen since training began
    steps: float = 0.0  # optimizer steps that it has taken since training began
    loss: float = math.inf  # loss of the last batch; infinite where it is unknown
    place: float = 0.0  # its place in its data after its last step: a number that only grows
    pace: tuple[float, ...] = (0.0,) * 4  # as in `Header`
    collectives: int = 0  # as in `Header`
    fewest_collectives: float = math.inf
    """The fewest `collectives` of a rank that waits at a sync point for this one; infinite if none does."""
    speed: float = 1.0  # its batches per second, divided by those of the fastest rank; 1.0 while some are unknown
    last_seen: float = 0.0  # when the training thread last gave a sign of life
    in_step: bool = False  # it takes synchronous steps: all ranks must act on a vote after the same one
    stop_requested: bool = False  # set by a signal handler, which takes no lock; `ControlPlane.see` makes it a vote
    closing: bool = False
    trouble: PeerLost | CollectiveError | None = None
    """The failure of a collective call of the training thread, because of which new groups are formed."""

    composed: int = 0  # number of the last header composed: later changes travel with the next header
    agreed: Vote = Vote.NONE  # the votes that all ranks know of
    asked_last: Vote = Vote.NONE  # all ranks' votes in the last headers, also those that ranks do not act on yet
    opened: bool = False  # the sync point at which the training thread stands has opened
    num_opened: int = 0
    last_sync_point: SyncPointKind = SyncPointKind.NONE
    """The kind of the sync point that opened last, on those ranks that stood there."""
    last_clock: float = 0.0  # sum of all ranks' steps when it opened
    last_exchange: int = 1  # `next_exchange` when it opened
    moved: bool = False  # whether the model of any rank had changed since the sync point before
    next_exchange: int = 1  # id of the next exchange; equal on all ranks but one that lost the last answer
    saved: int = 0  # number of the last save that all ranks have agreed on
    marked: Any = None  # the copy made for it, until the training thread takes it or another marked one follows
    lost: list[Any] = field(default_factory=list)  # copies that the training thread did not take in time
    samples_by_name: dict[str, float] = field(default_factory=dict)
    """Samples that each replica had seen at the last header, by stable id, in rank order."""
    lost_samples: float = 0.0  # samples that lost processes had seen, as their last headers said
    losses: tuple[float, ...] = ()  # loss of each replica at the last header
    paces: tuple[tuple[float, ...], ...] = ()  # pace of each replica at the last header
    mean_steps: float = 0.0  # optimizer steps per replica, on average over all, at the last header
    steps_then: float = 0.0  # optimizer steps of this replica at the last header
    places: dict[str, float] = field(default_factory=dict)
    """Each rank's place in its data after the committed work, by stable id; equal on all ranks at a sync point."""
    failed: int = 0  # number of failed exchanges
    error: BaseException | None = None  # the error that has ended the engine's thread

    def wait(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Wait on the training thread until ``condition`` is true. The caller holds the lock.

        ``see`` is called every half second, and raises if the engine has failed.
        """
        while not condition():
            # The wait is short, so that `see` passes on a signal and notes that this thread lives.
            see()
            self.changed.wait(0.5)

    def stands_at(self, sync_point: SyncPointKind) -> bool:
        """Return whether the opening of ``sync_point`` releases the training thread. The caller holds the lock.

        SYNCHRONISE releases only a thread that waits at it. Any other sync point releases the thread wherever it waits.
        """
        return sync_point is not SyncPointKind.SYNCHRONISE or self.sync_point is sync_point

    def open_sync_point(self, sync_point: SyncPointKind, now: float) -> None:
        """Open ``sync_point``, so that the training thread continues if it waits there. The caller holds the lock."""
        if sync_point is SyncPointKind.SYNCHRONISE:
            self.agreed &= ~Vote.SYNCHRONISE
        if not self.stands_at(sync_point):
            return
        self.agreed &= ~_ASKED_FOR.get(self.sync_point, Vote.NONE)
        self.opened = True
        self.sync_point = SyncPointKind.NONE
        self.last_seen = now
        self.changed.notify_all()
