"""Channels between two processes that take turns; here through shared memory, for two processes of one host.

    the process that dials                              the process that answers
    fills `outgoing`, `send`     --- header, bytes ---> `receive`, reads `incoming`
    `receive`, reads `incoming`  <--- header, bytes --- fills `outgoing`, `send`

`PeerChannel` is one end of a channel, whatever carries it. `Dial` makes channels to one peer, and has the first turn.
The end whose turn it is may use both memories. A channel that has missed a deadline is closed, and dialled again.

The memory of `ShmChannel` is an anonymous file, whose descriptor is passed to the peer: there is no file name that a
crash could leave behind, and the file cannot shrink while a process reads it. When a process dies, the kernel closes
its socket, so that the peer notices at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_async._checks import parse_json
from lightning_async._sockets import unshared
from lightning_async.errors import ChannelTimeout, PeerLost

LONGEST = 1 << 17  # largest number of bytes of a header


@runtime_checkable
class PeerChannel(Protocol):
    """One end of a channel. All methods except `break_off` are called by one thread at a time."""

    @property
    def peer(self) -> str:
        """Name of the other process, for error messages."""
        ...

    @property
    def outgoing(self) -> Tensor:
        """Memory to fill before `send`, uint8."""
        ...

    @property
    def incoming(self) -> Tensor:
        """Memory that `receive` has filled, uint8; valid until the next `send`."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether `outgoing` is the peer's `incoming`, so that no bytes are moved."""
        ...

    def send(self, header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
        """Send a header, and ``size`` bytes of `outgoing`, without waiting for the peer; then it is the peer's turn.

        Args:
            header: JSON values. An entry ``at`` says at which offset the bytes begin, here and in the peer's
                `incoming`.
            size: Number of bytes. Default: 0.
            timeout_s: Longest wait for room in the channel, in seconds. Default: 60.

        Raises:
            ValueError: The header is too long, or `outgoing` has fewer than ``size`` bytes.
            PeerLost: The peer is known to be gone. If that is noticed later, `receive` raises this error.
            ChannelTimeout: The channel has had no room for the message within ``timeout_s``.
        """
        ...

    def receive(self, timeout_s: float | None = 60.0) -> tuple[dict[str, Any], int]:
        """Return the peer's header, and the number of bytes that it has sent to `incoming`.

        Args:
            timeout_s: Longest wait, in seconds. None: as long as the peer lives. Default: 60.

        Raises:
            ChannelTimeout: Nothing has come in time; the channel is broken.
            PeerLost: The peer is gone, or has sent a message that is not of this job.
        """
        ...

    def break_off(self) -> None:
        """Fail all waits in this channel, here and at the peer. Any thread may call this."""
        ...

    def close(self) -> None:
        """Close the connection and free the channel's memory; idempotent. Bytes not yet received may be lost."""
        ...


class Dial(Protocol):
    """An interface of an object that opens channels to one peer, one after another.

    It owns the buffers of the messages, which outlive each channel. The contents of the send buffer, `outgoing`, stay
    until they are overwritten. If the peer dies, they can be sent again to the process that replaces the peer.
    """

    @property
    def outgoing(self) -> Tensor: ...

    @property
    def incoming(self) -> Tensor: ...

    def connect(self, timeout_s: float) -> PeerChannel:
        """Return a new channel to the peer, which uses this object's buffers.

        The previous channel must be closed before.

        Raises:
            PeerLost: The peer does not answer.
        """
        ...

    def close(self) -> None:
        """Free the buffers of the messages; idempotent."""
        ...


class CheckedDial:
    """A dial that calls a function with the error if no peer answers.

    Args:
        dial: The dial that makes the channels.
        check: Called with the error; raises if no peer will ever answer.
    """

    def __init__(self, dial: Dial, check: Callable[[PeerLost], None]) -> None:
        self._dial = dial
        self._check = check

    @property
    def outgoing(self) -> Tensor:
        return self._dial.outgoing

    @property
    def incoming(self) -> Tensor:
        return self._dial.incoming

    def connect(self, timeout_s: float) -> PeerChannel:
        try:
            return self._dial.connect(timeout_s)
        except PeerLost as error:
            self._check(error)
            raise

    def close(self) -> None:
        self._dial.close()


def nobody_listens(error: BaseException) -> bool:
    """Return whether a dial has failed because no process listens there any more, not because of a delay."""
    return isinstance(error.__cause__, ConnectionRefusedError)


def packed(header: Mapping[str, Any], size: int, room: int) -> bytes:
    """Return the head of a message: its header and its number of bytes, encoded.

    Args:
        header: The header, in JSON values.
        size: Number of bytes of the message.
        room: Size of the sender's buffer, in bytes. The message must end within the buffer.

    Raises:
        ValueError: ``size`` is larger than ``room``, or the header is too long.

    >>> unpacked(packed({"version": 3}, 8, room=8), "a", room=8)
    ({'version': 3}, 8)
    """
    at = header.get("at", 0)
    if not (at >= 0 and 0 <= size <= room - at):
        raise ValueError(f"`send(size={size})` must be in [0, {room - at}], the memory of this channel.")
    data = json.dumps([size, dict(header)]).encode()
    if len(data) > LONGEST:
        raise ValueError(f"`send(header=...)` takes {len(data)} bytes, more than {LONGEST}.")
    return data


def unpacked(data: bytes, peer: str, room: int) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes that are encoded in ``data``, the head of a message; see `packed`.

    Args:
        data: Received bytes.
        peer: Name of the sender, for the error message.
        room: Size of the receiver's buffer, in bytes.

    Raises:
        PeerLost: The bytes are no head of a message, or the message would not fit into the buffer.
    """
    message = parse_json(data)
    size, header = message if isinstance(message, list) and len(message) == 2 else (None, None)
    at = header.get("at", 0) if isinstance(header, dict) else None
    if (
        not isinstance(header, dict)
        or type(at) is not int
        or type(size) is not int
        or not (at >= 0 and 0 <= size <= room - at)
    ):
        raise PeerLost(f"{peer} has sent {len(data)} bytes that are no message of this job's: the channel is closed.")
    return header, size


# Seconds within which a process that has dialled must send its first message.
_HELLO_S = 10.0
_ANSWER_S = 0.0003  # seconds for which to poll before sleeping; to sleep and wake up takes a tenth of that
_BACKLOG = 128
_USER = struct.Struct("3i")


class Memory:
    """An anonymous file, mapped into memory; its memory is allocated at once, so that writing to it cannot fail.

    Args:
        size: Number of bytes. None: the size that the file has.
        descriptor: Descriptor of the file. Default: -1, a new file is made.
        name: Name under which the system's tools show a new file.
    """

    def __init__(self, size: int | None, descriptor: int = -1, name: str = "lightning_async") -> None:
        made = descriptor < 0
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if made else descriptor
        try:
            if size is not None and size != os.fstat(self.descriptor).st_size:
                os.ftruncate(self.descriptor, size)
                os.posix_fallocate(self.descriptor, 0, size)  # raises without memory; a later write would be fatal
            mapping = mmap.mmap(self.descriptor, 0)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping

    def seal(self) -> None:
        """Fix the size, so that no process can shrink the file while another reads it, which would kill the reader."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def sealed(self) -> bool:
        """Whether the size is fixed."""
        return fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        self.bytes = self.bytes[:0].clone()
        if descriptor >= 0:
            os.close(descriptor)


_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)


class ShmChannel:
    """One end of a channel through shared memory; a `PeerChannel`.

    Args:
        sock: Socket that carries headers.
        peer: Name of the peer.
        outgoing: Memory of this end.
        incoming: Memory of the other end.
        asks: Whether this end expects answers at once, so that it polls for a moment before it sleeps. Default: False.
    """

    shares_memory = True

    def __init__(self, sock: socket.socket, peer: str, outgoing: Tensor, incoming: Tensor, asks: bool = False) -> None:
        self._socket = sock
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self._looks_s = _ANSWER_S if asks else 0.0
        sock.setblocking(False)

    def send(self, header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
        data = packed(header, size, self.outgoing.numel())
        self._when(select.POLLOUT, timeout_s, "has taken nothing", lambda: self._socket.send(data))

    def receive(self, timeout_s: float | None = 60.0) -> tuple[dict[str, Any], int]:
        data: bytes = self._when(select.POLLIN, timeout_s, "has said nothing", lambda: self._socket.recv(LONGEST + 1))
        if not data:
            raise self._lost("has closed the connection")
        try:
            return unpacked(data, self.peer, self.incoming.numel())
        except PeerLost:
            self.break_off()
            raise

    def break_off(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.break_off()
        self._socket.close()
        self.outgoing = self.incoming = torch.empty(0, dtype=torch.uint8)

    def _when(self, event: int, timeout_s: float | None, late: str, do: Any) -> Any:
        began = time.monotonic()
        while True:
            try:
                return do()
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._lost(f"is gone ({error.strerror})") from error
            now = time.monotonic()
            left = None if timeout_s is None else began + timeout_s - now
            # Polling first: an answer often comes sooner than this thread could sleep and be woken.
            if now - began < self._looks_s:
                os.sched_yield()  # other processes of this core, such as the peer, may run first
            elif left is not None and left <= 0:
                self.break_off()
                raise ChannelTimeout(
                    f"{self.peer} {late} for {time.monotonic() - began:.1f} s: it is stopped, or busy. See its log."
                )
            else:
                poll = select.poll()  # `select.select` cannot take descriptors above 1023
                poll.register(self._socket, event)
                poll.poll(None if left is None else left * 1000 + 1)

    def _lost(self, what: str) -> PeerLost:
        return PeerLost(f"{self.peer} {what}.")


class ShmDial:
    """A `Dial` for a peer on this host: it opens channels through shared memory.

    Args:
        name: Name under which the peer listens.
        outgoing_bytes: Size of the buffer for messages to the peer.
        incoming_bytes: Size of the buffer for messages from the peer.

    Raises:
        OSError: The shared memory cannot be allocated.
    """

    def __init__(self, name: str, outgoing_bytes: int, incoming_bytes: int) -> None:
        self.name = name
        self._sizes = (outgoing_bytes, incoming_bytes)
        first, second = (_whole_pages(size) for size in self._sizes)
        self._memory = Memory(first + second, name="lightning_async-channel")
        # The peer refuses memory whose size may change.
        self._memory.seal()
        self.outgoing, self.incoming = _halves(self._memory, self._sizes)

    def connect(self, timeout_s: float) -> ShmChannel:
        sock = unshared(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            sock.settimeout(timeout_s)
            sock.connect(_address(self.name))
            _check_user(sock)
            socket.send_fds(sock, [json.dumps(self._sizes).encode()], [self._memory.descriptor])
        except OSError as error:
            sock.close()
            kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
            raise kind(f"nobody answers at {self.name} of this host ({error}).") from error
        return ShmChannel(sock, self.name, self.outgoing, self.incoming, asks=True)

    def close(self) -> None:
        self.outgoing = self.incoming = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


def listen(name: str | None = None) -> tuple[socket.socket, str]:
    """Return a listening socket, and the name with which a `ShmDial` reaches it.

    The name exists until the last process that has the socket open has ended.
    """
    name = name or f"lightning_async-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(_address(name))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, name


def answer(sock: socket.socket, peer: str) -> ShmChannel:
    """Return the channel for a process that has dialled.

    Args:
        sock: Connected socket, which the listening socket has accepted.
        peer: Name of the peer, for messages.

    Raises:
        PeerLost: The peer belongs to another user, or has handed over no memory within ten seconds.
    """
    descriptors: list[int] = []
    try:
        unshared(sock).settimeout(_HELLO_S)
        _check_user(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, LONGEST, 1)
        sizes = tuple(json.loads(data))
        if len(descriptors) != 1 or len(sizes) != 2 or any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("it has handed over no memory")
        memory = Memory(None, descriptors.pop())
        try:
            # An unsealed file could shrink while it is read, which would kill this process.
            if not memory.sealed or memory.bytes.numel() != sum(map(_whole_pages, sizes)):
                raise ValueError("its memory is not what it says")
            theirs, ours = _halves(memory, sizes)
        finally:
            memory.close()  # closes the descriptor; the mapping stays
        return ShmChannel(sock, peer, ours, theirs)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        sock.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise PeerLost(f"{peer} has dialled and is not answered: {error}.") from error


def _check_user(sock: socket.socket) -> None:
    _, user, _ = _USER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.getuid():
        raise PermissionError(f"it is of user {user}")


def _halves(memory: Memory, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    first, second = sizes
    at = _whole_pages(first)
    return memory.bytes[:first], memory.bytes[at : at + second]


def _whole_pages(size: int) -> int:
    """Return the size of a buffer rounded up to whole pages, at least one page."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _address(name: str) -> str:
    if sys.platform != "linux":
        raise OSError(f"channels through shared memory need Linux, and this is {sys.platform}: use Gloo's")
    return f"\0{name}"
