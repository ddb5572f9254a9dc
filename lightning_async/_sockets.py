"""Sockets that a fork of this process, such as a DataLoader's worker, must not keep open.

A connection ends only when no process holds its socket any more. If the forks of a dead rank kept its sockets open,
its peers would not notice its death. Therefore each fork closes these sockets of its parent as soon as it begins. It
opens /dev/null under their descriptors: a library in the fork may later close the descriptor of its inherited socket,
and would close another file if the descriptor had been reused. Sockets that a fork opens itself are not affected.
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
    """Return the process's open sockets, as a mapping from descriptor to inode."""
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
    """Return ``question(socket)`` for the socket with this descriptor.

    Return None for a closed socket, for a Unix socket, and if ``question`` raises OSError.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return None if sock.family == socket.AF_UNIX else question(sock)
    except OSError:  # such as a listening socket, which has no peer
        return None


def listening_port(fd: int) -> int | None:
    """Return the port on which the socket with descriptor ``fd`` listens; None if it does not listen."""
    listens = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return _ask(fd, lambda sock: sock.getsockname()[1] if sock.getsockopt(*listens) else None)


def connects(fd: int, own: set[int], peers: set[int]) -> bool:
    """Return whether the local port of the socket ``fd`` is one of ``own``, or its peer's port is one of ``peers``."""
    return bool(_ask(fd, lambda sock: sock.getsockname()[1] in own or sock.getpeername()[1] in peers))


def own_address(fd: int) -> str | None:
    """Return the local address of the socket ``fd``, at which its peer may reach this host."""
    return _ask(fd, lambda sock: sock.getsockname()[0].removeprefix("::ffff:"))


def is_open(fd: int, inode: int) -> bool:
    """Return whether the descriptor still belongs to the socket with this inode."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def shut_down(sockets: Mapping[int, int]) -> None:
    """Shut the sockets down: all blocked reads and writes on them end, in this process and at their peers.

    Args:
        sockets: Inode of each socket, by descriptor. A descriptor that now belongs to another file is left alone.
    """
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            # The descriptor may have been closed meanwhile, and reused for another file.
            if os.fstat(sock.fileno()).st_ino == inode:
                sock.shutdown(socket.SHUT_RDWR)


_LATER_S = 0.5  # Shut down after torch's own timeout has passed: before that, torch would try once more.
_private: dict[int, int] = {}  # Descriptor to inode. The inode shows whether the descriptor was closed and reused.
_served: set[int] = set()  # Ports on which this process answers.
_under_way: list[Opening] = []


class Opening:
    """A record of the sockets that a library opens after the record was made.

    Args:
        ours: Function that returns whether the library has opened the socket with the given descriptor. The function is
            needed because other threads of this process open sockets, too.
    """

    def __init__(self, ours: Callable[[int], bool]) -> None:
        self._before = snapshot()
        self._ours = ours

    def sockets(self) -> dict[int, int]:
        """Return the sockets that the library has opened since this record was made, and has not closed.

        The result is the inode of each socket, by descriptor.
        """
        now = snapshot().items()
        return {fd: inode for fd, inode in now if self._before.get(fd) != inode and self._ours(fd)}


@contextlib.contextmanager
def opening(ours: Callable[[int], bool], within: timedelta | None = None) -> Iterator[Opening]:
    """Prevent forked processes from inheriting the sockets that a library opens within this context.

    Processes that are forked within the context do not inherit them, either. The context yields the record of the
    sockets.

    Args:
        ours: Function that returns whether the library has opened the socket with the given descriptor, see `Opening`.
        within: Time limit for the context. Soon after the limit, the sockets are shut down: otherwise torch would wait
            for ever for a server that accepts a connection and then sends nothing. Default: None, no limit.
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
    """Make later forks of this process close these sockets.

    Programs that this process executes do not inherit the sockets, either.

    Args:
        sockets: Inode of each socket, by descriptor. The inode shows whether the descriptor still belongs to the
            socket.
    """
    for fd in sockets:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.set_inheritable(fd, False)
    _private.update(sockets)


def unshared(sock: socket.socket) -> socket.socket:
    """Call `keep_from_forks` for the socket, and return it."""
    keep_from_forks({sock.fileno(): os.fstat(sock.fileno()).st_ino})
    return sock


def serves_at(port: int) -> None:
    """Prevent forked processes from inheriting the sockets of ``port``, on which this process listens.

    This includes connections that this process accepts later.
    """
    _served.add(port)


def _let_go() -> None:
    """Close the inherited sockets that this fork must not keep; called in each fork as it begins."""
    held = [dict(_private), *(each.sockets() for each in _under_way)]
    if _served:
        held.append({fd: inode for fd, inode in snapshot().items() if connects(fd, _served, set())})
    for fd, inode in (each for sockets in held for each in sockets.items()):
        if is_open(fd, inode):
            # `dup2` closes the socket and takes its descriptor in one step, so that no other file gets the number.
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, fd, inheritable=False)
            os.close(nothing)
    _private.clear()
    _served.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_let_go)
