"""Collectives through Horovod, which is imported only when it is used.

`HorovodWorld` is the Horovod of one process, and `HorovodCollectives` is one communicator. Nothing in Horovod can be
cancelled, and its blocking calls have no deadline. So every operation is asynchronous, named, and polled. A failed or
late operation *poisons* the world: nothing more is submitted, the buffers of operations under way stay alive until
Horovod has shut down, and every later operation raises at once. `run_elastic` is Horovod Elastic: it runs a function
again, with the ranks that are there, from the state that all ranks have committed.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import (
    Communicator,
    Operation,
    ReduceOp,
    Where,
    as_bytes,
    check_buffer,
    check_rows,
    reducible,
    room_for,
)
from lightning_async.errors import CollectiveError, CollectiveTimeout, PeerLost
from lightning_async.membership.generation import Generation

T = TypeVar("T")
Start = Callable[[str], int]
_current: HorovodWorld | None = None


def load() -> ModuleType:
    """Import ``horovod.torch``; raise ModuleNotFoundError, with the remedy, if it is not installed."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Horovod for this torch ({torch.__version__}) is not installed ({error}). Build it with "
            "`lightning-async build-horovod`, or train without it: `AsyncAveragingStrategy(transport='torch')`."
        ) from error


class HorovodWorld:
    """Horovod's ranks and state as this process sees them, from one ``hvd.init()`` to the next."""

    def __init__(self, hvd: ModuleType) -> None:
        self.hvd: Any = hvd
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.local_rank = int(hvd.local_rank())
        self.one_host = int(hvd.local_size()) == self.size
        self.another_follows = False
        """Whether another world follows a failure of this one, so that this process and its store must stay alive."""
        self.failure: CollectiveError | None = None
        # Number of strategies' runs so far, equal on all ranks. It distinguishes the names of their operations.
        self.num_runs = 0
        # The store of all ranks, for everything that is no collective; created at its first use.
        self.store: Any = None
        # Each ``hvd.init()`` creates a new object here, by which a stale world is recognised.
        self.life = hvd.mpi_ops._handle_map
        self.flights: set[Flight] = set()
        internal_error = importlib.import_module("horovod.common.exceptions").HorovodInternalError

        # Horovod Elastic continues after a `HorovodInternalError` only, so all errors are subclasses of it.
        self.failed_type: Any = type("HorovodFailed", (CollectiveError, internal_error), {})
        self.timeout_type: Any = type("HorovodTimeout", (CollectiveTimeout, internal_error), {})
        self.lost_type: Any = type("HorovodPeerLost", (PeerLost, internal_error), {})

    @classmethod
    def join(cls, size: int | None = None, gloo_timeout: timedelta | None = None) -> HorovodWorld:
        """Initialise Horovod if it is not yet, and return its world.

        ``size`` is the number of ranks that the launcher started; None: any number. After ``gloo_timeout`` Gloo inside
        Horovod gives up on a silent peer, unless ``HOROVOD_GLOO_TIMEOUT_SECONDS`` is set. Raises ModuleNotFoundError if
        Horovod is not installed, and RuntimeError if Horovod does not have ``size`` ranks.
        """
        global _current
        hvd: Any = load()
        if not hvd.is_initialized():
            if gloo_timeout is not None:
                os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(gloo_timeout.total_seconds())))
            # Waiting for a header is no stall, and our own deadlines find real stalls.
            os.environ.setdefault("HOROVOD_STALL_CHECK_DISABLE", "1")
            # Small tensors are fused before they come here, and Horovod's own buffer would cost two more copies.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
            hvd.init()
            _current = cls(hvd)
        # The user has initialised Horovod, possibly again.
        elif _current is None or _current.life is not hvd.mpi_ops._handle_map:
            _current = cls(hvd)
        if size is not None and _current.size != size:
            raise RuntimeError(
                f"Horovod sees {_current.size} rank(s), but the launcher started {size}: each would train alone. This "
                "Horovod was built without MPI? `lightning-async build-horovod --mpi`, or use horovodrun."
            )
        return _current

    @staticmethod
    def current(size: int | None = None) -> HorovodWorld | None:
        """Return the world if Horovod is initialised, else None; raise RuntimeError if it has not ``size`` ranks."""
        hvd: Any = sys.modules.get("horovod.torch")
        return HorovodWorld.join(size) if hvd is not None and hvd.is_initialized() else None

    @staticmethod
    def leave() -> None:
        """Shut Horovod down; if a rank hangs, this blocks until Gloo's timeout."""
        load().shutdown()

    def poison(self, error: Exception) -> CollectiveError:
        """Fail all operations under way, and all later ones; return the error that they raise."""
        if self.failure is None:
            late = isinstance(error, CollectiveTimeout)
            kind: type[CollectiveError] = self.timeout_type if late else self.failed_type
            self.failure = kind(str(error))
            for flight in list(self.flights):
                flight.operation.fail(self.failure)
        return self.failure


class HorovodOperation(Operation[T]):
    remedy = (
        "Horovod cannot cancel: this process takes part in no collective any more. Start again from the last "
        "checkpoint, or run under Horovod Elastic."
    )


class Flight:
    """An operation that is submitted in pieces, so that operations of other communicators can run between them."""

    def __init__(self, world: HorovodWorld, name: str, starts: Sequence[Start], operation: HorovodOperation) -> None:
        self.operation = operation
        self._world = world
        self._name = name
        self._starts = starts
        self._outputs: list[Any] = []
        self._handle: int | None = None
        # Any thread that waits for the operation may advance it. One of them does, and the others need not wait.
        self._lock = threading.Lock()

    def advance(self, finish: Callable[[list[Any]], object]) -> None:
        """Submit the next piece if the last one is done.

        If all are done, complete the operation with ``finish``'s result.

        Never blocks. ``finish`` receives the results of all pieces.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            hvd = self._world.hvd
            while not self.operation.ended():
                if self._handle is None and len(self._outputs) == len(self._starts):
                    self.operation.complete(finish(self._outputs))
                elif self._handle is None:
                    # In Lightning's inference mode, Horovod's thread could not resize the tensors that are created
                    # here.
                    with torch.inference_mode(False):
                        self._handle = self._starts[len(self._outputs)](f"{self._name}.{len(self._outputs)}")
                elif not hvd.poll(self._handle):
                    return
                else:
                    # This does not block, because the operation has ended.
                    self._outputs.append(hvd.synchronize(self._handle))
                    self._handle = None
            # Otherwise Horovod may still write, so the world keeps this object, and with it the buffers.
            if self._handle is None:
                self._world.flights.discard(self)
        except Exception as error:
            # Horovod's state is unknown after any error, so nothing more is submitted.
            self._world.poison(CollectiveError(f"{self.operation}: {error} {self.operation.remedy}"))
        finally:
            self._lock.release()


# A large buffer occupies Horovod for this much at a time.
PIECE_BYTES = 4 << 20
_NATIVE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class HorovodCollectives(Communicator["HorovodCollectives"]):
    """A communicator over Horovod's ranks. The names of its operations begin with a prefix of its own.

    So only its own operations need the same order on all ranks. Large buffers are sent in pieces, one at a time, so
    that small operations of other communicators can run between the pieces. Operations that only move data send it as
    uint8. Bools, small integers and half types are reduced as int64 or fp32 and rounded once, except for the dtypes in
    ``native``, which Horovod reduces itself. With ``recurring``, all operations of one kind have the same name: Horovod
    remembers what it has negotiated for a name, and would negotiate each new name again.
    """

    def __init__(
        self,
        world: HorovodWorld,
        *,
        name: str = "world",
        timeout: timedelta = timedelta(minutes=5),
        piece_bytes: int = PIECE_BYTES,
        poll_s: float = 0.005,
        native: frozenset[torch.dtype] = _NATIVE,
        recurring: bool = False,
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"`HorovodCollectives(timeout={timeout!r})` must be longer than zero.")
        if piece_bytes < 8:
            raise ValueError(f"`HorovodCollectives(piece_bytes={piece_bytes})` must be at least 8.")
        super().__init__(Where(name, Generation.first(world.rank, world.size)), timeout)
        self.horovod = world
        self._piece_bytes = piece_bytes
        self._poll_s = poll_s
        self._native = native
        self._recurring = recurring

    def for_gradients(self, timeout: timedelta, piece_bytes: int) -> HorovodCollectives:
        """Return a fork for gradients, for which training waits at each step: larger pieces, and fp16 sums in fp16."""
        fork = self.fork("gradients", timeout)
        fork._piece_bytes = max(piece_bytes, PIECE_BYTES)
        fork._poll_s = 0.001
        fork._native = _NATIVE | {torch.float16}
        fork._recurring = True
        return fork

    def check_adasum(self) -> None:
        hvd = self.horovod.hvd
        if not (hvd.mpi_built() and hvd.mpi_enabled()):
            raise ValueError(
                "Adasum needs Horovod over MPI: `lightning-async build-horovod --mpi`, then `mpirun` or "
                "`horovodrun --mpi`."
            )
        if self.world_size & (self.world_size - 1):
            raise ValueError(f"Adasum needs a number of ranks that is a power of two, not {self.world_size}.")

    def adasum(self, buffer: Tensor) -> Operation[Tensor]:
        """Combine ``buffer`` over all ranks by Adasum, in place; `check_adasum` says whether that is possible."""
        return self._reduce(buffer, ReduceOp.SUM, "adasum", lambda _: self.horovod.hvd.Adasum, in_pieces=False)

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        hvd = self.horovod.hvd
        ops = {ReduceOp.SUM: hvd.Sum, ReduceOp.MIN: hvd.Min, ReduceOp.MAX: hvd.Max}
        return self._reduce(buffer, op, f"all_reduce({op.value})", ops.__getitem__)

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_buffer(buffer)
        hvd = self.horovod.hvd
        mine = as_bytes(buffer)
        given = None if out is None else room_for(buffer, self.world_size, out)

        def finish(outputs: list[Any]) -> Tensor:
            data = (outputs[0] if outputs else mine).view(buffer.dtype).view(self.world_size, *buffer.shape)
            return data if given is None else given.copy_(data)

        starts = [lambda name: hvd.allgather_async(mine, name=name)] if mine.numel() else []
        return self._submit("all_gather", starts, finish)

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        hvd = self.horovod.hvd
        given = None if out is None else room_for(buffer[0], self.world_size, out)
        # With one row for each rank no 32-bit splits are needed, which would limit the length.
        mine = as_bytes(buffer).view(self.world_size, -1)

        def finish(outputs: list[Any]) -> Tensor:
            received = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
            rows = received.view(-1).view(buffer.dtype).view(buffer.shape)
            return rows if given is None else given.copy_(rows)

        return self._submit("all_to_all", [lambda name: hvd.alltoall_async(mine, name=name)], finish)

    def broadcast(self, buffer: Tensor, src: int = 0) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_rank(src, "src")
        hvd = self.horovod.hvd
        return self._submit(
            f"broadcast(src={src})",
            [
                lambda name, piece=piece: hvd.broadcast_async_(piece, src, name=name)
                for piece in self._pieces(as_bytes(buffer))
            ],
            lambda _: buffer,
        )

    def barrier(self) -> Operation[None]:
        token = torch.zeros(1, dtype=torch.int32)
        hvd = self.horovod.hvd
        return self._submit(
            "barrier",
            [lambda name: hvd.allreduce_async_(token, name=name, op=hvd.Sum)],
            lambda _: None,
        )

    def close(self) -> None:
        self._closed = True
        for branch in self._branches:
            branch.close()
        # Operations under way cannot be cancelled, so the world keeps their buffers.
        for flight in [each for each in self.horovod.flights if each.operation.where is self._where]:
            flight.operation.fail(CollectiveError(f"{self._where}: closed with operations under way."))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(max(1, self._piece_bytes // flat.element_size())))

    def _reduce(
        self, buffer: Tensor, op: ReduceOp, kind: str, how: Callable[[ReduceOp], Any], in_pieces: bool = True
    ) -> Operation[Tensor]:
        check_buffer(buffer)
        wire, op, narrow = reducible(buffer, op, self._native)
        hvd = self.horovod.hvd
        # After `reducible`, which replaces the sum of bools by a maximum.
        horovod_op = how(op)

        def finish(_: object) -> Tensor:
            narrow(wire)
            return buffer

        return self._submit(
            kind,
            [
                lambda name, piece=piece: hvd.allreduce_async_(piece, name=name, op=horovod_op)
                for piece in (self._pieces(wire) if in_pieces else [wire])
            ],
            finish,
        )

    def _submit(self, kind: str, starts: Sequence[Start], finish: Callable[[list[Any]], T]) -> Operation[T]:
        """Start an operation: each of ``starts`` submits a piece; ``finish`` makes the result from their outputs."""
        self._check_usable()
        self._seq += 1
        name = kind if self._recurring else f"{self._seq}:{kind}"
        operation: HorovodOperation[T] = HorovodOperation(
            self._where, kind, self._seq, self._timeout, self._fail, poll=lambda: flight.advance(finish)
        )
        operation.late = self.horovod.timeout_type
        operation.poll_s = self._poll_s
        flight = Flight(self.horovod, f"{self.name}/{name}", starts, operation)
        self.horovod.flights.add(flight)
        flight.advance(finish)
        return operation

    def _check_usable(self) -> None:
        failure = self.horovod.failure
        if failure is not None:
            raise type(failure)(f"{self._where}: Horovod is unusable since an earlier failure. It was: {failure}")
        super()._check_usable()

    def _fail(self, error: CollectiveError) -> None:
        self.horovod.poison(error)

    def _open(self) -> None:
        """Do nothing, because Horovod has formed its groups."""

    def _child(self, where: Where, timeout: timedelta) -> HorovodCollectives:
        child = HorovodCollectives(
            self.horovod, name=where.name, timeout=timeout, piece_bytes=self._piece_bytes, poll_s=self._poll_s,
            native=self._native, recurring=self._recurring,
        )  # fmt: skip
        child._where = where
        return child


C = TypeVar("C")


class Committed(Generic[C]):
    """The state to which all ranks return when a rank is lost, and from which a joining rank begins."""

    def __init__(self, value: C) -> None:
        self.value = value
        self._check: Callable[[], None] = lambda: None

    def commit(self, value: C) -> None:
        """Replace the value. All ranks do this at the same point.

        Raises:
            HostsUpdatedInterrupt: Hosts were added or are to be removed, so all ranks must form a new world.
        """
        self.value = value
        self._check()


def run_elastic(
    train: Callable[[], T], committed: Committed[C], broadcast: Callable[[Any], Any], gloo_timeout: timedelta
) -> T:
    """Call ``train`` until it returns: again in a new world, each time that a rank is lost or the hosts change.

    ``train`` must let all ranks continue from the same commit, and must not catch Horovod's errors. ``broadcast``
    returns rank 0's object on all ranks.
    """
    elastic: Any = importlib.import_module("horovod.common.elastic")
    HorovodWorld.join(gloo_timeout=gloo_timeout)

    class State(elastic.State):
        """The state object that Horovod Elastic asks for.

        It stores nothing, because `Committed` holds the committed value.
        """

        def __init__(self) -> None:
            super().__init__(bcast_object=broadcast, get_rank=lambda: HorovodWorld.join().rank)

        def save(self) -> None:
            """Do nothing, because `Committed.commit` has saved the value."""

        def restore(self) -> None:
            """Do nothing, because the committed value has not changed."""

        def sync(self) -> None:
            """Do nothing, because ``train`` itself makes all ranks continue from the same committed value."""

    state = State()
    committed._check = state.check_host_updates

    def in_a_new_world() -> None:
        HorovodWorld.leave()
        HorovodWorld.join(gloo_timeout=gloo_timeout)

    def in_this_world(_: State) -> T:
        world = HorovodWorld.join()
        world.another_follows = True
        try:
            return train()
        finally:
            world.another_follows = False

    return elastic.run_fn(in_this_world, in_a_new_world)(state)
