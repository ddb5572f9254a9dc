"""A rank keeps bytes for others in its memory, where they outlive their owners; see `parcels` for what is said."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.parcels import Address, Line, unshared

__all__ = ["Keeper", "facing", "next_to"]

log = logging.getLogger(__name__)
_AT_ONCE = 16
_ENDS_S = 5.0


@dataclass
class _Parcel:
    label: dict[str, Any]
    data: bytearray
    readers: int = 0


class Keeper:
    """Listens at a free port, and has a thread for each errand; ended by `close`.

    Of each owner it has the bytes that came last, whole, and memory for the next ones to arrive in.

    Args:
        host: an address of this host's, that the others reach.
        seal: of the job.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, seal: Seal) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = unshared(socket.create_server((host, 0), family=family, backlog=_AT_ONCE))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._seal, self._pid = seal, os.getpid()
        self._kept: dict[str, _Parcel] = {}
        self._spare: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self._lines: dict[Line, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="lightning_async keeper", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Bytes of memory that it has for others."""
        with self._lock:
            kept = [len(parcel.data) for parcel in self._kept.values()]
            return sum(kept) + sum(map(len, self._spare.values()))

    @property
    def owners(self) -> tuple[str, ...]:
        """Of whom it has something."""
        with self._lock:
            return tuple(sorted(self._kept))

    def close(self) -> None:
        """End what is under way, and give the memory back; idempotent. In a fork this does nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        with self._lock:
            self._closed = True
            lines = dict(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        for line in lines:
            line.break_off()
        for thread in (self._thread, *lines.values()):
            thread.join(_ENDS_S)
        self._listener.close()
        with self._lock:
            self._kept.clear()
            self._spare.clear()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("What is left with this rank is not heard of any more: %s", error)
                return
            line = Line(sock, self._seal)
            thread = threading.Thread(target=self._serve, args=(line,), name="lightning_async errand", daemon=True)
            with self._lock:
                refused = self._closed or len(self._lines) >= _AT_ONCE
                if not refused:
                    self._lines[line] = thread
            if refused:
                line.close()
                continue
            thread.start()

    def _serve(self, line: Line) -> None:
        try:
            line.greet()
            told = line.hear()
            owner = told.get("owner")
            if told.get("token") != self.address.token or not isinstance(owner, str):
                return
            {"deposit": self._deposit, "fetch": self._fetch, "forget": self._forget}[told["errand"]](line, owner, told)
        except (OSError, KeyError, TypeError, ValueError, MemoryError) as error:
            log.debug("An errand came to nothing: %r", error)  # who came says so
        finally:
            line.close()
            with self._lock:
                self._lines.pop(line, None)

    def _deposit(self, line: Line, owner: str, told: dict[str, Any]) -> None:
        size = int(told["size"])
        with self._lock:
            data = self._spare.pop(owner, bytearray())
        if len(data) != size:
            try:
                data = bytearray(size)
            except MemoryError:
                line.say({"refused": f"there is no memory for {size / 2**20:.0f} MiB"})
                return
        try:
            line.say({})
            line.receive_into(memoryview(data))
        except BaseException:
            with self._lock:
                self._spare.setdefault(owner, data)
            raise
        with self._lock:
            before, self._kept[owner] = self._kept.get(owner), _Parcel(dict(told["label"]), data)
            if before is not None and not before.readers:
                self._spare[owner] = before.data
        line.say({})

    def _fetch(self, line: Line, owner: str, told: dict[str, Any]) -> None:
        with self._lock:
            if (parcel := self._kept.get(owner)) is not None:
                parcel.readers += 1
        if parcel is None:
            line.say({})
            return
        try:
            line.say({"size": len(parcel.data), "label": parcel.label})
            line.send(memoryview(parcel.data))
        finally:
            with self._lock:
                parcel.readers -= 1

    def _forget(self, line: Line, owner: str, told: dict[str, Any]) -> None:
        with self._lock:
            self._kept.pop(owner, None)
            self._spare.pop(owner, None)
        line.say({})


def facing(host: str, port: int) -> str:
    """The address of this host's that another one is reached from; ``facing("127.0.0.1", 1)`` is ``"127.0.0.1"``.

    Raises:
        OSError: it cannot be reached.
    """
    kind, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(kind[0], socket.SOCK_DGRAM) as sock:
        sock.connect(kind[4])  # nothing is sent
        return sock.getsockname()[0]


def next_to(mine: int, left: Sequence[int], hosts: Mapping[int, str]) -> int | None:
    """Who is to keep what a rank leaves: on the next host the one at the same place, on one host the next rank.

    So a host takes nobody's copy with it, and nobody has more than others, where hosts have equal numbers of ranks.

    >>> two = {0: "a", 1: "a", 2: "b", 3: "b"}
    >>> [next_to(rank, [0, 1, 2, 3], two) for rank in range(4)]
    [2, 3, 0, 1]
    >>> [next_to(rank, [0, 2, 3], two) for rank in (0, 2, 3)], [next_to(rank, [2, 3], two) for rank in (2, 3)]
    ([2, 0, 0], [3, 2])
    >>> next_to(3, [3], two) is None
    True

    Args:
        mine: this rank.
        left: all that are there, this one among them.
        hosts: where each of them is.
    """
    by_host: dict[str, list[int]] = {}
    for rank in left:
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    names = list(by_host)
    here = by_host[hosts.get(mine, "")]
    there = by_host[names[(names.index(hosts.get(mine, "")) + 1) % len(names)]]
    place = here.index(mine) + (there is here)
    found = there[place % len(there)]
    return None if found == mine else found
