"""Collectives through Horovod."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.communicator import Communicator
from lightning_async.comm.horovod.world import Flight, HorovodOperation, HorovodWorld, Start
from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.operation import Operation, Where
from lightning_async.comm.protocols import ReduceOp
from lightning_async.comm.reductions import as_bytes, check_buffer, check_rows, reducible, room_for, sum_rows
from lightning_async.errors import CollectiveError

__all__ = ["PIECE_BYTES", "HorovodCollectives"]

T = TypeVar("T")

PIECE_BYTES = 4 << 20
_NATIVE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


class HorovodCollectives(Communicator["HorovodCollectives"]):
    """One communicator over Horovod's ranks, or over a process set: a prefix of names, with an order of its own.

    Large buffers travel in pieces, one at a time, so that a small operation of another fork passes between them.
    Byte-moving operations see uint8; bools, small integers and half types are reduced as int64 or fp32, and rounded
    once.

    Args:
        world: from `HorovodWorld.join`.
        name: differs between communicators of one world.
        timeout: deadline of each operation.
        piece_bytes: size of the pieces. Default 4 MiB.
        poll_s: longest pause between two looks at an operation that is waited for.
        native: types that are reduced as they are.
        recurring: operations of one kind follow each other, under one name. Horovod remembers what it has negotiated
            for a name; with numbered names, that do not recur, it negotiates every operation anew.
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
        self._process_set: Any = world.hvd.global_process_set
        self._piece_bytes, self._poll_s, self._native, self._recurring = piece_bytes, poll_s, native, recurring

    def for_gradients(self, timeout: timedelta, piece_bytes: int) -> HorovodCollectives:
        """A fork for what the training thread waits for, step by step: in one piece, fp16 reduced as it is."""
        fork = self.fork("gradients", timeout)
        fork._piece_bytes, fork._poll_s, fork._native = max(piece_bytes, PIECE_BYTES), 0.001, _NATIVE | {torch.float16}
        fork._recurring = True
        return fork

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> HorovodCollectives | None:
        """See `Collectives`.

        Raises:
            ValueError: Horovod was not told at its start that these ranks will be by themselves.
        """
        child = super().split(ranks, name, timeout)
        world_ranks = [self._world_rank(rank) for rank in sorted(set(ranks))]
        # Making one is an operation of the whole world.
        whole = self.world_size == self.horovod.size
        process_set = (self.horovod.add_process_set if whole else self.horovod.process_set)(world_ranks)
        if process_set is None:
            raise ValueError(
                f"{self._where}: `split(ranks={sorted(ranks)})`: Horovod knows some of its ranks by themselves only "
                f"where it was told so at its start: `HorovodWorld.join(process_sets=[{world_ranks}])`, or by "
                "HOROVOD_DYNAMIC_PROCESS_SETS=1."
            )
        if child is not None:
            child._process_set = process_set
        return child

    def check_adasum(self) -> None:
        """Raise ValueError where Horovod has no Adasum for this world."""
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
        """See `Collectives`."""
        hvd = self.horovod.hvd
        ops = {ReduceOp.SUM: hvd.Sum, ReduceOp.MIN: hvd.Min, ReduceOp.MAX: hvd.Max}
        return self._reduce(buffer, op, f"all_reduce({op.value})", ops.__getitem__)

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_buffer(buffer)
        hvd, mine = self.horovod.hvd, as_bytes(buffer)
        given = None if out is None else room_for(buffer, self.world_size, out)

        def finish(outputs: list[Any]) -> Tensor:
            data = (outputs[0] if outputs else mine).view(buffer.dtype).view(self.world_size, *buffer.shape)
            return data if given is None else given.copy_(data)

        starts = (
            [lambda name: hvd.allgather_async(mine, name=name, process_set=self._process_set)] if mine.numel() else []
        )
        return self._submit("all_gather", starts, finish)

    def reduce_scatter(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        """See `Collectives`. Rows are exchanged, then combined in the order of ranks, half types in fp32."""
        check_rows(buffer, self.world_size)
        return self._all_to_all(buffer, f"reduce_scatter({op.value})", lambda rows: sum_rows(rows, op))

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        given = None if out is None else room_for(buffer[0], self.world_size, out)
        return self._all_to_all(buffer, "all_to_all", lambda rows: rows if given is None else given.copy_(rows))

    def broadcast(self, buffer: Tensor, src: int = 0) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_peer(src, "src")
        hvd, root = self.horovod.hvd, self._world_rank(src)
        return self._submit(
            f"broadcast(src={src})",
            [
                lambda name, piece=piece: hvd.broadcast_async_(piece, root, name=name, process_set=self._process_set)
                for piece in self._pieces(as_bytes(buffer))
            ],
            lambda _: buffer,
        )

    def exchange(self, buffer: Tensor, peer: int) -> Operation[Tensor]:
        """See `Collectives`. Ranks that exchange with nobody need not call it.

        Raises:
            ValueError: the two were not among the ``process_sets`` of `HorovodWorld.join`, in a world of more than two.
        """
        check_buffer(buffer)
        self._check_peer(peer, "peer")
        if peer == self.rank:
            return self._submit("exchange", [], lambda _: buffer.clone(), name="self")
        hvd, mine = self.horovod.hvd, as_bytes(buffer)
        two = sorted((self._world_rank(self.rank), self._world_rank(peer)))
        pair = self.horovod.process_set(two)
        if pair is None:
            raise ValueError(
                f"{self._where}: `peer={peer}`: Horovod moves bytes between two ranks only where it was told so at its "
                f"start: `HorovodWorld.join(process_sets=[{two}])`."
            )
        tag = self._exchanged[peer] = self._exchanged.get(peer, 0) + 1
        other = int(peer > self.rank)

        def finish(outputs: list[Any]) -> Tensor:
            return outputs[0].view(2, -1)[other].contiguous().view(buffer.dtype).view(buffer.shape)

        return self._submit(
            f"exchange(peer={peer})",
            [lambda name: hvd.allgather_async(mine, name=name, process_set=pair)],
            finish,
            name=f"exchange{min(self.rank, peer)}-{max(self.rank, peer)}.{tag}",
        )

    def barrier(self) -> Operation[None]:
        token, hvd = torch.zeros(1, dtype=torch.int32), self.horovod.hvd
        return self._submit(
            "barrier",
            [lambda name: hvd.allreduce_async_(token, name=name, op=hvd.Sum, process_set=self._process_set)],
            lambda _: None,
        )

    def close(self) -> None:
        self._closed = True
        for branch in self._branches:
            branch.close()
        # What is under way cannot be called back: the world keeps its buffers.
        for flight in [each for each in self.horovod.flights if each.operation.where is self._where]:
            flight.operation.fail(CollectiveError(f"{self._where}: closed with operations under way."))

    # ------------------------------------------------------------------ the machinery

    def _world_rank(self, rank: int) -> int:
        """Horovod's own number of a rank."""
        return int(self.generation.name_of(rank))  # of the first and only generation

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(max(1, self._piece_bytes // flat.element_size())))

    def _reduce(
        self, buffer: Tensor, op: ReduceOp, kind: str, how: Callable[[ReduceOp], Any], in_pieces: bool = True
    ) -> Operation[Tensor]:
        check_buffer(buffer)
        wire, op, narrow = reducible(buffer, op, self._native)
        hvd, horovod_op = self.horovod.hvd, how(op)  # a bool's sum is a maximum

        def finish(_: object) -> Tensor:
            narrow(wire)
            return buffer

        return self._submit(
            kind,
            [
                lambda name, piece=piece: hvd.allreduce_async_(
                    piece, name=name, op=horovod_op, process_set=self._process_set
                )
                for piece in (self._pieces(wire) if in_pieces else [wire])
            ],
            finish,
        )

    def _all_to_all(self, buffer: Tensor, kind: str, finish: Callable[[Tensor], T]) -> Operation[T]:
        hvd = self.horovod.hvd
        # One row for each rank, whose length no splits have to name: those are 32-bit.
        mine = as_bytes(buffer).view(self.world_size, -1)

        def end(outputs: list[Any]) -> T:
            received = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
            return finish(received.view(-1).view(buffer.dtype).view(buffer.shape))

        return self._submit(
            kind, [lambda name: hvd.alltoall_async(mine, name=name, process_set=self._process_set)], end
        )

    def _submit(
        self, kind: str, starts: Sequence[Start], finish: Callable[[list[Any]], T], name: str | None = None
    ) -> Operation[T]:
        """Start an operation.

        Args:
            kind: for messages, and part of the name.
            starts: each submits one piece.
            finish: makes the result of what Horovod returned for each piece.
            name: where not all ranks call it; else the sequence number and the kind.
        """
        self._check_usable()
        if name is None:
            self._seq += 1
            name = kind if self._recurring else f"{self._seq}:{kind}"
        operation: HorovodOperation[T] = HorovodOperation(
            self._where, kind, self._seq, self._timeout, self._fail, poll=lambda: flight.advance(finish)
        )
        operation.late, operation.poll_s = self.horovod.timeout_type, self._poll_s
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
        """Horovod has formed its groups."""

    def _child(self, where: Where, timeout: timedelta) -> HorovodCollectives:
        child = HorovodCollectives(
            self.horovod, name=where.name, timeout=timeout, piece_bytes=self._piece_bytes, poll_s=self._poll_s,
            native=self._native, recurring=self._recurring,
        )  # fmt: skip
        child._where, child._process_set = where, self._process_set
        return child
