"""The process above a server: it starts the server again, and holds all that this must find again.

    starter ---- a socket: "stop", or its end ----> supervisor ---- a pipe: its end ----> server
                                                    memory, listening sockets: open in all three

It does nothing that could fail: no torch, little memory. The server's memory is an anonymous file, which lives as long
as a process has it open; the listening sockets take calls while there is no server, and the next one answers them.
Orders are a byte each: from the starter to its supervisor, and from that to the server.
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
"""`END` as soon as nobody is connected."""
ORPHANED = b"o"
"""The starter is gone: `END` once nobody has been connected for a while."""
UNSAVED = 74
"""The exit code of a server that has ended by an order, without its last snapshot: another one would not help."""
_QUICK_S = 20.0
_QUICK_DEATHS = 5  # in a row: what kills a server so soon would kill the next one, too


def main(control: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Keep a server running, until an order to stop, or its own end.

    Args:
        control: a connected socket. A byte is an order; at its end the server ends when nobody is connected.
        handed, settings: of `server_main.main`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the starter, which decides
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
    """Wait until the server has ended; return the order that it has followed, and whether the starter is gone."""
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
