"""Server processes: starting them, ending them, and replacing one whose supervisor was killed.

`ServerProcess` is one server under its supervisor, a process that restarts the server. `ServerStart` holds the settings
that the servers of one training share. If a supervisor is killed, its server's memory is lost. `Guard` then starts a
new server, which listens under the same name and begins with the newest snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any, NamedTuple

from lightning_async._subprocess import HelperProcess
from lightning_async.comm.p2p import listen
from lightning_async.comm.p2p_gloo import address_of
from lightning_async.errors import AsyncTrainingError
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.partition import TABLES
from lightning_async.parameter_server.snapshots import Shelf
from lightning_async.parameter_server.supervisor import DRAIN, END, STOP

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
# Longest wait until a server that ends has freed its address.
_REPLACING_ENDS_S = 20.0
# Longest wait until a server has ended, or has written its last snapshot.
_ENDS_S = 10.0
# Number of calls that wait while there is no server.
_BACKLOG = 128


class ServerProcess:
    """A server on this host, under a supervisor that starts the server again, with its memory, when it is killed.

    The server outlives the process that starts it, because other workers still need it. It ends by `close` or `leave`.
    It also ends once its starter is gone and no worker has been connected for a while.

    Args:
        worker_rules: Rules by which the server treats workers. Default: None, asynchronous.
        linger_s: Seconds for which the server waits for workers once its starter is gone. Default: 30.
        host: Address of this host for workers on other hosts. Default: None, only workers of this host can connect.
        port: Port at that address. Default: 0, a free one.
        server: Number of the server among the servers, for its snapshots. Default: 0.
        name: Name by which workers of this host find the server. Default: None, a secret one.
        snapshots: Folder of all servers' snapshots, as a path or as a URL of fsspec. The server begins with its newest
            snapshot, and takes a last one when it ends. Default: None, the server takes no snapshots.
        snapshot_every: Seconds between two snapshots. Default: 60.

    Raises:
        ValueError: ``snapshot_every`` is not above 0.
        AsyncTrainingError: The system does not let the server start, or the folder cannot be written to.
    """

    def __init__(
        self, worker_rules: WorkerRules | None = None, linger_s: float = 30.0, host: str | None = None, port: int = 0,
        *, server: int = 0, name: str | None = None, snapshots: str | None = None, snapshot_every: float = 60.0,
    ) -> None:  # fmt: skip
        if not snapshot_every > 0:
            raise ValueError(f"`ServerProcess(snapshot_every={snapshot_every!r})` must be > 0 seconds.")
        self._settings = {
            "terms": (worker_rules or WorkerRules()).plain(), "linger_s": linger_s, "server": server,
            "snapshots": snapshots, "snapshot_every": snapshot_every,
        }  # fmt: skip
        self._process: HelperProcess | None = None
        self.name = ""
        """Name of the server, for `ShmDial` on this host."""
        self.address: dict[str, Any] = {}
        """Address of the server as a dict of JSON values, for `p2p_gloo.dial` on any host."""
        try:
            with contextlib.ExitStack() as opened:
                self._start(opened, name, host, port)
        except OSError as error:
            raise AsyncTrainingError(f"no parameter server can be started: {error}") from error

    def _start(self, opened: contextlib.ExitStack, name: str | None, host: str | None, port: int) -> None:
        if (folder := self._settings["snapshots"]) is not None:
            Shelf(folder, self._settings["server"]).close()  # raises here if the folder cannot be written to
        # This process closes its copies below: supervisor and server keep the memory alive.
        memories = [os.memfd_create("lightning_async-server") for _ in range(TABLES)]
        for memory in memories:
            opened.callback(os.close, memory)
        listener, self.name = listen(name)
        listeners = [opened.enter_context(listener)]
        self.address = address_of(self.name)
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # The starter binds the port, so that a port that is taken raises here, and not in another process.
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            listeners.append(opened.enter_context(listener))
            self.address = address_of(self.name, host, listener.getsockname()[1])
        handed = [*memories, *(each.fileno() for each in listeners)]
        self._process = HelperProcess(
            "lightning_async.parameter_server.supervisor", [handed, {**self._settings, "address": self.address}],
            "supervises a server", descriptors=handed,
        )  # fmt: skip

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.popen.pid

    @property
    def pid(self) -> int | None:
        """The process id of the server; None while no server runs."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.supervisor}/task/{self.supervisor}/children") as file:
                children = file.read().split()
            return int(children[0]) if children else None
        return None

    @property
    def killed(self) -> bool:
        """Whether the process that supervises the server was killed. The server's memory is then lost, too."""
        return self._process is not None and (self._process.popen.poll() or 0) < 0

    def tell_to_end(self) -> None:
        """Tell the server to end, after a last snapshot if it takes snapshots.

        Returns at once. `close` waits for the server's end.
        """
        self._order(END if self._settings["snapshots"] else STOP)

    def close(self, drain_s: float = 0.0, snapshot_s: float = _ENDS_S) -> int:
        """End the server, and free its memory; idempotent.

        Args:
            drain_s: Longest wait until no worker is connected, in seconds. Default: 0.
            snapshot_s: Longest wait for a last snapshot and the server's end, in seconds; after that, the server is
                killed. Default: 10.

        Returns:
            0; or 1 if the server could not take its last snapshot, or has failed before.
        """
        if (process := self._process) is None:
            return 0
        if drain_s > 0.0:
            self._order(DRAIN)
        status = process.wait(drain_s)
        if status is None:
            self.tell_to_end()
            status = process.wait(snapshot_s)
        if status is None:
            status = 1
            self._order(STOP)
            if process.wait(_ENDS_S) is None:
                process.popen.kill()  # the server notices this, and ends
                process.wait()
        process.channel.close()
        self._process = None
        return int(status != 0)

    def leave(self, within_s: float = 1.0) -> None:
        """Stop managing the server, which then ends by itself once no worker is connected.

        Args:
            within_s: Longest wait for the server's end, in seconds. Default: 1.
        """
        if (process := self._process) is None:
            return
        self._order(DRAIN)
        # Still needed: from here on it ends by itself.
        if process.wait(within_s) is None:
            process.leave()
        process.channel.close()
        self._process = None

    def _order(self, word: bytes) -> None:
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):
                process.channel.send(word)


class Shelving(NamedTuple):
    """The settings of one training's snapshots: where servers write them, and how often.

    Args:
        folder: Folder of the snapshots. Default: None, servers take no snapshots.
        every_s: Seconds between two snapshots. Default: 60.
    """

    folder: str | None = None
    every_s: float = 60.0


class ServerStart(NamedTuple):
    """The arguments of `ServerProcess` that the servers of one training share.

    Args:
        worker_rules: Rules by which servers treat workers.
        host: Address of this host for workers on other hosts. Default: None, only workers of this host can connect.
        shelving: Folder of snapshots, and how often they are taken. Default: servers take no snapshots.
    """

    worker_rules: WorkerRules
    host: str | None = None
    shelving: Shelving = Shelving()

    def begin(self, server: int, port: int = 0, name: str | None = None) -> ServerProcess:
        """Start the server with the number ``server``; ``port`` and ``name`` are as for `ServerProcess`."""
        folder, every_s = self.shelving
        return ServerProcess(
            self.worker_rules, host=self.host, port=port, server=server, name=name, snapshots=folder,
            snapshot_every=every_s,
        )  # fmt: skip

    def again(
        self, server: int, address: Mapping[str, Any], is_over: Callable[[], bool] = lambda: False
    ) -> ServerProcess:
        """Start a server at the address of a server that is gone or about to end.

        Args:
            server: Number of the server.
            address: Address of the server that is gone.
            is_over: Function that returns whether no server is needed any more. While the address is still in use,
                attempts go on for up to 20 s, or until this function returns True. Default: a server is always needed.

        Raises:
            AsyncTrainingError: The system does not let the server start.
        """
        until = time.monotonic() + _REPLACING_ENDS_S
        while True:
            try:
                return self.begin(server, address["port"] or 0, address["name"])
            except AsyncTrainingError as error:
                # A server that is about to end may still hold the address: only then does another attempt help.
                taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not taken or is_over() or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


class Guard:
    """A thread that replaces each server of this rank whose supervisor is killed.

    The guard does not replace a server whose supervisor has exited without being killed.

    Args:
        start: Settings with which servers are started.
        own: Servers by number. The guard writes the new servers into this mapping, until `close` is called.
    """

    def __init__(self, start: ServerStart, own: dict[int, ServerProcess]) -> None:
        self._start = start
        self._own = own
        # Closing one end wakes the thread, which waits for the other.
        self._woken, self._wakes = os.pipe()
        self._watched = {os.pidfd_open(process.supervisor): number for number, process in own.items()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_async guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop replacing servers; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self._wakes)
        self._thread.join()
        for descriptor in (self._woken, *self._watched):
            os.close(descriptor)

    def _watch(self) -> None:
        while not self._closed.is_set():
            for descriptor in self._watched.keys() & connection.wait([self._woken, *self._watched]):
                if not self._closed.is_set():
                    self._replace(descriptor)

    def _replace(self, descriptor: int) -> None:
        number = self._watched.pop(descriptor)
        os.close(descriptor)
        before = self._own[number]
        # A server that ended by itself was told to, or could not serve.
        if not before.killed:
            return
        _log.warning(
            "Server %d is lost with its memory: its supervisor was killed. Another server replaces it, with its "
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
