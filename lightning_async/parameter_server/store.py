"""A server's shard, in memory that outlives the server: weights, optimizer state, and which pushes were applied.

    journal: record of version 7, bank 1      bank 0: version 6, then what becomes of 7
                                              bank 1: version 7, read
    an update: bank 1 --- gradient ---> bank 0, then one record: version 8, bank 0, the worker's push is applied

A server that is killed in between leaves version 7 as it was; with the record, version 8 is there, and so is the note
whose push it holds. So an update and its acknowledgement are whole or absent, together. `ShardArrays` holds the arrays
and the record.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_async.algorithms.staleness import UNCORRECTED, StalenessPolicy, Weight, described, make_policy
from lightning_async.parameter_server.optimizers import DanaStep, ServerOptimizer, begun, make_optimizer
from lightning_async.parameter_server.shared_memory import ROOM, SIZE, Arrays, Journal, SharedArrays, mapped
from lightning_async.parameter_server.update import (
    AHEAD,
    BUFFER,
    MOMENTUM,
    PULLED,
    Means,
    ShardUpdates,
    StateBeforePush,
    kept_arrays,
    own_arrays,
    shared_arrays,
)

_SINGLE = 32  # lags that a histogram counts one by one
BOTH = 2
"""Flag in ``bank``: both places of what a worker has pulled are in use."""
LOST_LIVES = 1 << 32
"""Lives that may have been given after a snapshot, and must not be given again."""
_WORKER_BYTES = 214  # of a worker's entry in the journal, beside its name
_GROWTH_BYTES = 2048  # by which the rest of the record may grow

Record = Mapping[str, Any]
"""What a store remembers beside its arrays.

``workers`` holds for each name: its ``life``; its ``client``'s id; the last applied ``push``, with its ``lag``, whether
it was ``dropped``, and whether all were ``called`` with it; its ``clock``; whether it is ``live``; the sync point that
it ``rests`` at; its ``slot`` of memory, and the valid ``bank`` of that; after the loss of a server's memory, the number
of the push that the worker had ``said`` was applied. ``lives`` is the highest life so far.
"""


class Store:
    """One server's shard.

    Args:
        descriptor: of an anonymous file, empty or as a store has left it; OSError where there is no memory.
        threads: that work on a large shard. Default: 1.
    """

    def __init__(self, descriptor: int, threads: int = 1) -> None:
        self._held = ShardArrays(descriptor, threads)
        self._policy: StalenessPolicy = UNCORRECTED
        self._optimizer: ServerOptimizer | None = None
        if self.ready:
            self._map(self.record, known=True)
            self._held.free()

    @property
    def ready(self) -> bool:
        """Whether there are weights."""
        return "version" in self._held.record

    @property
    def version(self) -> int:
        """Updates since the first weights."""
        return self._held.record["version"]

    @property
    def contents(self) -> Mapping[str, Any]:
        """The number of weights, their optimizer and policy, and the plan's fingerprint."""
        return self._held.record["contents"]

    @property
    def params(self) -> Tensor:
        """The weights of `version`; unchanged until the second update from now."""
        return self._held.bank["params"]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The fields of optimizer and policy."""
        return {name: tensor for name, tensor in self._held.bank.items() if name not in ("params", AHEAD, BUFFER)}

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """All arrays of the weights' size, by name."""
        return self._held.parts

    @property
    def record(self) -> Mapping[str, Any]:
        return self._held.record

    @property
    def incarnation(self) -> str:
        """An id that changes where versions do not follow on those before, as in a store that was restored."""
        return self.record["incarnation"]

    @property
    def scalars(self) -> Mapping[str, float]:
        return self.record["scalars"]

    @property
    def lags(self) -> Mapping[str, Any]:
        """The histogram of lag, see `counted`, with the ``mean`` of recent lags."""
        return {**self.record["lags"], "mean": Means(*self.record["means"]).lag}

    @property
    def workers(self) -> dict[str, dict[str, Any]]:
        """A copy of the workers' entries in the record, to be changed and given to `remember`."""
        return {name: dict(entry) for name, entry in self.known.items()}

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """The workers' entries, read-only."""
        return self._held.record["workers"]

    def initialise(
        self,
        params: Tensor,
        optimizer: str,
        arguments: Mapping[str, Any],
        fingerprint: str = "",
        policy: StalenessPolicy = UNCORRECTED,
        state: Mapping[str, Tensor] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Begin with these weights, version 0: fp32, flat.

        Args:
            optimizer, arguments: see `make_optimizer`.
            fingerprint: of the plan.
            policy: of staleness.
            state, scalars: of the optimizer; momenta of workers' own begin anew.

        Raises:
            ValueError: there are weights; or the optimizer is unknown, not for the policy, or has no such state.
        """
        self._check_empty()
        contents = {
            "numel": params.numel(), "optimizer": optimizer, "arguments": dict(arguments), "fingerprint": fingerprint,
            "staleness": described(policy),
        }  # fmt: skip
        record = {
            **self.record, "version": 0, "bank": 0, "scalars": begun(state, scalars), "contents": contents,
            "means": (0.0, 0) * 2, "lags": {"counts": {}, "dropped": 0}, "gathered": 0, "buffer": 0,
            "incarnation": secrets.token_hex(8),
        }  # fmt: skip
        self._map(record)
        if unknown := (state or {}).keys() - self._held.shard.banks[0].keys():
            raise ValueError(f"`optimizer={optimizer!r}` has no {sorted(unknown)} in its state.")
        self._held.fill(params, {} if policy.momentum_by_worker else state or {})
        self._held.commit(record)

    def clear(self) -> None:
        """Drop the weights; workers are remembered."""
        self._optimizer = None
        self._held.clear()

    def restore(self, record: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
        """Go on with the `record` and the `parts` of a snapshot; raise ValueError where there are weights."""
        self._check_empty()
        self._map(record, known=True)
        self._held.record = dict(record)
        for name, field in self.parts.items():
            field.copy_(parts[name])
        self.note(**restored(record))

    def note(self, **entries: Any) -> None:
        self._held.commit({**self.record, **entries})

    def push(
        self, worker: str, number: int, gradient: Tensor, lag: int, lr: float | None = None,
        reply: Tensor | None = None, spare: bool = False,
    ) -> bool:  # fmt: skip
        """Apply one worker's push, as the policy decides; return whether ``reply`` was filled.

        Args:
            number: of the push.
            gradient: fp32, bf16 or fp16, flat.
            lag: updates since its worker has pulled.
            lr: in place of the optimizer's own.
            reply: memory of the shard's size; filled as by `pull` where that costs nothing.
            spare: it was computed at what was pulled to the worker's spare place.

        Raises:
            OSError: there is no memory for what is kept of the worker.
        """
        policy = self._policy
        updates = self._updates()
        own = self._held.own(worker, spare)
        if PULLED in own[0]:  # what is kept of a pull counts with it, and not before the push is there
            reply = None
        bank = self.known[worker].get("bank", 0)
        before = self._held.before(own, bank & ~BOTH)
        weight = updates.weigh(before, gradient, lag)
        means = before.means.with_lag(lag, policy.decay)
        changes: dict[str, Any] = {"lags": counted(self.record["lags"], lag, dropped=weight is None), "means": means}
        if weight is not None and before.gathered + 1 < policy.buffer_size:
            updates.gather(before, gradient, weight)
            changes.update(gathered=before.gathered + 1, buffer=1 - self.record["buffer"])
            reply = None
        elif weight is not None:
            scalars, means = updates.step(before._replace(means=means), gradient, weight, lr, reply=reply)
            changes.update(self._stepped(scalars), means=means, gathered=0)
        applied = {"lag": lag, "dropped": weight is None}
        if own_arrays(policy) and weight is not None:
            applied["bank"] = bank ^ 1
        workers = with_pushes(self.known, {worker: number}, applied)
        self._held.commit({**self.record, **changes, "workers": workers})
        return weight is not None and reply is not None

    def apply(self, gradient: Tensor, pushes: Mapping[str, int], lr: float | None = None, called: bool = False) -> int:
        """Make the next version of a gradient that several workers have made together; return the version.

        A gradient that is not finite changes nothing, and its pushes are counted.

        Args:
            gradient: as of `push`.
            pushes: number of each worker's push.
            lr: in place of the optimizer's own.
            called: whether one of them has called all workers.
        """
        updates = self._updates()
        changes = dict[str, Any]()
        if updates.is_finite(gradient):
            scalars, means = updates.step(self._held.before(), gradient, Weight(), lr, late=False)
            changes = {**self._stepped(scalars), "means": means}
        workers = with_pushes(self.known, pushes, {"lag": 0, "dropped": not changes, "called": called})
        self._held.commit({**self.record, **changes, "workers": workers})
        return self.version

    def count(self, pushes: Mapping[str, int], called: bool = False) -> None:
        self.remember(with_pushes(self.known, pushes, {"lag": 0, "dropped": False, "called": called}))

    def pull(self, worker: str, target: Tensor, spare: bool = False, plain: bool = False) -> None:
        """Copy what a worker computes its next gradient at, or the ``plain`` weights, to ``target``."""
        kept = self._held.own(worker, spare)[0].get(PULLED)
        seen = self.params if plain else self._held.visible
        self._held.shard.copy(*((each, seen) for each in (target, kept) if each is not None))

    def remember(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the workers' entries, and free the memory of those that are gone. ValueError: there are too many."""
        if len(workers) > len(self.record["workers"]):
            check_room(self.record, workers)
        lives = max([self.record["lives"], *(entry["life"] for entry in workers.values())])
        record = {**self.record, "workers": {name: dict(entry) for name, entry in workers.items()}, "lives": lives}
        if not self.ready:
            self._held.record = record  # it comes with the first weights: a server without has nothing to lose
            return
        slots = slots_of(record)
        gone = {slot: bank for slot, bank in slots_of(self.record).items() if slot not in slots}
        if gone and isinstance(self._optimizer, DanaStep):
            momenta = [self._held.shard.slot(slot)[bank][MOMENTUM] for slot, bank in gone.items()]
            before = self._held.before()
            self._optimizer.without(before.old, before.new, momenta, before.scalars)
            record["bank"] = 1 - record["bank"]
        self._held.commit(record)
        if gone:
            self._held.free()

    def copy_(self, target: Tensor, field: str = "params") -> None:
        """Copy `params`, or a field of the `state`."""
        self._held.shard.copy((target, self._held.bank[field]))

    def copy_parts(self, targets: Mapping[str, Tensor]) -> None:
        parts = self.parts
        self._held.shard.copy(*((target, parts[name]) for name, target in targets.items()))

    def close(self) -> None:
        """Free the memory; another process with the file keeps it."""
        self._optimizer = None
        self._held.close()

    def _check_empty(self) -> None:
        if self.ready:
            raise ValueError(f"the store has weights already, of version {self.version}.")

    def _updates(self) -> ShardUpdates:
        assert self._optimizer is not None, "the store has no weights"
        return ShardUpdates(self._policy, self._optimizer, self._held.shard.share_out)

    def _stepped(self, scalars: Mapping[str, float]) -> dict[str, Any]:
        return {"version": self.version + 1, "bank": 1 - self.record["bank"], "scalars": scalars}

    def _map(self, record: Mapping[str, Any], known: bool = False) -> None:
        contents = record["contents"]
        policy = make_policy(contents["staleness"])
        given = (contents["optimizer"], contents["arguments"])
        optimizer = make_optimizer(*given, known=known, momentum_by_worker=policy.momentum_by_worker)
        self._held.map(contents["numel"], policy, optimizer)
        self._optimizer = optimizer
        self._policy = policy


class ShardArrays:
    """The record and the arrays of one server.

    What is updated has two places, and the record says which of them is valid. The weights that a worker has pulled
    have one: they are written before the worker is answered, and a worker without an answer asks again before it
    pushes. A worker that pulls while it computes a gradient at earlier weights has two, and says which one it means.
    """

    def __init__(self, descriptor: int, threads: int) -> None:
        self._descriptor = descriptor
        self._threads = threads
        self.journal = Journal(mapped(descriptor, 0, SIZE))
        self.record: dict[str, Any] = self.journal.record or {"workers": {}, "lives": 0}
        """As in the journal; only in memory before there are weights."""
        self._shard: SharedArrays | None = None
        self._own: tuple[str, ...] = ()
        self._kept: tuple[str, ...] = ()

    @property
    def shard(self) -> SharedArrays:
        assert self._shard is not None, "the store has no weights"
        return self._shard

    @property
    def bank(self) -> Arrays:
        """The valid bank of shared arrays."""
        return self.shard.banks[self.record["bank"]]

    @property
    def visible(self) -> Tensor:
        bank = self.bank
        return bank[AHEAD if AHEAD in bank else "params"]

    @property
    def parts(self) -> dict[str, Tensor]:
        parts = dict(self.before().old)
        for slot, bank in slots_of(self.record).items():
            parts |= {f"{name} {slot}": array for name, array in self.shard.slot(slot)[bank].items()}
        for slot in (entry["slot"] for entry in self.record["workers"].values() if entry.get("bank", 0) & BOTH):
            parts |= {f"{name} {slot}, spare": array for name, array in self.shard.spare(slot).items()}
        return parts

    def map(self, numel: int, policy: StalenessPolicy, optimizer: ServerOptimizer) -> None:
        """Map the arrays that these two need, as they are in the file."""
        self._own = own_arrays(policy)
        self._kept = kept_arrays(policy)
        shared = shared_arrays(policy, optimizer)
        self._shard = SharedArrays(self._descriptor, numel, shared, self._own, self._kept, self._threads)

    def fill(self, params: Tensor, state: Mapping[str, Tensor]) -> None:
        """Fill the first shared bank: the weights, and fields of the optimizer's state; zeros for all others."""
        for name, field in self.shard.banks[0].items():
            if name in ("params", AHEAD):
                field.copy_(params)
            elif name in state:
                field.copy_(state[name])
            else:
                field.zero_()

    def clear(self) -> None:
        """Drop the weights, and all that is a worker's own."""
        own = ("slot", "bank")
        entries = self.record["workers"].items()
        workers = {name: {key: entry[key] for key in entry if key not in own} for name, entry in entries}
        self.commit({"workers": workers, "lives": self.record["lives"]})
        self.shard.close()
        self._shard = None

    def commit(self, record: dict[str, Any]) -> None:
        """Write the record; it is valid from when this returns, and not before."""
        self.journal.write(record)
        self.record = record

    def before(self, own: tuple[Arrays, Arrays] = ({}, {}), bank: int = 0) -> StateBeforePush:
        """Return what an update finds, with the arrays of its worker's `own` and their valid ``bank``."""
        # Fields are in the banks with the first step: one that makes its own then has nothing to begin with.
        banks = self.shard.banks
        here = self.record["bank"]
        buffer = self.record["buffer"]
        old = {**banks[here], **own[bank]}
        new = {**banks[1 - here], **own[1 - bank]}
        if BUFFER in old:
            old[BUFFER] = banks[buffer][BUFFER]
            new[BUFFER] = banks[1 - buffer][BUFFER]
        scalars = dict(self.record["scalars"])
        means = Means(*self.record["means"])
        return StateBeforePush(old, new, scalars, means, self.record["gathered"])

    def own(self, worker: str, spare: bool = False) -> tuple[Arrays, Arrays]:
        """Return a worker's own arrays, twice; they stay until the worker is forgotten. OSError: there is no memory.

        Args:
            spare: with the second place of what it has pulled, in place of the first one.
        """
        if not (self._own or self._kept):
            return {}, {}
        entry = self.record["workers"][worker]
        if "slot" not in entry:
            used = slots_of(self.record)
            entry = {**entry, "slot": next(slot for slot in range(len(used) + 1) if slot not in used), "bank": 0}
            first, _ = self.shard.slot(entry["slot"])
            if MOMENTUM in first:
                first[MOMENTUM].zero_()
            if PULLED in first:
                first[PULLED].copy_(self.visible)
            self.commit({**self.record, "workers": {**self.record["workers"], worker: entry}})
        old, new = self.shard.slot(entry["slot"])
        if not (spare and self._kept):
            return old, new
        other = self.shard.spare(entry["slot"])
        if not entry["bank"] & BOTH:
            other[PULLED].copy_(old[PULLED])
            entry = {**entry, "bank": entry["bank"] | BOTH}
            self.commit({**self.record, "workers": {**self.record["workers"], worker: entry}})
        return {**old, **other}, {**new, **other}

    def free(self) -> None:
        """Free the slots that no worker has."""
        self.shard.keep_only(slots_of(self.record))

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def counted(lags: Mapping[str, Any], lag: int, dropped: bool = False) -> dict[str, Any]:
    """Return the histogram with one more push; its keys are strings, as in JSON.

    Small lags have a bin each, others share those by powers of two.

    >>> counted(counted({"counts": {}, "dropped": 0}, 3), 40, dropped=True)
    {'counts': {'3': 1, '32': 1}, 'dropped': 1}
    """
    counts = lags["counts"]
    key = str(lag if lag < _SINGLE else 1 << (lag.bit_length() - 1))
    return {"counts": {**counts, key: counts.get(key, 0) + 1}, "dropped": lags["dropped"] + dropped}


def in_words(lags: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Summarise how late pushes were on several servers.

    Args:
        lags: for each server, ``counts`` of pushes by lag (a key stands for all lags up to the next one) and the number
            of ``dropped`` ones; where it takes snapshots, the ``durable`` version, and the number of ``lost`` pushes.

    >>> in_words([{"counts": {0: 1, 1: 3}, "dropped": 1}, {"counts": {0: 2, 1: 2}, "dropped": 0}])
    {'lag, in updates': '0: 38%, 1: 62%', 'dropped': '1'}
    >>> in_words([{"counts": {0: 9}, "dropped": 0, "durable": 7, "lost": 2}])["versions in snapshots"]
    '7'
    """
    counts: Counter[int] = Counter()
    for each in lags:
        counts.update(each["counts"])
    pushes = sum(counts.values()) // len(lags)
    dropped = sum(each["dropped"] for each in lags)
    shares = ", ".join(f"{lag}: {100 * count / counts.total():.0f}%" for lag, count in sorted(counts.items()))
    kept = [each for each in lags if "durable" in each]
    durable = ["none" if each["durable"] < 0 else str(each["durable"]) for each in kept]
    return {
        "lag, in updates": (shares or "none") if pushes else "none, in step",
        "dropped": f"{dropped}",
        **({"versions in snapshots": ", ".join(durable)} if kept else {}),
        **({"acknowledged pushes lost": ", ".join(str(each["lost"]) for each in kept)} if kept else {}),
    }


def restored(snapshot: Record) -> dict[str, Any]:
    """Return what differs from a snapshot in a store that begins with it; ``restored`` grows each time."""
    when = max(snapshot.get("restored", 0) + 1, int(time.time()))
    return {"incarnation": secrets.token_hex(8), "lives": snapshot["lives"] + LOST_LIVES, "restored": when}


def with_pushes(
    workers: Mapping[str, Mapping[str, Any]], pushes: Mapping[str, int], changes: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the workers' entries once these pushes are applied; forgotten workers stay so.

    >>> with_pushes({"a": {"push": 1, "clock": 3}}, {"a": 2}, {"lag": 0})
    {'a': {'push': 2, 'clock': 4, 'lag': 0}}
    """
    pushed = {
        name: {**workers[name], **changes, "push": number, "clock": workers[name]["clock"] + 1}
        for name, number in pushes.items()
        if name in workers
    }
    return {**workers, **pushed}


def said(entry: Mapping[str, Any]) -> int:
    """Return the last push that is applied, or that the worker knows was applied before it was lost.

    >>> said({"push": 3}), said({"push": 3, "said": 5}), said({"push": 6, "said": 5})
    (3, 5, 6)
    """
    return max(entry["push"], entry.get("said", 0))


def slots_of(record: Record) -> dict[int, int]:
    """Return the workers' slots, and the valid bank of each."""
    return {entry["slot"]: entry["bank"] & ~BOTH for entry in record["workers"].values() if "slot" in entry}


def check_room(record: Record, names: Mapping[str, Any]) -> None:
    """Raise ValueError where these workers might not fit into the journal."""
    rest = len(json.dumps({**record, "workers": {}}))
    if len(json.dumps([*names])) + _WORKER_BYTES * len(names) + rest + _GROWTH_BYTES > ROOM:
        raise ValueError(f"a server remembers {len(names) - 1} workers, and has no room for one more.")
