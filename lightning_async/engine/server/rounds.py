"""Pushes that wait for those of all others, and become one update: their mean, weighted by samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.server.feedback import Arrived
from lightning_async.engine.server.quorum import Terms, round_due
from lightning_async.engine.server.store import Store
from lightning_async.ops.define import eager

__all__ = ["Push", "Rounds"]


@dataclass
class Push:
    """One that waits.

    Args:
        number: of its worker's.
        weight: samples that it is the mean of; 0 where there is nothing in it.
        gradient: None where there is nothing in it.
        lr: in place of the optimizer's own.
        gate: that its worker has come from.
        call: all are to hear of it.
    """

    number: int
    weight: float
    gradient: Arrived | None
    lr: float | None
    gate: int
    call: bool = False


class Rounds:
    """Of one server; used under its lock.

    Args:
        store: its shard.
        terms: see there.
    """

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store, self._terms = store, terms
        self._waiting: dict[str, Push] = {}
        self._sum = self._decoded = torch.empty(0)

    @property
    def waiting(self) -> Collection[str]:
        """Workers whose pushes wait."""
        return self._waiting.keys()

    def put(self, worker: str, push: Push) -> None:
        """It waits from now on."""
        self._waiting[worker] = push

    def drop(self, worker: str) -> None:
        """Its worker has begun another life."""
        self._waiting.pop(worker, None)

    def complete(self, allow: Callable[[Mapping[str, int]], bool] = lambda pushes: True) -> bool:
        """Apply the pushes that wait, where they are of all that live; whether they were.

        Args:
            allow: whether these pushes may be. Default: any may.
        """
        if not self._waiting:
            return False
        gate = max((push.gate for push in self._waiting.values()), default=0)
        if not round_due(self._terms, self._store.version, self._store.known, self._waiting, gate):
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
