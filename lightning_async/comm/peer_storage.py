"""Storage of bytes in another rank's memory: one connection for each errand.

    client                                    keeper, see `PeerStore`
                                   <--------- a nonce
    an errand, sealed with it      --------->
    deposit:                       <--------- there is memory for it, or a refusal
    the bytes, their checksum      --------->
                                   <--------- done: the bytes are kept from now on, in place of older ones
    fetch:                         <--------- label and size; the bytes, their checksum
    forget:                        <--------- done

An errand is one request of a client: `deposit`, `fetch` or `forget`. Client and keeper share nothing but the
connection: if one of them dies, the other one finds it closed, or silent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_async._checks import parse_json
from lightning_async._sockets import unshared
from lightning_async.membership.signing import Seal

log = logging.getLogger(__name__)


SILENCE_S = 10.0  # seconds without a byte after which a connection is given up
_PIECE = 4 << 20
_LONGEST = 1 << 16  # largest number of bytes of a message
_LENGTH = struct.Struct("!I")
_NONCE = 16


@dataclass(frozen=True)
class Address:
    """The address of a keeper.

    Args:
        host: Host of the keeper.
        port: Port of the keeper.
        token: Random text that distinguishes this keeper from others that have listened there.
    """

    host: str
    port: int
    token: str

    def note(self) -> dict[str, Any]:
        """Return the address as a dictionary of JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> Address | None:
        """Return the address for a dictionary that `note` has returned; None if the dictionary is malformed."""
        host = note.get("host")
        port = note.get("port")
        token = note.get("token")
        if not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16 or not isinstance(token, str):
            return None
        return cls(host, port, token)


class PeerStoreConnection:
    """A connection that carries signed messages, and bytes with their checksum.

    Each method raises OSError if the connection ends, times out, or brings something that is not of this job.

    Args:
        sock: Socket, connected.
        seal: Signer of the job's messages.
        silence_s: Seconds without a byte after which the connection is closed. Default: None, `SILENCE_S`.
    """

    def __init__(self, sock: socket.socket, seal: Seal, silence_s: float | None = None) -> None:
        self.socket = unshared(sock)
        self._seal = seal.within("parcels")
        self._nonce = ""
        sock.settimeout(SILENCE_S if silence_s is None else silence_s)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """Send a nonce, with which all later messages are sealed."""
        nonce = secrets.token_bytes(_NONCE)
        self._nonce = nonce.hex()
        self.socket.sendall(nonce)

    def hear_greeting(self) -> None:
        """Receive the other end's nonce."""
        self._nonce = bytes(self.receive(_NONCE)).hex()

    def say(self, message: Mapping[str, Any]) -> None:
        sealed = self._seal.sign(self._nonce, json.dumps(dict(message)).encode())
        self.socket.sendall(_LENGTH.pack(len(sealed)) + sealed)

    def hear(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > _LONGEST:
            raise ConnectionError(f"a message of {length} bytes is none of this job's")
        message = parse_json(self._seal.read(self._nonce, bytes(self.receive(length))))
        if not isinstance(message, dict):
            raise ConnectionError("a message came that is none of this job's")
        return message

    def send(self, data: memoryview, crc32: int | None = None) -> None:
        """Send bytes and their checksum: ``crc32``, if it is known from an earlier time, or the present one."""
        total = 0
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            total = zlib.crc32(piece, total)
            self.socket.sendall(piece)
        self.say({"crc32": total if crc32 is None else crc32})

    def receive_into(self, data: memoryview) -> int:
        """Receive the bytes that `send` sends, check them, and return their checksum."""
        total = 0
        at = 0
        while at < len(data):
            if not (count := self.socket.recv_into(data[at : at + _PIECE])):
                raise ConnectionError(f"the connection ended after {at} of {len(data)} bytes")
            total = zlib.crc32(data[at : at + count], total)
            at = at + count
        if self.hear().get("crc32") != total:
            raise ConnectionError(f"{len(data)} bytes have not arrived as they were sent, or were kept as they arrived")
        return total

    def receive(self, count: int) -> bytearray:
        data = bytearray(count)
        at = 0
        while at < count:
            if not (more := self.socket.recv_into(memoryview(data)[at:])):
                raise ConnectionError("the connection ended")
            at += more
        return data

    def break_off(self) -> None:
        """End all waits on this connection now. Any thread may call this."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def _errand(
    address: Address, seal: Seal, opened: Callable[[PeerStoreConnection], None] = lambda line: None, **words: Any
) -> Iterator[PeerStoreConnection]:
    line = PeerStoreConnection(socket.create_connection((address.host, address.port), SILENCE_S), seal)
    try:
        opened(line)
        line.hear_greeting()
        line.say({"token": address.token, **words})
        yield line
    finally:
        line.close()


def deposit(
    address: Address, seal: Seal, owner: str, label: Mapping[str, Any], data: memoryview,
    opened: Callable[[PeerStoreConnection], None] = lambda line: None,
) -> None:  # fmt: skip
    """Store an owner's bytes in a keeper's memory.

    They replace the owner's earlier bytes, which are kept until all new bytes have arrived.

    Args:
        address: Address of the keeper.
        seal: Seal of the job.
        owner: Name of the owner.
        label: JSON values, returned by `fetch`.
        data: The bytes, which must not change during the call.
        opened: Called with the connection, so that another thread can break it off. Default: nothing is called.

    Raises:
        OSError: The keeper is gone, silent for ten seconds, or refuses.
    """
    with _errand(address, seal, opened, errand="deposit", owner=owner, label=dict(label), size=len(data)) as line:
        if (why := line.hear().get("refused")) is not None:
            raise ConnectionError(str(why))
        line.send(data)
        line.hear()


def fetch(address: Address, seal: Seal, owner: str) -> tuple[dict[str, Any], bytearray] | None:
    """Return the label and the bytes that a keeper has of an owner, or None; raise as `deposit` does."""
    with _errand(address, seal, errand="fetch", owner=owner) as line:
        found = line.hear()
        if type(size := found.get("size")) is not int or not isinstance(label := found.get("label"), dict):
            return None
        data = bytearray(size)
        line.receive_into(memoryview(data))
        return label, data


def forget(address: Address, seal: Seal, owner: str) -> None:
    """Delete the bytes of rank ``owner`` from the `PeerStore` of another rank.

    Args:
        address: Address of the `PeerStore`.
        seal: Signer of the job's messages.
        owner: Name of the rank whose bytes are deleted.

    Raises the errors of `deposit`.
    """
    with _errand(address, seal, errand="forget", owner=owner) as line:
        line.hear()


# Largest number of errands at once.
_AT_ONCE = 16
_ENDS_S = 5.0


@dataclass
class _Parcel:
    label: dict[str, Any]
    data: bytearray
    crc32: int
    """Checksum of the bytes when they arrived, by which `fetch` notices bytes that have changed in memory."""
    readers: int = 0


class PeerStore:
    """A store in this rank's memory for bytes of other ranks, which survive the death of those ranks. Ends by `close`.

    It listens at a free port of ``host``, and has a thread for each connection. For each owner, it stores the last
    bytes that have arrived completely, and has memory for the bytes that arrive next.

    Args:
        host: Address of this host at which to listen.
        seal: Signer of the job's messages.
    """

    def __init__(self, host: str, seal: Seal) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = unshared(socket.create_server((host, 0), family=family, backlog=_AT_ONCE))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._seal = seal
        self._pid = os.getpid()
        self._kept: dict[str, _Parcel] = {}
        self._spare: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self._lines: dict[PeerStoreConnection, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="lightning_async keeper", daemon=True)
        self._thread.start()

    @property
    def size(self) -> int:
        """Number of bytes of memory that this store uses for all owners together."""
        with self._lock:
            kept = [len(parcel.data) for parcel in self._kept.values()]
            return sum(kept) + sum(map(len, self._spare.values()))

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the owners whose bytes are kept."""
        with self._lock:
            return tuple(sorted(self._kept))

    def close(self) -> None:
        """End all connections, and free the memory; idempotent. Does nothing in a forked process."""
        # The threads and connections belong to the process that made them, not to its forks.
        if os.getpid() != self._pid or self._closed:
            return
        with self._lock:
            self._closed = True
            lines = dict(self._lines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread that accepts
        for line in lines:
            line.break_off()
        # With a limit: a thread that does not end is a daemon, and must not hold up the process.
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
                    log.warning("This rank keeps no more bytes of other ranks: it cannot accept connections: %s", error)
                return
            line = PeerStoreConnection(sock, self._seal)
            thread = threading.Thread(target=self._serve, args=(line,), name="lightning_async errand", daemon=True)
            with self._lock:
                # Strangers that connect and stay silent must not exhaust the threads.
                refused = self._closed or len(self._lines) >= _AT_ONCE
                if not refused:
                    self._lines[line] = thread
            if refused:
                line.close()
                continue
            thread.start()

    def _serve(self, line: PeerStoreConnection) -> None:
        try:
            line.greet()
            told = line.hear()
            owner = told.get("owner")
            if told.get("token") != self.address.token or not isinstance(owner, str):
                return
            {"deposit": self._deposit, "fetch": self._fetch, "forget": self._forget}[told["errand"]](line, owner, told)
        except (OSError, KeyError, TypeError, ValueError, MemoryError) as error:
            log.debug("An errand has failed: %r", error)  # the other rank reports it
        finally:
            line.close()
            with self._lock:
                self._lines.pop(line, None)

    def _deposit(self, line: PeerStoreConnection, owner: str, told: dict[str, Any]) -> None:
        size = int(told["size"])
        with self._lock:
            # Taken out, so that two errands of one owner never write to the same memory.
            data = self._spare.pop(owner, bytearray())
        if len(data) != size:
            try:
                data = bytearray(size)
            except MemoryError:
                line.say({"refused": f"there is no memory for {size / 2**20:.0f} MiB"})
                return
        try:
            line.say({})
            crc32 = line.receive_into(memoryview(data))
        except BaseException:
            with self._lock:
                self._spare.setdefault(owner, data)
            raise
        with self._lock:
            before = self._kept.get(owner)
            self._kept[owner] = _Parcel(dict(told["label"]), data, crc32)
            # Memory that is still being sent must not be overwritten by the next deposit.
            if before is not None and not before.readers:
                self._spare[owner] = before.data
        line.say({})

    def _fetch(self, line: PeerStoreConnection, owner: str, told: dict[str, Any]) -> None:
        with self._lock:
            if (parcel := self._kept.get(owner)) is not None:
                # The lock is held, so that a deposit cannot reuse the memory before it is sent.
                parcel.readers += 1
        if parcel is None:
            line.say({})
            return
        try:
            line.say({"size": len(parcel.data), "label": parcel.label})
            line.send(memoryview(parcel.data), parcel.crc32)
        finally:
            with self._lock:
                parcel.readers -= 1

    def _forget(self, line: PeerStoreConnection, owner: str, told: dict[str, Any]) -> None:
        with self._lock:
            self._kept.pop(owner, None)
            self._spare.pop(owner, None)
        line.say({})


def facing(host: str, port: int) -> str:
    """Return the local address from which this host reaches another host; raise OSError if there is no route to it."""
    kind, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(kind[0], socket.SOCK_DGRAM) as sock:
        sock.connect(kind[4])  # a datagram socket sends nothing here; it only chooses a local address
        return sock.getsockname()[0]


def next_to(mine: int, left: Sequence[int], hosts: Mapping[int, str]) -> int | None:
    """Return the rank that stores the bytes of rank ``mine``; None if no other rank is live.

    With several hosts, it is the rank at the same place on the next host, so that the two ranks are not lost with one
    host. With a single host, it is the next rank. If hosts have equal numbers of ranks, each rank stores the bytes of
    one other rank.

    Args:
        mine: The rank whose bytes are stored.
        left: All live ranks, ``mine`` included.
        hosts: Host of each rank.

    >>> two = {0: "a", 1: "a", 2: "b", 3: "b"}
    >>> [next_to(rank, [0, 1, 2, 3], two) for rank in range(4)]
    [2, 3, 0, 1]
    >>> [next_to(rank, [0, 2, 3], two) for rank in (0, 2, 3)], [next_to(rank, [2, 3], two) for rank in (2, 3)]
    ([2, 0, 0], [3, 2])
    >>> next_to(3, [3], two) is None
    True
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
