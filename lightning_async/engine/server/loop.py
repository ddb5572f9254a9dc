"""A server: what it answers to its workers, one thread for each of them, one lock around the store.

    hello       who I am -> which life this is, what was applied of mine        initialise  the first weights
    push        a gradient -> the version that it is in                         read        weights, or optimizer state
    pull        -> weights of one version                                       leave       nobody waits for me any more
    rest        nobody waits for me, until they are beyond this gate            forget      ... for these; from anybody
    snapshot    have it all on disk                               hold        no push is applied until I pull, see `cut`

A worker has a life: from its first hello on, over any number of connections, until another process comes under its
name, or the others have stopped waiting for it. Pushes of one life are numbered from 1, without gaps, and applied in
order: one that comes again, as its answer was lost, is answered and not applied. So each is applied once, whoever dies.
Only where the memory is lost with its host, pushes are: those that came after the last snapshot. All answers say which
version that holds, and a worker that comes back hears which of its pushes it holds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_async.comm.channel import Channel
from lightning_async.engine.server import cut
from lightning_async.engine.server.beginning import Beginning
from lightning_async.engine.server.exchange import Exchange
from lightning_async.engine.server.presence import Presence
from lightning_async.engine.server.quorum import NEWCOMERS, Terms, awaited
from lightning_async.engine.server.refused import GONE, Refused, take_asked
from lightning_async.engine.server.remembered import said
from lightning_async.engine.server.rounds import Push, Rounds
from lightning_async.engine.server.snapshots import Shelf, Snapshots
from lightning_async.engine.server.store import Store
from lightning_async.errors import PeerLost

__all__ = ["HELLO_S", "Server"]

HELLO_S = 10.0
_LOOK_S = 0.25
_HELD_S = 0.02
_OF_A_PUSH = ("lag", "dropped", "called")


class Server:
    """One server's engine.

    Args:
        store: its shard.
        terms: see there.
        shelf: for its snapshots, of which it takes the newest where the store has no weights. Default: none are taken.
        every_s: seconds between two. Default: they are taken when a worker asks.
    """

    def __init__(self, store: Store, terms: Terms, shelf: Shelf | None = None, every_s: float = math.inf) -> None:
        self._store, self._terms = store, terms
        self._changed = threading.Condition()
        self.snapshots = None if shelf is None else Snapshots(store, self._changed, shelf, every_s)
        self._presence = Presence(store, terms)
        self._rounds, self._cuts = Rounds(store, terms), cut.Cuts()
        self._beginning = Beginning(store, terms)
        self._exchange = Exchange(store, terms)

    @property
    def connected(self) -> int:
        """Workers that have a connection."""
        return len(self._presence.channels)

    def serve(self, channel: Channel, said: tuple[dict[str, Any], int] | None = None) -> None:
        """Answer one worker until it is gone; on a thread of its own. What it has said already comes first."""
        worker = None
        try:
            while True:
                header, size = said or channel.receive(HELLO_S if worker is None else None)
                said = None
                try:
                    if worker is None and header.get("do") == "forget":
                        reply, length = self.forget(header["workers"]), 0
                    elif worker is None:
                        worker, reply = self._hello(channel, header)
                        length = 0
                    else:
                        reply, length = self._answer(worker, channel, header, size)
                except Refused as refused:
                    reply, length = {"refused": refused.kind, "why": str(refused)}, 0
                channel.send(reply, length)
        except PeerLost:
            pass  # its others go on; it comes back, or does not
        finally:
            channel.close()
            self._gone(worker, channel)

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            for channel in self._presence.channels.values():
                channel.break_off()

    def forget(self, names: Sequence[str]) -> dict[str, Any]:
        """Others know that these are lost."""
        with self._changed:
            self._evict(set(names) & self._store.known.keys())
        return {}

    # All below are called by the workers' threads

    def _hello(self, channel: Channel, header: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if header.get("do") != "hello":
            raise Refused("hello", f"{channel.peer} has not said who it is.")
        worker, life = str(header["worker"]), header["life"]
        with self._changed:
            self._beginning.check_plan(worker, header["fingerprint"])
            try:
                known = self._presence.hello(worker, channel, header)
            except ValueError as error:
                raise Refused("full", str(error)) from error
            if known is None:
                raise Refused("evicted", f"worker {worker!r} {GONE}")
            self._cuts.release(worker)
            if known["life"] != life:
                self._rounds.drop(worker)
            self._changed.notify_all()
            return worker, {"life": known["life"], "push": known["push"], **self._version()}

    def _answer(
        self, worker: str, channel: Channel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        if header.get("do") == "snapshot":
            take_asked(self.snapshots)
        with self._changed:
            self._check_current(worker, channel)
            self._presence.heard(worker, served=False)
            try:
                return self._answer_now(worker, channel, header, size)
            finally:
                self._presence.heard(worker)

    def _answer_now(
        self, worker: str, channel: Channel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        do = header.get("do")
        if do == "part":  # of a push to come, in the channel's memory
            return {}, 0
        if do in ("bring", "initialise"):
            if header.get("anew"):  # what others compute is of weights that there are no more
                self._evict(set(self._presence.channels) - {worker})
            memory = channel.incoming[:size]
            self._beginning.bring(header["field"], memory) if do == "bring" else self._beginning.begin(header, memory)
            self._changed.notify_all()
            return self._version(), 0
        if do in ("leave", "rest"):
            self._presence.leave(worker) if do == "leave" else self._presence.rest(worker, header["gate"])
            self._changed.notify_all()
            return {}, 0
        if not self._store.ready:
            raise Refused("uninitialised", "the server has no weights: it is new, or its host has lost them.")
        if do == "push":
            return self._push(worker, channel, header, size)
        if do == "hold":
            self._cuts.hold(worker, header["limit_s"])
            return {"cut": cut.plain(cut.applied_by(self._store.known))}, 0
        if do == "pull" and "cut" in header:
            return self._pull_at(worker, channel, header)
        if do in ("snapshot", "pull"):
            return self._version(), self._exchange.give(worker, channel, header) if do == "pull" else 0
        if do == "lags":
            told, lost = self._version(), self._store.record.get("lost", 0)
            kept = {} if self.snapshots is None else {"durable": told["durable"], "lost": lost}
            return {**told, "lags": {**self._store.lags, **kept}}, 0
        if do == "read":
            told = {**self._version(), "fields": self._exchange.fields, "scalars": dict(self._store.scalars)}
            return told, self._exchange.read(channel, header["field"])
        raise Refused("request", f"worker {worker!r} asks for {do!r}, which is nothing that a server does.")

    def _push(self, worker: str, channel: Channel, header: Mapping[str, Any], size: int) -> tuple[dict[str, Any], int]:
        number, told, filled = header["number"], self._store.known[worker], None
        if number == said(told) + 1:
            self._until(worker, channel, lambda: self._allow({worker: number}))
            gradient = self._exchange.arrived(channel, header, size) if header["weight"] > 0.0 else None
            if in_step := self._in_step():
                how = header["weight"], gradient, header["lr"], header["gate"], header["call"]
                self._rounds.put(worker, Push(number, *how))
            elif gradient is not None:
                filled = self._exchange.apply(worker, channel, gradient, header)
            else:
                self._store.count({worker: number})
            if not in_step:
                self._evict(self._presence.pushed(header["gate"]))
        elif number != told["push"]:
            raise Refused("request", f"push {number} of worker {worker!r} came after {said(told)}: one is missing.")
        self._changed.notify_all()
        self._wait(worker, channel, number, header["gate"])
        told = self._store.known[worker]
        reply = {**self._version(), "number": number, **{key: told.get(key, False) for key in _OF_A_PUSH}}
        if not header["pull"]:
            return reply, 0
        return reply, self._exchange.give(worker, channel, header, filled == self._store.version)

    def _pull_at(self, worker: str, channel: Channel, header: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The weights with all pushes of its cut, and no others; nothing, where its hold is over."""
        wanted = cut.from_plain(header["cut"])
        self._cuts.wants(worker, wanted)
        self._changed.notify_all()

        def there() -> bool:
            return not self._cuts.holds(worker) or not cut.missing(wanted, self._store.known)

        self._until(worker, channel, there)
        held = self._cuts.holds(worker)
        length = self._exchange.give(worker, channel, header) if held else 0
        self._cuts.release(worker)
        self._changed.notify_all()
        return {**self._version(), "again": not held}, length

    def _allow(self, pushes: Mapping[str, int]) -> bool:
        return self._cuts.allow(pushes, self._store.known, self._presence.channels)

    def _until(self, worker: str, channel: Channel, there: Callable[[], bool]) -> None:
        while not there():
            self._changed.wait(_HELD_S)
            self._check_current(worker, channel)
            if self._presence.sweep() | self._rounds.complete(self._allow):
                self._changed.notify_all()

    def _wait(self, worker: str, channel: Channel, number: int, gate: int) -> None:
        """Until this worker may go on, as all others have come far enough, or are waited for no more."""
        since, limit_s = time.monotonic(), self._terms.dead_after_s
        while True:
            self._check_current(worker, channel)
            if self._presence.sweep() | self._rounds.complete(self._allow):
                self._changed.notify_all()
            blockers = awaited(self._terms, self._store.known, self._rounds.waiting, worker, number, gate)
            if not blockers:
                return
            late = time.monotonic() - since > limit_s
            if late and blockers == {NEWCOMERS}:
                come = f"{len(self._store.known)} of {self._terms.num_workers} workers have come within {limit_s:g} s"
                raise Refused("missing", f"{come}: see the logs of the others.")
            if late:
                self._evict(blockers)
            else:
                self._changed.wait(min(_LOOK_S, limit_s / 4))

    def _version(self) -> dict[str, Any]:
        if not self._store.ready:
            return {"version": None}
        durable = -1 if self.snapshots is None else self.snapshots.version
        version = self._store.version
        told = {"durable": durable, "incarnation": self._store.incarnation, "in_step": self._in_step()}
        told |= {"restored": self._store.record.get("restored", 0)}
        return {"version": version, **told}

    def _in_step(self) -> bool:
        return self._terms.in_step(self._store.version, self._store.record.get("warmup_steps"))

    def _check_current(self, worker: str, channel: Channel) -> None:
        if self._presence.channels.get(worker) is not channel:
            raise PeerLost(f"worker {worker!r} has another connection, or was evicted.")

    def _gone(self, worker: str | None, channel: Channel) -> None:
        with self._changed:
            if worker is not None and self._presence.channels.get(worker) is channel:
                self._presence.away(worker)
                self._changed.notify_all()

    def _evict(self, workers: set[str]) -> None:
        """What they say under this life counts no more."""
        if workers:
            self._presence.forget(*workers)
            self._changed.notify_all()
