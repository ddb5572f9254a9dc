"""All that one worker has on servers: a table for each group of parameters with settings of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_async.engine.server.ahead import Send
from lightning_async.engine.server.client import Answer
from lightning_async.engine.server.optimizer_state import Group, fill_state
from lightning_async.engine.server.totals import PushTotals
from lightning_async.engine.server.worker import Worker

__all__ = ["Tables"]


class Tables:
    """Each has servers of its own. Used by one thread at a time, but for `give_up`.

    Args:
        workers: one for each table.
        totals: count what moves. Default: ones of their own.
    """

    def __init__(self, workers: Sequence[Worker], totals: PushTotals | None = None) -> None:
        self.workers, self._totals = list(workers), totals or PushTotals()
        self._asked: Sequence[int] = ()
        self.called = False
        """With the last push, somebody has called all, see `Answer.called`."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the weights that were pulled last, of all tables' servers."""
        return tuple(version for worker in self.workers for version in worker.versions)

    @property
    def restored(self) -> int:
        """See `Answer`; of these versions."""
        return sum(worker.restored for worker in self.workers)

    def updates(self, groups: Sequence[Group]) -> int:
        """Steps of all optimizers in the weights that were pulled last; a step is of all of its optimizer's tables.

        Args:
            groups: of each table.

        >>> from types import SimpleNamespace as Table
        >>> tables = Tables([Table(versions=(3, 2)), Table(versions=(3, 3)), Table(versions=(5,))])
        >>> tables.updates([Group(0, 0, "SGD", {}), Group(0, 1, "SGD", {}), Group(1, 0, "Adam", {})])
        8
        """
        most: dict[int, int] = {}
        for group, worker in zip(groups, self.workers, strict=True):
            most[group.optimizer] = max(most.get(group.optimizer, 0), *worker.versions)
        return sum(most.values())

    @property
    def in_step(self) -> bool:
        """Versions are made of a push of each worker, still."""
        return any(worker.in_step for worker in self.workers)

    @property
    def pulled(self) -> bool:
        """The last request has brought weights."""
        return any(self.workers[table].pulled for table in self._asked)

    def take_(self) -> None:
        """Write to the parameters what the last request has brought."""
        for table in self._asked:
            if self.workers[table].pulled:
                self.workers[table].take_()

    def written(self, coming: bool, every: bool) -> list[str]:
        """See `Worker`."""
        return [name for worker in self.workers for name in worker.written(coming, every)]

    @contextmanager
    def backward(self, send: Send | None) -> Iterator[None]:
        """A backward pass, see `Ahead`; without ``send`` gradients leave after it."""
        for worker in self.workers:
            worker.begin_gradients()
            if send is not None:
                worker.ahead.begin(send)
        try:
            yield
        except BaseException:
            for worker in self.workers:
                worker.ahead.give_up()
            raise

    def fill_gradients(self, tables: Sequence[int]) -> None:
        """See `Worker`."""
        for table in tables:
            self.workers[table].fill_gradients()

    def has_gradients(self, tables: Sequence[int]) -> bool:
        """Whether any parameter of these tables has one."""
        return any(p.grad is not None for table in tables for p in self.workers[table].params)

    def is_finite(self, tables: Sequence[int]) -> bool:
        """Whether all that these tables have been filled with is, for the next push."""
        return all(self.workers[table].is_finite for table in tables)

    def push(self, rates: Mapping[int, float | None], **how: Any) -> None:
        """Gradients of these tables, with their learning rates."""
        self._asked = list(rates)
        self._heard([self.workers[table].push(lr=lr, **how) for table, lr in rates.items()], how["weight"] > 0.0)

    def fill_change(self) -> None:
        """See `Worker`."""
        for worker in self.workers:
            worker.fill_change()

    @property
    def has_change(self) -> bool:
        """Whether `fill_change` has found any."""
        return any(worker.has_change for worker in self.workers)

    def push_change(self, **how: Any) -> None:
        """Changes of all tables."""
        self._asked = range(len(self.workers))
        self._heard([worker.push_change(**how) for worker in self.workers], how["weight"] > 0.0)

    def meet(self) -> None:
        """See `Worker`."""
        self._asked = range(len(self.workers))
        for worker in self.workers:
            worker.meet()
            self._totals.moved(0, worker.traffic[1])

    def rest(self, gate: int) -> None:
        """See `Client.rest`."""
        for worker in self.workers:
            worker.rest(gate)

    def lags(self) -> list[dict[str, Any]]:
        """See `Client.lags`; of all tables' servers."""
        self._asked = ()
        return [told for worker in self.workers for told in worker.lags()]

    def state(self, first: bool) -> dict[str, Any] | None:
        """For a checkpoint: what compression has yet to deliver, see `Worker`; of the ``first`` worker the plans, too,
        by which servers have what it holds, see `Plan.from_plain`."""
        owed = {name: tensor for worker in self.workers for name, tensor in worker.owed().items()}
        plans = [worker.plan.plain() for worker in self.workers] if first else []
        return {**({"owed": owed} if owed else {}), **({"plans": plans} if first else {})} or None

    def owe(self, saved: Mapping[str, Any]) -> None:
        """Go on with what was owed in that `state`."""
        for worker in self.workers:
            worker.owe(saved.get("owed", {}))

    def fill_state(self, optimizer: Optimizer, tables: Sequence[int]) -> None:
        """See `optimizer_state.fill_state`."""
        self._asked = ()
        for table in tables:
            fill_state(optimizer, self.workers[table])

    def _heard(self, answers: Sequence[Answer], filled: bool) -> None:
        """A push was answered, of all tables that were asked."""
        self.called = any(answer.called for answer in answers)
        for table in self._asked:
            pushed, pulled = self.workers[table].traffic
            self._totals.moved(pushed * filled, pulled * self.workers[table].pulled)
        if filled:
            self._totals.late(max(lag for answer in answers for lag in answer.lags))

    def give_up(self) -> None:
        """See `Client.give_up`."""
        for worker in self.workers:
            worker.give_up()

    def close(self) -> None:
        """See `Client.close`."""
        for worker in self.workers:
            worker.close()
