"""Threads as ranks: collectives inside one process, for tests and for learning.

`InProcessWorld` makes `InProcessCollectives` with the semantics of the real transports, but strict and repeatable:
reductions run in the order of ranks, and ranks that call different things get an error that names both, where a real
transport would hang or abort. `FaultyCollectives` wraps any collectives with the faults of a `Script`, for tests of
whatever must survive them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import (
    CommunicatorWrapper,
    ElasticCollectives,
    ElasticCommunicator,
    Operation,
    Pending,
    ReduceOp,
    Where,
    check_buffer,
    check_rows,
    room_for,
    sum_rows,
)
from lightning_async.errors import CollectiveError, CollectiveTimeout
from lightning_async.membership.generation import Generation
from lightning_async.membership.store import HashStore

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange", "barrier", "*")


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


T = TypeVar("T")


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
        self.inner = inner
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

    def reduce_scatter(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        return self._call("reduce_scatter", lambda: self.inner.reduce_scatter(buffer, op))

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        return self._call("all_to_all", lambda: self.inner.all_to_all(buffer, out))

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        return self._call("broadcast", lambda: self.inner.broadcast(buffer, src))

    def exchange(self, buffer: Tensor, peer: int) -> Pending[Tensor]:
        return self._call("exchange", lambda: self.inner.exchange(buffer, peer))

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


class _Call(NamedTuple):
    """One rank's part in an operation. ``combine`` maps all parts, in the order of ranks, to this rank's result."""

    rank: int
    signature: str
    buffer: Tensor | None
    combine: Callable[[list[Tensor]], Any]
    operation: Operation[Any]


class _Board:
    """Where the ranks of one communicator in one generation meet. All methods may be called by any rank's thread."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lock = threading.RLock()
        self.joined: set[int] = set()
        self.changed = threading.Condition(self.lock)
        self._calls: dict[Any, list[_Call]] = {}
        self.reason: str | None = None

    def arrive(self, key: Any, needed: int, call: _Call) -> None:
        """Add one rank's call; the last one to arrive executes the operation for all."""
        with self.lock:
            if self.reason is not None:
                call.operation.fail(CollectiveError(f"{call.operation} failed at once: {self.reason}"))
                return
            calls = self._calls.setdefault(key, [])
            calls.append(call)
            if call.signature != calls[0].signature:
                self.break_off(
                    f"ranks disagree on operation {key}: rank {calls[0].rank} called {calls[0].signature}, "
                    f"rank {call.rank} called {call.signature}. All ranks must call the same, in the same order."
                )
            elif len(calls) == needed:
                del self._calls[key]
                _execute(sorted(calls, key=lambda each: each.rank))

    def break_off(self, reason: str) -> None:
        """Fail everything under way and to come, on all ranks, as a closed connection would."""
        with self.lock:
            if self.reason is None:
                self.reason = reason
            calls = [call for calls in self._calls.values() for call in calls]
            self._calls.clear()
            self.changed.notify_all()
        for call in calls:
            call.operation.fail(CollectiveError(f"{call.operation} was broken off: {reason}"))

    def join(self, where: Where, timeout: timedelta) -> None:
        """Wait until every rank has joined, as forming a real group does."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self.changed:
            self.joined.add(where.rank)
            self.changed.notify_all()
            while len(self.joined) < self.world_size and self.reason is None:
                if not self.changed.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                    missing = sorted(set(range(self.world_size)) - self.joined)
                    raise CollectiveTimeout(
                        f"{where}: forming the group: after {timeout.total_seconds():g} s still without rank(s) "
                        f"{missing}. See the logs of those."
                    )
            if self.reason is not None:
                raise CollectiveError(f"{where}: forming the group failed: {self.reason}")


def _execute(calls: list[_Call]) -> None:
    # Somebody may have given up in this instant; then nobody gets a result, and nothing is written.
    buffers = [call.buffer.detach().clone() if call.buffer is not None else torch.empty(0) for call in calls]
    for call in calls:
        if not call.operation.ended():
            call.operation.complete(call.combine(buffers))


class InProcessWorld:
    """A world of threads. Hand each thread its own `collectives`, or let `run` do it.

    Args:
        world_size: number of ranks.
        timeout: default deadline of operations and of forming groups.
    """

    def __init__(self, world_size: int, timeout: timedelta = timedelta(seconds=10)) -> None:
        if world_size < 1:
            raise ValueError(f"`InProcessWorld(world_size={world_size})` must be at least 1.")
        self.world_size = world_size
        self.timeout = timeout
        self.store = HashStore()
        self._lock = threading.Lock()
        self._boards: dict[tuple[int, str, tuple[str, ...]], _Board] = {}
        self._ranks = [self._root(Generation.first(rank, world_size)) for rank in range(world_size)]

    def collectives(self, rank: int) -> InProcessCollectives:
        """Rank ``rank``'s communicator: always the same object."""
        return self._ranks[rank]

    def joining(self, name: str) -> InProcessCollectives:
        """The communicator of one more rank, alone until it is reconfigured into the others' next generation."""
        return self._root(Generation.joining(name))

    def run(self, fn: Callable[[InProcessCollectives], T], timeout: timedelta = timedelta(seconds=30)) -> list[T]:
        """Run ``fn`` once per rank, on a thread each, and return the results in the order of ranks.

        Raises:
            BaseException: whatever came first out of ``fn``; the other ranks are aborted then, so that they end.
            CollectiveTimeout: a thread was still running at the deadline (it is a daemon, and left behind).
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = fn(self._ranks[rank])
            except BaseException as error:
                errors.append(error)
                self._ranks[rank].abort()

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        deadline = time.monotonic() + timeout.total_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            for collectives in self._ranks:
                collectives.abort()
            for thread in threads:
                thread.join(1.0)
        if errors:
            raise errors[0]
        if stuck:
            raise CollectiveTimeout(f"{', '.join(stuck)} still running after {timeout.total_seconds():g} s.")
        return [results[rank] for rank in range(self.world_size)]

    def board(self, where: Where) -> _Board:
        with self._lock:
            key = (where.generation.number, where.name, where.generation.members)
            return self._boards.setdefault(key, _Board(where.world_size))

    def _root(self, generation: Generation) -> InProcessCollectives:
        return InProcessCollectives(self, Where("world", generation), self.timeout)


class InProcessCollectives(ElasticCommunicator["InProcessCollectives"]):
    """One rank's communicator in an `InProcessWorld`; see there. Implements `ElasticCollectives`."""

    def __init__(self, world: InProcessWorld, where: Where, timeout: timedelta) -> None:
        super().__init__(where, timeout)
        self._world = world
        self._board = world.board(where)

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        """See `Collectives`. In the order of ranks, half types in fp32 and rounded once."""
        check_buffer(buffer)
        return self._submit(
            f"all_reduce({op.value})", buffer, lambda all_: _write(buffer, sum_rows(torch.stack(all_), op))
        )

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_buffer(buffer)
        gathered = room_for(buffer, self.world_size, out)
        return self._submit("all_gather", buffer, lambda all_: _write(gathered, torch.stack(all_)))

    def reduce_scatter(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        rank = self.rank
        return self._submit(
            f"reduce_scatter({op.value})", buffer, lambda all_: sum_rows(torch.stack([each[rank] for each in all_]), op)
        )

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        rank = self.rank
        received = room_for(buffer[0], self.world_size, out)
        return self._submit(
            "all_to_all", buffer, lambda all_: _write(received, torch.stack([each[rank] for each in all_]))
        )

    def broadcast(self, buffer: Tensor, src: int = 0) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_peer(src, "src")
        return self._submit(f"broadcast(src={src})", buffer, lambda all_: _write(buffer, all_[src]))

    def exchange(self, buffer: Tensor, peer: int) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_peer(peer, "peer")
        self._exchanged[peer] = self._exchanged.get(peer, 0) + 1
        low, high = sorted((self.rank, peer))
        key = f"{low}<->{high} #{self._exchanged[peer]}"
        other = 1 if peer > self.rank else 0
        needed = 1 if peer == self.rank else 2
        return self._submit("exchange", buffer, lambda all_: all_[other if needed == 2 else 0].clone(), key, needed)

    def barrier(self) -> Operation[None]:
        return self._submit("barrier", None, lambda all_: None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for branch in self._branches:
            branch.close()
        self._board.break_off(f"rank {self.rank} has closed '{self.name}'")

    # ------------------------------------------------------------------ the machinery

    def _submit(
        self,
        kind: str,
        buffer: Tensor | None,
        combine: Callable[[list[Tensor]], T],
        pair: str | None = None,
        needed: int | None = None,
    ) -> Operation[T]:
        self._check_usable()
        self._seq += 1
        operation: Operation[T] = Operation(self._where, kind, self._seq, self._timeout, self._fail)
        shape = "" if buffer is None else f" of {buffer.dtype} {tuple(buffer.shape)}"
        call = _Call(self.rank, kind + shape, buffer, combine, operation)
        # Exchanges have an order per pair of ranks: the others need not take part.
        key = pair if pair is not None else f"#{self._num_collectives()}"
        self._board.arrive(key, self.world_size if needed is None else needed, call)
        return operation

    def _fail(self, error: CollectiveError) -> None:
        if self._failure is None:
            self._failure = error
        self._board.break_off(f"rank {self.rank} gave up: {error}")

    def _open(self) -> None:
        self._check_usable()
        try:
            self._board.join(self._where, self._timeout)
        except CollectiveError as error:
            self._fail(error)
            raise

    def _child(self, where: Where, timeout: timedelta) -> InProcessCollectives:
        return InProcessCollectives(self._world, where, timeout)

    def _enter(self, where: Where) -> None:
        self._where, self._board = where, self._world.board(where)

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._board.reason is not None:
            raise CollectiveError(f"{self._where}: unusable since an earlier failure. It was: {self._board.reason}")


def _write(buffer: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        buffer.copy_(value)
    return buffer
