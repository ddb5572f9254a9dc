"""A store in a process of its own, which outlives the rank that has started it.

    rank 0 --- "outlive" ------------------> the store stays if rank 0 is lost, and ends when no rank is connected
           --- "follow" -------------------> all ranks have ended a run normally: the store ends with rank 0
           --- the channel ends -----------> rank 0 has ended

The process has a session of its own. It inherits none of rank 0's pipes and sockets, because some other process may
wait until they are closed. Rank 0 opens the listening socket, and passes it to the process. Ranks may connect before
the process has imported torch; they are answered afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time

from lightning_async._sockets import connects, listening_port, snapshot
from lightning_async._subprocess import HelperProcess

_OUTLIVE = b"1"
_FOLLOW = b"0"
_LOOK_S = 0.1
# Seconds without a connection after which the store ends, because ranks reconnect within a shorter time.
_NOBODY_S = 0.5


class StoreProcess:
    """A child process that holds a store, and answers ranks at a listening socket.

    It ends when its parent ends, unless `outlive` was called.
    """

    def __init__(self, listening: socket.socket) -> None:
        process = HelperProcess(
            __name__, [listening.fileno(), *listening.getsockname()[:2]], f"keeps the store of process {os.getpid()}",
            descriptors=[listening.fileno()], stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        # Nobody waits for the process, because it may end last. Without a return code, Popen would warn of it.
        process.popen.returncode = 0
        self._channel = process.channel
        self._lock = threading.Lock()
        self._runs = 0

    def outlive(self) -> None:
        """Note that a run has begun: if the parent ends, the store still serves as long as a rank is connected."""
        self._count(1)

    def follow(self) -> None:
        """Tell the store's process that a run has ended normally.

        When no run is left, the store ends together with the parent.
        """
        self._count(-1)

    def close(self) -> None:
        self._channel.close()

    def _count(self, runs: int) -> None:
        # Runs may begin and end on different threads. If the process is gone, the heartbeat reports it.
        with self._lock, contextlib.suppress(OSError):
            self._runs += runs
            self._channel.send(_OUTLIVE if self._runs else _FOLLOW)


def main(channel: int, listening: int, host: str, port: int) -> None:
    """Serve the store in the new process, on the socket ``listening``; ``channel`` is the socket to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        # These signals are meant for ranks, and launchers send them to all processes.
        signal.signal(number, signal.SIG_IGN)
    from torch._C._distributed_c10d import TCPStore

    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    store = TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening)  # type: ignore
    with socket.socket(fileno=channel) as rank:
        outlives = False
        while said := rank.recv(64):
            outlives = said.endswith(_OUTLIVE)
    until = time.monotonic() + _NOBODY_S
    while outlives and time.monotonic() < until:
        time.sleep(_LOOK_S)
        # The store has one connection to itself.
        if _connected(port) > 1:
            until = time.monotonic() + _NOBODY_S
    del store
    # torch's threads would delay a normal exit.
    os._exit(0)


def _connected(port: int) -> int:
    return sum(connects(fd, {port}, set()) and listening_port(fd) is None for fd in snapshot())
