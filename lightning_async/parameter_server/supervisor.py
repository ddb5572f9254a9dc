"""The process above a server: it starts it again, and holds all that the server must find again.

    who starts it ---- a socket: "stop", or its end ----> supervisor ---- a pipe: its end ----> server
                                                          memory, listening sockets: open in all three

It does nothing that could fail: no torch, no memory to speak of. The memory is an anonymous file, so it lives as long
as somebody has it open; the listening sockets take calls while there is no server, and the next one answers them.
Orders are a byte each: a starter's to its supervisor, and that one's to the server.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from lightning_async._subprocess import bare_command

STOP = b"s"
"""End now."""
END = b"e"
"""End, with a last snapshot where any are taken."""
DRAIN = b"d"
"""The same as soon as nobody is connected any more."""
ORPHANED = b"o"
"""Who started it is gone: the same once nobody has been connected for a while."""
UNSAVED = 74
"""The exit code of a server that has ended as it was to, without the last snapshot: another one would have no more."""
_QUICK_S = 20.0
_QUICK_DEATHS = 5  # one after the other: what kills a server so soon would kill the next one, too


def main(control: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Keep a server running, until told to stop, or it ends by itself.

    Args:
        control: a connected socket. A byte: an order to end; its end, and the server is to end when nobody is
            connected with it any more.
        handed: descriptors, handed on: of the memory, and of listening sockets.
        settings: handed on.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for who started it, and who decides
    quick = 0
    with socket.socket(fileno=control) as orders:
        orphaned = False
        while True:
            began = time.monotonic()
            life, ours = os.pipe()
            arguments = [life, handed, {**settings, "orphaned": orphaned}]
            server = subprocess.Popen(
                bare_command("lightning_async.parameter_server.server_main", arguments, "serves parameters"),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[life, *handed],
            )  # fmt: skip
            os.close(life)
            stop, orphaned = _watch(server, orders, ours, orphaned)
            os.close(ours)
            if stop or server.returncode in (0, UNSAVED):
                sys.exit(int(stop != "killed" and server.returncode != 0))
            quick = quick + 1 if time.monotonic() - began < _QUICK_S else 1
            print(f"A parameter server, process {server.pid}, has ended with {server.returncode}.", file=sys.stderr)
            if server.returncode > 0 and quick >= _QUICK_DEATHS:
                print(f"That was the {quick}th in a row: it is not started again.", file=sys.stderr)
                sys.exit(1)


def _watch(server: subprocess.Popen[bytes], orders: socket.socket, ours: int, orphaned: bool) -> tuple[str, bool]:
    """Wait until the server has ended; return whether it was to, and whether nobody can say so any more."""
    death = os.pidfd_open(server.pid)
    stop = ""
    try:
        while True:
            poll = select.poll()
            poll.register(death, select.POLLIN)
            if not orphaned:
                poll.register(orders, select.POLLIN)
            ready = {found for found, _ in poll.poll()}
            if orders.fileno() in ready:
                try:
                    word = orders.recv(1)
                except ConnectionError:
                    word = b""
                if word == END:
                    stop = "ended"
                elif word == STOP:
                    stop = "killed"
                    server.kill()  # it is made for that
                elif not word:
                    orphaned = True
                    word = ORPHANED
                with contextlib.suppress(BrokenPipeError):  # it has ended
                    os.write(ours, word)
            if death in ready:
                server.wait()
                return stop, orphaned
    finally:
        os.close(death)
