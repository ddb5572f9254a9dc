"""Bytes that one rank leaves with another one for later: what goes over one connection, made for one errand.

    client                                    keeper, see `keeper`
                                   <--------- a nonce
    an errand, sealed with it      --------->
    deposit:                       <--------- there is memory for it, or why not
    the bytes, their sum           --------->
                                   <--------- done: they are kept from now on, in place of older ones
    fetch:                         <--------- what they were called; the bytes, their sum
    forget:                        <--------- done

The connection is all there is between the two: whoever dies, the other one finds it closed, or silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_async.comm.membership.signing import Seal

__all__ = ["SILENCE_S", "Address", "Line", "deposit", "fetch", "forget", "unshared"]

SILENCE_S = 10.0
"""Seconds without a byte after which a connection is given up."""
_PIECE = 4 << 20
_LONGEST = 1 << 16  # bytes of a message
_LENGTH = struct.Struct("!I")
_NONCE = 16

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go() -> None:
    """In a fork, such as a DataLoader's worker: or the other side would not see the rank's death while that lives."""
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class Address:
    """Where a keeper is.

    Args:
        host, port: that it listens at.
        token: which one it is, of all that have ever listened there.
    """

    host: str
    port: int
    token: str

    def note(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> Address | None:
        """What `note` has said; None where that says nothing."""
        host, port, token = note.get("host"), note.get("port"), note.get("token")
        if not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16 or not isinstance(token, str):
            return None
        return cls(host, port, token)


class Line:
    """One connection: sealed messages, and bytes with their sum. What goes wrong on it is an `OSError`.

    Args:
        sock: connected; this line's from now on.
        seal: of the job.
        silence_s: after which it is given up. Default: ten seconds.
    """

    def __init__(self, sock: socket.socket, seal: Seal, silence_s: float = SILENCE_S) -> None:
        self.socket, self._seal, self._nonce = unshared(sock), seal.within("parcels"), ""
        sock.settimeout(silence_s)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """On the keeper's side: what is said to another connection is worth nothing here."""
        nonce = secrets.token_bytes(_NONCE)
        self._nonce = nonce.hex()
        self.socket.sendall(nonce)

    def hear_greeting(self) -> None:
        """On the client's side."""
        self._nonce = bytes(self.receive(_NONCE)).hex()

    def say(self, message: Mapping[str, Any]) -> None:
        sealed = self._seal.sign(self._nonce, json.dumps(dict(message)).encode())
        self.socket.sendall(_LENGTH.pack(len(sealed)) + sealed)

    def hear(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > _LONGEST:
            raise ConnectionError(f"a message of {length} bytes is none of this job's")
        value = self._seal.read(self._nonce, bytes(self.receive(length)))
        try:
            message = None if value is None else json.loads(value)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("a message came that is none of this job's")
        return message

    def send(self, data: memoryview) -> None:
        """All of it, and its sum."""
        total = 0
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            total = zlib.crc32(piece, total)
            self.socket.sendall(piece)
        self.say({"crc32": total})

    def receive_into(self, data: memoryview) -> None:
        """The same; what has arrived is right when this returns."""
        total, at = 0, 0
        while at < len(data):
            if not (count := self.socket.recv_into(data[at : at + _PIECE])):
                raise ConnectionError(f"the connection ended after {at} of {len(data)} bytes")
            total, at = zlib.crc32(data[at : at + count], total), at + count
        if self.hear().get("crc32") != total:
            raise ConnectionError(f"{len(data)} bytes have not arrived as they were sent")

    def receive(self, count: int) -> bytearray:
        data, at = bytearray(count), 0
        while at < count:
            if not (more := self.socket.recv_into(memoryview(data)[at:])):
                raise ConnectionError("the connection ended")
            at += more
        return data

    def break_off(self) -> None:
        """From any thread: what waits on this line ends now."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def unshared(sock: socket.socket) -> socket.socket:
    """One that forks of this process do not hold open."""
    _sockets.add(sock)
    return sock


@contextlib.contextmanager
def _errand(
    address: Address, seal: Seal, opened: Callable[[Line], None] = lambda line: None, **words: Any
) -> Iterator[Line]:
    line = Line(socket.create_connection((address.host, address.port), SILENCE_S), seal)
    try:
        opened(line)
        line.hear_greeting()
        line.say({"token": address.token, **words})
        yield line
    finally:
        line.close()


def deposit(
    address: Address, seal: Seal, owner: str, label: Mapping[str, Any], data: memoryview,
    opened: Callable[[Line], None] = lambda line: None,
) -> None:  # fmt: skip
    """Leave bytes with a keeper, in place of those that it has of this owner; these stay until all have arrived.

    Args:
        address: of the keeper.
        seal: of the job.
        owner: whose they are.
        label: what is said of them to whoever fetches them; of JSON's terms.
        data: the bytes, which stay as they are meanwhile.
        opened: called with the connection, to break it off. Default: nobody does.

    Raises:
        OSError: it is gone, says nothing for ten seconds, or does not take them.
    """
    with _errand(address, seal, opened, errand="deposit", owner=owner, label=dict(label), size=len(data)) as line:
        if (why := line.hear().get("refused")) is not None:
            raise ConnectionError(str(why))
        line.send(data)
        line.hear()


def fetch(address: Address, seal: Seal, owner: str) -> tuple[dict[str, Any], bytearray] | None:
    """What a keeper has of an owner, with its label; None where it has nothing.

    Raises:
        OSError: see `deposit`.
    """
    with _errand(address, seal, errand="fetch", owner=owner) as line:
        found = line.hear()
        if type(size := found.get("size")) is not int or not isinstance(label := found.get("label"), dict):
            return None
        data = bytearray(size)
        line.receive_into(memoryview(data))
        return label, data


def forget(address: Address, seal: Seal, owner: str) -> None:
    """Have a keeper forget what it has of an owner.

    Raises:
        OSError: see `deposit`.
    """
    with _errand(address, seal, errand="forget", owner=owner) as line:
        line.hear()
