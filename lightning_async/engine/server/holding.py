"""What a server has, in memory that outlives it: a record, and the arrays that it is of.

Whatever is updated has two places, and a record says which of them count: what is new is there with it, whole. The
weights that a worker has pulled have one place. They are written before the worker is answered, and a worker that was
not answered asks again before it pushes: none is ever weighed by what is there in part. A worker that pulls while it
computes a gradient at what it had before has two of them, and says which one it means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_async.engine.server.journal import SIZE, Journal
from lightning_async.engine.server.remembered import BOTH, free_slot, slots_of
from lightning_async.engine.server.shard import Arrays, Shard, mapped
from lightning_async.engine.server.steps import ServerOptimizer
from lightning_async.engine.server.update import (
    AHEAD,
    BUFFER,
    MOMENTUM,
    PULLED,
    Before,
    Means,
    kept_arrays,
    own_arrays,
    shared_arrays,
)  # fmt: skip
from lightning_async.rules.staleness.protocol import StalenessPolicy

__all__ = ["Holding"]


class Holding:
    """Of one server.

    Args:
        descriptor: of an anonymous file, empty or as another one has left it; this one's from now on.
        threads: that work on large arrays. Default: 1.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, descriptor: int, threads: int = 1) -> None:
        self._descriptor, self._threads = descriptor, threads
        self.journal = Journal(mapped(descriptor, 0, SIZE))
        self.record: dict[str, Any] = self.journal.record or {"workers": {}, "lives": 0}
        """What the journal has; only in memory, before there are weights."""
        self._shard: Shard | None = None
        self._own: tuple[str, ...] = ()
        self._kept: tuple[str, ...] = ()

    @property
    def shard(self) -> Shard:
        """The arrays."""
        assert self._shard is not None, "the store has no weights"
        return self._shard

    @property
    def bank(self) -> Arrays:
        """The shared ones that count."""
        return self.shard.banks[self.record["bank"]]

    @property
    def visible(self) -> Tensor:
        """What workers pull."""
        bank = self.bank
        return bank[AHEAD if AHEAD in bank else "params"]

    @property
    def parts(self) -> dict[str, Tensor]:
        """All arrays that count, by name; with `record`, all that there is."""
        parts = dict(self.before().old)
        for slot, bank in slots_of(self.record).items():
            parts |= {f"{name} {slot}": array for name, array in self.shard.slot(slot)[bank].items()}
        for slot in (told["slot"] for told in self.record["workers"].values() if told.get("bank", 0) & BOTH):
            parts |= {f"{name} {slot}, spare": array for name, array in self.shard.spare(slot).items()}
        return parts

    def map(self, numel: int, policy: StalenessPolicy, optimizer: ServerOptimizer) -> None:
        """Have the arrays that these two need, as they are in the file."""
        self._own, self._kept = own_arrays(policy), kept_arrays(policy)
        shared = shared_arrays(policy, optimizer)
        self._shard = Shard(self._descriptor, numel, shared, self._own, self._kept, self._threads)

    @property
    def personal(self) -> bool:
        """Whether anything is kept of each worker."""
        return bool(self._own or self._kept)

    def fill(self, params: Tensor, state: Mapping[str, Tensor]) -> None:
        """The first of the shared ones: the weights, and fields of the optimizer's state; zeros for all others."""
        for name, field in self.shard.banks[0].items():
            if name in ("params", AHEAD):
                field.copy_(params)
            elif name in state:
                field.copy_(state[name])
            else:
                field.zero_()

    def clear(self) -> None:
        """There are no weights from now on, and nothing that is a worker's own."""
        kept = {name: self.record[name] for name in ("workers", "lives")}
        own = ("slot", "bank")
        kept["workers"] = {n: {k: v for k, v in told.items() if k not in own} for n, told in kept["workers"].items()}
        self.commit(kept)
        self.shard.close()
        self._shard = None

    def commit(self, record: dict[str, Any]) -> None:
        """From when this returns, and not before, the record is this one."""
        self.journal.write(record)
        self.record = record

    def before(self, own: tuple[Arrays, Arrays] = ({}, {}), bank: int = 0) -> Before:
        """What an update finds.

        Args:
            own: of its worker, see `own`.
            bank: of that, which counts.
        """
        # Fields are in the banks with the first step: one that makes its own then has nothing to begin with.
        banks, here, buffer = self.shard.banks, self.record["bank"], self.record["buffer"]
        old, new = {**banks[here], **own[bank]}, {**banks[1 - here], **own[1 - bank]}
        if BUFFER in old:
            old[BUFFER], new[BUFFER] = banks[buffer][BUFFER], banks[1 - buffer][BUFFER]
        scalars, means = dict(self.record["scalars"]), Means(*self.record["means"])
        return Before(old, new, scalars, means, self.record["gathered"])

    def own(self, worker: str, spare: bool = False) -> tuple[Arrays, Arrays]:
        """What a worker has of its own, in memory from now on until it is not remembered any more.

        Args:
            spare: with the other one of the two places of what it has pulled. Default: with the first one.

        Raises:
            OSError: there is no memory.
        """
        if not self.personal:
            return {}, {}
        told = self.record["workers"][worker]
        if "slot" not in told:
            told = {**told, "slot": free_slot(self.record), "bank": 0}
            first, _ = self.shard.slot(told["slot"])
            if MOMENTUM in first:
                first[MOMENTUM].zero_()
            if PULLED in first:
                first[PULLED].copy_(self.visible)
            self.commit({**self.record, "workers": {**self.record["workers"], worker: told}})
        old, new = self.shard.slot(told["slot"])
        if not (spare and self._kept):
            return old, new
        other = self.shard.spare(told["slot"])
        if not told["bank"] & BOTH:
            other[PULLED].copy_(old[PULLED])
            told = {**told, "bank": told["bank"] | BOTH}
            self.commit({**self.record, "workers": {**self.record["workers"], worker: told}})
        return {**old, **other}, {**new, **other}

    def free(self) -> None:
        """Give back what is nobody's."""
        self.shard.keep_only(slots_of(self.record))

    def close(self) -> None:
        """Give the memory back; whoever else has the file keeps it."""
        if self._shard is not None:
            self._shard.close()
        self._shard = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
