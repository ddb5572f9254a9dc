"""What two processes say to each other, in turns, with memory that goes along: a channel, whatever carries it.

    who dials                                        who answers
    fills `outgoing`, `send`  --- header, bytes --->  `receive`, reads `incoming`
    `receive`, reads `incoming` <--- header, bytes ---  fills `outgoing`, `send`

The turns are the back-pressure: there is one message on its way at most, in memory that is there from the start, so a
peer that reads slowly costs nobody anything but itself. Whose turn it is has both memories; the other side touches
neither. Who dials has the first turn. A channel that has missed a deadline is broken: it is closed, and dialled again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_async.errors import PeerLost

__all__ = ["LONGEST", "Channel", "CheckedDial", "Dial", "nobody_listens", "packed", "unpacked"]

LONGEST = 1 << 15
"""Bytes of a header."""


@runtime_checkable
class Channel(Protocol):
    """One end. All but `break_off` is called by one thread at a time."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages."""
        ...

    @property
    def outgoing(self) -> Tensor:
        """uint8, to be filled before `send`."""
        ...

    @property
    def incoming(self) -> Tensor:
        """uint8, what `receive` has received; until the next `send`."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether `outgoing` is the peer's `incoming`: nothing is moved."""
        ...

    def send(self, header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
        """A header, and ``size`` bytes of `outgoing`; it is the peer's turn then, and does not wait for it.

        Args:
            header: an ``at`` in it says where these bytes begin, here and in the peer's `incoming`; else at 0.
            timeout_s: for the peer to take it; the channel is broken then.

        Raises:
            ValueError: the header is too long, or there is less memory.
            PeerLost, ChannelTimeout: the peer is known to be gone, or has no room; else `receive` says so.
        """
        ...

    def receive(self, timeout_s: float | None = 60.0) -> tuple[dict[str, Any], int]:
        """The peer's header, and how many bytes have come to `incoming`.

        Args:
            timeout_s: None to wait for as long as the peer lives.

        Raises:
            ChannelTimeout: nothing has come in time; the channel is broken.
            PeerLost: the peer is gone, or has said what is none of this job's.
        """
        ...

    def break_off(self) -> None:
        """From any thread: what waits in this channel, here and at the peer, fails now."""
        ...

    def close(self) -> None:
        """Give the connection back, and the memory that is the channel's own; idempotent.

        What was sent and not received is lost, over some transports.
        """
        ...


class Dial(Protocol):
    """Where a peer is, and the memory for talking to it, which outlives any one channel.

    What lies in `outgoing` is there until it is written to: after a peer's death it is sent again to the next one.
    """

    @property
    def outgoing(self) -> Tensor: ...

    @property
    def incoming(self) -> Tensor: ...

    def connect(self, timeout_s: float) -> Channel:
        """A new channel with this memory; the one before it is closed by whoever has it.

        Raises:
            PeerLost: nobody is there, or not in time.
        """
        ...

    def close(self) -> None:
        """Give the memory back; idempotent."""
        ...


class CheckedDial:
    """A dial that knows why nobody will be there any more.

    Args:
        dial: this one's from now on.
        check: called with the error where nobody is there; raises where nobody will be.
    """

    def __init__(self, dial: Dial, check: Callable[[PeerLost], None]) -> None:
        self._dial, self._check = dial, check

    @property
    def outgoing(self) -> Tensor:
        return self._dial.outgoing

    @property
    def incoming(self) -> Tensor:
        return self._dial.incoming

    def connect(self, timeout_s: float) -> Channel:
        """See `Dial`; and what ``check`` raises."""
        try:
            return self._dial.connect(timeout_s)
        except PeerLost as error:
            self._check(error)
            raise

    def close(self) -> None:
        self._dial.close()


def nobody_listens(error: BaseException) -> bool:
    """Whether a dial has failed because nothing listens there any more: it was not late, nor out of reach."""
    return isinstance(error.__cause__, ConnectionRefusedError)


def packed(header: Mapping[str, Any], size: int, room: int) -> bytes:
    """A header as it travels, with the number of bytes that go along.

    >>> unpacked(packed({"version": 3}, 8, room=8), "a", room=8)
    ({'version': 3}, 8)

    Raises:
        ValueError: it is too long, or there is no room for so many bytes.
    """
    at = header.get("at", 0)
    if not (at >= 0 and 0 <= size <= room - at):
        raise ValueError(f"`send(size={size})` must be in [0, {room - at}], the memory of this channel.")
    data = json.dumps([size, dict(header)]).encode()
    if len(data) > LONGEST:
        raise ValueError(f"`send(header=...)` takes {len(data)} bytes, more than {LONGEST}.")
    return data


def unpacked(data: bytes, peer: str, room: int) -> tuple[dict[str, Any], int]:
    """What `packed` was given.

    Raises:
        PeerLost: it is none of this job's.
    """
    try:
        size, header = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        size, header = None, None
    at = header.get("at", 0) if isinstance(header, dict) else None
    if (
        not isinstance(header, dict)
        or type(at) is not int
        or type(size) is not int
        or not (at >= 0 and 0 <= size <= room - at)
    ):
        raise PeerLost(f"{peer} has sent {len(data)} bytes that are no message of this job's: the channel is closed.")
    return header, size
