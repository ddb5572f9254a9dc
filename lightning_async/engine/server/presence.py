"""Who is there: lives, connections, and how long a server has heard nothing of somebody.

    connected ---- its connection ends ----> away ---- says hello under its life ----> connected
        |                                     |
        | leaves; says nothing for too long   | does not come back
        +-------------------------------------+----> forgotten: what it had of its own is given back

A worker that is forgotten and comes back under its life is refused: lives are counted over all workers, so nobody else
    has it.

Silence is measured by the work of others: a clock that goes on while others push, and by little while nobody does, so
that a pause of all, as for a validation, is nobody's silence. So is being away: by one that goes on while others ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.quorum import Terms, live
from lightning_async.engine.server.remembered import said
from lightning_async.engine.server.store import Store

__all__ = ["Presence"]

_IDLE = 0.1  # of `dead_after_s`: what a clock goes on by at most, between two pushes, or two looks


class Presence:
    """The workers of one server; called under its lock.

    Args:
        store: that remembers them.
        terms: see there.
        now: seconds. Default: the system's clock.
    """

    def __init__(self, store: Store, terms: Terms, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._terms, self._now = store, terms, now
        self.channels: dict[str, Channel] = {}
        """Of those that are connected."""
        self._clock, self._pushed_at = 0.0, now()
        self._heard: dict[str, float] = {}
        self._awake, self._swept_at = 0.0, now()
        self._away_since = dict.fromkeys(store.workers, 0.0)

    def hello(self, worker: str, channel: Channel, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Let a worker in; what is known of it. None: it has been forgotten, or another has come under its name.

        Args:
            header: its ``life``, if it has one; its ``client``'s own name; the ``incarnation`` of the store that it
                knows: one that was restored may never have heard of it, or less than the worker was ``said``.

        Raises:
            ValueError: there is no room for it.
        """
        self.sweep()
        workers, life, incarnation = self._store.workers, header["life"], header.get("incarnation")
        if life is not None and incarnation is not None and incarnation == self._store.record.get("replaced"):
            return None  # what it computes at is no more: others have begun anew
        known = workers.pop(worker, None)
        restored = self._store.ready and incarnation not in (None, self._store.incarnation)
        if life is None or (restored and (known is None or known["life"] != life)):
            others = [told["clock"] for told in workers.values() if told["live"]]
            known = {"life": self._store.record["lives"] + 1, "push": 0, "clock": min(others, default=0)}
        elif known is None and not self._store.ready:
            known = {"life": life, "push": 0, "clock": 0}
        elif known is None or known["life"] != life:
            return None
        told = {**known, "live": True, "rests": -1, "client": header["client"]}
        if restored:
            told["said"] = header["said"]
            self._store.note(lost=self._store.record.get("lost", 0) + max(0, header["said"] - said(known)))
        self._store.remember({**workers, worker: told})
        if (before := self.channels.get(worker)) is not None:
            before.break_off()
        self.channels[worker] = channel
        self._away_since.pop(worker, None)
        self.heard(worker)
        return known

    def heard(self, worker: str, served: bool = True) -> None:
        """It has said something, and is not silent while it waits for the answer, until it is ``served``."""
        if worker in self.channels:
            self._heard[worker] = self._clock if served else math.inf

    def pushed(self, gate: int = 0) -> set[str]:
        """Somebody has, from beyond so many gates; who of those that it could wait for is silent for too long."""
        now = self._now()
        self._clock += min(now - self._pushed_at, _IDLE * self._terms.dead_after_s)
        self._pushed_at = now
        late = {name for name in self.channels if self._clock - self._heard[name] > self._terms.dead_after_s}
        return late & live(self._store.known, gate) if late else late

    def sweep(self) -> bool:
        """Forget those that have been away for too long; whether there are any."""
        now = self._now()
        self._awake += min(now - self._swept_at, _IDLE * self._terms.dead_after_s)
        self._swept_at = now
        late = [name for name, since in self._away_since.items() if self._awake - since > self._terms.dead_after_s]
        if late:
            self.forget(*late)
        return bool(late)

    def away(self, worker: str) -> None:
        """Its connection has ended: nobody waits for it, and it may come back. What it has pushed counts."""
        self._drop(worker)
        self._away_since[worker] = self._awake
        workers = self._store.workers
        workers[worker]["live"] = False
        self._store.remember(workers)

    def rest(self, worker: str, gate: int) -> None:
        """Nobody waits for it until somebody comes from beyond that gate. Beyond one that all rest at, where they have
        the same weights, nobody is ahead of anybody."""
        workers = self._store.workers
        workers[worker]["rests"] = gate
        if not live(workers, gate):
            ahead = max(told["clock"] for told in workers.values())
            workers = {name: {**told, "clock": ahead} for name, told in workers.items()}
        self._store.remember(workers)

    def leave(self, worker: str) -> None:
        """It goes by itself, and is still to be answered."""
        self._drop(worker)
        self.forget(worker)

    def forget(self, *names: str) -> None:
        """They are gone for good: what they say under their lives counts no more. What they have pushed does."""
        workers, lives = self._store.workers, self._store.record["lives"]
        for name in names:
            if (channel := self._drop(name)) is not None:
                channel.break_off()
            self._away_since.pop(name, None)
            if self._store.ready and self._store.version > 0:
                workers.pop(name, None)
            elif name in workers:  # before the first update it is counted who has come
                lives += 1
                workers[name] = {"life": lives, "push": 0, "clock": 0, "live": False, "rests": -1, "client": ""}
        self._store.remember(workers)

    def _drop(self, worker: str) -> Channel | None:
        self._heard.pop(worker, None)
        return self.channels.pop(worker, None)
