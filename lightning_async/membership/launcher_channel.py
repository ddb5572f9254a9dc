"""Messages between a rank and the launcher that has started it: a rank's generation, and deaths of other ranks.

    rank --- {"process": 4711, "generation": 1, "members": ["0", "2"]} ---> launcher
    rank --- {"process": 4711, "failure": {"text": "ValueError: bad", "epoch": 0, "batch": 9, ...}} ---> launcher
    rank <-- {"process": 4711, "dead": 1, "was": 4712, "how": "its process was killed"} --- launcher

``was`` is the process id of the dead rank.

The launcher and each rank are connected by a pair of sockets. An environment variable identifies the rank's socket by
descriptor, device and inode. One message is one datagram: it arrives whole or not at all, never waits for a reader, and
raises no SIGPIPE. Forks of a rank inherit the descriptor: the launcher ignores their messages, and they read none. This
module imports nothing slow, because the launcher runs without torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_async._checks import parse_json

CHANNEL = "LIGHTNING_ASYNC_LAUNCHER_FD"
"""The environment variable that names a rank's end: descriptor, device and inode."""
REJOIN = "LIGHTNING_ASYNC_REJOIN"
"""The environment variable that counts how often a rank was started again while the others continued.

The value "torchrun", on all ranks, means that each has an agent of its own, which counts the starts of this rank alone.
With a store for the start, see `startup.Assembly`, the value is the count, "@", and the number of the common start.
"""
_BY_TORCHRUN = "torchrun"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# Number of bytes of a message, enough for nine thousand ranks. A longer message is not sent.
LONGEST = 1 << 16
_LONGEST_TEXT = 4000  # characters of an exception that are sent
_MOST_SAMPLES = 2000  # indices of samples that are sent
_ENDS_S = 2.0
_log = logging.getLogger(__name__)
# The listeners of this process: two, while one run follows another.
_listeners: list[Listener] = []


class Death(NamedTuple):
    """The death of a rank's process, which did not end normally."""

    rank: int  # the number with which it was started
    process: int  # its process id; a rank that was started again has another one
    text: str  # how it has ended, in words that follow the rank


class Failure(NamedTuple):
    """The exception of a rank's program, and the batch in which it was raised."""

    text: str  # type of the exception, and the last line of its message
    epoch: int
    batch: int  # number of the batch in the rank's epoch
    samples: Sequence[int] = ()  # indices of the batch's samples; empty if they are unknown

    def repeats(self, before: Failure, is_same_rank: bool) -> bool:
        """Return whether the same exception was raised ``before`` in this epoch, by the same samples or a rank's batch.

        In other epochs it is another one: a restart goes on in the epoch of the failure. Numbers in the text may
        differ, such as a process or an address.

        >>> before = Failure("ValueError: bad in process 11", 0, 4, [37, 38])
        >>> Failure("ValueError: bad in process 12", 0, 9, [36, 37]).repeats(before, False)
        True
        """
        texts = {re.sub(r"0x[0-9a-fA-F]+|\d+", "#", failure.text) for failure in (self, before)}
        if len(texts) > 1 or self.epoch != before.epoch:
            return False
        return (is_same_rank and self.batch == before.batch) or not set(self.samples).isdisjoint(before.samples)


def tell_generation(number: int, members: Sequence[str]) -> None:
    """Send the launcher this rank's generation and its members.

    This neither waits nor raises, even if there is no launcher, or if the socket's descriptor now belongs to another
    file. The message is lost if the launcher has hundreds of unread messages.
    """
    _send({"generation": int(number), "members": [str(member) for member in members]})


def tell_failure(failure: Failure) -> None:
    """Send the launcher the exception that ends this rank, and where it was raised; see `tell_generation`.

    A longer text or more samples than fit into the message are cut.
    """
    cut = failure._replace(text=failure.text[:_LONGEST_TEXT], samples=list(failure.samples[:_MOST_SAMPLES]))
    _send({"failure": cut._asdict()})


def _send(said: dict[str, Any]) -> None:
    message = _dump({"process": os.getpid(), **said})
    if len(message) > LONGEST:
        return
    with contextlib.suppress(OSError, ValueError, OverflowError):
        # No plain write, because the descriptor may become another file in between, which must not get this message.
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, _mine())
        try:
            channel.setblocking(False)
            channel.send(message)
        finally:
            # The descriptor belongs to the process and not to this object, so it stays open.
            channel.detach()


def came_back() -> int | None:
    """Return how often this rank was restarted while the others trained on; None if it started with all ranks."""
    text, *_ = os.environ.get(REJOIN, "").partition("@")
    text = os.environ.get(_RESTARTS, "0") if text == _BY_TORCHRUN else text
    return (int(text) or None) if text.isascii() and text.isdigit() else None


def attempt() -> str:
    """Return how often the launcher had restarted all ranks together when this process was started, such as "0"."""
    text, _, told = os.environ.get(REJOIN, "").partition("@")
    return told or ("0" if text == _BY_TORCHRUN else os.environ.get(_RESTARTS, "0"))


def listen(on_death: Callable[[Death], None]) -> Listener | None:
    """Return a listener that calls ``on_death`` for every death that the launcher reports, until it is closed.

    Deaths that were reported while there was no listener are included. Returns None if no launcher has started this
    process.
    """
    with contextlib.suppress(OSError, ValueError, OverflowError):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, os.dup(_mine()))
        creator, *_ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        # A fork of the rank has another parent, and must not take the rank's messages.
        if creator == os.getppid():
            return Listener(channel, on_death)
        channel.close()
    return None


class Listener:
    """A thread that reads the launcher's messages to this rank, until `close`. Errors of ``on_death`` are logged."""

    def __init__(self, channel: socket.socket, on_death: Callable[[Death], None]) -> None:
        self._channel = channel
        self._on_death = on_death
        self._process = os.getpid()
        self._wake, self._woken = socket.socketpair()
        _listeners.append(self)
        self._thread = threading.Thread(target=self._run, name="lightning_async listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent. A fork of the rank has no such thread, and there this does nothing."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(ValueError):
            _listeners.remove(self)
        # Send and do not close, because a fork may hold the socket open. An error means that the thread has ended by
        # itself.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENDS_S)

    def _run(self) -> None:
        with self._channel, self._wake, self._woken:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN | select.POLLRDHUP)
            poll.register(self._woken, select.POLLIN)
            while self._woken.fileno() not in (ready := dict(poll.poll())):
                try:
                    self._hear(self._channel.recv(LONGEST, socket.MSG_DONTWAIT))
                except BlockingIOError:
                    # The socket was shut down by a process that has inherited it.
                    if ready[self._channel.fileno()] != select.POLLIN:
                        return
                except OSError:
                    return

    def _hear(self, message: bytes) -> None:
        if (death := _death(message, self._process)) is None:
            return
        # One listener reads each message, so it passes the message on to all.
        for listener in tuple(_listeners):
            try:
                listener._on_death(death)
            except Exception:
                # One listener's error must not keep the death from the others.
                _log.exception(
                    "The launcher has reported that rank %d %s, and handling this report failed.",
                    death.rank,
                    death.text,
                )


def _death(message: bytes, process: int) -> Death | None:
    said = _load(message, process)
    rank, was, how = (said.get(name) for name in ("dead", "was", "how"))
    if type(rank) is not int or type(was) is not int or not isinstance(how, str):
        return None
    return Death(rank, was, how)


def _mine() -> int:
    """Return the descriptor of this rank's socket; raise ValueError, OSError or OverflowError if there is none."""
    name = os.environ.get(CHANNEL, "")
    descriptor = int(name.partition(":")[0])
    if name != _name(descriptor):
        raise ValueError("it is another file by now")
    return descriptor


def named(descriptor: int) -> dict[str, str]:
    """Return, as a dictionary, the environment variable by which a rank finds the descriptor that it inherits."""
    return {CHANNEL: _name(descriptor)}


def news(death: Death, process: int) -> bytes:
    """Return the message by which the launcher reports a rank's death to the rank with the process id ``process``.

    >>> news(Death(1, 4712, "its process was killed"), 4711)
    b'{"process":4711,"dead":1,"was":4712,"how":"its process was killed"}'
    """
    return _dump({"process": process, "dead": death.rank, "was": death.process, "how": death.text})


def heard(message: bytes, process: int) -> tuple[int, tuple[str, ...]] | None:
    """Return number and members of the generation that a rank's message reports; None for any other message.

    >>> heard(b'{"process":4711,"generation":1,"members":["0","2"]}', 4711)
    (1, ('0', '2'))
    """
    said = _load(message, process)
    number = said.get("generation")
    members = said.get("members")
    if type(number) is not int or number < 0 or not isinstance(members, list):
        return None
    return (number, tuple(members)) if all(isinstance(member, str) for member in members) else None


def failure_of(message: bytes, process: int) -> Failure | None:
    """Return the failure that a rank's message reports; None for any other message."""
    match _load(message, process).get("failure"):
        case {"text": str(text), "epoch": int(epoch), "batch": int(batch), "samples": list(samples)} if all(
            type(sample) is int for sample in samples
        ):
            return Failure(text, epoch, batch, samples)
    return None


def _dump(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _load(message: bytes, process: int) -> dict[str, Any]:
    """Return the content of a message from or to the process with this id; an empty one for any other message."""
    said = parse_json(message)
    return said if isinstance(said, dict) and said.get("process") == process else {}


def _name(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{descriptor}:{found.st_dev}:{found.st_ino}"
