"""A server of one shard: it answers workers, with one thread for each worker and one lock around the store.

A worker may send these requests:

    hello       my name and the id of my process -> the id, and the number of my last push that was applied
    initialise  the first weights; `bring` sends fields of the optimizer's state before
    push        a gradient -> the version that contains it; `part` sends a part of the gradient before
    pull        -> weights of one version
    read        -> weights, or a field of the optimizer's state
    lags        -> how late pushes were
    rest        do not wait for me, except for pushes that are made after this sync point
    leave       do not wait for me any more
    forget      do not wait for these workers any more; any process may send this
    snapshot    write a snapshot now

The server gives each process of a worker an id, its life, at the first hello. One process may use several connections.
Its id becomes invalid when another process takes the worker's name, or when the server forgets the worker. Pushes of
one process are numbered from 1, without gaps, and are applied in this order. A worker repeats a push whose answer was
lost; the server then answers, and does not apply the push again. Each push is therefore applied once, whichever process
dies.
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
from lightning_async.parameter_server.client import Arrived
from lightning_async.parameter_server.consistency import (
    NOT_YET_JOINED,
    WorkerRules,
    awaited,
    live,
    round_due,
    stated_staleness,
)
from lightning_async.parameter_server.optimizers import TooManyRuns
from lightning_async.parameter_server.partition import Spans, common_spans
from lightning_async.parameter_server.snapshots import GONE, RequestError, Shelf, Snapshots, memory_for
from lightning_async.parameter_server.store import Store, said

# Seconds within which a new connection must send its first message.
HELLO_S = 10.0
# Longest wait between two checks for workers that are too late.
_LOOK_S = 0.25
_OF_A_PUSH = ("lag", "dropped", "called")
_IDLE = 0.1  # share of `dead_after_s` by which a clock advances at most between two pushes, or two sweeps


class Server:
    """A server of one shard.

    Args:
        store: Store that holds the shard.
        worker_rules: Rules by which the server treats its workers.
        shelf: Folder of the server's snapshots. Default: None, the server takes no snapshots.
        every_s: Seconds between two snapshots. Default: infinity, a snapshot is taken when a worker asks.
    """

    def __init__(
        self, store: Store, worker_rules: WorkerRules, shelf: Shelf | None = None, every_s: float = math.inf
    ) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._changed = threading.Condition()
        self.snapshots = None if shelf is None else Snapshots(store, self._changed, shelf, every_s)
        self._sessions = WorkerSessions(store, worker_rules)
        self._rounds = SyncRounds(store, worker_rules)
        self._initialization = TableInitialization(store, worker_rules)
        self._transfer = RequestTransfer(store, worker_rules)

    @property
    def connected(self) -> int:
        return len(self._sessions.channels)

    def serve(self, channel: PeerChannel, first: tuple[dict[str, Any], int] | None = None) -> None:
        """Answer one worker until its connection ends. Runs on a thread of its own.

        Args:
            channel: Connection to the worker; closed at the end.
            first: Header and size of a first message that the caller has received already. Default: None, `serve`
                receives the first message.
        """
        worker = None
        try:
            while True:
                header, size = first or channel.receive(HELLO_S if worker is None else None)
                first = None
                length = 0
                try:
                    if worker is not None:
                        reply, length = self._answer(worker, channel, header, size)
                    elif header.get("do") == "forget":
                        self.forget(header["workers"])
                        reply = {}
                    else:
                        worker, reply = self._hello(channel, header)
                except RequestError as refused:
                    reply = {"refused": refused.kind, "why": str(refused)}
                channel.send(reply, length)
        except PeerLost:
            pass  # the other workers continue; this one may connect again
        finally:
            channel.close()
            self._gone(worker, channel)

    def close(self) -> None:
        with self._changed:
            for channel in self._sessions.channels.values():
                channel.break_off()

    def forget(self, names: Sequence[str]) -> None:
        """Stop waiting for these workers, because other processes have found them dead.

        Their processes are refused from now on.
        """
        with self._changed:
            self._evict(set(names) & self._store.known.keys())

    # The methods below run on the workers' threads.

    def _hello(self, channel: PeerChannel, header: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        if header.get("do") != "hello":
            raise RequestError("hello", f"{channel.peer} has not said who it is.")
        worker = str(header["worker"])
        life = header["life"]
        with self._changed:
            self._initialization.check_plan(worker, header["fingerprint"])
            try:
                # The plan is checked first: a worker with another plan must not replace one that trains.
                known = self._sessions.hello(worker, channel, header)
            except ValueError as error:
                raise RequestError("full", str(error)) from error
            if known is None:
                raise RequestError("evicted", f"worker {worker!r} {GONE}")
            # The worker has a new process: pushes of the earlier one that wait in a round would count twice.
            if known["life"] != life:
                self._rounds.drop(worker)
            self._changed.notify_all()
            return worker, {"life": known["life"], "push": known["push"], **self._version()}

    def _answer(
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        if header.get("do") == "snapshot":
            if self.snapshots is None:
                raise RequestError("request", "the server takes no snapshots: it was given no folder for them.")
            try:
                # Outside the lock: other workers are answered while the snapshot is written to disk.
                self.snapshots.take()
            except OSError as error:
                raise RequestError("request", f"the server cannot take a snapshot: {error}") from error
        with self._changed:
            self._check_current(worker, channel)
            # Marked before the answer, which may take long: a worker that waits is not silent.
            self._sessions.record_request(worker, served=False)
            try:
                return self._answer_now(worker, channel, header, size)
            except TooManyRuns as error:
                raise RequestError("settings", str(error)) from error
            finally:
                self._sessions.record_request(worker)

    def _answer_now(
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        do = header.get("do")
        if do == "part":  # a part of the next push; it stays in the channel's memory
            return {}, 0
        if do in ("bring", "initialise"):
            if header.get("anew"):  # the other workers compute gradients at weights that are replaced now
                self._evict(set(self._sessions.channels) - {worker})
            # The memory is the worker's, and stays unchanged until this answer is sent.
            memory = channel.incoming[:size]
            if do == "bring":
                self._initialization.bring(header["field"], memory)
            else:
                self._initialization.begin(header, memory)
            self._changed.notify_all()
            return self._version(), 0
        if do in ("leave", "rest"):
            if do == "leave":
                self._sessions.leave(worker)
            else:
                self._sessions.rest(worker, header["sync_point"])
            self._changed.notify_all()
            return {}, 0
        if not self._store.ready:
            raise RequestError("uninitialised", "the server has no weights: it is new, or its host has lost them.")
        if do == "push":
            return self._push(worker, channel, header, size)
        if do in ("snapshot", "pull"):
            return self._version(), self._transfer.give(worker, channel, header) if do == "pull" else 0
        if do == "lags":
            reply = self._version()
            lost = self._store.record.get("lost", 0)
            kept = {} if self.snapshots is None else {"durable": reply["durable"], "lost": lost}
            return {**reply, "lags": {**self._store.lags, **kept}}, 0
        if do == "read":
            reply = {**self._version(), "fields": self._transfer.fields, "scalars": list(self._store.scalars)}
            return reply, self._transfer.read(channel, header["field"])
        raise RequestError("request", f"worker {worker!r} asks for {do!r}, which is nothing that a server does.")

    def _push(
        self, worker: str, channel: PeerChannel, header: Mapping[str, Any], size: int
    ) -> tuple[dict[str, Any], int]:
        number = header["number"]
        entry = self._store.known[worker]
        filled = None
        # Any other number was either applied already (its answer was lost) or shows that a push is missing.
        if number == said(entry) + 1:
            gradient = self._transfer.arrived(channel, header, size) if header["weight"] > 0.0 else None
            if in_step := self._in_step():
                weight = header["weight"]
                push = Push(
                    number, weight, gradient, header["lr"], header["sync_point"], header["call"], header["skips"]
                )
                self._rounds.put(worker, push)
            elif gradient is not None:
                filled = self._transfer.apply(worker, channel, gradient, header)
            else:
                self._store.count({worker: number})
            if not in_step:
                self._evict(self._sessions.pushed(header["sync_point"]))
        elif number != entry["push"]:
            raise RequestError(
                "request", f"push {number} of worker {worker!r} came after {said(entry)}: one is missing."
            )
        self._changed.notify_all()
        # Also for a repeated push: its worker may still be too far ahead.
        self._wait(worker, channel, number, header["sync_point"])
        entry = self._store.known[worker]
        reply = {**self._version(), "number": number, **{key: entry.get(key, False) for key in _OF_A_PUSH}}
        if not header["pull"]:
            return reply, 0
        return reply, self._transfer.give(worker, channel, header, filled == self._store.version)

    def _wait(self, worker: str, channel: PeerChannel, number: int, sync_point: int) -> None:
        """Wait until the rules let this worker continue after its push; evict workers that keep it waiting too long.

        The caller holds `self._changed`, which the wait releases.

        Args:
            worker: Name of the worker.
            channel: Connection to the worker. Raises PeerLost if it is not the worker's connection any more.
            number: Number of the worker's push.
            sync_point: Number of sync points that the worker has passed.

        Raises:
            RequestError: Too few workers have joined in time.
        """
        since = time.monotonic()
        limit_s = self._worker_rules.dead_after_s
        while True:
            self._check_current(worker, channel)
            if self._sessions.sweep() | self._rounds.complete():
                self._changed.notify_all()
            # Computed again in every turn: workers may have joined, left or pushed during the wait.
            blockers = awaited(self._worker_rules, self._store.known, self._rounds.waiting, worker, number, sync_point)
            if not blockers:
                return
            late = time.monotonic() - since > limit_s
            # Nobody can be evicted for workers that have never come.
            if late and blockers == {NOT_YET_JOINED}:
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
        return {
            "version": self._store.version, "durable": durable, "incarnation": self._store.incarnation,
            "in_step": self._in_step(), "restored": self._store.record.get("restored", 0),
        }  # fmt: skip

    def _in_step(self) -> bool:
        return self._worker_rules.in_step(self._store.version, self._store.record.get("warmup_steps"))

    def _check_current(self, worker: str, channel: PeerChannel) -> None:
        if self._sessions.channels.get(worker) is not channel:
            raise PeerLost(f"worker {worker!r} has another connection, or was evicted.")

    def _gone(self, worker: str | None, channel: PeerChannel) -> None:
        with self._changed:
            # A worker that has connected again has another channel: the end of this one then says nothing about it.
            if worker is not None and self._sessions.channels.get(worker) is channel:
                self._sessions.away(worker)
                self._changed.notify_all()

    def _evict(self, workers: set[str]) -> None:
        if workers:
            # Workers that wait for the evicted ones have to look again, so they are notified below.
            self._sessions.forget(*workers)
            self._changed.notify_all()


class WorkerSessions:
    """The workers of one server: the id of each worker's process, its connection, and how long it has been silent.

    A worker whose connection has ended is away until it connects again from the same process. The server forgets a
    worker that leaves, is silent for too long, or does not come back. It then frees the worker's memory, and refuses
    requests of this process from then on.

    Two clocks measure how long workers are silent or away. Both advance little while no worker is active, so that a
    pause of all workers, such as a validation, evicts nobody. The clock of silence advances when workers push. The
    clock of absence advances at each `sweep`, when workers connect, push or wait. The caller of each method holds the
    server's lock.
    """

    def __init__(self, store: Store, worker_rules: WorkerRules, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._now = now
        self.channels: dict[str, PeerChannel] = {}
        self._clock = 0.0
        self._pushed_at = now()
        self._active_at: dict[str, float] = {}
        self._awake = 0.0
        self._swept_at = now()
        self._away_since = dict.fromkeys(store.workers, 0.0)

    def hello(self, worker: str, channel: PeerChannel, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Admit a worker and return its entry, or return None if the server refuses the worker.

        The server gives each process of a worker an id, its life. A life is refused if the worker was forgotten, if
        another process has taken its name, or if other workers have replaced the weights meanwhile. A worker without a
        life gets a new one.

        Args:
            worker: Name of the worker.
            channel: The worker's new connection; an earlier one is broken off.
            header: The hello: the worker's ``life``, or None; the ``incarnation`` of the store that
                it knows; and ``said``, the number of the last push that it knows was applied. A restored store may know
                neither the life nor that push.

        Raises:
            ValueError: There are too many workers.
        """
        self.sweep()
        workers = self._store.workers
        life = header["life"]
        incarnation = header.get("incarnation")
        if life is not None and incarnation is not None and incarnation == self._store.record.get("replaced"):
            return None  # the worker computes gradients at weights that others have replaced
        known = workers.pop(worker, None)
        restored = self._store.ready and incarnation not in (None, self._store.incarnation)
        if life is None or (restored and (known is None or known["life"] != life)):
            # A worker that joins late begins at the slowest clock, or the others would wait for it to catch up.
            others = [entry["clock"] for entry in workers.values() if entry["live"]]
            known = {"life": self._store.record["lives"] + 1, "push": 0, "clock": min(others, default=0)}
        elif known is None and not self._store.ready:
            known = {"life": life, "push": 0, "clock": 0}
        elif known is None or known["life"] != life:
            return None
        entry = {**known, "live": True, "rests": -1}
        if restored:
            entry["said"] = header["said"]
            self._store.note(lost=self._store.record.get("lost", 0) + max(0, header["said"] - said(known)))
        self._store.remember({**workers, worker: entry})
        if (before := self.channels.get(worker)) is not None:
            # The thread of the earlier connection may still wait for a message: this ends it.
            before.break_off()
        self.channels[worker] = channel
        self._away_since.pop(worker, None)
        self.record_request(worker)
        return known

    def record_request(self, worker: str, served: bool = True) -> None:
        """Record that a worker is active, because it has sent a request.

        Args:
            worker: Name of the worker.
            served: Whether the request has been answered. A worker that waits for an answer is never silent.
        """
        if worker in self.channels:
            self._active_at[worker] = self._clock if served else math.inf

    def pushed(self, sync_point: int = 0) -> set[str]:
        """Advance the clock of silence, because a worker has pushed.

        Returns the live workers that were silent for too long. ``sync_point`` is the number of sync points that the
        worker has passed.
        """
        now = self._now()
        # The minimum keeps a common pause of all workers from counting as silence.
        self._clock += min(now - self._pushed_at, _IDLE * self._worker_rules.dead_after_s)
        self._pushed_at = now
        late = {name for name in self.channels if self._clock - self._active_at[name] > self._worker_rules.dead_after_s}
        return late & live(self._store.known, sync_point) if late else late

    def sweep(self) -> bool:
        """Forget workers that have been away for too long; return whether there were any."""
        now = self._now()
        # The minimum keeps a time in which no worker sends requests from counting in full.
        self._awake += min(now - self._swept_at, _IDLE * self._worker_rules.dead_after_s)
        self._swept_at = now
        limit_s = self._worker_rules.dead_after_s
        late = [name for name, since in self._away_since.items() if self._awake - since > limit_s]
        if late:
            self.forget(*late)
        return bool(late)

    def away(self, worker: str) -> None:
        """Record that a worker's connection has ended: nobody waits for the worker, and it may come back."""
        self._drop(worker)
        self._away_since[worker] = self._awake
        workers = self._store.workers
        workers[worker]["live"] = False
        self._store.remember(workers)

    def rest(self, worker: str, sync_point: int) -> None:
        """Record that pushes up to this sync point need not wait for the worker; later pushes wait for it again.

        Once all workers rest at the sync point, they have the same weights. Their counts of pushes (``clock``) are then
        set to the highest one.
        """
        workers = self._store.workers
        workers[worker]["rests"] = sync_point
        if not live(workers, sync_point):
            ahead = max(entry["clock"] for entry in workers.values())
            workers = {name: {**entry, "clock": ahead} for name, entry in workers.items()}
        self._store.remember(workers)

    def leave(self, worker: str) -> None:
        """Forget a worker that leaves; its connection stays open for the answer."""
        self._drop(worker)
        self.forget(worker)

    def forget(self, *names: str) -> None:
        """Forget workers for good: requests of their processes are refused from now on.

        Pushes that were applied stay applied.
        """
        workers = self._store.workers
        lives = self._store.record["lives"]
        for name in names:
            if (channel := self._drop(name)) is not None:
                channel.break_off()
            self._away_since.pop(name, None)
            if self._store.ready and self._store.version > 0:
                workers.pop(name, None)
            elif name in workers:  # the entry stays: before the first update the server counts workers that came
                lives += 1
                workers[name] = {"life": lives, "push": 0, "clock": 0, "live": False, "rests": -1}
        self._store.remember(workers)

    def _drop(self, worker: str) -> PeerChannel | None:
        self._active_at.pop(worker, None)
        return self.channels.pop(worker, None)


class TableInitialization:
    """The initialization of a server's shard by a worker: weights, optimizer, and the optimizer's state."""

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._brought: dict[str, Tensor] = {}

    def check_plan(self, worker: str, fingerprint: str) -> None:
        """Raise RequestError if the store has weights of another plan of shards than the worker's ``fingerprint``."""
        if self._store.ready and fingerprint != (mine := self._store.contents["fingerprint"]):
            raise RequestError("settings", f"worker {worker!r} comes with plan {fingerprint}, the server has {mine}.")

    def bring(self, field: str, memory: Tensor) -> None:
        """Keep a copy of ``memory``: `begin` uses it as the field ``field`` of the optimizer's state."""
        self._brought[field] = memory.view(torch.float32).clone()

    def begin(self, header: Mapping[str, Any], memory: Tensor) -> None:
        """Initialize the store with the worker's weights in ``memory``, unless the store has weights.

        Raises RequestError if the worker's settings differ from the store's. If the header says ``anew``, weights that
        the store has are replaced.
        """
        # Taken even if the server has weights already, to free the memory.
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
        if policy not in (None, stated := stated_staleness(self._worker_rules.staleness), mine["staleness"]):
            raise RequestError("settings", f"`staleness` is {policy!r} there and {stated!r} on the server.")


class RequestTransfer:
    """The transfer of arrays between a server's store and the memory of workers' channels.

    Views of the channels' memory are kept from one request to the next.
    """

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._decoded = torch.empty(0)
        self._arrived: WeakKeyDictionary[PeerChannel, tuple[tuple[Any, ...], Arrived]] = WeakKeyDictionary()
        self._targets: WeakKeyDictionary[PeerChannel, torch.Tensor] = WeakKeyDictionary()

    def arrived(self, channel: PeerChannel, header: Mapping[str, Any], size: int) -> Arrived:
        """Return a push as the channel received it; raise RequestError if its size is wrong."""
        size = header.get("size", size)
        numel = self._store.contents["numel"]
        before, arrived = self._arrived.get(channel, ((), None))
        if arrived is not None and before == (size, header["compression"], numel):
            return arrived
        try:
            # Kept for the next push of the same size, which finds its views of the memory made.
            arrived = Arrived.of(channel.incoming[:size], header, numel)
        except (TypeError, ValueError) as error:
            raise RequestError("settings", f"{error}.") from error
        self._arrived[channel] = (size, header["compression"], numel), arrived
        return arrived

    def apply(self, worker: str, channel: PeerChannel, gradient: Arrived, header: Mapping[str, Any]) -> int | None:
        """Apply a push to the store.

        Returns:
            The version of the weights that were written to the channel in the same pass; None if none were written.
        """
        if gradient.compression is not None and self._decoded.numel() != gradient.numel:
            self._decoded = torch.empty(gradient.numel)
        values = gradient.floats(self._decoded)
        lag = self._store.version - header["base"]
        target = self._target(channel) if header["pull"] else None
        with memory_for(worker, self._worker_rules):
            there = self._store.push(
                worker, header["number"], values, lag, header["lr"], target, header["of"], header["skips"]
            )
        return self._store.version if there else None

    def give(self, worker: str, channel: PeerChannel, header: Mapping[str, Any], there: bool = False) -> int:
        """Write the weights, or the field that the request names, to the channel for the worker.

        Args:
            worker: Name of the worker.
            channel: Connection to the worker.
            header: The request; ``field`` is the field of the optimizer's state that it asks for, or None for the
                weights.
            there: Whether `apply` has written the weights to the channel already. Default: False.

        Returns:
            The number of bytes for the worker.
        """
        target = self._target(channel)
        field = header.get("field")
        plain = field == "params"
        if not there:
            with memory_for(worker, self._worker_rules):
                self._store.pull(worker, target, header["to"], plain)
        return target.nbytes if field is None or plain else self.read(channel, field)

    def read(self, channel: PeerChannel, field: str) -> int:
        """Copy a field of the state into the channel, for a worker that reads it; return the field's size in bytes.

        Raises RequestError if no field has this name.
        """
        fields = self.fields
        if field not in fields:
            raise RequestError("request", f"there is no {field!r}; there are {sorted(fields)}.")
        self._store.copy_(self._target(channel), field)
        return self._target(channel).nbytes

    @property
    def fields(self) -> list[str]:
        """The names of the arrays that a worker can read: the weights, and the fields of the optimizer's state."""
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
    """A push that waits for its round. `Client.push` describes the fields.

    An empty push has no gradient, and weight 0.
    """

    number: int
    weight: float
    gradient: Arrived | None
    lr: float | None
    sync_point: int
    call: bool
    skips: Spans


class SyncRounds:
    """Rounds of pushes, in the mode ``"sync"`` and in warm-up: each push waits for those of all other live workers.

    The mean of these pushes, weighted by samples, is applied as one update.
    """

    def __init__(self, store: Store, worker_rules: WorkerRules) -> None:
        self._store = store
        self._worker_rules = worker_rules
        self._waiting: dict[str, Push] = {}
        self._sum = self._decoded = torch.empty(0)

    @property
    def waiting(self) -> Collection[str]:
        """The names of the workers whose pushes wait for a round."""
        return self._waiting.keys()

    def put(self, worker: str, push: Push) -> None:
        self._waiting[worker] = push

    def drop(self, worker: str) -> None:
        self._waiting.pop(worker, None)

    def complete(self) -> bool:
        """Apply the waiting pushes as one update, once all live workers have pushed; return whether this was done."""
        if not self._waiting:
            return False
        sync_point = max((push.sync_point for push in self._waiting.values()), default=0)
        if not round_due(self._worker_rules, self._store.version, self._store.known, self._waiting, sync_point):
            return False
        names = sorted(self._waiting)  # one order, so that sums are equal to the bit
        pushes = [self._waiting[name] for name in names]
        numbers = {name: push.number for name, push in zip(names, pushes, strict=True)}
        called = any(push.call for push in pushes)
        if sum(push.weight for push in pushes) > 0.0:
            lr = next((p.lr for p in pushes if p.lr is not None), None)
            # A parameter is stepped if any worker has a gradient for it.
            skips = common_spans([push.skips for push in pushes if push.gradient is not None])
            self._store.apply(self._mean(pushes), numbers, lr, called, skips)
        else:  # all pushes are empty
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
