"""What every rank says in a header, whichever wing it is for."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

__all__ = ["Arrival", "Gate", "Header", "Mark", "Vote"]


class Gate(enum.IntEnum):
    """Where a rank's training thread stands."""

    NONE = 0
    """Nowhere: it trains."""
    VALIDATE = 1
    EPOCH_END = 2
    TRAIN_END = 3
    STOP = 4
    """It leaves training early, because a rank was told to."""
    SYNCHRONISE = 5
    """It goes from local steps back to synchronous ones, for which all replicas must be equal."""
    DECIDE = 6
    """It has called all together: something is to be decided on one model."""


class Arrival(enum.Enum):
    """How a rendezvous ended."""

    OPEN = "open"
    """Every rank is here and holds the same model."""
    VALIDATE = "validate"
    """A rank asks for a validation: go to `Gate.VALIDATE`, then come back."""
    DECIDE = "decide"
    """A rank has called all together: go to `Gate.DECIDE`, then come back."""
    STOP = "stop"
    """A rank was told to stop: go to `Gate.STOP`."""


class Vote(enum.Flag):
    """What one rank asks of all. All hear it with the next header, and do it from their next batch boundary on."""

    NONE = 0
    STOP = enum.auto()
    """Leave training: this rank was told to."""
    END = enum.auto()
    """End training as after its last epoch: a time limit, `trainer.should_stop`."""
    VALIDATE = enum.auto()
    """Come to a validation: this rank waits there."""
    SYNCHRONISE = enum.auto()
    """Become equal: this rank is to take synchronous steps."""
    SAVE = enum.auto()
    """Mark the next round: a checkpoint is due. The engine's threads do it, so nobody else hears of it."""
    DECIDE = enum.auto()
    """Come together: this rank waits there."""
    EPOCH = enum.auto()
    """Whoever has no end of the epoch of its own comes to it: this rank waits there."""

    @property
    def lasting(self) -> Vote:
        """What is still to be done once a gate has opened: all but what asks for a gate."""
        return self & ~(Vote.VALIDATE | Vote.SYNCHRONISE | Vote.DECIDE | Vote.EPOCH)


class Mark(NamedTuple):
    """A checkpoint that belongs to an exchange: one model, one rule state, and what each rank has of its own.

    Args:
        number: of the save, the same on all ranks.
        step: optimizer steps per replica, the mean over all.
        members: the names of those that take part: they have a message, or stand at a gate. Names, as the exchange may
            be committed in a generation in which numbers are others.
    """

    number: int
    step: int
    members: tuple[str, ...]


class Header(NamedTuple):
    """The common part.

    Args:
        exchange: id of the exchange that this rank would commit next.
        ready: priority of the kind of round that it has a message for; 0 for none.
        votes: what it asks of all.
        excused: nobody need wait for its message: it stands at a gate, is done, or has been silent for long.
        gate: where its training thread stands.
        gate_index: which of the gates of that kind (the epoch).
        layout: fingerprint of what its buckets hold.
        version: how often that has changed since training began.
        clock: optimizer steps that it has taken in all.
        samples: samples that it has seen in all.
        opened: gates that have opened for it.
        last_gate: the last of them.
        last_moved: whether the model had changed when that one opened.
        last_clock: steps of all ranks at that time.
        last_exchange: its `exchange` at that time.
        saved: the last save that it knows of, by number.
        loss: of its last batch; infinite where that is not known, or not finite.
        place: how far it is in its data: with what its message holds, or, without one, with its last step.
        held: the exchange whose payload it has, where others may not; 0 for none.
        in_step: it takes synchronous steps.
        pace: seconds that a batch takes of its own time, for data, compute and communication, and its samples.
    """

    exchange: int = 1
    ready: int = 0
    votes: Vote = Vote.NONE
    excused: bool = False
    gate: Gate = Gate.NONE
    gate_index: int = 0
    layout: int = 0
    version: int = 0
    clock: float = 0.0
    samples: float = 0.0
    opened: int = 0
    last_gate: Gate = Gate.NONE
    last_moved: bool = False
    last_clock: float = 0.0
    last_exchange: int = 1
    saved: int = 0
    loss: float = math.inf
    place: float = 0.0
    held: int = 0
    in_step: bool = False
    pace: tuple[float, ...] = (0.0,) * 4  # stays the last: a tuple is laid out behind the rest
