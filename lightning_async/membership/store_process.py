"""A store in a process of its own, which outlives the rank that has started it.

    rank 0 --- "outlive" ------------------> all are here: the others may lose rank 0, and go on
           --- "follow" -------------------> all have ended a run
           --- the end of the channel -----> rank 0 has ended: so does this, or when no rank is connected any more

It has a session of its own, and nothing of rank 0's that somebody may wait for the end of. Rank 0 listens, and hands
the socket over: who comes before this has imported torch is answered when it has.
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
_NOBODY_S = 0.5


class StoreProcess:
    """Serves a store on this socket, which listens already; ends with this process, unless told to `outlive` it."""

    def __init__(self, listening: socket.socket) -> None:
        process = HelperProcess(
            __name__, [listening.fileno(), *listening.getsockname()[:2]], f"keeps the store of process {os.getpid()}",
            descriptors=[listening.fileno()], stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        process.popen.returncode = 0  # nobody waits for it, as it may end last
        self._channel = process.channel
        self._lock = threading.Lock()
        self._runs = 0

    def outlive(self) -> None:
        """Note that a run has begun: should this process end, the store serves as long as a rank is connected."""
        self._count(1)

    def follow(self) -> None:
        """Note that a run has ended in order. After the last one the store ends with this process, and frees the
        port."""
        self._count(-1)

    def close(self) -> None:
        self._channel.close()

    def _count(self, runs: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # it is gone: the heartbeat says so
            self._runs += runs
            self._channel.send(_OUTLIVE if self._runs else _FOLLOW)


def main(channel: int, listening: int, host: str, port: int) -> None:
    """Serve in that process, on the socket ``listening``; ``channel`` leads to the rank."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for ranks
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
        if _connected(port) > 1:  # to itself it is, too
            until = time.monotonic() + _NOBODY_S
    del store
    os._exit(0)  # torch has threads, and the store nothing to say any more


def _connected(port: int) -> int:
    return sum(connects(fd, {port}, set()) and listening_port(fd) is None for fd in snapshot())
