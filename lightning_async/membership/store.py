"""Clients of torch.distributed's stores: one for each thread, each with its own timeout."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lightning_async._sockets import connects, opening
from lightning_async.membership.signing import Seal

T = TypeVar("T")
# Number of refused requests in a row after which a shorter silence is enough.
_REFUSALS = 10
# Held while a client connects, because its sockets are found by what appears meanwhile in this process.
_connecting = threading.Lock()


class Contact:
    """A watch over whether the store answers a rank; the store counts as lost after ``dead_s`` without an answer.

    After ten refused requests in a row, a quarter of that time is enough.
    """

    def __init__(self, now: float, dead_s: float) -> None:
        self.refusals = 0
        self._dead_s = dead_s
        self._answered_at = self._asked_at = now
        self._silent_s = 0.0
        self._error = "none"

    def answered(self, now: float) -> None:
        self._answered_at = now
        self.refusals = 0
        self._silent_s = 0.0

    def refused(self, error: Exception) -> None:
        self.refusals += 1
        self._error = str(error).split("\n", 1)[0][:200]

    def lost(self, now: float) -> str | None:
        """Return why the store is lost, or None.

        Call this regularly: the store's silence is measured from call to call.
        """
        # A request may hang because the store's host is stopped, so the silence is measured by calls of this method.
        # Each call adds a limited portion, because this process may have been the one that was stopped.
        self._silent_s += min(now - max(self._asked_at, self._answered_at), self._dead_s / 4)
        self._asked_at = now
        refuses = self.refusals >= _REFUSALS and now - self._answered_at >= self._dead_s / 4
        if not refuses and self._silent_s < self._dead_s:
            return None
        what = f"{self.refusals} attempts, last error: {self._error}" if self.refusals else "no answer, and no error"
        return (
            f"the store has not answered for {now - self._answered_at:.1f} s ({what}). Its host, rank 0 or the "
            "launcher, is gone; without it no group can be formed. Start again from the last checkpoint."
        )


def own_client(store: Store, timeout: timedelta) -> Store:
    """Return a client for the calling thread alone, because a blocking request would delay other threads.

    The client should be kept. For every new client, torch's server looks up the client's host name, and answers nobody
    meanwhile. If the DNS does not answer, that takes many seconds.
    """
    return connect(store, timeout)[0]


def connect(store: Store, timeout: timedelta) -> tuple[Store, dict[int, int]]:
    """Return a new client of the store, and its sockets: inodes by descriptor.

    If a request of the client hangs, shutting its sockets down ends the request. See `own_client`.
    """
    client: Any = store
    known: Any = base_of(client)
    # Without the lock, another thread's new sockets would be taken for this client's.
    with _connecting:
        usual = None if isinstance(known, HashStore) else known.timeout
        ports: set[int] = {known.port} if isinstance(known, TCPStore) else set()
        if usual is not None:
            # The clone connects with this timeout, and the store's host may be lost at this moment.
            known.set_timeout(timeout)
        try:
            with opening(lambda fd: connects(fd, set(), ports), timeout) as opened:
                client = client.clone()
        finally:
            if usual is not None:
                known.set_timeout(usual)
        sockets = opened.sockets()
    # A HashStore has no clients: its clone is itself, and everybody shares its timeout.
    if not isinstance(known, HashStore):
        client.set_timeout(timeout)
    return client, sockets


class PollingStore(Store):
    """A view of a store that waits by polling, so that torch can form a group through it without blocking in C.

    Any number of threads can share ``store``, the client that this view wraps. Forming a group can be ended early:
    ``check`` is called repeatedly while a key is waited for, and may raise. A value without the right signature counts
    as missing.
    """

    def __init__(self, store: Store, prefix: str, check: Callable[[], None], seal: Seal) -> None:
        super().__init__()
        self._store: Any = store
        self._prefix = prefix
        self._check = check
        self._seal = seal

    def set(self, key: str, value: Any) -> None:
        name = self._prefix + key
        self._store.set(name, self._seal.sign(name, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        return self.read([key], bytes)[0]

    def read(self, keys: Sequence[str], parse: Callable[[bytes], T | None]) -> list[T]:
        """Return the values of all keys, once each of them exists and ``parse`` returns something for it."""
        self.wait(list(keys))
        names = [self._prefix + key for key in keys]
        while True:
            opened = map(self._seal.open, names, read_all(self._store, names))
            values = [None if value is None else parse(value) for value in opened]
            good = [value for value in values if value is not None]
            if len(good) == len(names):
                return good
            self._check()
            # A value without the right signature may be replaced by the right one.
            time.sleep(0.02)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # pyright: ignore
        names = [self._prefix + key for key in keys]
        pause = 0.001
        while not self._store.check(names):
            self._check()
            # Poll instead of blocking in the store, because nothing could interrupt that, and other threads would wait.
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def has_extended_api(self) -> bool:
        return False


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of existing keys, in one request if the store can; block for missing keys."""
    client: Any = store
    if keys and client.has_extended_api():
        return client.multi_get(list(keys))
    return [client.get(key) for key in keys]


def settle(store: Store, key: str, value: bytes, seal: Seal, parse: Callable[[bytes], T | None]) -> T | None:
    """Write ``value`` unless another rank has written one before; return the parsed value of the first, on all ranks.

    So ranks agree on one answer to a question: whichever is written first. What is not signed by this job, or what
    ``parse`` returns None for, is replaced. Returns None if a stranger has replaced it again.
    """
    client: Any = store
    signed = seal.sign(key, value)
    before = b""
    for _ in range(2):
        before = client.compare_set(key, before, signed)
        opened = seal.open(key, before)
        if opened is not None and (settled := parse(opened)) is not None:
            return settled
    return None


def reachable(store: Store, timeout: timedelta) -> bool:
    """Return whether something listens at the store's address.

    Only a socket is connected. A client of the store would try for long.
    """
    base = base_of(store)
    if not isinstance(base, TCPStore):
        return True
    try:
        socket.create_connection((base.host, base.port), timeout.total_seconds()).close()
    except OSError:
        return False
    return True


def base_of(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store  # type: ignore[attr-defined]
    return store
