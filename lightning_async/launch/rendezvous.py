"""``--rdzv HOST:PORT``: which launcher is the first node's, what guards the place, what has to be the same."""

from __future__ import annotations

import errno
import importlib.metadata
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_async.comm.membership.signing import SECRET
from lightning_async.launch.places import Wanted

__all__ = ["address", "first", "secret_of", "settings"]

_SHORTEST_SECRET = 16
_BACKLOG = 128


def address(text: str) -> tuple[str, int]:
    """Host and port.

    >>> address("10.0.0.1:29400"), address("[fd00::1]:29400")
    (('10.0.0.1', 29400), ('fd00::1', 29400))

    Raises:
        ValueError: it is no place that other hosts can be told.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{text!r} must be HOST:PORT, with a port from 1 to 65535.")
    if _is(host, "is_unspecified"):
        raise ValueError(f"{text!r}: {host} is on every host; give the address of the first node.")
    return host, int(port)


def first(host: str, port: int) -> socket.socket | None:
    """A socket that listens there, where that is this host; None where it is another one, or a launcher has it here.

    A name that leads nowhere may be another host's that is yet to come.

    Raises:
        OSError: the system does not let this process listen.
        ValueError: other hosts cannot reach what this one takes the name for.
    """
    try:
        leads_to = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    for family, _, _, _, (found, *_) in leads_to:
        try:
            listener = socket.create_server((str(found), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        if _is(str(found), "is_loopback") and host != "localhost" and not _is(host, "is_loopback"):
            listener.close()
            raise ValueError(f"this host takes {host} for {found}, which no other host can reach; give its address.")
        return listener
    return None


def secret_of(file: Path | None, environment: Mapping[str, str], asks: str = "--rdzv") -> str:
    """The job's secret: what the file holds, or the variable.

    Args:
        asks: the option that needs one, for messages.

    Raises:
        ValueError: there is none, it is short, or others can read the file.
        OSError: the file cannot be read.
    """
    if file is None:
        secret, where = environment.get(SECRET, ""), SECRET
    else:
        with file.open() as opened:
            found = os.fstat(opened.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
                raise ValueError(f"--secret-file {file}: others can read it, or it is another user's; chmod 600.")
            secret, where = opened.read().strip(), f"--secret-file {file}"
    if not secret:
        raise ValueError(f"{asks} asks for a secret, the same on all hosts: --secret-file, or the variable {SECRET}.")
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"{where}: the secret is shorter than {_SHORTEST_SECRET} characters (`openssl rand -hex 32`).")
    return secret


def settings(wanted: Wanted, max_restarts: int, program: Sequence[str]) -> dict[str, object]:
    """What all nodes need to have in common, by names that people know."""
    try:
        version = importlib.metadata.version("lightning_async")
    except importlib.metadata.PackageNotFoundError:
        version = "of a checkout"
    return {
        "lightning_async's version": version,
        "--nnodes": wanted.text,
        "--max-restarts": max_restarts,
        "the program": list(program),
    }


def _is(host: str, what: str) -> bool:
    try:
        return getattr(ipaddress.ip_address(host), what)
    except ValueError:
        return False
