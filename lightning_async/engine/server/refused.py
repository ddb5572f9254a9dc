"""Requests that a server does not do, and what it tells their workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.snapshots import Snapshots

__all__ = ["GONE", "Refused", "memory_for", "take_asked"]

GONE = (
    "was taken for dead, or was started again elsewhere; or another training has begun anew with the same servers, or "
    "has a worker of the same name, as it may not in the modes sync and ssp."
)
"""What may have become of a worker that is refused."""


class Refused(Exception):
    """A request that comes to nothing: of what kind, and why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@contextmanager
def memory_for(worker: str, terms: Terms) -> Iterator[None]:
    """Refuse what there is no memory for."""
    try:
        yield
    except OSError as error:
        raise Refused(
            "memory", f"its host has no memory for what `staleness={terms.staleness!r}` keeps of {worker!r}: {error}."
        ) from error


def take_asked(snapshots: Snapshots | None) -> None:
    """A snapshot, as a worker has asked for one."""
    if snapshots is None:
        raise Refused("request", "the server takes no snapshots: it was given no folder for them.")
    try:
        snapshots.take()
    except OSError as error:
        raise Refused("request", f"the server cannot take a snapshot: {error}") from error
