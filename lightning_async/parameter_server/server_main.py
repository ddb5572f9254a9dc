"""The server's process: it answers who dials, until it is killed, told to end, or has nobody left.

`main` waits for calls and orders. It holds `ServerTables`: a table for each group of parameters, each with its own
memory and `Server`.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_async.comm.p2p import PeerChannel, answer
from lightning_async.comm.p2p_gloo import answer_pair, seal_of_servers
from lightning_async.errors import AsyncTrainingError, PeerLost
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.partition import TABLES
from lightning_async.parameter_server.server import HELLO_S, Server
from lightning_async.parameter_server.snapshots import RequestError, Shelf
from lightning_async.parameter_server.store import Store
from lightning_async.parameter_server.supervisor import DRAIN, END, UNSAVED

_CRASHED = 70
_LOOK_S = 1.0
_SOON_S = 0.02
_MOST = 8  # threads; more do not make the memory faster
_CALLERS = 64  # that have not said yet who they are
_GREETING_S = 20.0


def main(life: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Serve, with the memory as the one before has left it.

    Args:
        life: a pipe: its end, and this process ends; a byte: an order, see `supervisor`.
        handed: descriptors: of the `TABLES` memories, and of the sockets that workers dial.
        settings: ``terms``, see `WorkerRules`; ``linger_s``; its ``address``; its number, ``server``; its folder of
            ``snapshots``, if any, and ``snapshot_every`` so many seconds; whether it is ``orphaned`` already.
    """
    # Threads of torch's own would wait for each other at every operation, beside workers that take the cores.
    threads = min(_MOST, torch.get_num_threads())
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # where there are none left, Gloo ends the process
    memories = handed[:TABLES]
    listeners = handed[TABLES:]
    keeping = Keeping(settings["snapshots"], settings["server"], settings["snapshot_every"])
    server = ServerTables(memories, WorkerRules(**settings["terms"]), threads, keeping)
    orphaned = bool(settings["orphaned"])
    alone_since = time.monotonic()
    linger_s = float(settings["linger_s"])
    told = {**settings["address"], "server": settings["server"], "terms": settings["terms"]}
    calls = {each: _Calls(server, socket.socket(fileno=each), told) for each in listeners}
    poll = select.poll()
    for each in (life, *listeners):
        poll.register(each, select.POLLIN)
    while True:
        ready = {found for found, _ in poll.poll(1000 * (_LOOK_S if linger_s else _SOON_S))}
        if life in ready:
            word = os.read(life, 1)
            if not word:
                os._exit(0)  # its supervisor is gone, and the memory with it
            if word == END:
                _end(server)
            orphaned = True
            linger_s = 0.0 if word == DRAIN else linger_s
        for each, of_listener in calls.items():
            of_listener.see_to(each in ready)
        if server.over:
            orphaned = True
            linger_s = 0.0
        if server.connected:
            alone_since = time.monotonic()
        if orphaned and not server.connected and time.monotonic() - alone_since >= linger_s:
            _end(server)


def _end(server: ServerTables) -> None:
    try:
        server.take_last()
    except (OSError, AsyncTrainingError) as error:
        print(f"A parameter server ends without a last snapshot: {error}", file=sys.stderr, flush=True)
        os._exit(UNSAVED)
    os._exit(0)


class _Calls:
    """The callers of one listening socket, each on a thread of its own; strangers among them do no harm.

    Args:
        server: that answers.
        listener: of this host's processes, or of others'.
        told: of the server, to whoever asks.
    """

    def __init__(self, server: ServerTables, listener: socket.socket, told: dict[str, Any]) -> None:
        self._server = server
        self._listener = listener
        self._told = told
        self._near = listener.family == socket.AF_UNIX
        self._greeting: dict[socket.socket, float] = {}
        listener.setblocking(False)

    def see_to(self, ready: bool) -> None:
        """Answer who has called; whoever has not said by now who it is, is no worker."""
        now = time.monotonic()
        for sock, since in list(self._greeting.items()):
            if now - since > _GREETING_S:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes its thread
        if not ready:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:  # who called is gone already
            return
        if len(self._greeting) >= _CALLERS:
            sock.close()
            return
        self._greeting[sock] = now
        threading.Thread(target=self._serve, args=(sock,), name="lightning_async worker", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if (channel := self._answer(sock)) is not None:
                self._server.serve(channel)
        except PeerLost as error:
            print(error, file=sys.stderr)
        except BaseException:
            # A server that has gone wrong is no server: the next one has the last whole version; workers ask again.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_CRASHED)

    def _answer(self, sock: socket.socket) -> PeerChannel | None:
        try:
            if self._near:
                return answer(sock, "a worker")
            return answer_pair(sock, f"a worker at {_shown(sock)}", seal_of_servers(), self._told)
        finally:
            self._greeting.pop(sock, None)


def _shown(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(sock.getpeername()[0])
    return "an unknown place"


class ServerTables:
    """The tables of one server; those that its memory holds, and each other one from when a worker first names it.

    Args:
        memories: `TABLES` descriptors of anonymous files, one for each table, see `Store`; its own from now on.
        worker_rules: how workers are treated.
        threads: that work on a large shard. Default: 1.
        keeping: of snapshots. Default: none.
    """

    def __init__(
        self, memories: Sequence[int], worker_rules: WorkerRules, threads: int = 1, keeping: Keeping | None = None
    ) -> None:
        self._memories = list(memories)
        self._worker_rules = worker_rules
        self._threads = threads
        self._keeping = keeping or Keeping()
        self._making = threading.Lock()
        self.over = False
        """A worker has said that training is over."""
        self._servers: dict[int, Server] = {}
        for table, memory in enumerate(self._memories):
            if os.fstat(memory).st_size or table == 0:
                self._server(table)

    @property
    def connected(self) -> int:
        """Connections of workers, to all tables."""
        return sum(server.connected for server in self._all)

    def serve(self, channel: PeerChannel) -> None:
        """Answer one worker, of the table that it names, until it is gone; on a thread of its own."""
        try:
            header, size = channel.receive(HELLO_S)
            try:
                _check_first(header)
                if header.get("do") == "over":
                    self.over = True
                    channel.send({})
                    raise PeerLost("nothing more is said.")
                server = self._called(header)
                if header.get("do") == "forget":
                    for each in self._all:
                        each.forget(header["workers"])
            except RequestError as refused:
                channel.send({"refused": refused.kind, "why": str(refused)})
                raise PeerLost(str(refused)) from refused
        except PeerLost:
            channel.close()
            return
        server.serve(channel, (header, size))

    def take_last(self) -> None:
        """Take a last snapshot of each table, where any are taken; nothing is applied after it."""
        for server in self._all:
            if server.snapshots is not None:
                server.snapshots.take(last=True)

    @property
    def _all(self) -> list[Server]:
        return list(self._servers.values())

    def _called(self, header: Mapping[str, Any]) -> Server:
        """Return the server of the table that a first message names."""
        table = header.get("table", 0)
        if type(table) is not int or not 0 <= table < TABLES:
            raise RequestError("settings", f"there is no table {table!r}: the server has {TABLES}.")
        return self._server(table)

    def _server(self, table: int) -> Server:
        with self._making:
            if (found := self._servers.get(table)) is None:
                found = self._servers[table] = self._make(table)
            return found

    def _make(self, table: int) -> Server:
        folder, server, every_s = self._keeping
        shelf = None if folder is None else Shelf(folder, server, table)
        found = Server(Store(self._memories[table], self._threads), self._worker_rules, shelf, every_s)
        if found.snapshots is not None:
            found.snapshots.begin()
        return found


class Keeping(NamedTuple):
    """The way in which snapshots are kept.

    Args:
        folder: of all servers' snapshots. Default: none are taken.
        server: the number of this one. Default: 0.
        every_s: seconds between two. Default: they are taken when a worker asks.
    """

    folder: str | None = None
    server: int = 0
    every_s: float = math.inf


def _check_first(header: Mapping[str, Any]) -> None:
    """Check that a first message is whole, so that whoever says something else harms no server.

    >>> _check_first({"do": "hello"})
    Traceback (most recent call last):
    lightning_async.parameter_server.snapshots.RequestError: {'do': 'hello'} is nothing that a server is told first.
    """
    whole = True
    if header.get("do") == "forget":
        names = header.get("workers")
        whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
    elif header.get("do") == "hello":
        texts = [header.get(name) for name in ("worker", "client", "fingerprint")]
        numbers = [header.get(name, "") for name in ("life", "said")]
        whole = all(isinstance(text, str) for text in texts) and all(isinstance(n, int | None) for n in numbers)
    if not whole:
        raise RequestError("request", f"{header} is nothing that a server is told first."[:300])
