"""A server on threads of the test's process, and its workers: real channels, no processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightning_async.comm.p2p import Dial, ShmDial, answer, listen
from lightning_async.comm.p2p_gloo import PairDial, answer_pair
from lightning_async.errors import PeerLost
from lightning_async.membership.signing import Seal
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.server import Server
from lightning_async.parameter_server.snapshots import Shelf
from lightning_async.parameter_server.store import Store

__all__ = ["Running", "push", "running"]


class Running:
    """A server that can be replaced by another one over the same memory, as after a kill.

    Args:
        terms: of the server.
        numel: of its shard.
        gloo: whether workers talk to it over Gloo, and not through shared memory. Default: False.
        snapshots: folder for them. Default: none are taken.
    """

    def __init__(self, terms: WorkerRules, numel: int, gloo: bool = False, snapshots: Path | None = None) -> None:
        self.terms, self.numel, self.snapshots = terms, numel, snapshots
        self.file = os.memfd_create("test")
        self._listener, self.name = listen()
        self._port = 0
        if gloo:
            self._listener.close()
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._port = self._listener.getsockname()[1]
        self._clients: list[Client] = []
        self._threads: list[threading.Thread] = []
        self.crashes: list[BaseException] = []
        self.begin()
        threading.Thread(target=self._accept, name="accepts").start()

    def begin(self) -> None:
        """A new server: what the one before knew and did not write down is gone."""
        self.store = Store(os.dup(self.file))
        self.server = Server(self.store, self.terms, Shelf(str(self.snapshots), 0) if self.snapshots else None)

    def worker(
        self,
        name: str,
        timeout_s: float = 20.0,
        fingerprint: str = "plan",
        others: Sequence[Running] = (),
        **how: Any,
    ) -> Client:
        """A client of this server, and of others."""
        dials = [each.dial() for each in (self, *others)]
        client = Client(name, dials, fingerprint, timeout_s, **how)
        self._clients.append(client)
        return client

    def dial(self) -> Dial:
        size = 4 * self.numel
        if self._port:
            return PairDial("127.0.0.1", self._port, self.name, size, size)
        return ShmDial(self.name, size, size)

    def started(self, name: str, optimizer: str = "delta", arguments: dict[str, Any] | None = None) -> Client:
        client = self.worker(name)
        client.gradients[0].zero_()
        client.start(optimizer, arguments)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close(leave=False)
        with suppress(OSError):
            self._listener.shutdown(2)
        self.server.close()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        self.store.close()
        os.close(self.file)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock, self.server), name="serves")
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, server: Server) -> None:
        try:
            if self._port:
                channel = answer_pair(sock, "a worker", Seal(), {"name": self.name})
            else:
                channel = answer(sock, "a worker")
            assert channel is not None
            server.serve(channel)
        except PeerLost:
            pass
        except BaseException as error:
            self.crashes.append(error)


@contextmanager
def running(numel: int = 8, gloo: bool = False, snapshots: Path | None = None, **terms: Any) -> Iterator[Running]:
    found = Running(WorkerRules(**terms), numel, gloo, snapshots)
    try:
        yield found
    finally:
        found.close()
        assert not found.crashes, found.crashes


def push(client: Client, value: float, **how: Any) -> torch.Tensor:
    """Push one number for all elements; the weights that were pulled."""
    client.gradients[0].fill_(value)
    client.push(**how)
    return client.weights[0].clone()
