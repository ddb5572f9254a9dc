"""A TCP proxy in front of a store, that can stall: as a host that is busy, or looks up names, would."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType


class Proxy:
    """Passes bytes on, both ways, while it is not told to stall.

    Args:
        port: of the loopback interface, where it leads to.

    Attributes:
        connections: how many it has accepted.
        lookup_s: for each new connection it stalls for so long, as torch's store does while it looks up a name.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.connections = 0
        self.lookup_s = 0.0
        self._flows = threading.Event()
        self._flows.set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._server.getsockname()[1]

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flows.set()
        for end in [self._server, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5.0)

    @property
    def flows(self) -> bool:
        return self._flows.is_set()

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def _start(self, what: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=what, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.connections += 1
                if self.lookup_s:
                    self.stall()
                    threading.Event().wait(self.lookup_s)
                    self.flow()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [client, server]
                self._start(self._pass, client, server)
                self._start(self._pass, server, client)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
