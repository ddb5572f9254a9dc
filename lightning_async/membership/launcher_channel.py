"""Messages between a rank and the launcher that has started it: with whom a rank trains, and who has died.

    rank --- {"process": 4711, "generation": 1, "members": ["0", "2"], "imports": ["torch"], "sets": []} ---> launcher
    rank <-- {"process": 4711, "dead": 1, "was": 4712, "how": "its process was killed"} --- launcher

The launcher hands each rank one end of a pair of sockets, named in a variable by its number and by what file it is.
One message is one datagram: it is whole or not there, never waits for a reader, and raises no SIGPIPE. Processes other
than that rank are ignored, and read nothing: descriptors are inherited where processes fork. Only the standard library
is imported: the launcher runs without torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHANNEL = "LIGHTNING_ASYNC_LAUNCHER_FD"
"""The environment variable that names a rank's end: descriptor, device and inode."""
REJOIN = "LIGHTNING_ASYNC_REJOIN"
"""The environment variable of a rank that is started again while others train on: how often it has been.

Where it is "torchrun", on all ranks, each has an agent of its own, which counts the starts of this rank alone. Where
the store says it, see `assembly`, it is how often, "@", and which start of all this one is of.
"""
_IMPORTS = ("torch", "lightning.pytorch", "pytorch_lightning", "lightning_async")
"""What takes a program long to import, and may be imported before it is known which rank it will be."""
_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH_", "PYTORCH_")
"""How variables begin that these libraries read as they are imported."""
_SET_AT_IMPORT = ("PYTORCH_NVML_BASED_CUDA_CHECK",)
"""Of these, what such a library sets itself, in whoever imports it: Lightning."""
_BY_TORCHRUN = "torchrun"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LONGEST = 1 << 16  # bytes of a message, which names up to nine thousand ranks; a longer one is not sent
_ENDS_S = 2.0
_log = logging.getLogger(__name__)
_listeners: list[Listener] = []  # of this process: two, while one run follows another


class Death(NamedTuple):
    """The end of a rank's process, and not in order."""

    rank: int  # the number that it was started with
    process: int  # its number; where the rank has been started again, another one lives
    text: str  # how it has ended, in words that follow the rank


class Program(NamedTuple):
    """The facts about a rank's program that another process needs to be ready for it."""

    imports: tuple[str, ...]  # of the libraries that take long, those that it has imported, in this order
    sets: tuple[str, ...]  # variables which these read as they are imported, and which it has set itself


def tell_generation(number: int, members: Sequence[str]) -> None:
    """Tell the launcher the generation of this rank, by stable names, and what its program has imported.

    It neither waits nor raises where there is no launcher, or none any more, or where the descriptor is closed or
    somebody else's by now. Where the launcher has read nothing of hundreds of messages, this one is lost.
    """
    said = {"process": os.getpid(), "generation": int(number), "members": [str(member) for member in members]}
    message = _dump({**said, "imports": [name for name in sys.modules if name in _IMPORTS], "sets": _set_by_itself()})
    if len(message) > LONGEST:
        return
    with contextlib.suppress(OSError, ValueError, OverflowError):
        # Not a plain write: what the descriptor is may change in between, and a file must not get this.
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, _mine())
        try:
            channel.setblocking(False)
            channel.send(message)
        finally:
            channel.detach()


def _set_by_itself() -> list[str]:
    """Return variables that libraries read as they are imported, where this process was started with others."""
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    read = {name for name in os.environ if name.startswith(_READ_AT_IMPORT)}.difference(_SET_AT_IMPORT)
    return sorted(name for name in read if os.fsencode(f"{name}={os.environ[name]}") not in given)


def came_back() -> int | None:
    """Return how often this rank was started again while others trained on; None where it was started with all."""
    text, *_ = os.environ.get(REJOIN, "").partition("@")
    text = os.environ.get(_RESTARTS, "0") if text == _BY_TORCHRUN else text
    return (int(text) or None) if text.isascii() and text.isdigit() else None


def attempt() -> str:
    """Return which start of all ranks this process is of, as who starts them counts; it trains with those of the same
    one."""
    text, _, told = os.environ.get(REJOIN, "").partition("@")
    return told or ("0" if text == _BY_TORCHRUN else os.environ.get(_RESTARTS, "0"))


def listen(on_death: Callable[[Death], None]) -> Listener | None:
    """Call ``on_death`` for deaths from now on, and for those told since somebody last listened, until this is closed.

    Returns None where no launcher has started this process.
    """
    with contextlib.suppress(OSError, ValueError, OverflowError):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, os.dup(_mine()))
        creator, *_ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if creator == os.getppid():  # else a fork of the rank, from which it must not take what is told
            return Listener(channel, on_death)
        channel.close()
    return None


class Listener:
    """A thread that reads what the launcher tells this rank; ended by `close`. Errors of ``on_death`` are logged."""

    def __init__(self, channel: socket.socket, on_death: Callable[[Death], None]) -> None:
        self._channel = channel
        self._on_death = on_death
        self._process = os.getpid()
        self._wake, self._woken = socket.socketpair()
        _listeners.append(self)
        self._thread = threading.Thread(target=self._run, name="lightning_async listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent. A fork of the rank has none: there this does nothing."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(ValueError):
            _listeners.remove(self)
        with contextlib.suppress(OSError):  # it has ended by itself
            self._wake.send(b"\0")  # not closed: a fork may hold it open
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
                    if ready[self._channel.fileno()] != select.POLLIN:  # whoever has inherited it has shut it down
                        return
                except OSError:
                    return

    def _hear(self, message: bytes) -> None:
        if (death := _death(message, self._process)) is None:
            return
        for listener in tuple(_listeners):  # each message is read by one of them
            try:
                listener._on_death(death)
            except Exception:
                _log.exception("Rank %d %s; that was told by the launcher, and was of no use.", death.rank, death.text)


def _death(message: bytes, process: int) -> Death | None:
    said = _load(message, process)
    rank, was, how = (said.get(name) for name in ("dead", "was", "how"))
    if type(rank) is not int or type(was) is not int or not isinstance(how, str):
        return None
    return Death(rank, was, how)


def _mine() -> int:
    """Return this rank's end; raise ValueError, OSError or OverflowError where there is none, or none any more."""
    name = os.environ.get(CHANNEL, "")
    descriptor = int(name.partition(":")[0])
    if name != _name(descriptor):
        raise ValueError("it is another file by now")
    return descriptor


def named(descriptor: int) -> dict[str, str]:
    """Return the variable of the rank that inherits this descriptor."""
    return {CHANNEL: _name(descriptor)}


def news(death: Death, process: int) -> bytes:
    """Return a message that tells the rank of ``process`` of another one's death.

    >>> news(Death(1, 4712, "its process was killed"), 4711)
    b'{"process":4711,"dead":1,"was":4712,"how":"its process was killed"}'
    """
    return _dump({"process": process, "dead": death.rank, "was": death.process, "how": death.text})


def heard(message: bytes, process: int) -> tuple[int, tuple[str, ...]] | None:
    """Return the generation that a rank has told, and its members; None for another's, or another message.

    >>> heard(b'{"process":4711,"generation":1,"members":["0","2"]}', 4711)
    (1, ('0', '2'))
    """
    said = _load(message, process)
    number = said.get("generation")
    members = said.get("members")
    if type(number) is not int or number < 0 or not isinstance(members, list):
        return None
    return (number, tuple(members)) if all(isinstance(member, str) for member in members) else None


def program(message: bytes, process: int) -> Program | None:
    """Return what a rank has told of its program; None for another's, or another message.

    >>> program(b'{"process":4711,"imports":["torch"],"sets":[]}', 4711)
    Program(imports=('torch',), sets=())
    """
    said = _load(message, process)
    imports = said.get("imports")
    sets = said.get("sets")
    if not isinstance(imports, list) or not isinstance(sets, list):
        return None
    return Program(tuple(name for name in _IMPORTS if name in imports), tuple(str(name) for name in sets))


def problem_of(message: bytes, process: int) -> str:
    """Return why a process that stands by cannot be ready, as it has told; else ""."""
    return str(_load(message, process).get("standby", ""))


def _dump(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _load(message: bytes, process: int) -> dict[str, Any]:
    """Return what is said by, or to, this process; nothing where that is no message, or another one's."""
    try:
        said = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) and said.get("process") == process else {}


def _name(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{descriptor}:{found.st_dev}:{found.st_ino}"
