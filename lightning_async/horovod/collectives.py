"""Collectives through Horovod, which is imported only when it is asked for.

`HorovodWorld` is what a process has of Horovod, and `HorovodCollectives` one communicator of it. Nothing in Horovod can
be cancelled, and its blocking calls know no deadline. So every operation is asynchronous, named, and polled; a failed
or late one *poisons* the world: nothing more is submitted, the buffers of what is under way stay alive until Horovod
has shut down, and every later operation raises at once. `run_elastic` is Horovod Elastic: it runs, and runs again with
whoever is there, from what all ranks have committed.
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
    """Import ``horovod.torch``; raise ModuleNotFoundError, which says how to get it, where it is not installed."""
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Horovod for this torch ({torch.__version__}) is not installed ({error}). Build it with "
            "`lightning-async build-horovod`, or train without it: `AsyncAveragingStrategy(transport='torch')`."
        ) from error


class HorovodWorld:
    """The Horovod of this process, from one ``hvd.init()`` to the next."""

    def __init__(self, hvd: ModuleType) -> None:
        self.hvd: Any = hvd
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.local_rank = int(hvd.local_rank())
        self.one_host = int(hvd.local_size()) == self.size
        self.another_follows = False
        """What fails here goes on in another world: this process, and what it holds, stays until that is formed."""
        self.failure: CollectiveError | None = None
        self.num_runs = 0  # runs of strategies so far, which names their operations apart; equal on all ranks
        self.store: Any = None  # of all ranks, for what is no collective; made by whoever needs it first
        self.life = hvd.mpi_ops._handle_map  # a new one comes with every init
        self.flights: set[Flight] = set()
        internal_error = importlib.import_module("horovod.common.exceptions").HorovodInternalError

        # For Horovod Elastic, which goes on after a `HorovodInternalError`, and after no other.
        self.failed_type: Any = type("HorovodFailed", (CollectiveError, internal_error), {})
        self.timeout_type: Any = type("HorovodTimeout", (CollectiveTimeout, internal_error), {})
        self.lost_type: Any = type("HorovodPeerLost", (PeerLost, internal_error), {})

    @classmethod
    def join(cls, size: int | None = None, gloo_timeout: timedelta | None = None) -> HorovodWorld:
        """Initialise Horovod where that is not done; ``size``, which the launcher started, is compared.

        After ``gloo_timeout`` Gloo inside Horovod gives up on a silent peer, unless ``HOROVOD_GLOO_TIMEOUT_SECONDS``
        says so. Raises ModuleNotFoundError where Horovod is not installed, RuntimeError where it sees another number of
        ranks.
        """
        global _current
        hvd: Any = load()
        if not hvd.is_initialized():
            if gloo_timeout is not None:
                os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(gloo_timeout.total_seconds())))
            # Waiting for a header is no stall here, and what is one is found by deadlines of our own.
            os.environ.setdefault("HOROVOD_STALL_CHECK_DISABLE", "1")
            # What is worth fusing is fused before it comes here: Horovod's own buffer would cost two copies more.
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
            hvd.init()
            _current = cls(hvd)
        elif _current is None or _current.life is not hvd.mpi_ops._handle_map:
            _current = cls(hvd)  # the user has initialised it
        if size is not None and _current.size != size:
            raise RuntimeError(
                f"Horovod sees {_current.size} rank(s), but the launcher started {size}: each would train alone. This "
                "Horovod was built without MPI? `lightning-async build-horovod --mpi`, or use horovodrun."
            )
        return _current

    @staticmethod
    def current(size: int | None = None) -> HorovodWorld | None:
        """Return the world, where Horovod is initialised; ``size`` is what `join` compares."""
        hvd: Any = sys.modules.get("horovod.torch")
        return HorovodWorld.join(size) if hvd is not None and hvd.is_initialized() else None

    @staticmethod
    def leave() -> None:
        """Shut Horovod down; with a rank that stands still this blocks until Gloo's timeout."""
        load().shutdown()

    def poison(self, error: Exception) -> CollectiveError:
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
    """The pieces of one operation, submitted one after the other: a small one of another fork is not kept waiting."""

    def __init__(self, world: HorovodWorld, name: str, starts: Sequence[Start], operation: HorovodOperation) -> None:
        self.operation = operation
        self._world = world
        self._name = name
        self._starts = starts
        self._outputs: list[Any] = []
        self._handle: int | None = None
        self._lock = threading.Lock()

    def advance(self, finish: Callable[[list[Any]], object]) -> None:
        """Submit the next piece, or end the operation; never blocks."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            hvd = self._world.hvd
            while not self.operation.ended():
                if self._handle is None and len(self._outputs) == len(self._starts):
                    self.operation.complete(finish(self._outputs))
                elif self._handle is None:
                    # In Lightning's validation, new tensors would be such that Horovod's thread must not resize.
                    with torch.inference_mode(False):
                        self._handle = self._starts[len(self._outputs)](f"{self._name}.{len(self._outputs)}")
                elif not hvd.poll(self._handle):
                    return
                else:
                    self._outputs.append(hvd.synchronize(self._handle))  # does not block: it has ended
                    self._handle = None
            if self._handle is None:  # else Horovod may still write: the world keeps this, and so the buffers
                self._world.flights.discard(self)
        except Exception as error:
            self._world.poison(CollectiveError(f"{self.operation}: {error} {self.operation.remedy}"))
        finally:
            self._lock.release()


PIECE_BYTES = 4 << 20
_NATIVE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class HorovodCollectives(Communicator["HorovodCollectives"]):
    """One communicator over Horovod's ranks: a prefix of names, with an order of its own.

    Large buffers travel in pieces, one at a time, so that a small operation of another fork passes between them.
    Byte-moving operations see uint8; bools, small integers and half types are reduced as int64 or fp32, and rounded
    once, but for ``native`` ones. ``recurring`` operations of one kind follow each other under one name: Horovod
    remembers what it has negotiated for a name, and negotiates numbered operations anew.
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
        """Return a fork for what the training thread waits for, step by step: in one piece, fp16 as it is."""
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
        """Combine ``buffer`` over all ranks by Adasum, in place; see `check_adasum`."""
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
        # One row for each rank, whose length no splits have to name: those are 32-bit.
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
        # What is under way cannot be called back: the world keeps its buffers.
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
        horovod_op = how(op)  # a bool's sum is a maximum

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
        """Start an operation: each of ``starts`` submits one piece, ``finish`` makes a result of all."""
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
        """Do nothing: Horovod has formed its groups."""

    def _child(self, where: Where, timeout: timedelta) -> HorovodCollectives:
        child = HorovodCollectives(
            self.horovod, name=where.name, timeout=timeout, piece_bytes=self._piece_bytes, poll_s=self._poll_s,
            native=self._native, recurring=self._recurring,
        )  # fmt: skip
        child._where = where
        return child


C = TypeVar("C")


class Committed(Generic[C]):
    """The state that all ranks go back to when ranks are lost, and that ranks that join begin with."""

    def __init__(self, value: C) -> None:
        self.value = value
        self._check: Callable[[], None] = lambda: None

    def commit(self, value: C) -> None:
        """Replace the value; all ranks do at the same point.

        Raises:
            HostsUpdatedInterrupt: hosts have come or are to go: leave, for a world with them.
        """
        self.value = value
        self._check()


def run_elastic(
    train: Callable[[], T], committed: Committed[C], broadcast: Callable[[Any], Any], gloo_timeout: timedelta
) -> T:
    """Call ``train`` until it returns; after a lost rank, and with every change of hosts, in a new world.

    ``train`` sees to it that all ranks go on from one commit, and leaves Horovod's errors alone; ``broadcast`` sends
    rank 0's object to all ranks.
    """
    elastic: Any = importlib.import_module("horovod.common.elastic")
    HorovodWorld.join(gloo_timeout=gloo_timeout)

    class State(elastic.State):
        """`Committed`, as Horovod wants to see it. What is committed is saved."""

        def __init__(self) -> None:
            super().__init__(bcast_object=broadcast, get_rank=lambda: HorovodWorld.join().rank)

        def save(self) -> None:
            """Do nothing: `Committed.commit` does."""

        def restore(self) -> None:
            """Do nothing: the committed value is what it was."""

        def sync(self) -> None:
            """``train`` begins with that, where hosts were only lost as well."""

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
