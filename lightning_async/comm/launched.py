"""What a rank tells the launcher that has started it: which generation it is in, and with whom.

    rank --- {"process": 4711, "generation": 1, "members": ["0", "2"]} ---> launcher

The launcher hands each rank one end of a pair of sockets, and names it in a variable by its number and by what file it
is. One message is one datagram: it is whole or not there, never waits for a reader, and, sent to one who is gone,
raises no SIGPIPE. Whoever is not that rank is not heard: descriptors are inherited where processes fork.

Only the standard library is imported: the launcher runs without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence

__all__ = ["CHANNEL", "LONGEST", "REJOIN", "came_back", "heard", "named", "tell_generation"]

CHANNEL = "LIGHTNING_ASYNC_LAUNCHER_FD"
"""The environment variable that names a rank's end: descriptor, device and inode."""
REJOIN = "LIGHTNING_ASYNC_REJOIN"
"""The environment variable of a rank that is started again while others train on: how often it has been."""
LONGEST = 4096
"""Bytes of a message; a longer one is not sent."""


def tell_generation(number: int, members: Sequence[str]) -> None:
    """Tell the launcher that this rank is in a generation.

    It neither waits nor raises where there is no launcher, or none any more, or where the descriptor is closed or
    somebody else's by now. Where the launcher has read nothing of hundreds of messages, this one is lost.

    Args:
        number: of the generation; the first is 0.
        members: their names for life, those of the numbers that ranks were started with.
    """
    said = {"process": os.getpid(), "generation": int(number), "members": [str(member) for member in members]}
    message = json.dumps(said, separators=(",", ":")).encode()
    if len(message) > LONGEST:
        return
    with contextlib.suppress(OSError, ValueError, OverflowError):
        descriptor = int(os.environ.get(CHANNEL, "").partition(":")[0])
        if os.environ[CHANNEL] != _name(descriptor):
            return
        # Not a plain write: what the descriptor is may change in between, and a file must not get this.
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, descriptor)
        try:
            channel.setblocking(False)
            channel.send(message)
        finally:
            channel.detach()


def came_back() -> int | None:
    """How often this rank was started again while others trained on; None where it was started with all."""
    text = os.environ.get(REJOIN, "")
    return int(text) if text.isascii() and text.isdigit() else None


def named(descriptor: int) -> dict[str, str]:
    """The variable of the rank that inherits this descriptor."""
    return {CHANNEL: _name(descriptor)}


def heard(message: bytes, process: int) -> tuple[int, tuple[str, ...]] | None:
    """The generation that a rank has told, and its members; None for what is not the rank's, or no such message.

    >>> heard(b'{"process":4711,"generation":1,"members":["0","2"]}', 4711)
    (1, ('0', '2'))

    Args:
        message: as it has come.
        process: the rank's.
    """
    try:
        said = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("process") != process:
        return None
    number, members = said.get("generation"), said.get("members")
    if type(number) is not int or number < 0 or not isinstance(members, list):
        return None
    if not all(isinstance(member, str) for member in members):
        return None
    return number, tuple(members)


def _name(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{descriptor}:{found.st_dev}:{found.st_ino}"
