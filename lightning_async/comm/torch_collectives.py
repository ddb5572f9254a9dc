"""Collectives through torch.distributed: Gloo, NCCL, and MPI if torch was built with it.

`TorchCollectives` is one communicator. `Flights` holds its pending operations, and fails all of them as soon as one
fails. A `TorchGroup` is torch's process group of one generation. It keeps an operation's tensors alive until torch no
longer uses them, which can be long after the operation was aborted. At the end of a generation, `Flights.land` fails
the pending operations and disposes of the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lightning_async.comm import torch_groups
from lightning_async.comm.collectives import (
    ElasticCommunicator,
    Operation,
    ReduceOp,
    Where,
    as_bytes,
    check_buffer,
    check_rows,
    reducible,
    room_for,
)
from lightning_async.comm.nccl import RegisteredMemory
from lightning_async.comm.torch_groups import TorchGroup
from lightning_async.comm.torch_rendezvous import MeetingOptions, form
from lightning_async.errors import AsyncTrainingError, CollectiveError
from lightning_async.membership.generation import Generation, at_start
from lightning_async.membership.store import Store

T = TypeVar("T")
Finish = Callable[[], T]
"""A function that returns the result of an operation once torch has ended it."""


class Flights:
    """The operations under way over one group.

    Used by the thread that calls operations, and by threads of torch when operations end.

    Args:
        fail: Called with an error and the operation that failed first; it has to call `break_off`.
    """

    def __init__(self, fail: Callable[[CollectiveError, Operation[Any]], None]) -> None:
        self.group: TorchGroup | None = None
        self._broken: CollectiveError | None = None
        self._fail = fail
        self._lock = threading.Lock()
        self._pending: dict[int, Operation[Any]] = {}

    def __len__(self) -> int:
        return sum(not operation.done() for operation in list(self._pending.values()))

    def over(self, group: TorchGroup) -> None:
        """Use this group for the operations from now on."""
        with self._lock:
            self.group = group

    def start(
        self,
        group: TorchGroup,
        operation: Operation[T],
        start: Callable[[Any], Any],
        finish: Finish[T],
        tensors: tuple[Tensor, ...],
        backstop: timedelta,
    ) -> None:
        """Let torch begin an operation.

        If another thread has ended the group's operations by `land` meanwhile, fail it at once.

        Args:
            group: The process group, which must have been registered with `over`.
            operation: The operation.
            start: Function that begins the operation on torch's process group, and returns torch's `Work`, or several.
            finish: Function that returns the result, once torch has ended the work.
            tensors: Tensors that torch reads or writes.
            backstop: Deadline after which torch ends its own wait, if nobody has aborted the operation earlier.
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
            # Outside the lock, because torch may wait here, and `break_off` needs the lock to end that wait.
            works = start(group.pg)
        except Exception as error:
            self._end(operation, finish, error)
            group.in_flight.pop(operation.seq, None)
            return
        group.watch(operation, works, lambda error: self._end(operation, finish, error), backstop)
        if self._broken is not None:  # another thread broke off just before, and did not see this operation
            operation.fail(CollectiveError(f"{operation} was broken off: {self._broken}"))

    def break_off(self, error: CollectiveError, first: Operation[Any] | None = None) -> None:
        """Fail operation ``first`` with the error, and all others as broken off by it. Any thread may call this."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            group = self.group
            pending = list(self._pending.values())
        if first is not None:
            first.fail(error)
        for operation in pending:
            operation.fail(CollectiveError(f"{operation} was broken off after {operation.elapsed_s():.2f} s: {error}"))
        if group is not None:
            group.break_off()

    def land(self) -> None:
        """Dispose of the group, and fail its operations, so that none of them concerns the next group."""
        with self._lock:
            group = self.group
            pending = list(self._pending.values())
            self.group = None
            self._pending = {}
        for operation in pending:
            operation.fail(_landed(operation))
        if group is not None:
            group.dispose()
        with self._lock:
            self._broken = None

    def _end(self, operation: Operation[T], finish: Finish[T], error: Exception | None) -> None:
        # An operation that has ended already was broken off: its result must not be written any more.
        if error is None and not operation.ended():
            try:
                value = finish()
            except Exception as caught:
                error = caught
            else:
                operation.complete(value)
        if error is not None and not operation.ended():
            self._fail(operation.failure(error), operation)
        if self._pending.get(operation.seq) is operation:  # the operation may be of an earlier generation
            del self._pending[operation.seq]


def _landed(operation: Operation[Any]) -> CollectiveError:
    return CollectiveError(f"{operation} was broken off: its groups are no more.")


_BACKENDS = ("gloo", "nccl", "mpi")
# Number of bytes from which sends and receives are faster than Gloo's own gather, see `torch_groups.swap`.
_LARGE_BYTES = 1 << 16
_MOST_TAGS = 1 << 30
_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MIN: dist.ReduceOp.MIN, ReduceOp.MAX: dist.ReduceOp.MAX}


class TorchCollectives(ElasticCommunicator["TorchCollectives"]):
    """One communicator over a process group of torch, formed from a store, without the default group.

    The constructor does no I/O: `open`, or else the first operation, forms the group together with all members, within
    ``form_timeout``. It also opens the communicators that `fork` has made before; later forks are opened at once. An
    operation that fails or passes its deadline aborts its communicator: the sockets are shut down, so that waiting
    peers fail as well, and every later operation raises at once; see `ElasticCommunicator`.

    Args:
        store: Store that all members can reach; other threads may use it, too, if none blocks in it.
        rank: Rank of this member at the start; `reconfigure` may change it.
        world_size: Number of members at the start; `reconfigure` may change it.
        backend: ``"gloo"`` (CPU tensors), ``"nccl"`` (CUDA tensors) or ``"mpi"``. Default: ``"gloo"``.
        name: Name that differs between communicators that share a store. Default: ``"world"``.
        timeout: Deadline of each operation. Default: 5 minutes.
        form_timeout: Deadline of forming a group. Default: 5 minutes.
        device: Device on which NCCL connects, and has its barrier. Default: None, the current CUDA device.
        max_ctas: Largest number of the GPU's thread blocks (CTAs) that NCCL may use; training uses the others.
            Default: 4.
        meeting_options: Settings of the rendezvous of members through the store. Default: None, the defaults of
            `MeetingOptions`.

    Raises:
        ValueError: An argument is out of range, or torch was built without the backend.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        backend: str = "gloo",
        name: str = "world",
        timeout: timedelta = timedelta(minutes=5),
        form_timeout: timedelta = timedelta(minutes=5),
        device: torch.device | None = None,
        max_ctas: int = 4,
        meeting_options: MeetingOptions | None = None,
    ) -> None:
        _check_arguments(backend, timeout, form_timeout)
        super().__init__(Where(name, at_start("TorchCollectives", rank, world_size, None)), timeout)
        self._store = store
        self._backend = backend
        self._device = device
        self._max_ctas = max_ctas
        self._form_timeout = form_timeout
        self._meeting_options = MeetingOptions() if meeting_options is None else meeting_options
        self._flights = Flights(self._fail)
        self._memory = RegisteredMemory()
        self._made: dict[Any, Any] = {}

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Operation[Tensor]:
        """Reduce over all ranks, in place; types that the backend cannot reduce are converted, and converted back."""
        check_buffer(buffer)
        wire, torch_op, narrow = reducible(buffer, op)

        def start(pg: Any) -> Any:
            return pg.allreduce([wire], self._options(dist.AllreduceOptions, reduceOp=_OPS[torch_op]))

        def finish() -> Tensor:
            narrow(wire)
            return buffer

        return self._submit(f"all_reduce({op.value})", start, finish, (buffer, wire))

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_buffer(buffer)
        gathered = room_for(buffer, self.world_size, out)
        rows = [as_bytes(row) for row in gathered]
        mine = as_bytes(buffer)
        large = self._large_tag(mine)

        def start(pg: Any) -> Any:
            if large is not None:
                return torch_groups.swap(
                    pg, self.rank, dict.fromkeys(range(len(rows)), mine), dict(enumerate(rows)), large
                )
            if self._backend == "nccl":  # the form with a list would copy
                return pg._allgather_base(as_bytes(gathered), mine, self._options(AllgatherOptions))
            return pg.allgather([rows], [mine], self._options(AllgatherOptions))

        return self._submit("all_gather", start, lambda: gathered, (buffer, gathered))

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_rows(buffer, self.world_size)
        received = room_for(buffer[0], self.world_size, out)
        mine = as_bytes(buffer)
        theirs = as_bytes(received)
        large = self._large_tag(mine)

        def start(pg: Any) -> Any:
            if large is not None:
                sent, rows = (dict(enumerate(each.chunk(self.world_size))) for each in (mine, theirs))
                return torch_groups.swap(pg, self.rank, sent, rows, large)
            return pg.alltoall_base(theirs, mine, [], [], self._options(dist.AllToAllOptions))

        return self._submit("all_to_all", start, lambda: received, (buffer, received))

    def broadcast(self, buffer: Tensor, src: int = 0) -> Operation[Tensor]:
        check_buffer(buffer)
        self._check_rank(src, "src")
        data = as_bytes(buffer)

        def start(pg: Any) -> Any:
            return pg.broadcast([data], self._options(dist.BroadcastOptions, rootRank=src, rootTensor=0))

        return self._submit(f"broadcast(src={src})", start, lambda: buffer, (buffer,))

    def barrier(self) -> Operation[None]:
        # A reduction of one number on a known device, which every backend has.
        token = torch.zeros(1, device=self._token_device())
        return self._submit(
            "barrier", lambda pg: pg.allreduce([token], self._options(dist.AllreduceOptions)), lambda: None, (token,)
        )

    def reconfigure(self, generation: Generation) -> None:
        if self._backend == "mpi":
            raise CollectiveError(f"{self._where}: torch forms groups of MPI only once. It failed by: {self._failure}")
        super().reconfigure(generation)

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> TorchCollectives | None:
        if self._backend == "mpi" and len(set(ranks)) < self.world_size:
            raise ValueError(
                f"{self._where}: `split(ranks={sorted(ranks)})`: torch's MPI has groups of all ranks only."
            )
        return super().split(ranks, name, timeout)

    def registered(self, buffer: Tensor) -> Tensor:
        if self._backend != "nccl":
            return buffer
        return self._memory.copy(self._open().pg, buffer)

    def close(self) -> None:
        self._closed = True
        for branch in self._branches:
            branch.close()
        if len(self._flights):
            self._fail(CollectiveError(f"{self._where}: closed with operations under way."))
        self._flights.land()

    def _large_tag(self, data: Tensor) -> int | None:
        """Return the tag of an operation that is so large that it uses sends and receives; otherwise None."""
        if self._backend != "gloo" or data.numel() < _LARGE_BYTES:
            return None
        return self._seq % _MOST_TAGS

    def _submit(
        self, kind: str, start: Callable[[Any], Any], finish: Finish[T], tensors: tuple[Tensor, ...]
    ) -> Operation[T]:
        self._check_usable()
        group = self._open()
        self._seq += 1
        operation: Operation[T] = Operation(self._where, kind, self._seq, self._timeout, self._fail)
        self._flights.start(group, operation, start, finish, tensors, self._backstop())
        return operation

    def _fail(self, error: CollectiveError, first: Operation[Any] | None = None) -> None:
        if self._failure is None:
            self._failure = error
        self._flights.break_off(error, first)

    def _is_open(self) -> bool:
        return self._flights.group is not None

    def _open(self) -> torch_groups.TorchGroup:
        group = self._flights.group  # read once, because another thread may call `land`
        if group is None:
            self._check_usable()
            try:
                group = form(
                    self._store,
                    self._where,
                    self._backend,
                    self._form_timeout,
                    self._token_device() if self._backend == "nccl" else None,
                    self._max_ctas,
                    cancelled=lambda: self._failure is not None or self._closed,
                    meeting_options=self._meeting_options,
                )
            except AsyncTrainingError as error:
                self._fail(error if isinstance(error, CollectiveError) else CollectiveError(str(error)))
                raise
            # Memory of an earlier generation is used with the new group, too.
            self._memory.register(group.pg)
            self._flights.over(group)
        self._check_usable()
        return group

    def _child(self, where: Where, timeout: timedelta) -> TorchCollectives:
        child = TorchCollectives(
            self._store, where.rank, where.world_size, backend=self._backend, name=where.name, timeout=timeout,
            form_timeout=self._form_timeout, device=self._device, max_ctas=self._max_ctas,
            meeting_options=self._meeting_options,
        )  # fmt: skip
        # The constructor numbers members by rank, but the child keeps its parent's generation.
        child._where = where
        return child

    def _enter(self, where: Where) -> None:
        self._flights.land()
        self._where = where

    def _options(self, kind: Callable[[], Any], **fields: Any) -> Any:
        key = kind, *fields.items()
        if key not in self._made:
            options = self._made[key] = kind()
            for name, value in {"timeout": self._backstop(), **fields}.items():
                setattr(options, name, value)
        return self._made[key]

    def _backstop(self) -> timedelta:
        # Later than the operation's own deadline, whose message is better: this only ends what cannot be broken off.
        return self._timeout + timedelta(seconds=1)

    def _token_device(self) -> torch.device:
        if self._backend != "nccl":
            return torch.device("cpu")
        return self._device if self._device is not None else torch.device("cuda", torch.cuda.current_device())


def _check_arguments(backend: str, timeout: timedelta, form_timeout: timedelta) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"`TorchCollectives(backend={backend!r})` must be one of {_BACKENDS}.")
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if not available[backend]():
        raise ValueError(f"`TorchCollectives(backend={backend!r})`: this torch ({torch.__version__}) has no {backend}.")
    for argument, value in (("timeout", timeout), ("form_timeout", form_timeout)):
        if value <= timedelta(0):
            raise ValueError(f"`TorchCollectives({argument}={value})` must be positive.")
