"""Operations under way over a group of torch's, and the end of all of them as soon as one fails.

An operation's tensors change hands twice. From `start` on they are the group's, which keeps them until torch lets go:
that may be later than the operation has ended, where it was broken off. Its result is the caller's when it is complete.
A generation ends by `land`: the group is disposed of, and its operations, which have failed, are forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

from lightning_async.comm.operation import Operation
from lightning_async.comm.torch.groups import Group
from lightning_async.errors import CollectiveError

__all__ = ["Flights"]

T = TypeVar("T")
Finish = Callable[[], T]


class Flights:
    """What is under way over one group; used by the thread that calls, and by torch's when operations end.

    Args:
        fail: called with the error and the operation that failed first; it is to `break_off`.
    """

    def __init__(self, fail: Callable[[CollectiveError, Operation[Any]], None]) -> None:
        self.group: Group | None = None
        self._broken: CollectiveError | None = None
        self._fail = fail
        self._lock = threading.Lock()
        self._pending: dict[int, Operation[Any]] = {}

    def __len__(self) -> int:
        return sum(not operation.done() for operation in list(self._pending.values()))

    def over(self, group: Group) -> None:
        """From now on, operations go over this group."""
        with self._lock:
            self.group = group

    def start(
        self,
        group: Group,
        operation: Operation[T],
        start: Callable[[Any], Any],
        finish: Finish[T],
        tensors: tuple[Tensor, ...],
        backstop: timedelta,
    ) -> None:
        """Have torch begin; `over` was called before.

        Args:
            group: what operations went over when this one was called. Another thread may have had it `land` since.
            start: makes torch's work of its group.
            finish: makes the result when that has ended.
            tensors: what torch reads or writes.
            backstop: torch's own deadline.
        """
        with self._lock:
            landed = self.group is not group
            if not landed:
                self._pending[operation.seq] = operation
                group.in_flight[operation.seq] = tensors, None
        if landed:
            operation.fail(_landed(operation))
            return
        try:
            works = start(group.pg)
        except Exception as error:
            self._end(operation, finish, error)
            group.in_flight.pop(operation.seq, None)
            return
        group.watch(operation, works, lambda error: self._end(operation, finish, error), backstop)
        if self._broken is not None:  # in this instant, by another thread that did not see this operation
            operation.fail(CollectiveError(f"{operation} was broken off: {self._broken}"))

    def break_off(self, error: CollectiveError, first: Operation[Any] | None = None) -> None:
        """``first`` fails with the error, everything else because of it; any thread may call it."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            group, pending = self.group, list(self._pending.values())
        if first is not None:
            first.fail(error)
        for operation in pending:
            operation.fail(CollectiveError(f"{operation} was broken off after {operation.elapsed_s():.2f} s: {error}"))
        if group is not None:
            group.break_off()

    def land(self) -> None:
        """Dispose of the group. What is under way has failed: how it ends is no news of the next group's."""
        with self._lock:
            group, pending = self.group, list(self._pending.values())
            self.group, self._pending = None, {}
        for operation in pending:
            operation.fail(_landed(operation))
        if group is not None:
            group.dispose()
        with self._lock:
            self._broken = None

    def _end(self, operation: Operation[T], finish: Finish[T], error: Exception | None) -> None:
        if error is None and not operation.ended():
            try:
                value = finish()
            except Exception as caught:
                error = caught
            else:
                operation.complete(value)
        if error is not None and not operation.ended():
            self._fail(operation.failure(error), operation)
        if self._pending.get(operation.seq) is operation:  # it may be of an earlier generation
            del self._pending[operation.seq]


def _landed(operation: Operation[Any]) -> CollectiveError:
    return CollectiveError(f"{operation} was broken off: its groups are no more.")
