"""The exceptions that training raises, all derived from `AsyncTrainingError`.

Wrong arguments raise ``ValueError`` or ``TypeError`` at construction. The exceptions here are raised later; their
messages name the rank, the round, the peer, the time that has passed, and what to do next.
"""

from __future__ import annotations

START_AGAIN = ", and start again from the last checkpoint"
"""Advice at the end of a message, for errors that end training."""


def in_brief(text: str) -> str:
    r"""Return the first and the last line of an error's text, without the traceback, for messages to other ranks.

    >>> in_brief("KeyError: Caught KeyError in worker process 0.\nOriginal Traceback:\n  ...\nKeyError: 'x'")
    "KeyError: Caught KeyError in worker process 0. KeyError: 'x'"
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(line[:500] for line in dict.fromkeys(lines[:1] + lines[-1:]))


class AsyncTrainingError(RuntimeError):
    """The base class of this package's run-time errors; wrong arguments raise ValueError or TypeError instead."""


class CollectiveError(AsyncTrainingError):
    """A collective operation failed; its process group must be formed again before the next operation."""


class CollectiveTimeout(CollectiveError):
    """A collective operation did not complete before its deadline."""


class LinkLost(CollectiveError):
    """Two members of a group that is being formed do not reach each other, although both reach the store.

    Args:
        message: Text of the error.
        leaving: Ranks that leave, so that the others reach each other.
    """

    def __init__(self, message: str, leaving: tuple[int, ...]) -> None:
        super().__init__(message)
        self.leaving = leaving


class GenerationChanged(CollectiveError):
    """A peer has left the present generation of process groups, and waits for the other ranks in the next one."""


class PeerLost(AsyncTrainingError):
    """A peer has stopped sending heartbeats, or has reported its failure.

    Args:
        message: Text of the error.
        ranks: Ranks of the lost peers. Default: none, the ranks are unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ChannelTimeout(PeerLost):
    """A peer has sent nothing, or received nothing, before the deadline; the channel to it is closed."""


class StoreLost(PeerLost):
    """The key-value store by which ranks form their groups does not answer any more, so the run ends on every rank."""


class Evicted(PeerLost):
    """The other ranks have declared this rank dead, and have continued without it."""


class LayoutMismatch(AsyncTrainingError):
    """The replicas' parameters differ in number, order, shape or dtype."""


class GateMismatch(AsyncTrainingError):
    """The ranks wait for different operations or sync points at the same time, and cannot go on together."""


class SettingsMismatch(AsyncTrainingError):
    """The ranks were started with different settings."""


class CheckpointError(AsyncTrainingError):
    """A checkpoint cannot be written, found or read."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, or its content differs from what was written."""


class TrainingDiverged(AsyncTrainingError):
    """A loss, a gradient or a parameter is out of bounds, and all configured remedies are used up."""
