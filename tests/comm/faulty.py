"""Scripted faults around any collectives, for tests of whatever must survive them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import (
    CommunicatorWrapper,
    ElasticCollectives,
    Operation,
    Pending,
    ReduceOp,
    Where,
)
from lightning_async.errors import CollectiveError
from lightning_async.membership.generation import Generation

T = TypeVar("T")
_OPS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier", "*")


@dataclass(frozen=True)
class Fail:
    """The operation fails here. Its peers' fails too; with ``after``, theirs completes: the data has moved."""

    after: bool = False
    text: str = "scripted failure"


@dataclass(frozen=True)
class Hang:
    """This rank never comes: the operation ends by its deadline, or by `FaultyCollectives.abort`."""


@dataclass(frozen=True)
class Delay:
    """This rank comes late: when the event is set, or after so many seconds. The operation returns at once."""

    until: threading.Event | float


@dataclass(frozen=True)
class Corrupt:
    """The result arrives wrong: ``how`` changes it in place, by default all bits of the first element."""

    how: Callable[[Tensor], None] | None = None


@dataclass(frozen=True)
class Kill:
    """Calls the function given to `FaultyCollectives`; should that return, this rank's communicators are aborted."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a script.

    Args:
        op: the method's name, or "*" for any.
        nth: strikes in the nth call, from 1, of those that match.
        action: what happens.
        name: only on the communicator of this name, "world/payload"; by default on any.
    """

    op: str
    nth: int = 1
    action: Fail | Hang | Delay | Corrupt | Kill = field(default_factory=Fail)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise ValueError(f"`Fault(op={self.op!r})` must be one of {_OPS}.")
        if self.nth < 1:
            raise ValueError(f"`Fault(nth={self.nth})` counts from 1.")


class Script:
    """Counts calls, over a communicator and all of its forks."""

    def __init__(self, faults: Sequence[Fault], kill: Callable[[], None] | None) -> None:
        self.kill = kill
        self._counts = [(fault, [0]) for fault in faults]
        self._lock = threading.Lock()

    def strike(self, op: str, name: str) -> Fault | None:
        struck = None
        with self._lock:
            for fault, count in self._counts:
                if fault.op in (op, "*") and fault.name in (name, None):
                    count[0] += 1
                    if count[0] == fault.nth and struck is None:
                        struck = fault
        return struck


class FaultyCollectives(CommunicatorWrapper):
    """``inner``, with the faults of a script. Implements `ElasticCollectives`.

    Args:
        inner: what does the work. Give each rank its own wrapper.
        script: the faults; each strikes once.
        kill: what `Kill` calls.
        timeout: deadline of an operation that hangs here; by default that of ``inner``.
    """

    def __init__(
        self,
        inner: ElasticCollectives,
        script: Sequence[Fault] = (),
        *,
        kill: Callable[[], None] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.inner: Any = inner
        self._script = Script(script, kill)
        self._timeout: timedelta = timeout if timeout is not None else getattr(inner, "timeout", timedelta(seconds=10))
        self._failure: str | None = None
        self._held: list[Operation[Any]] = []
        self._late: _Late[Any] | None = None
        self._branches: list[FaultyCollectives] = []
        self._seq = 0

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        return self._call("all_reduce", lambda: self.inner.all_reduce(buffer, op))

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        return self._call("all_gather", lambda: self.inner.all_gather(buffer, out))

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        return self._call("all_to_all", lambda: self.inner.all_to_all(buffer, out))

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        return self._call("broadcast", lambda: self.inner.broadcast(buffer, src))

    def barrier(self) -> Pending[None]:
        return self._call("barrier", lambda: self.inner.barrier())

    def fork(self, name: str, timeout: timedelta | None = None) -> FaultyCollectives:
        return self._branch(self.inner.fork(name, timeout), timeout)

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> FaultyCollectives | None:
        inner = self.inner.split(ranks, name, timeout)
        return None if inner is None else self._branch(inner, timeout)

    def abort(self) -> None:
        self._end_held("aborted")
        self.inner.abort()

    def reconfigure(self, generation: Generation) -> None:
        try:
            self.inner.reconfigure(generation)
        except CollectiveError:
            self._end_held("aborted")
            raise
        self._end_held("aborted")
        self._renew()

    def registered(self, buffer: Tensor) -> Tensor:
        return self.inner.registered(buffer)

    def open(self) -> None:
        """See `Collectives`; nothing is scripted for it."""
        self.inner.open()

    def close(self) -> None:
        self._end_held("closed")
        self.inner.close()

    # ------------------------------------------------------------------ the machinery

    def _branch(self, inner: ElasticCollectives, timeout: timedelta | None) -> FaultyCollectives:
        child = FaultyCollectives(inner, timeout=self._timeout if timeout is None else timeout)
        child._script = self._script
        self._branches.append(child)
        return child

    def _call(self, op: str, call: Callable[[], Pending[T]]) -> Pending[T]:
        self._seq += 1
        if self._failure is not None:
            raise CollectiveError(f"{self._where()}: unusable since an earlier failure. It was: {self._failure}")
        if self._late is not None:
            # The transport's order is the order of calls.
            self._late.wait_until_sent()
            self._late = None
        fault = self._script.strike(op, self.name)
        if fault is None:
            return call()
        action = fault.action
        if isinstance(action, Delay):
            self._late = _Late(self._operation(op), action.until, call)
            self._held.append(self._late.held)
            return self._late
        if isinstance(action, Corrupt):
            return _Changed(call(), lambda value: _corrupt(value, action.how))
        if isinstance(action, Fail) and action.after:
            return _Changed(
                call(), lambda value: self._give_up(f"{op} #{self._seq}: {action.text}, after the data moved")
            )
        operation: Operation[T] = self._operation(op)
        if isinstance(action, Hang):
            self._held.append(operation)
            return operation
        if isinstance(action, Kill) and self._script.kill is not None:
            self._script.kill()
        text = action.text if isinstance(action, Fail) else "this rank was killed by the script"
        self._failure = f"{operation} failed: {text}"
        operation.fail(CollectiveError(self._failure))
        self.inner.abort()
        return operation

    def _operation(self, op: str) -> Operation[Any]:
        return Operation(self._where(), op, self._seq, self._timeout, self._expired)

    def _expired(self, error: CollectiveError) -> None:
        self._failure = str(error)
        self.inner.abort()

    def _give_up(self, text: str) -> None:
        self._failure = f"{self._where()}: {text}"
        raise CollectiveError(self._failure)

    def _end_held(self, why: str) -> None:
        for operation in self._held:
            operation.fail(CollectiveError(f"{operation} was {why} after {operation.elapsed_s():.2f} s."))
        self._held = []
        self._late = None
        for branch in self._branches:
            branch._end_held(why)

    def _renew(self) -> None:
        self._failure = None
        for branch in self._branches:
            branch._renew()

    def _where(self) -> Where:
        return Where(self.name, self.generation)


class _Late(Pending[T]):
    """An operation whose call reaches the transport only when it is released."""

    def __init__(self, held: Operation[T], until: threading.Event | float, call: Callable[[], Pending[T]]) -> None:
        self.held = held
        self._event = until if isinstance(until, threading.Event) else threading.Event()
        self._at = None if isinstance(until, threading.Event) else time.monotonic() + until
        self._call = call
        self._sent: Pending[T] | None = None

    def wait_until_sent(self) -> None:
        self.wait_sent(self.held.timeout.total_seconds())

    def wait_sent(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while self._sent is None and not self.held.ended():
            left = until - time.monotonic()
            if self._event.is_set() or (self._at is not None and time.monotonic() >= self._at):
                self._sent = self._call()
            elif left <= 0:
                return False
            else:
                self._event.wait(min(left, 0.02))
        return self._sent is not None

    def done(self) -> bool:
        return self._sent.done() if self.wait_sent(0.0) and self._sent is not None else self.held.done()

    def wait(self, timeout: timedelta) -> bool:
        until = time.monotonic() + timeout.total_seconds()
        if self.wait_sent(timeout.total_seconds()) and self._sent is not None:
            return self._sent.wait(timedelta(seconds=max(until - time.monotonic(), 0.0)))
        return self.held.done()

    def result(self, timeout: timedelta | None = None) -> T:
        limit = self.held.timeout if timeout is None else timeout
        until = time.monotonic() + limit.total_seconds()
        if self.wait_sent(limit.total_seconds()) and self._sent is not None:
            return self._sent.result(timedelta(seconds=max(until - time.monotonic(), 0.0)))
        return self.held.result(timedelta(0))


class _Changed(Pending[T]):
    """An operation that completes, and whose result is then tampered with, once."""

    def __init__(self, inner: Pending[T], tamper: Callable[[T], object]) -> None:
        self._inner = inner
        self._tamper = tamper
        self._error: CollectiveError | None = None
        self._tampered = False

    def done(self) -> bool:
        return self.wait(timedelta(0))

    def wait(self, timeout: timedelta) -> bool:
        if not self._inner.wait(timeout):
            return False
        self._strike()
        return True

    def result(self, timeout: timedelta | None = None) -> T:
        value = self._inner.result(timeout)
        self._strike()
        if self._error is not None:
            raise CollectiveError(*self._error.args)
        return value

    def _strike(self) -> None:
        if self._tampered:
            return
        self._tampered = True
        try:
            self._tamper(self._inner.result())
        except CollectiveError as error:
            self._error = error


def _corrupt(value: object, how: Callable[[Tensor], None] | None) -> None:
    if not isinstance(value, Tensor) or value.numel() == 0:
        return
    if how is not None:
        how(value)
        return
    flat = value.detach().view(-1)
    if flat.dtype is torch.bool:
        flat[0] = not flat[0]
    else:
        flat.view(torch.uint8)[: flat.element_size()].bitwise_not_()
