"""Sockets that a fork of this process, such as a DataLoader's worker, must not hold on to.

A connection ends when nobody holds it any more: whoever waits for a dead rank would wait for its forks, too. So these
let go of it as they begin. They keep the numbers, as something else under them, because in them a library may still
come to close what it takes for its sockets. What a fork opens itself is its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

# The process's sockets by file descriptor and inode: to find those a library has opened, and to shut them down.


def snapshot() -> dict[int, int]:
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


def opened_since(before: dict[int, int]) -> list[tuple[int, int]]:
    return [(fd, inode) for fd, inode in snapshot().items() if before.get(fd) != inode]


def _borrow(fd: int) -> socket.socket | None:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError:
        return None


def listening_port(fd: int) -> int | None:
    if (sock := _borrow(fd)) is None:
        return None
    with sock:
        try:
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return sock.getsockname()[1] if listens and sock.family != socket.AF_UNIX else None
        except OSError:
            return None


def connects(fd: int, own: set[int], peers: set[int]) -> bool:
    if (sock := _borrow(fd)) is None:
        return False
    with sock:
        try:
            return sock.family != socket.AF_UNIX and (sock.getsockname()[1] in own or sock.getpeername()[1] in peers)
        except OSError:  # a listening socket has no peer
            return False


def own_address(fd: int) -> str | None:
    """Of this end, as the peer may reach it."""
    if (sock := _borrow(fd)) is None:
        return None
    with sock:
        try:
            return sock.getsockname()[0].removeprefix("::ffff:") if sock.family != socket.AF_UNIX else None
        except OSError:
            return None


def is_open(fd: int, inode: int) -> bool:
    """Whether the descriptor still is that socket."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def shut_down(sockets: Mapping[int, int]) -> None:
    """File descriptors with their inodes: whoever waits in them, here and at the peers, hears that they have ended."""
    for fd, inode in sockets.items():
        _shut_down(fd, inode)


def _shut_down(fd: int, inode: int) -> None:
    if (sock := _borrow(fd)) is None:
        return
    with sock:
        try:
            # The descriptor may have been closed and given to something else.
            if os.fstat(sock.fileno()).st_ino == inode:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


_LATER_S = 0.5  # than torch's own end, or it would try once more
_private: dict[int, int] = {}  # descriptor to inode; of those that were closed since, the inode tells
_served: set[int] = set()
_under_way: list[Opening] = []


class Opening:
    """The sockets that a library opens from now on.

    Args:
        ours: which of those: other threads open some, too.
    """

    def __init__(self, ours: Callable[[int], bool]) -> None:
        self._before = snapshot()
        self._ours = ours

    def sockets(self) -> dict[int, int]:
        """Those that are there by now: descriptor to inode."""
        return {fd: inode for fd, inode in opened_since(self._before) if self._ours(fd)}


@contextlib.contextmanager
def opening(ours: Callable[[int], bool], within: timedelta | None = None) -> Iterator[Opening]:
    """What is opened within is kept from forks, those that begin meanwhile, too; see `Opening`.

    Args:
        within: it is shut down soon after so long: where a server has a connection and says nothing, torch waits in it
            without an end. Default: never.
    """
    opened = Opening(ours)
    _under_way.append(opened)
    end = None if within is None else _in(within, lambda: shut_down(opened.sockets()))
    try:
        yield opened
    finally:
        if end is not None:
            end.cancel()
        keep_from_forks(opened.sockets())
        _under_way.remove(opened)


def _in(within: timedelta, end: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(within.total_seconds() + _LATER_S, end)
    timer.daemon = True
    timer.start()
    return timer


def keep_from_forks(sockets: Mapping[int, int]) -> None:
    """These are of this process alone, and of no program that it becomes.

    Args:
        sockets: descriptor to inode.
    """
    for fd in sockets:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.set_inheritable(fd, False)
    _private.update(sockets)


def serves_at(port: int) -> None:
    """This process answers there, by sockets that are yet to come: they are its alone, too."""
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
