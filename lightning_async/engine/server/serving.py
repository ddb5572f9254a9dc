"""The server's process: it answers who dials, until it is killed, told to end, or has nobody left."""

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
from typing import Any

import torch

from lightning_async.comm.channel import Channel
from lightning_async.comm.reach import seal_of_servers
from lightning_async.comm.shm import answer
from lightning_async.comm.torch.dialling import answer_pair
from lightning_async.engine.server.hosting import Hosting, Keeping
from lightning_async.engine.server.orders import DRAIN, END, UNSAVED
from lightning_async.engine.server.plan import TABLES
from lightning_async.engine.server.quorum import Terms
from lightning_async.errors import AsyncTrainingError, PeerLost

__all__ = ["main"]

_CRASHED = 70
_LOOK_S, _SOON_S = 1.0, 0.02
_MOST = 8  # threads; more do not make the memory faster
_CALLERS = 64  # that have not said yet who they are
_GREETING_S = 20.0


def main(life: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Serve, with the memory as the one before has left it.

    Args:
        life: a pipe: its end, and this process ends; a byte: see `orders`.
        handed: descriptors: of the `TABLES` memories, and of the sockets that workers dial.
        settings: ``terms``; ``linger_s``; its ``address``; its number, ``server``; the folder of its ``snapshots``, if
            any, and ``snapshot_every`` so many seconds; whether it is ``orphaned`` already.
    """
    # Threads of torch's own would wait for each other at every operation, beside workers that take the cores.
    threads = min(_MOST, torch.get_num_threads())
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # where there are none left, Gloo ends the process
    memories, listeners = handed[:TABLES], handed[TABLES:]
    keeping = Keeping(settings["snapshots"], settings["server"], settings["snapshot_every"])
    server = Hosting(memories, Terms(**settings["terms"]), threads, keeping)
    orphaned, alone_since, linger_s = bool(settings["orphaned"]), time.monotonic(), float(settings["linger_s"])
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
            orphaned, linger_s = True, 0.0 if word == DRAIN else linger_s
        for each, of_listener in calls.items():
            of_listener.see_to(each in ready)
        if server.over:
            orphaned, linger_s = True, 0.0
        if server.connected:
            alone_since = time.monotonic()
        if orphaned and not server.connected and time.monotonic() - alone_since >= linger_s:
            _end(server)


def _end(server: Hosting) -> None:
    try:
        server.take_last()
    except (OSError, AsyncTrainingError) as error:
        print(f"A parameter server ends without a last snapshot: {error}", file=sys.stderr, flush=True)
        os._exit(UNSAVED)
    os._exit(0)


class _Calls:
    """Those that come to one listening socket, each on a thread of its own; strangers among them do no harm.

    Args:
        server: that answers.
        listener: of this host's processes, or of others'.
        told: of the server, to whoever asks.
    """

    def __init__(self, server: Hosting, listener: socket.socket, told: dict[str, Any]) -> None:
        self._server, self._listener, self._told = server, listener, told
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

    def _answer(self, sock: socket.socket) -> Channel | None:
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
