"""One program at a time writes into a directory of checkpoints, and waits for what an earlier one still writes.

| file | is locked by |
| --- | --- |
| ``.claim`` | one process of the program that trains there, while it lives; says who that is |
| ``.ranks`` | all of that program's, which share it: the first one may be lost, and the others train on |
| ``.writer-0`` | the process that writes rank 0's part, from before its first save on; it outlives its trainer |

The kernel lets go of a lock when its process ends, however it ends: nothing is left that would have to be cleaned.
Where a file system has no locks (fsspec's), nobody is noticed. Whoever only reads needs no claim.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from lightning_async.engine.checkpoint.store import CheckpointStore
from lightning_async.engine.files import Files, Lock
from lightning_async.errors import CheckpointError

__all__ = ["Claim", "has_no_writer", "has_writer", "lock_of_writer"]

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""A program that ends, or one that only deletes something, may let go."""
QUIET_S = 5.0
"""A wait that is longer is said."""
_PAUSE_S = 0.02
_WRITER = ".writer-"

Gather = Callable[[Any], Sequence[Any]]


class Claim:
    """What a program has on a directory while it writes there; one for each rank, of which one holds the lock.

    Args:
        store: the checkpoints.
        program: names the program; the same on all of its ranks.
        does: what it does there, for those who come meanwhile. Default: it trains.
    """

    def __init__(self, store: CheckpointStore, program: str, does: str = "trains into it") -> None:
        self._store, self._program, self._does = store, program, does
        self._path, self._shared_path = f"{store.dirpath}/.claim", f"{store.dirpath}/.ranks"
        self._lock: Lock | None = None
        self._shared: Lock | None = None

    def take(self, gather: Gather = lambda value: [value]) -> None:
        """Have the directory for this program.

        Args:
            gather: one plain value of every rank, to all, which call this together. Default: this is the only one.

        Raises:
            CheckpointError: on all ranks; another program has one of their directories, and which one that is; or
                nothing can be written there.
        """
        told = gather(self._take())
        if any(told):
            self.release()
            raise CheckpointError("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(told) if words))
        with contextlib.suppress(OSError):  # nobody but who has `.claim` would be in the way
            self._shared = self._store.files.lock(self._shared_path, shared=True)

    def join(self) -> None:
        """Have the directory with this program's other ranks, which train there.

        Raises:
            CheckpointError: they do not train into this directory.
        """
        try:
            lock = self._store.files.lock(self._path)
        except BlockingIOError:
            theirs = self._holder().get("program") == self._program
        else:
            # The file system has no locks; or the rank that had said so was stopped when the others lost it, and has
            # let go since.
            theirs = lock is None or self._is_left()
            if lock is not None:
                lock.close()
        if not theirs:
            raise CheckpointError(f"{self._store.dirpath} is no directory that the other ranks train into.")
        self.take()

    def _is_left(self) -> bool:
        """Whether ranks of this program train there, though none says so any more."""
        shared = _is_free(self._store.files, self._shared_path) is False
        return shared and self._holder().get("program") == self._program

    def keep(self) -> None:
        """Ranks are lost: where the one that said who trains there is among them, this one does. Waits for nobody."""
        if self._lock is None and self._shared is not None:
            with contextlib.suppress(OSError):  # another rank was quicker, or somebody looks whether we have it
                self._lock = self._store.files.lock(self._path)
                self._say()

    def wait(self, gather: Gather = lambda value: [value], timeout_s: float = 600.0) -> None:
        """Until nothing is being written there by processes of an earlier program, or so much time is over.

        Args:
            gather: as above: ranks wait in turns of some seconds, so that each hears of the others.
            timeout_s: at most. Default: 10 minutes, as these processes wait for each other.
        """
        began, said = time.monotonic(), False
        while any(gather(_writes(self._store, QUIET_S))):
            left, there = timeout_s - (time.monotonic() - began), ", ".join(self._store.writing()) or "something"
            if not said or left <= 0:
                log.warning(
                    "A process of an earlier training is still writing %s in %s; %s.", there, self._store.dirpath,
                    f"waiting for it, {left:.0f} s more at most" if left > 0 else "it is not waited for any longer",
                )  # fmt: skip
            said = True
            if any(gather(left <= 0)):
                return

    def release(self) -> None:
        """Let go. Idempotent."""
        locks, self._lock, self._shared = (self._lock, self._shared), None, None
        for lock in locks:
            if lock is not None:
                lock.close()

    def _take(self) -> str:
        """Why not; nothing where this program has the directory."""
        until = time.monotonic() + GRACE_S
        while True:
            try:
                self._lock = self._store.files.lock(self._path)
                self._check_ranks()
            except BlockingIOError:
                holder = self._holder()
                if holder.get("program") == self._program:  # another rank
                    return ""
                if time.monotonic() > until:
                    return self._refusal(holder)
                time.sleep(_PAUSE_S)
            except OSError as error:
                return f"{self._store.dirpath} cannot be written into: {error}"
            else:
                self._say()
                return ""

    def _check_ranks(self) -> None:
        """Raises BlockingIOError where another program's ranks go on without the one that had taken the directory."""
        try:
            shared = self._store.files.lock(self._shared_path)
        except BlockingIOError:
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.close()
            raise
        if shared is not None:
            shared.close()

    def _say(self) -> None:
        if self._lock is not None:
            self._lock.write(json.dumps(self._who()).encode())

    def _who(self) -> dict[str, Any]:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return {
            "program": self._program, "does": self._does, "host": socket.gethostname(), "pid": os.getpid(),
            "since": since,
        }  # fmt: skip

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(self._store.files.read(self._path))
        except (OSError, ValueError):  # it is about to say who it is
            return {}
        return found if isinstance(found, dict) else {}

    def _refusal(self, holder: dict[str, Any]) -> str:
        who = "process {pid} on host {host} {does}, since {since}".format(
            **{"pid": "?", "host": "?", "does": "uses it", "since": "?", **holder}
        )
        return (
            f"{self._store.dirpath} is in use: {who}. Two programs must not write checkpoints into one directory: end "
            "that one, or take another directory."
        )


def lock_of_writer(files: Files, dirpath: str, rank: int) -> Lock | None:
    """What the process that writes a rank's part holds as long as it lives; None where that cannot be."""
    try:
        return files.lock(f"{dirpath}/{_WRITER}{rank}", shared=True)
    except OSError:  # what is wrong with the directory, the first save will tell
        return None


def has_writer(store: CheckpointStore, rank: int) -> bool:
    """Whether it is known that a process lives that may write a rank's part."""
    return _is_free(store.files, f"{store.dirpath}/{_WRITER}{rank}") is False


def has_no_writer(store: CheckpointStore, rank: int) -> bool:
    """Whether it is known that no process lives that would write a rank's part."""
    return _is_free(store.files, f"{store.dirpath}/{_WRITER}{rank}") is True


def _is_free(files: Files, path: str) -> bool | None:
    """Whether nobody has locked a file; None where that cannot be known."""
    try:
        lock = files.lock(path)
    except BlockingIOError:  # or another one that looks, just now
        return False
    except OSError:
        return None
    if lock is None:
        return None
    lock.close()
    return True


def _writes(store: CheckpointStore, patience_s: float) -> bool:
    """Whether a process still writes into the directory after so many seconds."""
    until = time.monotonic() + patience_s
    while True:
        names = [name for name in store.files.names(store.dirpath) if name.startswith(_WRITER)]
        if all(_is_free(store.files, f"{store.dirpath}/{name}") is not False for name in names):
            return False
        if time.monotonic() > until:
            return True
        time.sleep(_PAUSE_S)
