"""Threads as ranks: collectives inside one process, for tests and for learning.

`InProcessWorld` makes `InProcessCollectives` with the semantics of the real transports, but strict and repeatable:
reductions run in the order of ranks, and ranks that call different things get an error that names both, where a real
transport would hang or abort.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import (
    ElasticCommunicator,
    Operation,
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

T = TypeVar("T")


class _Call(NamedTuple):
    """One rank's part in an operation. ``combine`` maps all parts, in the order of ranks, to this rank's result."""

    rank: int
    signature: str
    buffer: Tensor | None
    combine: Callable[[list[Tensor]], Any]
    operation: Operation[Any]


class _Board:
    """A meeting place of one communicator's ranks in one generation. Any rank's thread may call its methods."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lock = threading.RLock()
        self.joined: set[int] = set()
        self.changed = threading.Condition(self.lock)
        self._calls: dict[int, list[_Call]] = {}
        self.reason: str | None = None

    def arrive(self, number: int, call: _Call) -> None:
        with self.lock:
            if self.reason is not None:
                call.operation.fail(CollectiveError(f"{call.operation} failed at once: {self.reason}"))
                return
            calls = self._calls.setdefault(number, [])
            calls.append(call)
            if call.signature != calls[0].signature:
                self.break_off(
                    f"ranks disagree on operation #{number}: rank {calls[0].rank} called {calls[0].signature}, "
                    f"rank {call.rank} called {call.signature}. All ranks must call the same, in the same order."
                )
            elif len(calls) == self.world_size:
                del self._calls[number]
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
        return self._ranks[rank]

    def joining(self, name: str) -> InProcessCollectives:
        """Return the communicator of one more rank, alone until reconfigured into the others' generation."""
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
    """One rank's communicator in an `InProcessWorld`; an `ElasticCollectives`."""

    def __init__(self, world: InProcessWorld, where: Where, timeout: timedelta) -> None:
        super().__init__(where, timeout)
        self._world = world
        self._board = world.board(where)

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        check_buffer(buffer)
        return self._submit(
            f"all_reduce({op.value})", buffer, lambda all_: _write(buffer, sum_rows(torch.stack(all_), op))
        )

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_buffer(buffer)
        gathered = room_for(buffer, self.world_size, out)
        return self._submit("all_gather", buffer, lambda all_: _write(gathered, torch.stack(all_)))

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        rank = self.rank
        received = room_for(buffer[0], self.world_size, out)
        return self._submit(
            "all_to_all", buffer, lambda all_: _write(received, torch.stack([each[rank] for each in all_]))
        )

    def broadcast(self, buffer: Tensor, src: int = 0) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_rank(src, "src")
        return self._submit(f"broadcast(src={src})", buffer, lambda all_: _write(buffer, all_[src]))

    def barrier(self) -> Operation[None]:
        return self._submit("barrier", None, lambda all_: None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for branch in self._branches:
            branch.close()
        self._board.break_off(f"rank {self.rank} has closed '{self.name}'")

    def _submit(self, kind: str, buffer: Tensor | None, combine: Callable[[list[Tensor]], T]) -> Operation[T]:
        self._check_usable()
        self._seq += 1
        operation: Operation[T] = Operation(self._where, kind, self._seq, self._timeout, self._fail)
        shape = "" if buffer is None else f" of {buffer.dtype} {tuple(buffer.shape)}"
        self._board.arrive(self._seq, _Call(self.rank, kind + shape, buffer, combine, operation))
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
