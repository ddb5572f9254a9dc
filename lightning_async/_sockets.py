"""Sockets that a fork of this process, such as a DataLoader's worker, must not hold on to.

A connection ends when nobody holds it any more: a wait for a dead rank would wait for its forks, too. So forks let go
of it as they begin. They keep the numbers, as something else under them, because a library may still come to close in
them what it takes for its sockets. A fork's own sockets are its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


def snapshot() -> dict[int, int]:
    """Return the process's open sockets: descriptor to inode."""
    found = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []:
        try:
            status = os.fstat(int(name))
        except (OSError, ValueError):  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _ask(fd: int, question: Callable[[socket.socket], T]) -> T | None:
    """Return a socket's answer; None for one that is closed, or of this machine only, or has none."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return None if sock.family == socket.AF_UNIX else question(sock)
    except OSError:  # such as a listening socket, which has no peer
        return None


def listening_port(fd: int) -> int | None:
    listens = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return _ask(fd, lambda sock: sock.getsockname()[1] if sock.getsockopt(*listens) else None)


def connects(fd: int, own: set[int], peers: set[int]) -> bool:
    return bool(_ask(fd, lambda sock: sock.getsockname()[1] in own or sock.getpeername()[1] in peers))


def own_address(fd: int) -> str | None:
    """Return the address of this end, as the peer may reach it."""
    return _ask(fd, lambda sock: sock.getsockname()[0].removeprefix("::ffff:"))


def is_open(fd: int, inode: int) -> bool:
    """Return whether the descriptor still is that socket."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def shut_down(sockets: Mapping[int, int]) -> None:
    """End sockets, descriptor to inode, and with them the waits in them, here and at the peers."""
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            # The descriptor may have been closed and given to something else.
            if os.fstat(sock.fileno()).st_ino == inode:
                sock.shutdown(socket.SHUT_RDWR)


_LATER_S = 0.5  # than torch's own end, or it would try once more
_private: dict[int, int] = {}  # descriptor to inode; of those that were closed since, the inode tells
_served: set[int] = set()
_under_way: list[Opening] = []


class Opening:
    """The sockets that a library opens from now on; ``ours`` chooses, as other threads open some, too."""

    def __init__(self, ours: Callable[[int], bool]) -> None:
        self._before = snapshot()
        self._ours = ours

    def sockets(self) -> dict[int, int]:
        """Return those that are open by now: descriptor to inode."""
        now = snapshot().items()
        return {fd: inode for fd, inode in now if self._before.get(fd) != inode and self._ours(fd)}


@contextlib.contextmanager
def opening(ours: Callable[[int], bool], within: timedelta | None = None) -> Iterator[Opening]:
    """Keep what is opened within from forks, those that begin meanwhile, too; see `Opening`.

    It is shut down soon after ``within``: where a server has a connection and is silent, torch waits in it without an
    end.
    """
    opened = Opening(ours)
    _under_way.append(opened)
    end = None
    if within is not None:
        end = threading.Timer(within.total_seconds() + _LATER_S, lambda: shut_down(opened.sockets()))
        end.daemon = True
        end.start()
    try:
        yield opened
    finally:
        if end is not None:
            end.cancel()
        keep_from_forks(opened.sockets())
        _under_way.remove(opened)


def keep_from_forks(sockets: Mapping[int, int]) -> None:
    """Keep these sockets, descriptor to inode, to this process: from forks and from programs that it becomes."""
    for fd in sockets:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.set_inheritable(fd, False)
    _private.update(sockets)


def unshared(sock: socket.socket) -> socket.socket:
    """Return the socket, which `keep_from_forks` keeps to this process."""
    keep_from_forks({sock.fileno(): os.fstat(sock.fileno()).st_ino})
    return sock


def serves_at(port: int) -> None:
    """Keep the sockets of this port, which are yet to come, from forks, too: this process answers there."""
    _served.add(port)


def _let_go() -> None:
    held = [dict(_private), *(each.sockets() for each in _under_way)]
    if _served:
        held.append({fd: inode for fd, inode in snapshot().items() if connects(fd, _served, set())})
    for fd, inode in (each for sockets in held for each in sockets.items()):
        if is_open(fd, inode):
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, fd, inheritable=False)
            os.close(nothing)
    _private.clear()
    _served.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_let_go)
