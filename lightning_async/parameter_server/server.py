"""A server: what it answers to its workers, one thread for each of them, one lock around the store.

    hello       who I am -> which life this is, what was applied of mine        initialise  the first weights
    push        a gradient -> the version that it is in                         read        weights, or optimizer state
    pull        -> weights of one version                                       leave       nobody waits for me any more
    rest        nobody waits for me, until others are beyond this sync point    forget      ... for these; from anybody
    snapshot    have it all on disk                               hold        no push is applied until I pull

A worker has a life: from its first hello on, over any number of connections, until another process comes under its
name, or the others have stopped waiting for it. Pushes of one life are numbered from 1, without gaps, and applied in
order: one that comes again, as its answer was lost, is answered and not applied. So each is applied once, whoever dies.
Only where the memory is lost with its host, pushes are: those that came after the last snapshot. All answers say which
version that holds, and a worker that comes back hears which of its pushes it holds.

`Server` comes first; then its parts, which all work under its lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.p2p import PeerChannel
from lightning_async.errors import PeerLost
from lightning_async.ops.flat_ops import eager
from lightning_async.parameter_server import consistency
from lightning_async.parameter_server.client import Arrived
from lightning_async.parameter_server.consistency import (
    NEWCOMERS,
    WorkerRules,
    awaited,
    live,
    round_due,
    stated_staleness,
)
from lightning_async.parameter_server.snapshots import GONE, RequestError, Shelf, Snapshots, memory_for, take_asked
from lightning_async.parameter_server.store import Store, said

HELLO_S = 10.0
_LOOK_S = 0.25
_HELD_S = 0.02
_OF_A_PUSH = ("lag", "dropped", "called")
_IDLE = 0.1  # of `dead_after_s`: what a clock goes on by at most, between two pushes, or two looks


class Server:
    """A server of one shard.

    Args:
        store: its shard.
        worker_rules: whom it waits for, and which pushes it takes.
        shelf: for its snapshots, of which it takes the newest where the store has no weights. Default: none are taken.
        every_s: seconds between two. Default: they are taken when a worker asks.
    """

    def __init__(
        self, store: Store, worker_rules: WorkerRules, shelf: Shelf | None = None, every_s: float = math.inf
    ) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._changed = threading.Condition()
        self.snapshots = None if shelf is None else Snapshots(store, self._changed, shelf, every_s)
        self._presence = WorkerSessions(store, worker_rules)
        self._rounds = SyncRounds(store, worker_rules)
        self._cuts = consistency.ConsistentReads()
        self._initialization = TableInitialization(store, worker_rules)
        self._transfer = RequestTransfer(store, worker_rules)

    @property
    def connected(self) -> int:
        """Workers that have a connection."""
        return len(self._presence.channels)

    def serve(self, channel: PeerChannel, said: tuple[dict[str, Any], int] | None = None) -> None:
        """Answer one worker until it is gone; on a thread of its own. What it has said already comes first."""
        worker = None
        try:
            while True:
                header, size = said or channel.receive(HELLO_S if worker is None else None)
                said = None
                try:
                    if worker is None and header.get("do") == "forget":
                        reply = self.forget(header["workers"])
                        length = 0
                    elif worker is None:
                        worker, reply = self._hello(channel, header)
                        length = 0
                    else:
                        reply, length = self._answer(worker, channel, header, size)
                except RequestError as refused:
                    reply = {"refused": refused.kind, "why": str(refused)}
                    length = 0
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
        """Stop waiting for these workers: others know that they are lost."""
        with self._changed:
            self._evict(set(names) & self._store.known.keys())
        return {}

    # All below are called by the workers' threads

    def _hello(self, channel: PeerChannel, header: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if header.get("do") != "hello":
            raise RequestError("hello", f"{channel.peer} has not said who it is.")
        worker = str(header["worker"])
        life = header["life"]
        with self._changed:
            self._initialization.check_plan(worker, header["fingerprint"])
            try:
                known = self._presence.hello(worker, channel, header)
            except ValueError as error:
                raise RequestError("full", str(error)) from error
            if known is None:
                raise RequestError("evicted", f"worker {worker!r} {GONE}")
            self._cuts.release(worker)
            if known["life"] != life:
                self._rounds.drop(worker)
            self._changed.notify_all()
            return worker, {"life": known["life"], "push": known["push"], **self._version()}

    def _answer(
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
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
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        do = header.get("do")
        if do == "part":  # of a push to come, in the channel's memory
            return {}, 0
        if do in ("bring", "initialise"):
            if header.get("anew"):  # what others compute is of weights that there are no more
                self._evict(set(self._presence.channels) - {worker})
            memory = channel.incoming[:size]
            self._initialization.bring(header["field"], memory) if do == "bring" else self._initialization.begin(
                header, memory
            )
            self._changed.notify_all()
            return self._version(), 0
        if do in ("leave", "rest"):
            self._presence.leave(worker) if do == "leave" else self._presence.rest(worker, header["sync_point"])
            self._changed.notify_all()
            return {}, 0
        if not self._store.ready:
            raise RequestError("uninitialised", "the server has no weights: it is new, or its host has lost them.")
        if do == "push":
            return self._push(worker, channel, header, size)
        if do == "hold":
            self._cuts.hold(worker, header["limit_s"])
            return {"cut": consistency.plain(consistency.applied_by(self._store.known))}, 0
        if do == "pull" and "cut" in header:
            return self._pull_at(worker, channel, header)
        if do in ("snapshot", "pull"):
            return self._version(), self._transfer.give(worker, channel, header) if do == "pull" else 0
        if do == "lags":
            told = self._version()
            lost = self._store.record.get("lost", 0)
            kept = {} if self.snapshots is None else {"durable": told["durable"], "lost": lost}
            return {**told, "lags": {**self._store.lags, **kept}}, 0
        if do == "read":
            told = {**self._version(), "fields": self._transfer.fields, "scalars": dict(self._store.scalars)}
            return told, self._transfer.read(channel, header["field"])
        raise RequestError("request", f"worker {worker!r} asks for {do!r}, which is nothing that a server does.")

    def _push(
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        number = header["number"]
        told = self._store.known[worker]
        filled = None
        if number == said(told) + 1:
            self._until(worker, channel, lambda: self._allow({worker: number}))
            gradient = self._transfer.arrived(channel, header, size) if header["weight"] > 0.0 else None
            if in_step := self._in_step():
                weight = header["weight"]
                push = Push(number, weight, gradient, header["lr"], header["sync_point"], header["call"])
                self._rounds.put(worker, push)
            elif gradient is not None:
                filled = self._transfer.apply(worker, channel, gradient, header)
            else:
                self._store.count({worker: number})
            if not in_step:
                self._evict(self._presence.pushed(header["sync_point"]))
        elif number != told["push"]:
            raise RequestError(
                "request", f"push {number} of worker {worker!r} came after {said(told)}: one is missing."
            )
        self._changed.notify_all()
        self._wait(worker, channel, number, header["sync_point"])
        told = self._store.known[worker]
        reply = {**self._version(), "number": number, **{key: told.get(key, False) for key in _OF_A_PUSH}}
        if not header["pull"]:
            return reply, 0
        return reply, self._transfer.give(worker, channel, header, filled == self._store.version)

    def _pull_at(self, worker: str, channel: PeerChannel, header: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Give the weights with all pushes of the worker's cut, and no others; nothing, where its hold is over."""
        wanted = consistency.from_plain(header["cut"])
        self._cuts.wants(worker, wanted)
        self._changed.notify_all()

        def there() -> bool:
            return not self._cuts.holds(worker) or not consistency.missing(wanted, self._store.known)

        self._until(worker, channel, there)
        held = self._cuts.holds(worker)
        length = self._transfer.give(worker, channel, header) if held else 0
        self._cuts.release(worker)
        self._changed.notify_all()
        return {**self._version(), "again": not held}, length

    def _allow(self, pushes: Mapping[str, int]) -> bool:
        return self._cuts.allow(pushes, self._store.known, self._presence.channels)

    def _until(self, worker: str, channel: PeerChannel, there: Callable[[], bool]) -> None:
        while not there():
            self._changed.wait(_HELD_S)
            self._check_current(worker, channel)
            if self._presence.sweep() | self._rounds.complete(self._allow):
                self._changed.notify_all()

    def _wait(self, worker: str, channel: PeerChannel, number: int, sync_point: int) -> None:
        """Wait until this worker may go on, as all others have come far enough, or are waited for no more."""
        since = time.monotonic()
        limit_s = self._worker_rules.dead_after_s
        while True:
            self._check_current(worker, channel)
            if self._presence.sweep() | self._rounds.complete(self._allow):
                self._changed.notify_all()
            blockers = awaited(self._worker_rules, self._store.known, self._rounds.waiting, worker, number, sync_point)
            if not blockers:
                return
            late = time.monotonic() - since > limit_s
            if late and blockers == {NEWCOMERS}:
                wanted = self._worker_rules.num_workers
                come = f"{len(self._store.known)} of {wanted} workers have come within {limit_s:g} s"
                raise RequestError("missing", f"{come}: see the logs of the others.")
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
        return self._worker_rules.in_step(self._store.version, self._store.record.get("warmup_steps"))

    def _check_current(self, worker: str, channel: PeerChannel) -> None:
        if self._presence.channels.get(worker) is not channel:
            raise PeerLost(f"worker {worker!r} has another connection, or was evicted.")

    def _gone(self, worker: str | None, channel: PeerChannel) -> None:
        with self._changed:
            if worker is not None and self._presence.channels.get(worker) is channel:
                self._presence.away(worker)
                self._changed.notify_all()

    def _evict(self, workers: set[str]) -> None:
        """Forget these workers: what they say under this life counts no more."""
        if workers:
            self._presence.forget(*workers)
            self._changed.notify_all()


class WorkerSessions:
    """The workers of one server: their lives, their connections, and how long each has been silent.

    A worker whose connection ends is away, and connected again once it says hello under its life. It is forgotten
    where it leaves, is silent for too long, or does not come back; what it had of its own is given back then. If it
    comes back under its life after that, it is refused: lives are counted over all workers, so nobody else has it.

    Others' work measures silence: that clock goes on while others push, and by little while nobody does, so that a
    pause of all, as for a validation, is nobody's silence. The clock of being away goes on while others ask.

    Args:
        store: that remembers them.
        worker_rules: how long a worker may be silent.
        now: seconds. Default: the system's clock.
    """

    def __init__(self, store: Store, worker_rules: WorkerRules, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._now = now
        self.channels: dict[str, PeerChannel] = {}
        """Of those that are connected."""
        self._clock = 0.0
        self._pushed_at = now()
        self._heard: dict[str, float] = {}
        self._awake = 0.0
        self._swept_at = now()
        self._away_since = dict.fromkeys(store.workers, 0.0)

    def hello(self, worker: str, channel: PeerChannel, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Let a worker in; what is known of it. None: it has been forgotten, or another has come under its name.

        Args:
            header: its ``life``, if it has one; its ``client``'s own name; the ``incarnation`` of the store that it
                knows: one that was restored may never have heard of it, or less than the worker was ``said``.

        Raises:
            ValueError: there is no room for it.
        """
        self.sweep()
        workers = self._store.workers
        life = header["life"]
        incarnation = header.get("incarnation")
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
        """Note that a worker has spoken; it is not silent while it waits for the answer, until it is ``served``."""
        if worker in self.channels:
            self._heard[worker] = self._clock if served else math.inf

    def pushed(self, sync_point: int = 0) -> set[str]:
        """Note a push from beyond so many sync points; return which live workers have been silent for too long."""
        now = self._now()
        self._clock += min(now - self._pushed_at, _IDLE * self._worker_rules.dead_after_s)
        self._pushed_at = now
        late = {name for name in self.channels if self._clock - self._heard[name] > self._worker_rules.dead_after_s}
        return late & live(self._store.known, sync_point) if late else late

    def sweep(self) -> bool:
        """Forget workers that have been away for too long; return whether there are any."""
        now = self._now()
        self._awake += min(now - self._swept_at, _IDLE * self._worker_rules.dead_after_s)
        self._swept_at = now
        late = [
            name for name, since in self._away_since.items() if self._awake - since > self._worker_rules.dead_after_s
        ]
        if late:
            self.forget(*late)
        return bool(late)

    def away(self, worker: str) -> None:
        """Note that a worker's connection has ended: nobody waits for it, it may come back, and its pushes count."""
        self._drop(worker)
        self._away_since[worker] = self._awake
        workers = self._store.workers
        workers[worker]["live"] = False
        self._store.remember(workers)

    def rest(self, worker: str, sync_point: int) -> None:
        """Have nobody wait for a worker until somebody comes from beyond that sync point. Beyond one that all rest at,
        where they have the same weights, nobody is ahead of anybody."""
        workers = self._store.workers
        workers[worker]["rests"] = sync_point
        if not live(workers, sync_point):
            ahead = max(told["clock"] for told in workers.values())
            workers = {name: {**told, "clock": ahead} for name, told in workers.items()}
        self._store.remember(workers)

    def leave(self, worker: str) -> None:
        """Forget a worker that goes by itself, and is still to be answered."""
        self._drop(worker)
        self.forget(worker)

    def forget(self, *names: str) -> None:
        """Forget workers for good: what they say under their lives counts no more, what they have pushed does."""
        workers = self._store.workers
        lives = self._store.record["lives"]
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

    def _drop(self, worker: str) -> PeerChannel | None:
        self._heard.pop(worker, None)
        return self.channels.pop(worker, None)


class TableInitialization:
    """How a server gets its first weights: a worker brings them, with the optimizer's state, and what they are for."""

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._brought: dict[str, Tensor] = {}

    def check_plan(self, worker: str, fingerprint: str) -> None:
        """Check that a worker has the plan that the weights are of; raise RequestError, where it has not."""
        if self._store.ready and fingerprint != (mine := self._store.contents["fingerprint"]):
            raise RequestError("settings", f"worker {worker!r} comes with plan {fingerprint}, the server has {mine}.")

    def bring(self, field: str, memory: Tensor) -> None:
        """A field of the optimizer's state, for `begin`."""
        self._brought[field] = memory.view(torch.float32).clone()

    def begin(self, header: Mapping[str, Any], memory: Tensor) -> None:
        """Take these weights, where there are none, or where others are to begin ``anew``.

        Raises:
            RequestError: there is no such optimizer, or another one, or what was brought for it is not there.
        """
        state = {name: self._brought.pop(name, None) for name in header["fields"]}
        if header["anew"] or not self._store.ready:
            self._begin(header, memory.view(torch.float32), state)
        self._check(header)

    def _begin(self, header: Mapping[str, Any], params: Tensor, state: dict[str, Tensor | None]) -> None:
        if missing := [name for name, field in state.items() if field is None]:
            raise RequestError(
                "uninitialised", f"{missing} were brought to the server that was here before: start again."
            )
        try:
            policy = self._worker_rules.policy(header["optimizer"], header["arguments"])
            before = self._store.incarnation if self._store.ready else None
            if self._store.ready:
                self._store.clear()
            theirs = (header["optimizer"], header["arguments"], header["fingerprint"])
            self._store.initialise(params, *theirs, policy, state, header["scalars"])  # pyright: ignore
            self._store.note(warmup_steps=header.get("warmup_steps"), replaced=before)
        except (TypeError, ValueError) as error:
            raise RequestError("settings", str(error)) from error

    def _check(self, header: Mapping[str, Any]) -> None:
        mine = self._store.contents
        for name in ("optimizer", "arguments", "fingerprint"):
            if mine[name] != header[name]:
                raise RequestError("settings", f"`{name}` is {header[name]!r} there and {mine[name]!r} on the server.")
        policy = header.get("staleness")
        if policy not in (None, told := stated_staleness(self._worker_rules.staleness), mine["staleness"]):
            raise RequestError("settings", f"`staleness` is {policy!r} there and {told!r} on the server.")


class RequestTransfer:
    """Transfer between a server's store and the memory of workers' channels; views of a channel's memory are kept."""

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._decoded = torch.empty(0)
        self._arrived: WeakKeyDictionary[PeerChannel, tuple[tuple[Any, ...], Arrived]] = WeakKeyDictionary()
        self._targets: WeakKeyDictionary[PeerChannel, torch.Tensor] = WeakKeyDictionary()

    def arrived(self, channel: PeerChannel, header: Mapping[str, Any], size: int) -> Arrived:
        """Return a push as it came; raise RequestError, where it is of another size."""
        size = header.get("size", size)
        numel = self._store.contents["numel"]
        before, arrived = self._arrived.get(channel, ((), None))
        if arrived is not None and before == (size, header["compression"], numel):
            return arrived
        try:
            arrived = Arrived.of(channel.incoming[:size], header, numel)
        except (TypeError, ValueError) as error:
            raise RequestError("settings", f"{error}.") from error
        self._arrived[channel] = (size, header["compression"], numel), arrived
        return arrived

    def apply(self, worker: str, channel: PeerChannel, gradient: Arrived, header: Mapping[str, Any]) -> int | None:
        """Apply it; the version that the channel has for the worker now, if any."""
        if gradient.compression is not None and self._decoded.numel() != gradient.numel:
            self._decoded = torch.empty(gradient.numel)
        values = gradient.floats(self._decoded)
        lag = self._store.version - header["base"]
        target = self._target(channel) if header["pull"] else None
        with memory_for(worker, self._worker_rules):
            there = self._store.push(worker, header["number"], values, lag, header["lr"], target, header["of"])
        return self._store.version if there else None

    def give(self, worker: str, channel: PeerChannel, header: Mapping[str, Any], there: bool = False) -> int:
        """Put what a worker pulls into the channel, unless it is there, or a field in its place; how many bytes."""
        target = self._target(channel)
        field = header.get("field")
        plain = field == "params"
        if not there:
            with memory_for(worker, self._worker_rules):
                self._store.pull(worker, target, header["to"], plain)
        return target.nbytes if field is None or plain else self.read(channel, field)

    def read(self, channel: PeerChannel, field: str) -> int:
        """Put a field into the channel and return how many bytes; raise RequestError, where there is none."""
        fields = self.fields
        if field not in fields:
            raise RequestError("request", f"there is no {field!r}; there are {sorted(fields)}.")
        self._store.copy_(self._target(channel), field)
        return self._target(channel).nbytes

    @property
    def fields(self) -> list[str]:
        """That can be read."""
        return ["params", *self._store.state]

    def _target(self, channel: PeerChannel) -> torch.Tensor:
        numel = self._store.contents["numel"]
        found = self._targets.get(channel)
        if found is None or found.numel() != numel:
            size = numel * torch.float32.itemsize
            if channel.outgoing.numel() < size:
                raise RequestError("settings", f"a shard of {size} bytes is asked for, with memory for fewer.")
            found = self._targets[channel] = channel.outgoing[:size].view(torch.float32)
        return found


@dataclass
class Push:
    """A push that waits.

    Args:
        number: of its worker's.
        weight: samples that it is the mean of; 0 where there is nothing in it.
        gradient: None where there is nothing in it.
        lr: in place of the optimizer's own.
        sync_point: that its worker has come from.
        call: all are to hear of it.
    """

    number: int
    weight: float
    gradient: Arrived | None
    lr: float | None
    sync_point: int
    call: bool = False


class SyncRounds:
    """Pushes that wait for those of all others, and become one update: their mean, weighted by samples."""

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._waiting: dict[str, Push] = {}
        self._sum = self._decoded = torch.empty(0)

    @property
    def waiting(self) -> Collection[str]:
        """Workers whose pushes wait."""
        return self._waiting.keys()

    def put(self, worker: str, push: Push) -> None:
        """Have this push of a worker wait from now on."""
        self._waiting[worker] = push

    def drop(self, worker: str) -> None:
        """Drop the push of a worker that has begun another life."""
        self._waiting.pop(worker, None)

    def complete(self, allow: Callable[[Mapping[str, int]], bool] = lambda pushes: True) -> bool:
        """Apply the pushes that wait, where they are of all live workers; return whether they were.

        Args:
            allow: whether these pushes may be. Default: any may.
        """
        if not self._waiting:
            return False
        sync_point = max((push.sync_point for push in self._waiting.values()), default=0)
        if not round_due(self._worker_rules, self._store.version, self._store.known, self._waiting, sync_point):
            return False
        names = sorted(self._waiting)  # one order, so that sums are equal to the bit
        pushes = [self._waiting[name] for name in names]
        numbers = {name: push.number for name, push in zip(names, pushes, strict=True)}
        if not allow(numbers):
            return False
        called = any(push.call for push in pushes)
        if sum(push.weight for push in pushes) > 0.0:
            lr = next((p.lr for p in pushes if p.lr is not None), None)
            self._store.apply(self._mean(pushes), numbers, lr, called)
        else:  # nobody has anything
            self._store.count(numbers, called)
        self._waiting.clear()
        return True

    def _mean(self, pushes: list[Push]) -> Tensor:
        total = sum(push.weight for push in pushes)
        filled = [(push.gradient, push.weight) for push in pushes if push.gradient is not None]
        numel = self._store.contents["numel"]
        if any(gradient.compression for gradient, _ in filled):
            self._decoded = _room(self._decoded, numel)
        if len(filled) == 1:
            return filled[0][0].floats(self._decoded)
        self._sum = _room(self._sum, numel).zero_()
        for gradient, weight in filled:
            eager(ops.accumulate_)(self._sum, gradient.floats(self._decoded), weight / total)
        return self._sum


def _room(before: Tensor, numel: int) -> Tensor:
    return before if before.numel() == numel else torch.empty(numel)
