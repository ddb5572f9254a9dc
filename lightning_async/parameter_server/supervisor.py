"""The process above a server: it starts the server again, and keeps open what the next server process needs.

    starter ---- a socket: orders, or closing ----> supervisor ---- a pipe: orders, or closing ----> server
                                                    memory, listening sockets: open in both

The supervisor imports no torch and uses little memory, so that it is less likely to be killed than the server. The
server's memory is an anonymous file, which exists as long as a process has it open. The listening sockets accept
connections while there is no server, and the next server answers them. An order is one byte. The starter sends it to
the supervisor, which passes it on to the server.
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
"""Order to end now."""
END = b"e"
"""Order to end, after a last snapshot if the server takes snapshots."""
DRAIN = b"d"
"""Order to end as `END` does, as soon as no worker is connected."""
ORPHANED = b"o"
"""Order to end as `END` does, once no worker has been connected for a while, because the starter is gone."""
UNSAVED = 74
"""The exit code of a server that was told to end, and could not write its last snapshot. It is not started again."""
# A server that ends within these seconds has died quickly.
_QUICK_S = 20.0
_QUICK_DEATHS = 5  # deaths in a row: the cause would kill the next server, too


def main(control: int, handed: list[int], settings: dict[str, Any]) -> None:
    """Keep a server running, until an order ends it, or until it ends by itself.

    Args:
        control: Descriptor of a socket that is connected to the starter. Each byte is an order: `STOP` kills the
            server, `END` ends it, and `DRAIN` ends it once no worker is connected. If the starter closes the socket, or
            ends, the server ends once no worker has been connected for a while.
        handed: Descriptors for the server, see `server_main.main`.
        settings: Settings of the server, see `server_main.main`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the starter gets them, too, and decides
    quick = 0
    with socket.socket(fileno=control) as orders:
        orphaned = False
        while True:
            began = time.monotonic()
            # A new pipe for each server: its end tells the server that the supervisor is gone.
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
    """Pass orders on to the server, until the server has ended; kill the server after the order `STOP`.

    Args:
        server: The server's process.
        orders: Socket of orders from the process that started the supervisor.
        ours: This process's end of the pipe to the server.
        orphaned: Whether the process that started the supervisor is gone already.

    Returns:
        Two values: ``"ended"`` after the order `END`, ``"killed"`` after the order `STOP`, otherwise an empty text; and
            whether the process that started the supervisor is gone.
    """
    death = os.pidfd_open(server.pid)
    stop = ""
    try:
        while True:
            poll = select.poll()
            poll.register(death, select.POLLIN)
            # A closed socket is always readable, and would end every wait at once.
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
                    server.kill()  # safe at any time: the memory stays whole
                elif not word:
                    orphaned = True
                    word = ORPHANED
                with contextlib.suppress(BrokenPipeError):  # the server has ended
                    os.write(ours, word)
            if death in ready:
                server.wait()
                return stop, orphaned
    finally:
        os.close(death)
