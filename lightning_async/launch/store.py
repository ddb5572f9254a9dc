"""The launcher's side of the store: the process that keeps it, and how that is told.

A store of torch is in a process of its own: torch takes seconds to import, and hundreds of megabytes; and where the
launcher is killed, the store has to outlive it until the ranks have saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_async._subprocess import HelperProcess, in_words
from lightning_async.launch.environment import ADDRESS
from lightning_async.launch.process import Process, watched

_BACKLOG = 2048
_LONGEST_WORDS = 1 << 16


class LaunchStore:
    """The process that keeps the store; see `store_main.main` for the arguments."""

    def __init__(
        self, readers: Sequence[int], logs: Path | None, grace_s: float, limits: Sequence[float] | None = None
    ) -> None:
        folder = None if logs is None else str(logs.absolute())
        self._process = HelperProcess(
            "lightning_async.launch.store_main", [list(readers), folder, grace_s, limits],
            f"keeps the store of launcher {os.getpid()}", descriptors=readers, kind=socket.SOCK_SEQPACKET, stdout=None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # of the user's, meant for ranks, libgomp may complain
        )  # fmt: skip
        self._channel = self._process.channel
        self.began = time.monotonic()
        self._port = 0
        self.pidfd = watched(self._process.popen)  # becomes readable when it ends

    @property
    def channel(self) -> int:
        """A descriptor where there is something to read once it has something to say."""
        return self._channel.fileno()

    def words(self) -> str:
        """Return what it says of ranks that hang; "" where it is gone, or speaks of those of the store before."""
        try:
            said = self._channel.recv(_LONGEST_WORDS, socket.MSG_DONTWAIT).decode(errors="replace")
        except OSError:
            return ""
        port, _, words = said.partition(" ")
        return words if port == str(self._port) else ""

    def open(self) -> int:
        """Open a store in place of the one before; return its port, where ranks can connect at once."""
        with socket.create_server((ADDRESS, 0), backlog=_BACKLOG) as server:
            self._port = server.getsockname()[1]
            self._tell({"what": "store", "host": ADDRESS, "port": self._port}, [server.fileno()])
        return self._port

    def started(self, process: Process) -> None:
        self._tell({"what": "started", "pid": process.pid}, [process.pidfd])

    def ended(self, process: Process) -> None:
        self._tell({"what": "ended", "pid": process.pid}, [])

    def died(self) -> str:
        """Return how it has ended, after its descriptor became readable."""
        status = self._process.popen.wait()
        self._channel.close()
        os.close(self.pidfd)
        return in_words(status)

    def close(self) -> None:
        self._process.popen.kill()  # first: the end of the channel is what it hears when the launcher was killed
        self.died()

    def _tell(self, said: Mapping[str, object], descriptors: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # it has ended: its descriptor tells
            socket.send_fds(self._channel, [json.dumps(said).encode()], descriptors)
