"""The process's sockets by file descriptor and inode: to find those a library has opened, and to shut them down."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping

__all__ = ["connects", "is_open", "listening_port", "opened_since", "own_address", "shut_down", "snapshot"]


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
