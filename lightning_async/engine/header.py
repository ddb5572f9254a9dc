"""What every rank says in a header, whichever wing it is for: where it stands, and what it asks of all."""

from __future__ import annotations

import enum

__all__ = ["Arrival", "Gate"]


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


class Arrival(enum.Enum):
    """How a rendezvous ended."""

    OPEN = "open"
    """Every rank is here and holds the same model."""
    VALIDATE = "validate"
    """A rank asks for a validation: go to `Gate.VALIDATE`, then come back."""
    STOP = "stop"
    """A rank was told to stop: go to `Gate.STOP`."""
