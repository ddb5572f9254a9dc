"""Forming, breaking off and disposing of torch's process group objects.

Groups are built directly from a store, without the default group, so that any number of them can be formed
again under the next generation. What torch 2.13 cannot do for Gloo is to cancel: ``abort()`` leaves a pending
operation waiting, and destroying the group then blocks until its timeout. Shutting down the group's own
sockets does cancel, here and at the peers, within milliseconds; hence the bookkeeping of sockets.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_async.comm.pending import Where
from lightning_async.comm.stores import PrefixStore, Store, own_client, read_all
from lightning_async.errors import CollectiveError, CollectiveTimeout

__all__ = ["Group", "form"]

_log = logging.getLogger(__name__)

_PREFIX = "lightning_async"
_DISPOSE_S = 2.0
_forming = threading.Lock()
# Strong references: the destructor of a group joins the group's threads, so it must never run on one of them
# (a callback holding the last reference), nor during the interpreter's shutdown.
_open: set[Group] = set()
_undead: list[Group] = []


class Group:
    """A process group with the sockets it owns.

    Args:
        pg: torch's object.
        sockets: file descriptors with their inode; shut down to break the group off.
        callbacks: whether work objects have a future with callbacks (Gloo), or must be polled (NCCL, MPI).
    """

    def __init__(self, pg: Any, sockets: dict[int, int], callbacks: bool) -> None:
        self.pg: Any = pg
        self.callbacks = callbacks
        self.in_flight: dict[int, object] = {}  # what the transport may still read or write, by sequence number
        self.helpers: set[threading.Thread] = set()
        self._sockets = sockets
        self._broken = False
        _open.add(self)

    def break_off(self) -> None:
        """Make everything pending fail soon, here and at the peers. Never blocks; any thread may call it."""
        if self._broken:
            return
        self._broken = True
        for fd, inode in self._sockets.items():
            _shutdown(fd, inode)
        if not self.callbacks and hasattr(self.pg, "abort"):  # NCCL; MPI cannot
            self.pg.abort()

    def dispose(self) -> None:
        """Destroy the group without blocking on a peer; idempotent."""
        _open.discard(self)
        if self.pg is None:
            return
        if self.in_flight or self.helpers or self._broken:
            self.break_off()
            deadline = time.monotonic() + _DISPOSE_S
            while (self.in_flight and self.callbacks) and time.monotonic() < deadline:
                time.sleep(0.001)
            for helper in list(self.helpers):
                helper.join(max(deadline - time.monotonic(), 0.0))
            if self.callbacks and (self.in_flight or any(helper.is_alive() for helper in self.helpers)):
                _log.warning("A process group with an operation under way could not be broken off; it is kept.")
                _undead.append(self)
                return
        self.pg = None
        self.in_flight.clear()


def form(
    store: Store,
    where: Where,
    backend: str,
    timeout: timedelta,
    device: torch.device | None,
    max_ctas: int,
    cancelled: Callable[[], bool],
) -> Group:
    """Form the group ``where`` names: wait for every member to come, then connect.

    Raises:
        CollectiveTimeout: not all members came in time; the message names them.
        CollectiveError: the store is out of reach, or ``cancelled`` became true.
    """
    if backend == "mpi":
        return Group(dist.new_group(backend="mpi"), {}, callbacks=False)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store = own_client(store, timeout)
        base = f"{_PREFIX}/{where.generation}/{where.name}"
        # The same name may be formed again later in the same program; old addresses must not be read then.
        attempt = store.add(f"{base}/attempt/{where.rank}", 1)
        base = f"{base}/{attempt}"
        if backend == "nccl":
            _meet(store, base, where, [], deadline, cancelled)
            return Group(_nccl(PrefixStore(base, store), where, timeout, device, max_ctas), {}, callbacks=False)
        return _gloo(store, base, where, deadline, cancelled)
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{where}: forming the group failed: {error}. A member died while connecting, or the store is gone; "
            "ask the membership who is alive, then reconfigure()."
        ) from error


def _nccl(store: Store, where: Where, timeout: timedelta, device: torch.device | None, max_ctas: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    group = dist.ProcessGroupNCCL(store, where.rank, where.world_size, options)
    if device is not None:
        group.eager_connect_single_device(device)
    return group


def _gloo(store: Store, base: str, where: Where, deadline: float, cancelled: Callable[[], bool]) -> Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    before = _sockets()
    options._devices = _devices()
    ports = [port for fd, inode in _new(before) if (port := _listening_port(fd)) is not None]
    options._threads = len(options._devices)
    everyones = _meet(store, base, where, ports, deadline, cancelled)
    left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    options._timeout = left
    with _forming:
        before = _sockets()
        pg = dist.ProcessGroupGloo(PrefixStore(base, store), where.rank, where.world_size, options)
        # Other threads open sockets too. Ours have one of our listening ports at this end, or a peer's at the other.
        own, peers = set(ports), {port for theirs in everyones for port in theirs}
        sockets = {fd: inode for fd, inode in _new(before) if _connects(fd, own, peers)}
    return Group(pg, sockets, callbacks=True)


def _devices() -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    # As torch does; lazily made connections could not be found for breaking them off.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device(lazy_init=False)]
    return [gloo.create_device(interface=name, lazy_init=False) for name in names]


def _meet(
    store: Store, base: str, where: Where, ports: list[int], deadline: float, cancelled: Callable[[], bool]
) -> list[list[int]]:
    """Wait until every member has announced itself; returns what they announced."""
    keys = [f"{base}/ready/{rank}" for rank in range(where.world_size)]
    store.set(keys[where.rank], json.dumps(ports))
    started, pause = time.monotonic(), 0.001
    while not store.check(keys):
        if cancelled():
            raise CollectiveError(f"{where}: forming the group was aborted.")
        if time.monotonic() >= deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise CollectiveTimeout(
                f"{where}: forming the group: after {time.monotonic() - started:.1f} s still without "
                f"rank(s) {missing}. Ask the membership who is alive, then reconfigure()."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return [json.loads(value) for value in read_all(store, keys)]


def _sockets() -> dict[int, int]:
    """The process's open sockets: descriptor to inode."""
    found = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []:
        try:
            status = os.fstat(int(name))
        except (OSError, ValueError):  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _new(before: dict[int, int]) -> list[tuple[int, int]]:
    return [(fd, inode) for fd, inode in _sockets().items() if before.get(fd) != inode]


def _borrow(fd: int) -> socket.socket | None:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError:
        return None


def _listening_port(fd: int) -> int | None:
    if (sock := _borrow(fd)) is None:
        return None
    with sock:
        try:
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return sock.getsockname()[1] if listens and sock.family != socket.AF_UNIX else None
        except OSError:
            return None


def _connects(fd: int, own: set[int], peers: set[int]) -> bool:
    if (sock := _borrow(fd)) is None:
        return False
    with sock:
        try:
            return sock.family != socket.AF_UNIX and (sock.getsockname()[1] in own or sock.getpeername()[1] in peers)
        except OSError:  # a listening socket has no peer
            return False


def _shutdown(fd: int, inode: int) -> None:
    if (sock := _borrow(fd)) is None:
        return
    with sock:
        try:
            # The descriptor may have been closed and given to something else.
            if os.fstat(sock.fileno()).st_ino == inode:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@atexit.register
def _dispose_all() -> None:
    # Threads of a group that end while the interpreter shuts down abort the process now and then.
    for group in list(_open):
        group.dispose()
