"""The exceptions of run time, as one tree.

Wrong arguments are ``ValueError`` or ``TypeError`` at construction; everything here happens later and names the rank,
the round, the peer, the time that passed, and what to do next.
"""

from __future__ import annotations

START_AGAIN = ", and start again from the last checkpoint"
"""What is to be done where training ends; nothing of it where it goes on."""


def in_brief(text: str) -> str:
    r"""Return an error's first line and its last one, for other ranks, without a traceback between them.

    >>> in_brief("KeyError: Caught KeyError in worker process 0.\nOriginal Traceback:\n  ...\nKeyError: 'x'")
    "KeyError: Caught KeyError in worker process 0. KeyError: 'x'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(line[:500] for line in dict.fromkeys(lines[:1] + lines[-1:]))


class AsyncTrainingError(RuntimeError):
    """Base of every run-time failure of this package."""


class CollectiveError(AsyncTrainingError):
    """A collective operation failed; its group must be re-formed before the next one."""


class CollectiveTimeout(CollectiveError):
    """A collective operation did not complete before its deadline."""


class GenerationChanged(CollectiveError):
    """A peer has left this generation of the groups and waits in the next one."""


class PeerLost(AsyncTrainingError):
    """A peer has stopped sending heartbeats, or said that it failed."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ChannelTimeout(PeerLost):
    """A peer has said nothing, or taken nothing, before the deadline; the channel to it is closed."""


class StoreLost(PeerLost):
    """The store does not answer any more: without it nobody can form a group, and the run ends on every rank."""


class Evicted(PeerLost):
    """The others took this rank for dead and have gone on without it."""


class LayoutMismatch(AsyncTrainingError):
    """The replicas' parameters differ in number, order, shape or dtype."""


class GateMismatch(AsyncTrainingError):
    """The ranks came to a sync point for different things, and none of them can give way."""


class SettingsMismatch(AsyncTrainingError):
    """The ranks were started with different settings."""


class CheckpointError(AsyncTrainingError):
    """A checkpoint cannot be written, found or read."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, or does not hold what was written to it."""


class TrainingDiverged(AsyncTrainingError):
    """Losses, gradients or parameters are out of bounds, and no remedy that was left has helped."""
