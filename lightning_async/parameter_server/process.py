"""Server processes, as their starter sees them.

`ServerProcess` is one of them, `ServerStart` says how those of one training are started, and `Guard` replaces one whose
supervisor was killed, and with it the memory: the next one listens under the same name, with the newest snapshot.
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
_REPLACING_ENDS_S = 20.0
_ENDS_S = 10.0
_BACKLOG = 128


class ServerProcess:
    """A server on this host, under a supervisor that starts it again when it is killed, with all that it had.

    It outlives its starter, as other workers still need it. It ends by `close` or `leave`, or once its starter is gone
    and nobody has been connected for a while.

    Args:
        worker_rules: how it treats workers. Default: asynchronous.
        linger_s: seconds that it waits for workers, once its starter is gone. Default: 30.
        host: an address of this host for workers on others. Default: it serves this host only.
        port: at that address. Default: a free one.
        server: its number among the servers, for its snapshots. Default: 0.
        name: by which this host's workers find it. Default: a secret one.
        snapshots: folder of all servers' snapshots, a path or what fsspec knows; it begins with its newest one, and
            ends with a last one. Default: none are taken.
        snapshot_every: seconds between two. Default: 60.

    Raises:
        ValueError: ``snapshot_every`` is not above 0.
        AsyncTrainingError: the system does not let it start, or the folder cannot be written to.
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
        """Argument of `ShmDial`."""
        self.address: dict[str, Any] = {}
        """Argument of `p2p_gloo.dial`, on any host; in JSON's terms."""
        try:
            with contextlib.ExitStack() as opened:
                self._start(opened, name, host, port)
        except OSError as error:
            raise AsyncTrainingError(f"no parameter server can be started: {error}") from error

    def _start(self, opened: contextlib.ExitStack, name: str | None, host: str | None, port: int) -> None:
        if (folder := self._settings["snapshots"]) is not None:
            Shelf(folder, self._settings["server"]).close()  # raises here where it cannot be written to
        memories = [os.memfd_create("lightning_async-server") for _ in range(TABLES)]
        for memory in memories:
            opened.callback(os.close, memory)
        listener, self.name = listen(name)
        listeners = [opened.enter_context(listener)]
        self.address = address_of(self.name)
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
        """The supervisor's process id."""
        assert self._process is not None
        return self._process.popen.pid

    @property
    def pid(self) -> int | None:
        """The server's process id; None while there is none."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.supervisor}/task/{self.supervisor}/children") as file:
                children = file.read().split()
            return int(children[0]) if children else None
        return None

    @property
    def killed(self) -> bool:
        """Whether the supervisor has been killed: all memory is gone with it."""
        return self._process is not None and (self._process.popen.poll() or 0) < 0

    def tell_to_end(self) -> None:
        """Tell the server to end, with a last snapshot where any are taken; `close` waits for it."""
        self._order(END if self._settings["snapshots"] else STOP)

    def close(self, drain_s: float = 0.0, snapshot_s: float = _ENDS_S) -> int:
        """End the server, and free its memory; idempotent.

        Args:
            drain_s: seconds for which others may still be connected.
            snapshot_s: seconds that it has for a last snapshot, where any are taken.

        Returns:
            0; 1 where it could not take its last snapshot, or has ended before, as it could not serve.
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
                process.popen.kill()  # the server sees that, and ends
                process.wait()
        process.channel.close()
        self._process = None
        return int(status != 0)

    def leave(self, within_s: float = 1.0) -> None:
        """Leave the server to others: it ends when nobody is connected; wait for that for ``within_s`` at most."""
        if (process := self._process) is None:
            return
        self._order(DRAIN)
        if process.wait(within_s) is None:
            process.leave()
        process.channel.close()
        self._process = None

    def _order(self, word: bytes) -> None:
        if (process := self._process) is not None:
            with contextlib.suppress(OSError):
                process.channel.send(word)


class Shelving(NamedTuple):
    """The folder of one training's snapshots, None where none are taken, and the seconds between two."""

    folder: str | None = None
    every_s: float = 60.0


class ServerStart(NamedTuple):
    """The arguments of `ServerProcess` that the servers of one training share."""

    worker_rules: WorkerRules
    host: str | None = None
    shelving: Shelving = Shelving()

    def begin(self, server: int, port: int = 0, name: str | None = None) -> ServerProcess:
        folder, every_s = self.shelving
        return ServerProcess(
            self.worker_rules, host=self.host, port=port, server=server, name=name, snapshots=folder,
            snapshot_every=every_s,
        )  # fmt: skip

    def again(
        self, server: int, address: Mapping[str, Any], is_over: Callable[[], bool] = lambda: False
    ) -> ServerProcess:
        """Start a server at the address of one that is gone, or about to end.

        Args:
            is_over: whether no server is needed any more.

        Raises:
            AsyncTrainingError: the system does not let it start.
        """
        until = time.monotonic() + _REPLACING_ENDS_S
        while True:
            try:
                return self.begin(server, address["port"] or 0, address["name"])
            except AsyncTrainingError as error:
                taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
                if not taken or is_over() or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_S)


class Guard:
    """A thread that replaces each server of this rank whose supervisor is killed; not one that has ended by itself.

    Args:
        start: how servers are started.
        own: servers by number; the guard changes it until it is closed.
    """

    def __init__(self, start: ServerStart, own: dict[int, ServerProcess]) -> None:
        self._start = start
        self._own = own
        self._woken, self._wakes = os.pipe()
        self._watched = {os.pidfd_open(process.supervisor): number for number, process in own.items()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_async guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Start no more servers; idempotent."""
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
