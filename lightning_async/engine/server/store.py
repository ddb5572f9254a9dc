"""A server's shard, in memory that outlives the server: weights, optimizer state, and what was applied of whom.

    journal: record of version 7, bank 1      bank 0: version 6, then what becomes of 7
                                              bank 1: version 7, read
    an update: bank 1 --- gradient ---> bank 0, then one record: version 8, bank 0, the worker's push is applied

Whoever is killed in between leaves version 7 as it was; with the record, version 8 is there, and so is the word of
whose push it holds. So an update and its acknowledgement are whole or absent, together. That goes for the buffer of a
policy that gathers pushes, and for what each worker has of its own, too: each has two places, and a record says which
one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_async.engine.server.holding import Holding
from lightning_async.engine.server.lags import counted
from lightning_async.engine.server.optimizers import begun, make_optimizer
from lightning_async.engine.server.remembered import BOTH, check_room, first_record, restored, slots_of, with_pushes
from lightning_async.engine.server.steps import Dana, ServerOptimizer
from lightning_async.engine.server.update import AHEAD, BUFFER, MOMENTUM, PULLED, Means, Updates, own_arrays
from lightning_async.rules.staleness.choose import described, make_policy
from lightning_async.rules.staleness.protocol import UNCORRECTED, StalenessPolicy, Weight

__all__ = ["Store"]


class Store:
    """One server's shard.

    Args:
        descriptor: of an anonymous file, empty or as a store has left it; the store's from now on.
        threads: that work on a large shard. Default: 1.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, descriptor: int, threads: int = 1) -> None:
        self._held = Holding(descriptor, threads)
        self._policy: StalenessPolicy = UNCORRECTED
        self._optimizer: ServerOptimizer | None = None
        if self.ready:
            self._map(self.record, known=True)
            self._held.free()

    @property
    def ready(self) -> bool:
        """Whether there are weights; a store without refuses pushes."""
        return "version" in self._held.record

    @property
    def version(self) -> int:
        """Updates since the first weights."""
        return self._held.record["version"]

    @property
    def contents(self) -> Mapping[str, Any]:
        """What the weights are of: their number, optimizer, policy, and the fingerprint that workers came with."""
        return self._held.record["contents"]

    @property
    def params(self) -> Tensor:
        """The weights of `version`; as they are until the second update from now."""
        return self._held.bank["params"]

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The fields of optimizer and policy, as `params`."""
        return {name: tensor for name, tensor in self._held.bank.items() if name not in ("params", AHEAD, BUFFER)}

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """All that is of the weights' size, by name, as `params`; with `record`, all that there is."""
        return self._held.parts

    @property
    def record(self) -> Mapping[str, Any]:
        """All else, in JSON's terms."""
        return self._held.record

    @property
    def incarnation(self) -> str:
        """Another one wherever versions may not follow on those before: a store that was restored has lost some."""
        return self.record["incarnation"]

    @property
    def scalars(self) -> Mapping[str, float]:
        """The optimizer's state besides."""
        return self.record["scalars"]

    @property
    def lags(self) -> Mapping[str, Any]:
        """How late pushes were, see `lags`: ``counts``, the ``mean`` of recent ones, and how many were ``dropped``."""
        return {**self.record["lags"], "mean": Means(*self.record["means"]).lag}

    @property
    def workers(self) -> dict[str, dict[str, Any]]:
        """What is remembered of each worker, by name; a copy, see `remember`."""
        return {name: dict(told) for name, told in self.known.items()}

    @property
    def known(self) -> Mapping[str, Mapping[str, Any]]:
        """The same, to be read only."""
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
        """The first weights, version 0: fp32, flat.

        Args:
            optimizer, arguments: see `make_optimizer`.
            fingerprint, policy: of the plan, and of staleness. Default: none, and nothing is done about it.
            state, scalars: of the optimizer, as it is to begin; momenta of workers' own begin anew. Default: none.

        Raises:
            ValueError: there are weights, or no such optimizer, or not one for the policy, or it has no such state.
        """
        self._check_empty()
        contents = {
            "numel": params.numel(), "optimizer": optimizer, "arguments": dict(arguments), "fingerprint": fingerprint,
            "staleness": described(policy),
        }  # fmt: skip
        record = first_record(self.record, contents, begun(state, scalars))
        self._map(record)
        if unknown := (state or {}).keys() - self._held.shard.banks[0].keys():
            raise ValueError(f"`optimizer={optimizer!r}` has no {sorted(unknown)} in its state.")
        self._held.fill(params, {} if policy.momentum_by_worker else state or {})
        self._held.commit(record)

    def clear(self) -> None:
        """There are no weights any more; workers are remembered."""
        self._optimizer = None
        self._held.clear()

    def restore(self, record: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
        """What was in `record` and `parts` once.

        Raises:
            ValueError: there are weights, or there is no such optimizer.
        """
        self._check_empty()
        self._map(record, known=True)
        self._held.record = dict(record)
        for name, field in self.parts.items():
            field.copy_(parts[name])
        self.note(**restored(record))

    def note(self, **told: Any) -> None:
        """Have this in the record."""
        self._held.commit({**self.record, **told})

    def push(
        self, worker: str, number: int, gradient: Tensor, lag: int, lr: float | None = None,
        reply: Tensor | None = None, spare: bool = False,
    ) -> bool:  # fmt: skip
        """One worker's push, as the policy will have it; whether `reply` has what its worker is to pull now.

        Args:
            number: of the push.
            gradient: fp32, bf16 or fp16, flat.
            lag: updates since its worker has pulled.
            lr: in place of the optimizer's own. Default: that one.
            reply: memory of the shard's size, which may be filled with what `pull` would fill it with, as that comes
                at no cost then. Default: none.
            spare: it was computed at what was pulled to the worker's spare place. Default: the first one.

        Raises:
            OSError: there is no memory for what is kept of the worker.
        """
        policy, updates, own = self._policy, self._updates(), self._held.own(worker, spare)
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
        """The next version, of what several workers have made together, and that their pushes are in it; the version.
        What is not finite changes nothing, and the pushes count as come.

        Args:
            gradient: as of `push`.
            pushes: the number of each worker's push that the gradient is made of.
            lr: in place of the optimizer's own. Default: that one.
            called: with one of them, all were called. Default: False.
        """
        updates, changes = self._updates(), dict[str, Any]()
        if updates.is_finite(gradient):
            scalars, means = updates.step(self._held.before(), gradient, Weight(), lr, late=False)
            changes = {**self._stepped(scalars), "means": means}
        workers = with_pushes(self.known, pushes, {"lag": 0, "dropped": not changes, "called": called})
        self._held.commit({**self.record, **changes, "workers": workers})
        return self.version

    def count(self, pushes: Mapping[str, int], called: bool = False) -> None:
        """These pushes have come, with nothing in them."""
        self.remember(with_pushes(self.known, pushes, {"lag": 0, "dropped": False, "called": called}))

    def pull(self, worker: str, target: Tensor, spare: bool = False, plain: bool = False) -> None:
        """What a worker computes its next gradient at, or ``plain`` weights, to memory of their size; as of `push`."""
        kept, seen = self._held.own(worker, spare)[0].get(PULLED), self.params if plain else self._held.visible
        self._held.shard.copy(*((each, seen) for each in (target, kept) if each is not None))

    def remember(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """What is to be remembered of workers from now on; what those had of their own is given back that are gone.

        Raises:
            ValueError: there is no room for so many.
        """
        if len(workers) > len(self.record["workers"]):
            check_room(self.record, workers)
        lives = max([self.record["lives"], *(told["life"] for told in workers.values())])
        record = {**self.record, "workers": {name: dict(told) for name, told in workers.items()}, "lives": lives}
        if not self.ready:
            self._held.record = record  # it comes with the first weights: a server without has nothing to lose
            return
        slots = slots_of(record)
        gone = {slot: bank for slot, bank in slots_of(self.record).items() if slot not in slots}
        if gone and isinstance(self._optimizer, Dana):
            momenta = [self._held.shard.slot(slot)[bank][MOMENTUM] for slot, bank in gone.items()]
            before = self._held.before()
            self._optimizer.without(before.old, before.new, momenta, before.scalars)
            record["bank"] = 1 - record["bank"]
        self._held.commit(record)
        if gone:
            self._held.free()

    def copy_(self, target: Tensor, field: str = "params") -> None:
        """What `params` or one of the `state` holds, to memory of its size."""
        self._held.shard.copy((target, self._held.bank[field]))

    def copy_parts(self, targets: Mapping[str, Tensor]) -> None:
        """What all `parts` hold."""
        parts = self.parts
        self._held.shard.copy(*((target, parts[name]) for name, target in targets.items()))

    def close(self) -> None:
        """Give the memory back; whoever else has the file keeps it."""
        self._optimizer = None
        self._held.close()

    def _check_empty(self) -> None:
        if self.ready:
            raise ValueError(f"the store has weights already, of version {self.version}.")

    def _updates(self) -> Updates:
        assert self._optimizer is not None, "the store has no weights"
        return Updates(self._policy, self._optimizer, self._held.shard.share_out)

    def _stepped(self, scalars: Mapping[str, float]) -> dict[str, Any]:
        return {"version": self.version + 1, "bank": 1 - self.record["bank"], "scalars": scalars}

    def _map(self, record: Mapping[str, Any], known: bool = False) -> None:
        contents = record["contents"]
        policy, given = make_policy(contents["staleness"]), (contents["optimizer"], contents["arguments"])
        optimizer = make_optimizer(*given, known=known, momentum_by_worker=policy.momentum_by_worker)
        self._held.map(contents["numel"], policy, optimizer)
        self._optimizer, self._policy = optimizer, policy
