"""A server's shard, in memory that outlives the server: weights, optimizer state, and the pushes that were applied.

    journal: record of version 7, bank 1      bank 0: version 6, to be overwritten by version 8
                                              bank 1: version 7, which workers read
    an update: bank 1 --- gradient ---> bank 0, then one record: version 8, bank 0, the worker's push is applied

A server that is killed before the record is written leaves version 7 as it was. Once the record is written, version 8
is valid, and the same record says whose push it contains. So an update and its acknowledgement are either both
recorded, or neither is. `ShardArrays` holds the arrays and the record.
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
from lightning_async.parameter_server.optimizers import DanaStep, ScalarRuns, ServerOptimizer, make_optimizer
from lightning_async.parameter_server.partition import Spans, common_spans
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
"""Flag in ``bank``: both places for the worker's pulled weights are in use."""
LOST_LIVES = 1 << 32
"""Number of lives (ids of workers' processes) that a restore skips: a server may have given them after the snapshot."""
_WORKER_BYTES = 214  # size of a worker's entry in the journal, without its name
_GROWTH_BYTES = 140_000  # by which the rest of the record may grow, with `MOST_RUNS` of scalars and as many spans

Record = Mapping[str, Any]
"""The state that a store remembers in addition to its arrays.

``workers`` holds one entry for each name:

- ``life``, the id of its process;
- ``push``, the number of its last applied push, with the ``lag`` of that push, whether it was ``dropped``, and whether
  all workers were ``called`` with it;
- ``clock``, its progress in pushes, by which the mode ``"ssp"`` compares workers;
- ``live``, whether others wait for it, and ``rests``, the sync point up to which they do not wait, or -1;
- ``slot``, its place in memory, and ``bank``, the index of the valid copy in this place, with the flag `BOTH`;
- ``said``, after the loss of a server's memory, the number of the last push that the worker knew was applied.

``lives`` is the highest life so far.
"""


class Store:
    """The shard of one server.

    Args:
        descriptor: Descriptor of an anonymous file, empty or as a store has left it.
        threads: Number of threads that work on a large shard. Default: 1.

    Raises:
        OSError: There is no memory.
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
        """Whether the store has weights."""
        return "version" in self._held.record

    @property
    def version(self) -> int:
        """The number of updates since the store was initialised."""
        return self._held.record["version"]

    @property
    def contents(self) -> Mapping[str, Any]:
        """A description of what the store holds: number and layout of the weights, optimizer, and staleness policy."""
        return self._held.record["contents"]

    @property
    def params(self) -> Tensor:
        """The weights of `version`. The next update leaves this tensor unchanged; the update after it overwrites it."""
        return self._held.bank["params"]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The tensors that the optimizer and the staleness policy keep, by name."""
        return {name: tensor for name, tensor in self._held.bank.items() if name not in ("params", AHEAD, BUFFER)}

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The weights and all other arrays of their size, by name."""
        return self._held.parts

    @property
    def record(self) -> Mapping[str, Any]:
        return self._held.record

    @property
    def incarnation(self) -> str:
        """An id of the sequence of versions. It changes when the store gets new weights, or restores a snapshot."""
        return self.record["incarnation"]

    @property
    def scalars(self) -> ScalarRuns:
        return self.record["scalars"]

    @property
    def lags(self) -> Mapping[str, Any]:
        """The histogram of the lags of pushes, see `counted`, with the ``mean`` of recent lags."""
        return {**self.record["lags"], "mean": Means(*self.record["means"]).lag}

    @property
    def workers(self) -> dict[str, dict[str, Any]]:
        """A copy of the workers' entries in the record, to be changed and passed to `remember`."""
        return {name: dict(entry) for name, entry in self.known.items()}

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """The store's entry of each worker, by the worker's name; read-only."""
        return self._held.record["workers"]

    def initialise(
        self,
        params: Tensor,
        optimizer: str,
        arguments: Mapping[str, Any],
        fingerprint: str = "",
        policy: StalenessPolicy = UNCORRECTED,
        state: Mapping[str, Tensor] | None = None,
        scalars: ScalarRuns = (),
    ) -> None:
        """Begin with these weights, as version 0.

        Args:
            params: The weights, fp32 and flat.
            optimizer: Name of the optimizer, see `make_optimizer`.
            arguments: Arguments of the optimizer.
            fingerprint: Fingerprint of the plan of shards.
            policy: Staleness policy.
            state: Fields of the optimizer's state. Momenta that are kept for each worker always begin at zero. Default:
                None, the state is new.
            scalars: Scalars of the optimizer's state. Default: none.

        Raises:
            ValueError: There are weights already; or the optimizer is unknown, does not fit the policy, or has no field
                with a name in ``state``.
        """
        self._check_empty()
        contents = {
            "numel": params.numel(), "optimizer": optimizer, "arguments": dict(arguments), "fingerprint": fingerprint,
            "staleness": described(policy),
        }  # fmt: skip
        record = {
            **self.record, "version": 0, "bank": 0, "contents": contents,
            "scalars": scalars or [(params.numel(), {})],
            "means": (0.0, 0) * 2, "lags": {"counts": {}, "dropped": 0}, "gathered": 0, "buffer": 0,
            "incarnation": secrets.token_hex(8),
        }  # fmt: skip
        # All checks come before the commit: a refused initialization leaves the store without weights.
        self._map(record)
        if unknown := (state or {}).keys() - self._held.shard.banks[0].keys():
            raise ValueError(f"`optimizer={optimizer!r}` has no {sorted(unknown)} in its state.")
        self._held.fill(params, {} if policy.momentum_by_worker else state or {})
        self._held.commit(record)

    def clear(self) -> None:
        """Drop the weights; the entries of workers stay."""
        self._optimizer = None
        self._held.clear()

    def restore(self, record: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
        """Continue with the `record` and the `parts` of a snapshot; raise ValueError if there are weights already."""
        self._check_empty()
        self._map(record, known=True)
        self._held.record = dict(record)
        for name, field in self.parts.items():
            field.copy_(parts[name])
        # The first commit: a server that is killed before it restores the snapshot again.
        self.note(**restored(record))

    def note(self, **entries: Any) -> None:
        """Write these entries into the shard's record, which outlives the server's process."""
        self._held.commit({**self.record, **entries})

    def push(
        self, worker: str, number: int, gradient: Tensor, lag: int, lr: float | None = None,
        reply: Tensor | None = None, spare: bool = False, skips: Spans = (),
    ) -> bool:  # fmt: skip
        """Apply one worker's push, as the staleness policy decides; return whether ``reply`` was filled.

        Args:
            worker: Name of the worker.
            number: Number of the push.
            gradient: The gradient, flat, in fp32, bf16 or fp16.
            lag: Number of updates since the weights at which the gradient was computed.
            lr: Learning rate in place of the optimizer's own. Default: None, the optimizer's own.
            reply: Memory of the shard's size. The update fills it with the weights that workers pull, if it can do so
                in the same pass. Default: None.
            spare: Whether the gradient was computed at the weights in the second of the worker's two places for pulled
                weights, see `ShardArrays`. Default: False.
            skips: Spans of parameters without a gradient, which stay as they are, and where the gradient is zero.
                Default: none.

        Raises:
            OSError: There is no memory for the worker's own arrays.
            TooManyRuns: Parameters without gradients split the optimizer's state into too many parts.
        """
        policy = self._policy
        updates = self._updates()
        own = self._held.own(worker, spare)
        if PULLED in own[0]:  # the copy of the pulled weights may change only once this push is committed
            reply = None
        # Read after `own`, which may have given the worker a slot.
        bank = self.known[worker].get("bank", 0)
        before = self._held.before(own, bank & ~BOTH)
        weight = updates.weigh(before, gradient, lag)
        means = before.means.with_lag(lag, policy.decay)
        changes: dict[str, Any] = {"lags": counted(self.record["lags"], lag, dropped=weight is None), "means": means}
        if before.gathered:
            skips = common_spans([self.record["skips"], skips])
        if weight is not None and before.gathered + 1 < policy.buffer_size:
            updates.gather(before, gradient, weight)
            changes.update(gathered=before.gathered + 1, buffer=1 - self.record["buffer"], skips=skips)
            reply = None
        elif weight is not None:
            scalars, means = updates.step(before._replace(means=means), gradient, weight, lr, reply=reply, skips=skips)
            changes.update(self._stepped(scalars), means=means, gathered=0)
        applied = {"lag": lag, "dropped": weight is None}
        # A dropped push has filled no bank.
        if own_arrays(policy) and weight is not None:
            applied["bank"] = bank ^ 1
        workers = with_pushes(self.known, {worker: number}, applied)
        self._held.commit({**self.record, **changes, "workers": workers})
        return weight is not None and reply is not None

    def apply(
        self, gradient: Tensor, pushes: Mapping[str, int], lr: float | None = None, called: bool = False,
        skips: Spans = (),
    ) -> int:  # fmt: skip
        """Apply the mean gradient of several workers' pushes; return the version afterwards.

        A gradient that is not finite changes nothing, but its pushes are counted.

        Args:
            gradient: The gradient, see `push`.
            pushes: Number of the push, by the name of the worker that made it.
            lr: Learning rate in place of the optimizer's own. Default: None, the optimizer's own.
            called: Whether one of the workers has pushed with ``call=True``, see `Client.push`.
            skips: Spans of parameters for which no worker has a gradient, see `push`.
        """
        updates = self._updates()
        changes = dict[str, Any]()
        # Each worker's push counts in any case, so that all of them continue with the next number.
        if updates.is_finite(gradient):
            scalars, means = updates.step(self._held.before(), gradient, Weight(), lr, late=False, skips=skips)
            changes = {**self._stepped(scalars), "means": means}
        workers = with_pushes(self.known, pushes, {"lag": 0, "dropped": not changes, "called": called})
        self._held.commit({**self.record, **changes, "workers": workers})
        return self.version

    def count(self, pushes: Mapping[str, int], called: bool = False) -> None:
        """Count pushes that change no weights, such as empty ones.

        Args:
            pushes: Number of the push, by the name of the worker that made it.
            called: Whether one of the workers has pushed with ``call=True``, to ask for a sync point. Default: False.
        """
        self.remember(with_pushes(self.known, pushes, {"lag": 0, "dropped": False, "called": called}))

    def pull(self, worker: str, target: Tensor, spare: bool = False, plain: bool = False) -> None:
        """Copy the weights at which a worker computes its next gradient to ``target``.

        Some staleness policies need the weights that each worker has pulled. The store then also keeps a copy of these
        weights, in one of the worker's two places.

        Args:
            worker: Name of the worker.
            target: Memory of the shard's size.
            spare: Whether to keep this copy in the worker's second place, because a gradient is still computed at the
                weights in the first one. Default: False.
            plain: Whether to copy the actual weights, even if workers compute gradients at predicted ones. Default:
                False.
        """
        kept = self._held.own(worker, spare)[0].get(PULLED)
        seen = self.params if plain else self._held.visible
        self._held.shard.copy(*((each, seen) for each in (target, kept) if each is not None))

    def remember(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the workers' entries, and free the memory of workers that have no entry any more.

        Raises:
            ValueError: There are too many workers.
        """
        if len(workers) > len(self.record["workers"]):
            check_room(self.record, workers)
        lives = max([self.record["lives"], *(entry["life"] for entry in workers.values())])
        record = {**self.record, "workers": {name: dict(entry) for name, entry in workers.items()}, "lives": lives}
        if not self.ready:
            # The journal begins with the first weights: a server without weights has nothing to lose.
            self._held.record = record
            return
        # Memory is freed only after the commit below: a server killed in between must find it.
        slots = slots_of(record)
        gone = {slot: bank for slot, bank in slots_of(self.record).items() if slot not in slots}
        # The sum of all momenta must not keep the momentum of a worker whose memory is freed.
        if gone and isinstance(self._optimizer, DanaStep):
            momenta = [self._held.shard.slot(slot)[bank][MOMENTUM] for slot, bank in gone.items()]
            before = self._held.before()
            self._optimizer.without(before.old, before.new, momenta, before.runs)
            record["bank"] = 1 - record["bank"]
        self._held.commit(record)
        if gone:
            self._held.free()

    def copy_(self, target: Tensor, field: str = "params") -> None:
        """Copy `params`, or a field of the `state`, to ``target``."""
        self._held.shard.copy((target, self._held.bank[field]))

    def copy_parts(self, targets: Mapping[str, Tensor]) -> None:
        parts = self.parts
        self._held.shard.copy(*((target, parts[name]) for name, target in targets.items()))

    def close(self) -> None:
        """Unmap the memory. The system frees it once no process has its file open."""
        self._optimizer = None
        self._held.close()

    def _check_empty(self) -> None:
        if self.ready:
            raise ValueError(f"the store has weights already, of version {self.version}.")

    def _updates(self) -> ShardUpdates:
        assert self._optimizer is not None, "the store has no weights"
        return ShardUpdates(self._policy, self._optimizer, self._held.shard.share_out)

    def _stepped(self, scalars: ScalarRuns) -> dict[str, Any]:
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

    Each array that updates change has two places, and the record says which of them is valid. The copy of the weights
    that a worker has pulled normally has one place, because it can be written again: the server writes it before it
    answers the pull, and a worker that gets no answer repeats the pull before it pushes. A worker that pulls while it
    computes a gradient at earlier weights has a second, spare place. In each request, it says which place it means.
    """

    def __init__(self, descriptor: int, threads: int) -> None:
        self._descriptor = descriptor
        self._threads = threads
        self.journal = Journal(mapped(descriptor, 0, SIZE))
        self.record: dict[str, Any] = self.journal.record or {"workers": {}, "lives": 0}
        """The record. While the store has no weights, changes of the record are not written to the journal."""
        self._shard: SharedArrays | None = None
        self._own: tuple[str, ...] = ()
        self._kept: tuple[str, ...] = ()

    @property
    def shard(self) -> SharedArrays:
        assert self._shard is not None, "the store has no weights"
        return self._shard

    @property
    def bank(self) -> Arrays:
        """The valid bank: the copy of the shared arrays that workers read. The next update writes the other bank."""
        return self.shard.banks[self.record["bank"]]

    @property
    def visible(self) -> Tensor:
        """The weights that workers pull: those of the version, or those that the policy predicts."""
        bank = self.bank
        return bank[AHEAD if AHEAD in bank else "params"]

    @property
    def parts(self) -> dict[str, Tensor]:
        """All arrays of the shard's size, by name; the name of a worker's own array contains the worker's slot."""
        parts = dict(self.before().old)
        for slot, bank in slots_of(self.record).items():
            parts |= {f"{name} {slot}": array for name, array in self.shard.slot(slot)[bank].items()}
        for slot in (entry["slot"] for entry in self.record["workers"].values() if entry.get("bank", 0) & BOTH):
            parts |= {f"{name} {slot}, spare": array for name, array in self.shard.spare(slot).items()}
        return parts

    def map(self, numel: int, policy: StalenessPolicy, optimizer: ServerOptimizer) -> None:
        """Map the part of the memory file that holds the arrays of the policy and the optimizer; keep their values."""
        self._own = own_arrays(policy)
        self._kept = kept_arrays(policy)
        shared = shared_arrays(policy, optimizer)
        self._shard = SharedArrays(self._descriptor, numel, shared, self._own, self._kept, self._threads)

    def fill(self, params: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write the weights and the given fields of the optimizer's state into the first bank.

        All other fields are set to zero.
        """
        for name, field in self.shard.banks[0].items():
            if name in ("params", AHEAD):
                field.copy_(params)
            elif name in state:
                field.copy_(state[name])
            else:
                field.zero_()

    def clear(self) -> None:
        """Drop the weights, and the arrays of all workers."""
        own = ("slot", "bank")
        entries = self.record["workers"].items()
        # New weights may need other arrays for each worker, so the places of the old ones are dropped.
        workers = {name: {key: entry[key] for key in entry if key not in own} for name, entry in entries}
        self.commit({"workers": workers, "lives": self.record["lives"]})
        self.shard.close()
        self._shard = None

    def commit(self, record: dict[str, Any]) -> None:
        """Write the record to the journal. It becomes valid when this method returns, and not before."""
        self.journal.write(record)
        self.record = record

    def before(self, own: tuple[Arrays, Arrays] = ({}, {}), bank: int = 0) -> StateBeforePush:
        """Return the state from which an update starts.

        Args:
            own: The two copies of the arrays that belong to the worker alone, as the method `own` returns them.
                Default: none.
            bank: Index of the valid copy in ``own``. Default: 0.
        """
        # The banks hold the optimizer's fields from the first step on; an optimizer of torch makes its own there.
        banks = self.shard.banks
        here = self.record["bank"]
        buffer = self.record["buffer"]
        old = {**banks[here], **own[bank]}
        new = {**banks[1 - here], **own[1 - bank]}
        if BUFFER in old:
            old[BUFFER] = banks[buffer][BUFFER]
            new[BUFFER] = banks[1 - buffer][BUFFER]
        means = Means(*self.record["means"])
        return StateBeforePush(old, new, self.record["scalars"], means, self.record["gathered"])

    def own(self, worker: str, spare: bool = False) -> tuple[Arrays, Arrays]:
        """Return the two copies of the arrays that the shard keeps for one worker, until the worker is forgotten.

        The first call for a worker allocates these arrays.

        Args:
            worker: Name of the worker.
            spare: Whether to return the second place of the weights that the worker has pulled, in place of the first
                one. Default: False.

        Raises:
            OSError: The memory cannot be allocated.
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
                # No copy of the worker's last pull was kept before it had a slot: the present weights stand in for it.
                first[PULLED].copy_(self.visible)
            self.commit({**self.record, "workers": {**self.record["workers"], worker: entry}})
        old, new = self.shard.slot(entry["slot"])
        if not (spare and self._kept):
            return old, new
        other = self.shard.spare(entry["slot"])
        # The flag is in the record, so that a restarted server knows of the second place.
        if not entry["bank"] & BOTH:
            # The spare place begins as a copy of the first one.
            other[PULLED].copy_(old[PULLED])
            entry = {**entry, "bank": entry["bank"] | BOTH}
            self.commit({**self.record, "workers": {**self.record["workers"], worker: entry}})
        return {**old, **other}, {**new, **other}

    def free(self) -> None:
        """Free the memory of slots that belong to no worker."""
        self.shard.keep_only(slots_of(self.record))

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def counted(lags: Mapping[str, Any], lag: int, dropped: bool = False) -> dict[str, Any]:
    """Return the histogram of lags with one more push; its keys are strings, as in JSON.

    Small lags have a bin each; larger ones share a bin for each power of two.

    >>> counted(counted({"counts": {}, "dropped": 0}, 3), 40, dropped=True)
    {'counts': {'3': 1, '32': 1}, 'dropped': 1}
    """
    counts = lags["counts"]
    key = str(lag if lag < _SINGLE else 1 << (lag.bit_length() - 1))
    return {"counts": {**counts, key: counts.get(key, 0) + 1}, "dropped": lags["dropped"] + dropped}


def in_words(lags: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Summarise how late pushes were on several servers.

    Args:
        lags: For each server, ``counts`` of pushes by lag (a key stands for all lags up to the next key) and the number
            of ``dropped`` pushes; if the server takes snapshots, the ``durable`` version and the number of ``lost``
            pushes.

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
    """Return the entries of the shard's record that change when this snapshot is restored.

    The entry ``restored`` is a number that grows with each restore.
    """
    # The clock makes the number grow even if the same snapshot is restored twice.
    when = max(snapshot.get("restored", 0) + 1, int(time.time()))
    return {"incarnation": secrets.token_hex(8), "lives": snapshot["lives"] + LOST_LIVES, "restored": when}


def with_pushes(
    workers: Mapping[str, Mapping[str, Any]], pushes: Mapping[str, int], changes: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the entries of all workers, with these pushes counted. Workers that were forgotten get no entry.

    Args:
        workers: The server's entry of each worker.
        pushes: Number of the push, by the name of the worker that made it.
        changes: Fields that are set in the entry of each of these workers.

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
    """Return the number of the worker's last push that is applied here, or was applied before a server lost its memory.

    >>> said({"push": 3}), said({"push": 3, "said": 5}), said({"push": 6, "said": 5})
    (3, 5, 6)
    """
    return max(entry["push"], entry.get("said", 0))


def slots_of(record: Record) -> dict[int, int]:
    """Return the index of the valid bank of each worker's slot (the worker's place in memory), by the slot's number."""
    return {entry["slot"]: entry["bank"] & ~BOTH for entry in record["workers"].values() if "slot" in entry}


def check_room(record: Record, names: Mapping[str, Any]) -> None:
    """Raise ValueError if the journal may have no room for the entries of these workers."""
    rest = len(json.dumps({**record, "workers": {}}))
    if len(json.dumps([*names])) + _WORKER_BYTES * len(names) + rest + _GROWTH_BYTES > ROOM:
        raise ValueError(f"a server remembers {len(names) - 1} workers, and has no room for one more.")
