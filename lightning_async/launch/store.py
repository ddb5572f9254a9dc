"""The launcher's side of the store: the process that keeps it, and messages to that process.

torch's store is in a process of its own, because torch takes seconds and hundreds of megabytes to import. And if the
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
    """The launcher's connection to the process that keeps the store.

    Args:
        readers: Descriptors of the ranks' pipes, see `store_main.main`.
        logs: Directory of the ranks' files, or None.
        grace_s: Seconds in which ranks must end once the launcher was killed.
        limits: Limits of hang detection, see `ReportedProgress`. Default: None, hangs are not detected.
    """

    def __init__(
        self, readers: Sequence[int], logs: Path | None, grace_s: float, limits: Sequence[float] | None = None
    ) -> None:
        folder = None if logs is None else str(logs.absolute())
        self._process = HelperProcess(
            "lightning_async.launch.store_main", [list(readers), folder, grace_s, limits],
            f"keeps the store of launcher {os.getpid()}", descriptors=readers, kind=socket.SOCK_SEQPACKET, stdout=None,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # the user's value is meant for ranks
        )  # fmt: skip
        self._channel = self._process.channel
        self.began = time.monotonic()
        self._port = 0
        self.pidfd = watched(self._process.popen)  # becomes readable when the process ends

    @property
    def channel(self) -> int:
        """Descriptor that is readable when the store's process has sent a message."""
        return self._channel.fileno()

    def words(self) -> str:
        """Return the message of the store's process that the ranks hang.

        It is empty if the store's process has ended, or if all ranks were restarted after the message was sent.
        """
        try:
            said = self._channel.recv(_LONGEST_WORDS, socket.MSG_DONTWAIT).decode(errors="replace")
        except OSError:
            return ""
        port, _, words = said.partition(" ")
        return words if port == str(self._port) else ""

    def open(self) -> int:
        """Open a store in place of the one before; return its port, to which ranks can connect at once."""
        # The launcher listens itself: ranks can connect while the other process still imports torch.
        with socket.create_server((ADDRESS, 0), backlog=_BACKLOG) as server:
            self._port = server.getsockname()[1]
            self._tell({"what": "store", "host": ADDRESS, "port": self._port}, [server.fileno()])
        return self._port

    def started(self, process: Process) -> None:
        """Tell the store's process that a rank has started, and pass it the descriptor that shows the rank's end."""
        self._tell({"what": "started", "pid": process.pid}, [process.pidfd])

    def ended(self, process: Process) -> None:
        self._tell({"what": "ended", "pid": process.pid}, [])

    def died(self) -> str:
        """Return in words how the store's process has ended; call this once ``pidfd`` is readable."""
        status = self._process.popen.wait()
        self._channel.close()
        os.close(self.pidfd)
        return in_words(status)

    def close(self) -> None:
        self._process.popen.kill()  # first: to this process, a closed channel means that the launcher was killed
        self.died()

    def _tell(self, said: Mapping[str, object], descriptors: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # the process has ended, as its descriptor will show
            socket.send_fds(self._channel, [json.dumps(said).encode()], descriptors)
