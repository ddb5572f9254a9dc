"""A worker's line to one server: whichever process that is, what was not answered is asked again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_async.comm.channel import Channel, Dial
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, Evicted, PeerLost, SettingsMismatch

__all__ = ["Line", "forget", "tell_over"]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.02
_DIAL_S, _PART_S = 5.0, 60.0
_REFUSALS: dict[str, type[AsyncTrainingError]] = {
    "evicted": Evicted, "settings": SettingsMismatch, "missing": PeerLost, "uninitialised": PeerLost,
}  # fmt: skip


class Line:
    """One server, whichever process that is; used by one thread, but for `give_up`.

    Args:
        server: its number, for messages.
        dial: the line's from now on.
        hello: that servers are told first: the ``worker`` whose line it is, and whatever else says who that is.
        absent_s: a server that cannot be reached for so long is lost.
        overlap: gradients may be of what was pulled before the last pull: the server has two places for that. Default:
            they are of the last one.
    """

    def __init__(
        self, server: int, dial: Dial, hello: Mapping[str, Any], absent_s: float, overlap: bool = False
    ) -> None:
        self.dial, self.base = dial, 0
        self.began = False
        """The server has weights: one without has lost them."""
        self._overlap, self._spare, self._pushed_then = overlap, False, 0  # where the last pull is, and when that was
        self.resent = self.pushed = 0
        self._missing: list[tuple[int, int]] = []
        """Pushes that were answered, and are lost since: behind one number, up to another."""
        self._server, self._worker, self._hello = server, hello["worker"], hello
        self._channel: Channel | None = None
        self._life: int | None = None
        self._incarnation: str | None = None
        self._request: tuple[Mapping[str, Any], int] = {}, 0
        self._asked_at = 0.0
        self._why = "nothing was heard of it"
        self._given_up, self._absent_s = False, absent_s
        self._left: int | None = None
        """From this byte on the next push is at the server already; None: nothing of it is."""
        self._away_since: float | None = None
        """When the server was last reached; None while there is a channel."""

    def ask(self, header: Mapping[str, Any], size: int) -> None:
        """Say it, if there is somebody; `reply` sees to the rest."""
        pushes, before = header["do"] == "push", header.get("base", self.base) < self.base
        flips = pushes or self.pushed > self._pushed_then  # a pull after a pull is in its place: nothing is of that one
        places = {"of": self._spare ^ (self._overlap and before), "to": self._spare ^ (self._overlap and flips)}
        self._request, self._asked_at, self.resent = ({**header, **places}, size), time.monotonic(), 0
        if self._channel is not None:
            self._try(self._channel)

    def pulled(self, version: int) -> None:
        """The last request has brought weights, of this version."""
        self.base, self._spare, self._pushed_then = version, self._request[0]["to"], self.pushed

    @property
    def lost(self) -> int:
        """How many pushes were answered, and are in no weights any more."""
        return sum(end - start for start, end in self._missing)

    def begin_part(self) -> None:
        """The memory is filled anew."""
        self._left = None

    def leave(self, at: int, size: int) -> None:
        """A part of the next push leaves ahead of it: the last one, or one in front of those that have left, or again.

        It may fail: what has not left goes with the push.
        """
        channel = self._channel
        if channel is None or channel.shares_memory:
            return
        try:
            channel.send({"do": "part", "at": at}, size)
            channel.receive(_PART_S)
        except PeerLost as error:
            self._drop(error)
        else:
            self._left = at if self._left is None else min(self._left, at)

    def reply(self, until: float) -> dict[str, Any]:
        """The answer, of whichever process gives it."""
        while True:
            now = time.monotonic()
            left = until - now
            if self._given_up:
                raise PeerLost(f"worker {self._worker!r} has given up on server {self._server}.")
            if self._channel is None:
                self._away_since = self._away_since or now
                left = min(left, self._away_since + self._absent_s - now)
                if left > 0 and not self._dial(left):
                    time.sleep(min(_PAUSE_S, left))
                    continue
                left = until - now
            if self._channel is None:
                raise ChannelTimeout(
                    f"worker {self._worker!r}: server {self._server} has not answered "
                    f"{self._request[0].get('do')!r} for {time.monotonic() - self._asked_at:.1f} s: {self._why} "
                    "See its log; it may need more time than `timeout`."
                )
            try:
                reply, _ = self._channel.receive(max(left, 0.001))
            except PeerLost as error:
                self._drop(error)
            else:
                if self._request[0].get("do") == "push":
                    self._left = None  # nothing of the next one is there
                return self._heard(reply)

    def give_up(self) -> None:
        self._given_up = True
        if (channel := self._channel) is not None:
            channel.break_off()

    def close(self, leave: bool) -> None:
        if self._channel is not None and leave:
            try:
                self._channel.send({"do": "leave"}, 0, 1.0)
                self._channel.receive(1.0)
            except PeerLost:
                pass  # it is gone, or busy: it sees the connection's end
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self.dial.close()

    def _dial(self, timeout_s: float) -> bool:
        """Whether there is a channel now, and the request is on its way."""
        try:
            channel = self._channel = self.dial.connect(min(timeout_s, _DIAL_S))
            now = {"life": self._life, "incarnation": self._incarnation, "said": self.pushed}
            channel.send({"do": "hello", **self._hello, **now}, 0, timeout_s)
            reply, _ = channel.receive(timeout_s)
        except PeerLost as error:
            self._drop(error)
            return False
        known, told = self._incarnation, self._heard(reply)
        self._life = told["life"]
        if self.began and told["version"] is None:
            raise PeerLost(
                f"worker {self._worker!r}: server {self._server} has lost its weights, of version {self.base} or "
                "later: its memory is gone, with its supervisor or its host. Start again from the last checkpoint."
            )
        if None not in (known, told["version"]) and told["incarnation"] != known:
            self._go_back(told)
        self.resent += 1
        self._away_since = None
        self._try(channel)
        return self._channel is not None

    def _go_back(self, told: Mapping[str, Any]) -> None:
        """The server had lost its memory, and has a snapshot: of what was said to it, less counts than was answered."""
        kept = told["push"]
        known = [(start, min(end, kept)) for start, end in self._missing if start < kept]
        self._missing = [*known, (kept, max(kept, self.pushed))]
        header, size = self._request
        self.base = min(self.base, told["version"])
        if "base" in header:
            header = {**header, "base": self.base}
        self._request = header, size
        _log.warning(
            "Worker %r: server %d has come back with a snapshot, of version %d. %d pushes of this worker's are lost in "
            "all.", self._worker, self._server, told["version"], self.lost,
        )  # fmt: skip

    def _try(self, channel: Channel) -> None:
        header, size = self._request
        try:
            if self._left is not None and header["do"] == "push":
                channel.send({**header, "size": size}, min(self._left, size))
            else:
                channel.send(header, size)
        except PeerLost as error:
            self._drop(error)

    def _drop(self, error: PeerLost) -> None:
        self._why, self._left = str(error), None
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _heard(self, reply: dict[str, Any]) -> dict[str, Any]:
        if (kind := reply.get("refused")) is not None:
            error = _REFUSALS.get(kind, AsyncTrainingError)
            raise error(f"worker {self._worker!r}: server {self._server} refuses: {reply['why']}")
        self._incarnation = reply.get("incarnation", self._incarnation)
        self.pushed = reply.get("number", self.pushed)
        return reply


def forget(dial: Dial, workers: Sequence[str], timeout_s: float = 10.0) -> None:
    """Tell a server that these workers are lost: nobody waits for them, and what they still say does not count.

    Raises:
        PeerLost: it does not answer in time.
    """
    _tell(dial, {"do": "forget", "workers": list(workers)}, timeout_s)


def tell_over(dial: Dial, timeout_s: float = 5.0) -> None:
    """Tell a server that the training is over: it ends when nobody is connected any more. Whoever does not answer has
    ended already, or will, a while after."""
    with contextlib.suppress(PeerLost), contextlib.closing(dial):
        _tell(dial, {"do": "over"}, timeout_s)


def _tell(dial: Dial, header: Mapping[str, Any], timeout_s: float) -> None:
    channel = dial.connect(timeout_s)
    try:
        channel.send(header, 0, timeout_s)
        channel.receive(timeout_s)
    finally:
        channel.close()
