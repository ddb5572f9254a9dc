"""The interface to communication, and the base classes of the package's own transports.

A `Collectives` is one communicator, whatever moves its bytes: a fixed set of ranks with one total order of operations.
Every operation is asynchronous and returns a `Pending`; nothing blocks without a deadline. A transport that can form
its groups again is an `ElasticCollectives`. `Communicator` and `ElasticCommunicator` are the base classes of
transports: they handle names, forks, splits, and failures, which last until the groups are formed again. Transports
return `Operation` objects, which know their own deadline, so that a late peer is noticed even if nobody waits for the
operation.
"""

from __future__ import annotations

import abc
import enum
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from lightning_async.errors import START_AGAIN, CollectiveError, CollectiveTimeout
from lightning_async.membership.generation import Generation

T = TypeVar("T")

# Longest wait between two looks at an operation whose transport reports nothing by itself.
_POLL_S = 0.005
_SOURCE = re.compile(r"\[[^\[\]\s]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Place in a library's source where an error was raised; removed, because it does not help a reader."""


@dataclass(frozen=True)
class Where:
    """The name and the generation of a communicator. They appear in keys of the store and in error messages.

    Args:
        name: Path of the communicator, such as ``"world/payload"``.
        generation: The current generation: its number, and the members of the communicator.
    """

    name: str
    generation: Generation

    @property
    def rank(self) -> int:
        return self.generation.rank

    @property
    def world_size(self) -> int:
        return self.generation.world_size

    def __str__(self) -> str:
        number = self.generation.number
        return f"rank {self.rank} of {self.world_size}, communicator '{self.name}', generation {number}"


class Operation(Generic[T]):
    """A `Pending` that its transport completes or fails, once, from any thread.

    Args:
        where: Name and generation of the communicator.
        kind: Name of the operation, for error messages.
        seq: Sequence number of the operation.
        timeout: Deadline of the operation.
        on_expire: Function that aborts the communicator. It is called once, with the error, by the thread that notices
            that the deadline has passed.
        poll: For transports without callbacks: function that completes or fails the operation if the transport has
            ended it. `done` and each waiting thread call it. Default: None.
    """

    late: type[CollectiveTimeout] = CollectiveTimeout
    remedy = f"See the logs of the other ranks{START_AGAIN}."

    def __init__(
        self,
        where: Where,
        kind: str,
        seq: int,
        timeout: timedelta,
        on_expire: Callable[[CollectiveError], None],
        poll: Callable[[], object] | None = None,
    ) -> None:
        self.where = where
        self.kind = kind
        self.seq = seq
        self.timeout = timeout
        self.started = time.monotonic()
        self.poll = poll
        self.poll_s = _POLL_S
        self.told = False  # whether the transport completes it by itself, so that `poll` only looks for errors
        self.sleep: Callable[[float], object] = self.ended_in
        """Waits for these seconds at most, until there may be something to `poll`."""
        self._on_expire = on_expire
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: CollectiveError | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} #{self.seq}"

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def complete(self, value: T) -> bool:
        """End the operation with a value; return False if it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._value = value
            self._ended.set()
            return True

    def fail(self, error: CollectiveError) -> bool:
        """End the operation with an error; return False if it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._error = error
            self._ended.set()
            return True

    def failure(self, error: Exception) -> CollectiveError:
        """Return the `CollectiveError` with which the operation fails after this exception of the transport."""
        kind = CollectiveTimeout if "timed out" in str(error).lower() else CollectiveError
        said = _SOURCE.sub("", str(error).split("\n", 1)[0]).rstrip(".")
        return kind(f"{self} failed after {self.elapsed_s():.2f} s: {said}. {self.remedy}")

    def ended(self) -> bool:
        """Return whether the operation has ended, without polling or checking the deadline."""
        return self._ended.is_set()

    def ended_in(self, seconds: float) -> bool:
        """Wait for these seconds at most; return whether the operation has ended."""
        return self._ended.wait(seconds)

    def done(self) -> bool:
        if not self._ended.is_set() and self.poll is not None:
            self.poll()
        if not self._ended.is_set() and self.elapsed_s() >= self.timeout.total_seconds():
            self._expire(self.timeout)
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        # The operation's own deadline may come first: to wait longer would notice a late peer too late.
        until = min(time.monotonic() + max(timeout.total_seconds(), 0.0), self.started + self.timeout.total_seconds())
        self._sleep_until(until)
        return self.done()

    def result(self, timeout: timedelta | None = None) -> T:
        if timeout is None:
            self.wait(self.timeout)
        elif not self.wait(timeout):
            self._expire(timeout)
        if self._error is not None:
            # A fresh exception for every caller: raising one object twice would grow its traceback.
            raise type(self._error)(*self._error.args) from self._error
        return self._value  # type: ignore[return-value]  # None is a value where T is None

    def _expire(self, limit: timedelta) -> None:
        error = self.late(
            f"{self} did not complete within {limit.total_seconds():g} s (waited {self.elapsed_s():.2f} s). A peer is "
            f"late, stopped or gone. {self.remedy}"
        )
        # Only the first to notice breaks off: another thread may have ended the operation just now.
        if self.fail(error):
            self._on_expire(error)

    def _sleep_until(self, until: float) -> None:
        if self.poll is None:
            self._ended.wait(max(until - time.monotonic(), 0.0))
            return
        if self.told:
            self.sleep(min(self.poll_s, max(until - time.monotonic(), 0.0)))
        while not self._ended.is_set():
            self.poll()
            left = until - time.monotonic()
            if self._ended.is_set() or left <= 0:
                return
            # Waits grow with the operation's age, so that a result is seen at most a tenth of its time too late.
            soon = self.poll_s if self.told else max(0.1 * self.elapsed_s(), self.poll_s / 25)  # a tenth late, at most
            self.sleep(min(soon, self.poll_s, left))


C = TypeVar("C", bound="Communicator")  # typing.Self is not in Python 3.10
E = TypeVar("E", bound="ElasticCommunicator")


class Communicator(abc.ABC, Generic[C]):
    """A base of communicators. A subclass adds the collective operations. The methods are documented in `Collectives`.

    Args:
        where: Name of the communicator, and its first generation.
        timeout: Deadline of each operation.
    """

    def __init__(self, where: Where, timeout: timedelta) -> None:
        self._where = where
        self._timeout = timeout
        self._among: frozenset[str] | None = None  # stable ids that a split was made for, members now or not
        self._branches: list[C] = []
        self._names: set[str] = set()
        self._seq = 0
        self._closed = False

    @property
    def rank(self) -> int:
        return self._where.rank

    @property
    def world_size(self) -> int:
        return self._where.world_size

    @property
    def name(self) -> str:
        return self._where.name

    @property
    def generation(self) -> Generation:
        return self._where.generation

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def open(self) -> None:
        self._open()
        for branch in self._branches:
            branch.open()

    def fork(self, name: str, timeout: timedelta | None = None) -> C:
        return self._branch(Where(self._take(name), self.generation), self._among, timeout)

    def registered(self, buffer: Tensor) -> Tensor:
        return buffer

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _open(self) -> object:
        """Form this communicator's own group."""

    @abc.abstractmethod
    def _child(self, where: Where, timeout: timedelta) -> C:
        """Return a new communicator: a fork has all ranks of this communicator, and a split has some of them."""

    def _take(self, name: str) -> str:
        """Reserve the name of a new fork or split, and return its path.

        Ranks outside of a split reserve its name, too.
        """
        self._check_usable()
        path = f"{self.name}/{name}"
        if path in self._names:
            raise ValueError(f"{self._where}: there is a fork or split '{path}' already.")
        # Also on ranks outside of a split: all ranks must refuse the same names.
        self._names.add(path)
        return path

    def _branch(self, where: Where, among: frozenset[str] | None, timeout: timedelta | None) -> C:
        child = self._child(where, self._timeout if timeout is None else timeout)
        child._among = among
        self._branches.append(child)
        if self._is_open():
            child.open()
        return child

    def _is_open(self) -> bool:
        return False

    def _check_usable(self) -> None:
        if self._closed:
            raise CollectiveError(f"{self._where}: closed.")

    def _check_rank(self, rank: int, argument: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self._where}: `{argument}={rank}` must be a rank in [0, {self.world_size}).")


class CommunicatorWrapper:
    """A base class for a wrapper of another communicator, ``inner``, with the same name, members and timeout."""

    inner: Any

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def generation(self) -> Generation:
        return self.inner.generation

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout


class ElasticCommunicator(Communicator[E]):
    """A base of communicators that can form new groups after a failure. A subclass adds the collective operations.

    After a failure, every operation raises until `reconfigure` has formed new groups. A failure of a fork or split does
    not concern the communicator that it was made from. `abort` and `reconfigure` are called on the original
    communicator, and include all its forks and splits.
    """

    def __init__(self, where: Where, timeout: timedelta) -> None:
        super().__init__(where, timeout)
        self._failure: CollectiveError | None = None

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> E | None:
        if not ranks or not all(rank in range(self.world_size) for rank in ranks):
            raise ValueError(
                f"{self._where}: `split(ranks={sorted(ranks)})` must name at least one rank, each in "
                f"[0, {self.world_size})."
            )
        path = self._take(name)
        among = frozenset(self.generation.name_of(rank) for rank in ranks)
        generation = self.generation.only(among)
        return None if generation is None else self._branch(Where(path, generation), among, timeout)

    def abort(self) -> None:
        self._fail(CollectiveError(f"{self._where}: aborted."))
        for branch in self._branches:
            branch.abort()

    def reconfigure(self, generation: Generation) -> None:
        """Form the groups of a generation, see `ElasticCollectives.reconfigure`.

        Raises:
            ValueError: The generation belongs to another member, or is not newer than the present one.
            CollectiveError: The communicator is closed, or forming the groups failed.
        """
        if generation.name != self.generation.name:
            raise ValueError(f"{self._where}: {generation} is not for this member, '{self.generation.name}'.")
        if generation.number <= self.generation.number:
            raise ValueError(f"{self._where}: {generation} is not newer than the present generation.")
        if self._closed:
            raise CollectiveError(f"{self._where}: closed.")
        # Operations of the old generation must not wait for members that are gone.
        self.abort()
        self._renew(generation)
        self.open()

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._failure is not None:
            # A fresh error for each call, of the first one's kind, so that its cause is not lost.
            kind = CollectiveTimeout if isinstance(self._failure, CollectiveTimeout) else CollectiveError
            raise kind(f"{self._where}: unusable since an earlier failure. It was: {self._failure}")

    @abc.abstractmethod
    def _fail(self, error: CollectiveError) -> None:
        """Mark this communicator as failed, unless it has failed already, and fail all pending operations."""

    @abc.abstractmethod
    def _enter(self, where: Where) -> None:
        """Begin the new generation ``where``, and release everything that belongs to the old one."""

    def _renew(self, generation: Generation) -> None:
        here = generation if self._among is None else generation.only(self._among)
        assert here is not None  # a rank outside of a split has no part of it
        self._enter(Where(self.name, here))
        self._failure = None
        self._seq = 0
        for branch in self._branches:
            branch._renew(generation)


T_co = TypeVar("T_co", covariant=True)


class ReduceOp(enum.Enum):
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@runtime_checkable
class Pending(Protocol[T_co]):
    """An operation under way. Its tensors must not be touched until it is done."""

    def done(self) -> bool:
        """Return whether the operation has ended, with a result or an error; never blocks."""
        ...

    def wait(self, timeout: timedelta) -> bool:
        """Block for at most ``timeout``, and return `done`; neither raises the operation's error nor cancels it."""
        ...

    def result(self, timeout: timedelta | None = None) -> T_co:
        """Return the operation's result; wait for it until the deadline.

        Args:
            timeout: Longest wait. Default: None, the communicator's own timeout.

        Raises:
            CollectiveTimeout: The deadline has passed; the communicator must be reconfigured.
            CollectiveError: The operation failed, because a peer died or the group was aborted.
        """
        ...


class Collectives(Protocol):
    """A communicator: an interface for collective operations on a group of ranks.

    All ranks call the same operations in the same order, from one thread at a time. Operations work in place on
    contiguous tensors if possible, and keep a reference to their tensors until they are done. They are numbered, so
    that error messages can name an operation. Sizes and dtypes must agree between ranks. Callers compare sizes and
    dtypes beforehand, because some transports abort the process if they differ.
    """

    @property
    def rank(self) -> int:
        """The rank in this generation; like `world_size`, it changes when groups are formed again."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def name(self) -> str:
        """Path of this communicator, such as ``"world/payload"`` for the fork "payload" of "world"."""
        ...

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        """Reduce ``buffer`` over all ranks, in place; every rank gets the same bits."""
        ...

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Return every rank's ``buffer``, stacked along a new first dimension, in ``out`` or a new tensor."""
        ...

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Send row ``i`` of ``buffer`` to rank ``i``; row ``j`` of the result comes from rank ``j``.

        Args:
            buffer: One row for each rank.
            out: Tensor for the result, which must not be ``buffer``. Default: None, a new tensor.
        """
        ...

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        """Overwrite ``buffer`` with that of rank ``src``."""
        ...

    def barrier(self) -> Pending[None]:
        """Return an operation that is done once every rank has called this."""
        ...

    def fork(self, name: str, timeout: timedelta | None = None) -> Collectives:
        """Return a new communicator over the same ranks, whose operations have an order of their own.

        All ranks must make their forks in the same order.

        The fork is opened at once if this communicator is open.

        Args:
            name: Name of the fork.
            timeout: Deadline of its operations. Default: None, the same as here.

        Raises:
            ValueError: The name is taken.
            CollectiveError: This communicator is closed or has failed.
        """
        ...

    def registered(self, buffer: Tensor) -> Tensor:
        """Return a copy of ``buffer`` in memory that this communicator moves fastest, also in later generations.

        Returns ``buffer`` itself if no memory is faster than other memory.
        """
        ...

    def open(self) -> None:
        """Form the groups of this communicator and its forks, with all ranks, without waiting for the first operation.

        Raises:
            CollectiveTimeout: Members are missing at the deadline; the message names them.
            CollectiveError: The communicator is closed, failed or aborted, or the store cannot be reached.
        """
        ...

    def close(self) -> None:
        """Release the communicator and its forks; never blocks on a peer; idempotent."""
        ...


@runtime_checkable
class ElasticCollectives(Collectives, Protocol):
    """Collectives whose groups can be broken off and formed again. torch's can, plain Horovod's cannot."""

    @property
    def generation(self) -> Generation:
        """The present members by stable id."""
        ...

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> ElasticCollectives | None:
        """Return a new communicator over some of the ranks, in the given order; None on a rank that is not one of them.

        All ranks call this with the same arguments, also the ranks that are not in the split. All ranks make their
        calls of `split` and `fork` in the same order. When groups are formed again, the split continues with its live
        members.

        Args:
            ranks: Ranks of the new communicator.
            name: Name of the split.
            timeout: Deadline of its operations. Default: None, the same as here.

        Raises:
            ValueError: The name is taken, or there are no ranks, or a rank is not in this communicator.
            CollectiveError: This communicator is closed or has failed.
        """
        ...

    def reconfigure(self, generation: Generation) -> None:
        """Abort all pending operations here and in all forks, and form the groups of ``generation``.

        Must be called on the original communicator, and not on a fork or split. Blocks until all members have called
        `reconfigure`. Raises the errors of `open`.
        """
        ...

    def abort(self) -> None:
        """Fail all pending operations of this rank at once, here and in all forks; peers notice the broken group."""
        ...


NATIVE = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""Dtypes that torch's Gloo, NCCL and MPI all reduce. Gloo's sum of bools would store a 2, and it has no int16."""


def check_buffer(buffer: Tensor) -> None:
    """Raise ValueError unless the tensor is dense, contiguous and outside of the autograd graph."""
    if not buffer.is_contiguous():
        raise ValueError(f"collectives work in place on contiguous tensors; got strides {buffer.stride()}.")
    if (buffer.requires_grad and not buffer.is_leaf) or buffer.is_sparse:
        raise ValueError("collectives take dense tensors outside of the autograd graph; detach() it.")


def check_rows(buffer: Tensor, world_size: int) -> None:
    """Raise ValueError unless the buffer has one row for each rank."""
    check_buffer(buffer)
    if buffer.dim() == 0 or buffer.shape[0] != world_size:
        raise ValueError(f"the first dimension must be world_size={world_size}; got shape {tuple(buffer.shape)}.")


def room_for(row: Tensor, world_size: int, out: Tensor | None) -> Tensor:
    """Return ``out``, or a new tensor if it is None, for the result: one row like ``row`` for each rank.

    Raises ValueError if ``out`` has another shape, dtype or device, or is not contiguous.
    """
    shape = (world_size, *row.shape)
    if out is None:
        return row.new_empty(shape)
    if out.shape != shape or out.dtype != row.dtype or out.device != row.device or not out.is_contiguous():
        raise ValueError(
            f"`out` must be contiguous, {row.dtype}, of shape {tuple(shape)}, on {row.device}; got {out.dtype}, shape "
            f"{tuple(out.shape)}, strides {out.stride()}, on {out.device}."
        )
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view of the same memory, for operations that only move bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def reducible(
    buffer: Tensor, op: ReduceOp, native: frozenset[torch.dtype] = NATIVE
) -> tuple[Tensor, ReduceOp, Callable[[Tensor], None]]:
    """Return the tensor to reduce instead of ``buffer``, the operation, and a function that writes back the result.

    Bools are reduced as bytes (SUM and MAX mean "any", MIN means "all"), complex numbers as pairs of real numbers, and
    types that are not ``native`` to the backend as fp32 or int64.
    """
    flat = buffer.detach().reshape(-1)
    if flat.dtype is torch.bool:
        # As bytes, because a sum of bools may store a 2.
        flat = flat.view(torch.uint8)
        op = ReduceOp.MAX if op is ReduceOp.SUM else op
    elif flat.is_complex():
        if op is not ReduceOp.SUM:
            raise ValueError(f"complex numbers have no {op.value}.")
        flat = torch.view_as_real(flat).reshape(-1)

    def back(wire: Tensor) -> None:
        flat.copy_(wire)

    if flat.dtype in native:
        return flat, op, lambda wire: None
    return flat.to(torch.float32 if flat.is_floating_point() else torch.int64), op, back


def sum_rows(rows: Tensor, op: ReduceOp) -> Tensor:
    """Reduce over the first dimension, one row after the other; half types are summed in fp32, and rounded once."""
    half = rows.is_floating_point() and rows.element_size() < 4
    if rows.dtype is torch.bool:
        return rows.all(0) if op is ReduceOp.MIN else rows.any(0)
    total = rows[0].to(torch.float32) if half else rows[0].clone()
    for row in rows[1:]:
        if op is ReduceOp.SUM:
            total += row
        elif op is ReduceOp.MIN:
            torch.minimum(total, row.to(total.dtype), out=total)
        else:
            torch.maximum(total, row.to(total.dtype), out=total)
    return total.to(rows.dtype)
