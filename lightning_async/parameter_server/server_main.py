"""The server's process: it answers workers until it is killed, is told to end, or has no worker left.

The main thread, in `main`, waits for connections and orders. `ServerTables` has a `Server` for each group of
parameters.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

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

# Exit code of a server that has found a fault in itself.
_CRASHED = 70
# Seconds between two checks whether any worker is still connected.
_LOOK_S = 1.0
# The same, once the server ends as soon as no worker is connected.
_SOON_S = 0.02
_MAX_THREADS = 8  # more do not make the memory faster
_CALLERS = 256  # largest number of connections that have sent no first message
# Shortest time between two lines in the log about connections that were not answered.
_NOTE_S = 60.0
# Seconds after which a connection without a first message is closed.
_GREETING_S = 20.0


def main(life: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Run the server until it ends; the process then exits, and this function does not return.

    Args:
        life: Pipe from the supervisor. Each byte is an order, see `supervisor`; when the supervisor is gone, the pipe
            is closed, and this process ends.
        handed: Descriptors: first those of the tables' memories, `TABLES` in number, with the contents that an earlier
            server process has left; then those of the sockets to which workers connect.
        settings: Settings of `ServerProcess`, the server's ``address``, and whether its starter is gone (``orphaned``).
    """
    # Workers use the cores, too: torch's own threads would wait for each other at every operation.
    threads = min(_MAX_THREADS, torch.get_num_threads())
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Gloo ends the process when descriptors run out
    memories = handed[:TABLES]
    listeners = handed[TABLES:]
    server = ServerTables(memories, WorkerRules(**settings["terms"]), threads, settings)
    orphaned = bool(settings["orphaned"])
    alone_since = time.monotonic()
    linger_s = float(settings["linger_s"])
    about = {**settings["address"], "server": settings["server"], "terms": settings["terms"]}
    calls = {each: _Calls(server, socket.socket(fileno=each), about) for each in listeners}
    poll = select.poll()
    for each in (life, *listeners):
        poll.register(each, select.POLLIN)
    while True:
        ready = {found for found, _ in poll.poll(1000 * (_LOOK_S if linger_s else _SOON_S))}
        if life in ready:
            word = os.read(life, 1)
            if not word:
                os._exit(0)  # the supervisor is gone, and nothing would start this server again
            if word == END:
                _end(server)
            orphaned = True
            linger_s = 0.0 if word == DRAIN else linger_s
        for each, of_listener in calls.items():
            of_listener.see_to(each in ready)
        # Training is over: the server ends without an order, once no worker is connected.
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
    """The connections to one listening socket. Each is answered on a thread of its own.

    At most 256 connections may be without a first message, and each of them for 20 s at most, so that strangers do not
    exhaust the threads. A further connection takes the place of the one that has been silent longest: a worker speaks
    at once. The log has a line a minute at most about connections that are not answered, with their number.

    Args:
        server: Tables of the server, which answer the requests.
        listener: Socket for processes of this host, or for other hosts.
        about: Description of the server, for processes that ask for it.
    """

    def __init__(self, server: ServerTables, listener: socket.socket, about: dict[str, Any]) -> None:
        self._server = server
        self._listener = listener
        self._about = about
        self._near = listener.family == socket.AF_UNIX
        self._greeting: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._unanswered = 0
        self._reason = ""
        self._next_note = 0.0
        listener.setblocking(False)

    def see_to(self, ready: bool) -> None:
        """Accept a connection if one is ``ready``; close connections that have sent no first message for too long."""
        now = time.monotonic()
        self._note_unanswered(now)
        silent = list(self._greeting.items())
        room = _CALLERS - ready
        for number, (sock, since) in enumerate(silent):  # the oldest first
            if now - since > _GREETING_S or number < len(silent) - room:
                self._greeting.pop(sock, None)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the wait of the connection's thread
        if not ready:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the caller has hung up already
            return
        self._greeting[sock] = now
        threading.Thread(target=self._serve, args=(sock,), name="lightning_async worker", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if (channel := self._answer(sock)) is not None:
                self._server.serve(channel)
        except PeerLost as error:
            with self._lock:
                self._unanswered += 1
                self._reason = str(error)
        except BaseException:
            # A faulty server must not continue: the next one has the last whole version, and workers ask again.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_CRASHED)

    def _note_unanswered(self, now: float) -> None:
        """Write to the log how many connections were not answered since the last such line."""
        if not self._unanswered or now < self._next_note:
            return
        with self._lock:
            number = self._unanswered
            self._unanswered = 0
        self._next_note = now + _NOTE_S
        more = f" And {number - 1} more connections were not answered." if number > 1 else ""
        print(f"{self._reason}{more}", file=sys.stderr, flush=True)

    def _answer(self, sock: socket.socket) -> PeerChannel | None:
        try:
            if self._near:
                return answer(sock, "a worker")
            place = "an unknown place"
            with contextlib.suppress(OSError):
                place = str(sock.getpeername()[0])
            return answer_pair(
                sock, f"a worker at {place}", seal_of_servers(), self._about, lambda: self._greeting.pop(sock, None)
            )
        finally:
            self._greeting.pop(sock, None)


class ServerTables:
    """The tables of one server. A table holds the weights and the optimizer state of one group of parameters.

    A new server process finds the tables of the one before in their memory. A further table is added when a worker
    names it for the first time.

    Args:
        memories: Descriptors of anonymous files, `TABLES` in number, one for each table, see `Store`.
        worker_rules: Rules by which the server treats workers.
        threads: Number of threads that work on a large shard.
        settings: Settings of `ServerProcess`, for snapshots.
    """

    def __init__(
        self, memories: Sequence[int], worker_rules: WorkerRules, threads: int, settings: Mapping[str, Any]
    ) -> None:
        self._memories = list(memories)
        self._worker_rules = worker_rules
        self._threads = threads
        self._settings = settings
        self._making = threading.Lock()
        self.over = False
        """Whether a worker has said that training is over."""
        self._servers: dict[int, Server] = {}
        for table, memory in enumerate(self._memories):
            if os.fstat(memory).st_size or table == 0:
                self._server(table)

    @property
    def connected(self) -> int:
        return sum(server.connected for server in self._all)

    def serve(self, channel: PeerChannel) -> None:
        """Answer one worker, for the table that it names, until its connection ends. Runs on a thread of its own.

        The first message may instead say that training is over, or name workers that have died. Any process may send
        such a message.
        """
        try:
            header, size = channel.receive(HELLO_S)
            try:
                _check_first(header)
                if header.get("do") == "over":
                    self.over = True
                    channel.send({})
                    raise PeerLost("nothing more is said.")
                table = header.get("table", 0)
                if type(table) is not int or not 0 <= table < TABLES:
                    raise RequestError("settings", f"there is no table {table!r}: the server has {TABLES}.")
                server = self._server(table)
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
        """Take a last snapshot of each table, if the server takes snapshots; no push is applied afterwards."""
        for server in self._all:
            if server.snapshots is not None:
                server.snapshots.take(last=True)

    @property
    def _all(self) -> list[Server]:
        return list(self._servers.values())

    def _server(self, table: int) -> Server:
        # Two workers may name a new table at the same time: it is made once.
        with self._making:
            if (found := self._servers.get(table)) is None:
                found = self._servers[table] = self._make(table)
            return found

    def _make(self, table: int) -> Server:
        folder = self._settings["snapshots"]
        shelf = None if folder is None else Shelf(folder, self._settings["server"], table)
        store = Store(self._memories[table], self._threads)
        made = Server(store, self._worker_rules, shelf, self._settings["snapshot_every"])
        if made.snapshots is not None:
            made.snapshots.begin()
        return made


def _check_first(header: Mapping[str, Any]) -> None:
    """Raise RequestError if a first message is malformed, so that a stranger does no harm.

    >>> _check_first({"do": "hello"})
    Traceback (most recent call last):
    lightning_async.parameter_server.snapshots.RequestError: {'do': 'hello'} is nothing that a server is told first.
    """
    whole = True
    if header.get("do") == "forget":
        names = header.get("workers")
        whole = isinstance(names, list) and all(isinstance(name, str) for name in names)
    elif header.get("do") == "hello":
        texts = [header.get(name) for name in ("worker", "fingerprint")]
        numbers = [header.get(name, "") for name in ("life", "said")]
        whole = all(isinstance(text, str) for text in texts) and all(isinstance(n, int | None) for n in numbers)
    if not whole:
        raise RequestError("request", f"{header} is nothing that a server is told first."[:300])
