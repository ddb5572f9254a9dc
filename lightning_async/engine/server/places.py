"""A worker's way to a shard that has a copy: to whichever of two servers has it, see `views`.

A worker that waits for an answer keeps its connection: to servers one that ends is a worker that nobody waits for. A
thread beside it asks whether the server still answers its callers; where it does not, and its copy does, the connection
is broken off, and the copy takes its place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from lightning_async.comm.channel import Channel, Dial
from lightning_async.engine.server.views import View, Views
from lightning_async.errors import PeerLost

__all__ = ["Places"]

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2
_ASKS_S = 5.0


class Places:
    """A dial, see `Dial`, whose memory is another one after `turn`: what a server that stands still has may be written
    to when it wakes.

    Args:
        shard: its number.
        table: of the servers'.
        servers: the number of the one that has it first, and of the one that has the copy.
        addresses: of these two.
        dial: the way to an address, with memory for the shard, or for nothing.
        views: who has it.
        lost_after_s: a server that cannot be reached, or does not answer its callers, for so long is lost.
    """

    def __init__(
        self,
        shard: int,
        table: int,
        servers: tuple[int, int],
        addresses: Sequence[Mapping[str, Any]],
        dial: Callable[[Mapping[str, Any], bool], Dial],
        views: Views,
        lost_after_s: float,
    ) -> None:
        self.shard, self.lost_after_s, self._servers = shard, lost_after_s, servers
        self._table, self._addresses, self._dial, self._views = table, list(addresses), dial, views
        self._known: View | None = None
        self._looked_at = 0.0
        self._current = dial(self._addresses[0], True)
        self._at = 0
        self.lost = False
        """The server answers nobody, and its copy does."""
        self._waits: tuple[Channel, float] | None = None
        """For an answer, and since when; the thread below looks at it."""
        self._closed = threading.Event()
        self._watches = False

    @property
    def outgoing(self) -> Tensor:
        return self._current.outgoing

    @property
    def incoming(self) -> Tensor:
        return self._current.incoming

    @property
    def view(self) -> View:
        """As far as this worker knows."""
        return self._known or View()

    @property
    def begun(self) -> bool:
        """Whether the shard has weights: a server without has lost them."""
        return self._known is not None

    def connect(self, timeout_s: float) -> Channel:
        """See `Dial`."""
        if self._known is None:
            self._look()
        self._turn()
        return self._current.connect(min(timeout_s, self.lost_after_s))

    def close(self) -> None:
        """See `Dial`."""
        self._closed.set()
        self._current.close()

    @contextmanager
    def watching(self, channel: Channel) -> Iterator[None]:
        """While an answer is waited for: where none will come, and the copy can take the server's place, this ends."""
        if not self._watches:
            self._watches = True
            threading.Thread(target=self._watch, name="lightning_async places", daemon=True).start()
        self._waits = channel, time.monotonic()
        try:
            yield
        finally:
            self._waits = None

    def told(self) -> dict[str, Any]:
        """What a server is to know of it."""
        other = self._addresses[1 - self.view.primary]
        place = {"address": other, "within_s": self.lost_after_s}
        return {"shard": self.shard, "table": self._table, "generation": self.view.generation, "copy": place}

    def begin(self, worker: str) -> None:
        """The shard has weights from now on."""
        if self._known is None:
            self._known, _ = self._views.claim(View(), worker)

    def hear(self, generation: int) -> None:
        """Of the server that is connected, which has answered: another worker has brought it word."""
        self.lost = False
        if self.begun and generation > self.view.generation:
            self._known = View(generation, self.view.primary)

    def go_on_alone(self, worker: str, why: str) -> None:
        """The copy is lost: the shard's server goes on without, where it has not been given up for the copy."""
        with suppress(PeerLost):  # the store is out of reach: the server says it again
            if not self._look():
                said = f"the copy on {self._server(1 - self.view.primary)} is lost"
                self._claim(View(self.view.generation + 1, self.view.primary), worker, said, why)

    def look_elsewhere(self, worker: str, why: str, lost: bool) -> bool:
        """Whether another view holds from now on: one that others have claimed, or, where the server is ``lost``, this
        worker. Asked again and again, it looks now and then."""
        now = time.monotonic()
        if not self.begun or (now - self._looked_at < _PAUSE_S and not self.lost):
            return False
        self._looked_at, self.lost = now, False
        with suppress(PeerLost):
            if self._look():
                return True
            if lost and self._asked(1 - self.view.primary).get("stands"):
                said = f"it is lost, and {self._server(1 - self.view.primary)} goes on with its copy"
                self._claim(View(self.view.generation + 1, 1 - self.view.primary), worker, said, why)
                return True
        return False

    def _look(self) -> bool:
        """Whether others have claimed a newer view."""
        before, self._known = self._known, self._views.newest(self._known)
        return before != self._known

    def _claim(self, view: View, worker: str, said: str, why: str) -> None:
        primary = self._server(self.view.primary)
        self._known, mine = self._views.claim(view, worker)
        if mine:  # one worker warns
            _log.warning(
                "Shard %d, which %s had: %s (worker %r: %s). All that was acknowledged is there. Until the lost "
                "server is back, the shard has no replica.", self.shard, primary, said, worker, why.rstrip("."),
            )  # fmt: skip

    def _server(self, place: int) -> str:
        return f"server {self._servers[place]}"

    def _watch(self) -> None:
        heard = 0.0
        while not self._closed.wait(self.lost_after_s / 4):
            waits, now = self._waits, time.monotonic()
            if waits is None or not self.begun or now - max(waits[1], heard) < self.lost_after_s:
                continue
            if self._asked(self.view.primary):
                heard = now
            elif self._asked(1 - self.view.primary).get("stands") and self._waits is waits:
                self.lost = True
                waits[0].break_off()

    def _asked(self, place: int) -> dict[str, Any]:
        """What the server in that place says to whether it ``stands`` by: has a whole copy of this generation; empty
        where it says nothing in time."""
        called = channel = None
        try:
            called = self._dial(self._addresses[place], False)
            channel = called.connect(min(_ASKS_S, self.lost_after_s))
            asked = {"do": "stands", "shard": self.shard, "table": self._table, "generation": self.view.generation}
            channel.send(asked, 0, self.lost_after_s)
            return channel.receive(self.lost_after_s)[0]
        except (PeerLost, OSError):
            return {}
        finally:
            for each in (channel, called):
                if each is not None:
                    each.close()

    def _turn(self) -> None:
        """To memory for the server of the present view, with what the worker has in that of the one before."""
        if self._at != self.view.primary:
            before, self._at = self._current, self.view.primary
            self._current = self._dial(self._addresses[self._at], True)
            self._current.outgoing.copy_(before.outgoing)
            self._current.incoming.copy_(before.incoming)
            before.close()
