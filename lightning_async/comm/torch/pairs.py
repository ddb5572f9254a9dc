"""Channels between two processes anywhere: each is a group of Gloo's of its own, of two ranks; see `dialling`.

    who sends                                    who receives
                                    <----------  has memory ready for bytes and for a head, before it is asked to
    bytes, head: at once, in order  ---------->  a head: what it is, and how many bytes there are; these are there then

Gloo moves what is sent when the peer is ready to receive, so that it is: nobody waits for a word about that. Both hear
within milliseconds of the other one's death. What torch does not do is to hear of that with half a message there, see
`groups`: so it is the head behind the bytes that is waited for. Parts of a message have their head in front, as it says
where they belong: large ones are waited for on a thread, and the connection is looked at.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.channel import LONGEST, packed, unpacked
from lightning_async.comm.torch.groups import Group
from lightning_async.errors import ChannelTimeout, PeerLost

__all__ = ["PairChannel"]

_LENGTH = struct.Struct("<I")
_HEAD = 2048  # bytes of the first message, which most headers fit into
_WATCHED = 1 << 15  # bytes from which on a message may be half there
_FOREVER_S = 30 * 24 * 3600.0
_PART_S, _SLOWEST = 60.0, 1 << 20  # seconds, and bytes of each further one, for what has begun to come to be whole
_LOOK_S = 0.05
_SETTLE = timedelta(seconds=1)
# Tags: where a group has several connections, each takes every so many-th tag, and all of these are the first one's.
_HEADS, _BYTES, _PARTS = 0, 2520, 5040


class PairChannel:
    """One end of a channel over Gloo; see `Channel`.

    Args:
        group: formed; the channel's from now on.
        rank: in it.
        peer: who is at the other end.
        outgoing, incoming: the memory of each direction.
    """

    shares_memory = False

    def __init__(self, group: Group, rank: int, peer: str, outgoing: Tensor, incoming: Tensor) -> None:
        self._group, self._other, self.peer = group, 1 - rank, peer
        self.outgoing, self.incoming = outgoing, incoming
        self._sent: list[Any] = []
        self._head: tuple[Any, Tensor] | None = None
        self._bytes: Any = None
        self._patience = _Patience(group)
        self._broken = self._closed = False

    def send(self, header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
        data = packed(header, size, self.outgoing.numel())
        text = torch.frombuffer(bytearray(_LENGTH.pack(len(data)) + data), dtype=torch.uint8)
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        first, at = min(len(text), _HEAD), header.get("at", 0)
        head[:first] = text[:first]
        self._expect()
        heads = (head, _HEADS), (text[_HEAD:], _HEADS)
        bytes_ = self.outgoing[at : at + size], _PARTS if at else _BYTES
        for tensor, tag in (*heads, bytes_) if at else (bytes_, *heads):
            if tensor.numel():
                self._sent.append(self._begin("send", tensor, tag))

    def receive(self, timeout_s: float | None = 60.0) -> tuple[dict[str, Any], int]:
        until = time.monotonic() + (_FOREVER_S if timeout_s is None else timeout_s)
        self._expect()
        assert self._head is not None
        (work, head), self._head = self._head, None
        self._wait(work, until, "has said nothing")
        self._settle()  # who answers has heard
        (length,) = _LENGTH.unpack(head[: _LENGTH.size].numpy().tobytes())
        text = head
        if (rest := min(max(0, _LENGTH.size + length - _HEAD), LONGEST)) > 0:
            text = torch.cat([head, torch.empty(rest, dtype=torch.uint8)])
            self._wait(self._begin("recv", text[_HEAD:], _HEADS), until, "has said nothing more")
        try:
            data = text[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
            header, size = unpacked(data, self.peer, self.incoming.numel())
        except PeerLost:
            self._break()
            raise
        if size:
            until = min(until, time.monotonic() + _PART_S + size / _SLOWEST)
            if at := header.get("at", 0):
                work = self._begin("recv", self.incoming[at : at + size], _PARTS)
                self._wait(work, until, "has sent only a part of a message", large=size >= _WATCHED)
            else:
                work, self._bytes = self._bytes, None
                self._wait(work, until, "has sent only a part of a message")  # it was there before its head
        return header, size

    def break_off(self) -> None:
        self._group.break_off()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._break()
            self._head = self._bytes = None
            self._sent.clear()  # torch reads and writes nothing more, as the connection is closed
            self._patience.close()
            self._group.dispose()
            self.outgoing = self.incoming = torch.empty(0, dtype=torch.uint8)

    def _expect(self) -> None:
        """Have memory ready for what the peer says next; for bytes all there is, of which it may fill less."""
        if self._bytes is None and self.incoming.numel():
            self._bytes = self._begin("recv", self.incoming, _BYTES)
        if self._head is None:  # behind the bytes, or the peer might send it ahead of them
            head = torch.empty(_HEAD, dtype=torch.uint8)
            self._head = self._begin("recv", head, _HEADS), head

    def _begin(self, kind: str, tensor: Tensor, tag: int) -> Any:
        try:
            if self._broken:
                raise RuntimeError("the channel is closed")
            return getattr(self._group.pg, kind)([tensor], self._other, tag)  # what it returns holds the tensor
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, until: float, late: str, large: bool = False) -> None:
        began = time.monotonic()
        left_s = max(until - began, 0.001)
        try:
            self._patience.wait(work, left_s) if large else work.wait(timedelta(seconds=left_s))
        except (RuntimeError, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
            if time.monotonic() < until and not timed_out:
                raise self._lost(error) from error
            self._break()
            raise ChannelTimeout(
                f"{self.peer} {late} for {time.monotonic() - began:.1f} s: it is stopped, or busy. See its log."
            ) from error

    def _settle(self) -> None:
        """What was sent has arrived: torch has done with its memory."""
        for work in self._sent:
            with contextlib.suppress(RuntimeError):
                work.wait(_SETTLE)
        self._sent.clear()

    def _lost(self, error: Exception) -> PeerLost:
        self._break()
        return PeerLost(f"{self.peer} is gone ({str(error).splitlines()[0].rstrip('.')}).")

    def _break(self) -> None:
        self._broken = True
        self.break_off()


class _Patience:
    """A thread that waits in torch for what is half there, in place of who may not wait for ever.

    Args:
        group: the channel's.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: Any, timeout_s: float) -> None:
        """Until it is done.

        Raises:
            RuntimeError: it never will be.
            TimeoutError: not in time.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_async arrivals", daemon=True)
            self._thread.start()
        self._group.helped_by(self._thread, timeout_s)
        self._works.put((work, timedelta(seconds=timeout_s)))
        until, looks = time.monotonic() + timeout_s, 0
        while looks < 3:  # it may just be completing: the last bytes and the end of the connection come together
            try:
                error = self._ends.get(timeout=min(_LOOK_S, max(0.001, until - time.monotonic())))
            except queue.Empty:
                looks += not self._group.connected
                if time.monotonic() > until:
                    raise TimeoutError from None
                continue
            if error is not None:
                raise error
            return
        raise RuntimeError("the connection to a peer was lost")

    def close(self) -> None:
        self._works.put(None)

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            work, limit = given
            try:
                work.wait(limit)
                error = None
            except RuntimeError as raised:
                error = raised
            del work, given  # they hold the memory
            self._group.helpers.discard(threading.current_thread())
            self._ends.put(error)
