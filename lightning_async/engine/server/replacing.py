"""A server in the place of one whose memory is gone, at the same address: it begins with the newest snapshot there is.

supervisor is killed ---> its server ends, and the memory with it
who started it sees that  ---> the next one listens under the same name ---> workers dial it, as they would anyway
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_async.engine.server.process import ServerProcess
from lightning_async.engine.server.quorum import Terms
from lightning_async.errors import AsyncTrainingError

__all__ = ["Guard", "Shelving", "Start"]

_log = logging.getLogger(__name__)
_LOOK_S, _ENDS_S = 0.1, 20.0


class Shelving(NamedTuple):
    """Where the servers of one training keep their snapshots.

    Args:
        folder: of all of them, and of nobody else. Default: none are taken.
        every_s: seconds between two. Default: 60.
    """

    folder: str | None = None
    every_s: float = 60.0


class Start(NamedTuple):
    """How the servers of one training are started.

    Args:
        terms: how they treat workers.
        host: this one's address, by which others reach it; None where all are on one.
        shelving: of snapshots. Default: none.
    """

    terms: Terms
    host: str | None = None
    shelving: Shelving = Shelving()

    def begin(self, server: int, port: int = 0, name: str | None = None) -> ServerProcess:
        """See `ServerProcess`."""
        folder, every_s = self.shelving
        return ServerProcess(
            self.terms, host=self.host, port=port, server=server, name=name, snapshots=folder, snapshot_every=every_s
        )

    def again(
        self, server: int, address: Mapping[str, Any], is_over: Callable[[], bool] = lambda: False
    ) -> ServerProcess:
        """At the address of one that is gone, or has not quite ended; ``is_over``: nobody needs it any more.

        Raises:
            AsyncTrainingError: the system does not let it start.
        """
        until = time.monotonic() + _ENDS_S
        while True:
            try:
                return self.begin(server, address["port"] or 0, address["name"])
            except AsyncTrainingError as error:
                taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not taken or is_over() or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


class Guard:
    """Has another server take the place of each one beside this rank whose supervisor is killed; on a thread.

    A server that has ended by itself, or could not serve, stays away.

    Args:
        start: how they are started.
        own: they, by their numbers; whoever takes a place is there. The guard's until it is closed.
    """

    def __init__(self, start: Start, own: dict[int, ServerProcess]) -> None:
        self._start, self._own = start, own
        self._woken, self._wakes = os.pipe()
        self._watched = {os.pidfd_open(process.supervisor): number for number, process in own.items()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_async guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent; nobody is started from now on."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self._wakes)
        self._thread.join()
        for descriptor in (self._woken, *self._watched):
            os.close(descriptor)

    def _watch(self) -> None:
        while not self._closed.is_set():
            poll = select.poll()
            for descriptor in (self._woken, *self._watched):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor in self._watched and not self._closed.is_set():
                    self._replace(descriptor)

    def _replace(self, descriptor: int) -> None:
        number = self._watched.pop(descriptor)
        os.close(descriptor)
        before = self._own[number]
        if not before.killed:
            return
        _log.warning(
            "Server %d is lost with its memory: its supervisor was killed. Another one takes its place, with its "
            "newest snapshot that is whole. Snapshots are in %s.", number, self._start.shelving.folder,
        )  # fmt: skip
        before.close()
        try:
            self._own[number] = self._start.again(number, before.address, self._closed.is_set)
        except (AsyncTrainingError, OSError) as error:
            if not self._closed.is_set():
                _log.error("No server takes the place of server %d: %s", number, error)
        else:
            self._watched[os.pidfd_open(self._own[number].supervisor)] = number
