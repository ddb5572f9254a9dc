"""The interface to communication, and what the package's own transports have in common.

A `Collectives` is one communicator, whatever moves its bytes: a fixed set of ranks with its own total order of
operations. Every operation is asynchronous and returns a `Pending`; nothing blocks without a deadline. Where a
transport can form its groups anew it is an `ElasticCollectives`. `Communicator` and `ElasticCommunicator` are the base
of transports: names, failures that stick, forks, and splits. They hand out `Operation` objects, which know their own
deadline, so that nobody needs to wait on them for a late peer to be noticed.
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

_POLL_S = 0.005
_SOURCE = re.compile(r"\[[^\[\]\s]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Where in a library's source an error was raised: of no use to who reads it."""


@dataclass(frozen=True)
class Where:
    """A communicator in one generation, for keys and messages."""

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

    ``on_expire`` is called once, from whichever thread notices that the deadline has passed: the transport breaks the
    communicator off there. ``poll``, for transports without a completion callback, completes or fails the operation
    when the transport has ended it; `done` calls it, and who waits.
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
        self.told = False  # the transport completes it by itself, and `poll` is for what goes wrong: no hurry
        self.sleep: Callable[[float], object] = self.ended_in
        """Waits for so many seconds at most, until there is something to `poll`."""
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
        """End well; return False where it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._value = value
            self._ended.set()
            return True

    def fail(self, error: CollectiveError) -> bool:
        """End badly; return False where it had ended already."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._error = error
            self._ended.set()
            return True

    def failure(self, error: Exception) -> CollectiveError:
        kind = CollectiveTimeout if "timed out" in str(error).lower() else CollectiveError
        said = _SOURCE.sub("", str(error).split("\n", 1)[0]).rstrip(".")
        return kind(f"{self} failed after {self.elapsed_s():.2f} s: {said}. {self.remedy}")

    def ended(self) -> bool:
        """Return `done`, without polling or looking at the deadline."""
        return self._ended.is_set()

    def ended_in(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def done(self) -> bool:
        if not self._ended.is_set() and self.poll is not None:
            self.poll()
        if not self._ended.is_set() and self.elapsed_s() >= self.timeout.total_seconds():
            self._expire(self.timeout)
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        # The own deadline may come first; waiting past it would notice a late peer later than promised.
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
            soon = self.poll_s if self.told else max(0.1 * self.elapsed_s(), self.poll_s / 25)  # a tenth late, at most
            self.sleep(min(soon, self.poll_s, left))


C = TypeVar("C", bound="Communicator")  # typing.Self is not in Python 3.10
E = TypeVar("E", bound="ElasticCommunicator")


class Communicator(abc.ABC, Generic[C]):
    """A communicator without the operations that move bytes; its methods do, and raise, what `Collectives` says."""

    def __init__(self, where: Where, timeout: timedelta) -> None:
        self._where = where
        self._timeout = timeout
        self._among: frozenset[str] | None = None  # the names a split was made for, here now or not
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
        """Make a branch."""

    def _take(self, name: str) -> str:
        """Return the path of a new branch. A split takes its name on the ranks outside of it, too."""
        self._check_usable()
        path = f"{self.name}/{name}"
        if path in self._names:
            raise ValueError(f"{self._where}: there is a fork or split '{path}' already.")
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
    """A class around another communicator, ``inner``, which says of itself what that says."""

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
    """An `ElasticCollectives` without the operations that move bytes.

    After a failure every operation raises, until `reconfigure` of the root. Branches are independent of each other and
    of the root in this; `abort` and `reconfigure` take them along.
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
        """Do as `ElasticCollectives` says; raise ValueError for another member's, or an older, generation."""
        if generation.name != self.generation.name:
            raise ValueError(f"{self._where}: {generation} is not for this member, '{self.generation.name}'.")
        if generation.number <= self.generation.number:
            raise ValueError(f"{self._where}: {generation} is not newer than the present generation.")
        if self._closed:
            raise CollectiveError(f"{self._where}: closed.")
        self.abort()
        self._renew(generation)
        self.open()

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._failure is not None:
            kind = CollectiveTimeout if isinstance(self._failure, CollectiveTimeout) else CollectiveError
            raise kind(f"{self._where}: unusable since an earlier failure. It was: {self._failure}")

    @abc.abstractmethod
    def _fail(self, error: CollectiveError) -> None:
        """Break this communicator off: set `_failure`, unless it is set, and fail everything pending."""

    @abc.abstractmethod
    def _enter(self, where: Where) -> None:
        """Drop what belongs to the old generation and set `_where`."""

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
        """Return whether it has ended, well or badly. Never blocks."""
        ...

    def wait(self, timeout: timedelta) -> bool:
        """Block for at most ``timeout`` and return `done`. Neither raises for, nor cancels, the operation."""
        ...

    def result(self, timeout: timedelta | None = None) -> T_co:
        """Return the operation's result; wait until the deadline (default: the communicator's own timeout).

        Raises:
            CollectiveTimeout: the deadline passed; the communicator must be reconfigured.
            CollectiveError: the operation failed (a peer died, the group was aborted).
        """
        ...


class Collectives(Protocol):
    """One communicator. All ranks call the same operations in the same order, from one thread at a time.

    Operations work in place on contiguous tensors where that makes sense, keep a reference to their tensors
    until they are done, and count a sequence number for messages. Sizes and dtypes must agree between
    ranks; callers compare them beforehand, because some transports abort the process if they differ.
    """

    @property
    def rank(self) -> int:
        """The rank in this generation, as `world_size` is: to be asked, not kept, where groups can be formed anew."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def name(self) -> str:
        """Path of forks and splits, ``"world/payload"``, for messages and for keys in the store."""
        ...

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        """Reduce ``buffer`` over all ranks, in place; every rank gets the same bits."""
        ...

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Return every rank's ``buffer``, stacked along a new first dimension, in ``out`` or a new tensor."""
        ...

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Send row ``i`` of ``buffer`` to rank ``i``; row ``j`` of the result came from rank ``j``.

        ``out``: where to, not ``buffer``; by default a new tensor.
        """
        ...

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        """Overwrite ``buffer`` with rank ``src``'s."""
        ...

    def barrier(self) -> Pending[None]:
        """Be done when every rank has called it."""
        ...

    def fork(self, name: str, timeout: timedelta | None = None) -> Collectives:
        """Make a communicator over the same ranks with an order of its own. All ranks fork in the same order.

        It is opened at once where this one is open.

        Raises:
            ValueError: the name is taken.
            CollectiveError: this communicator is closed or has failed.
        """
        ...

    def registered(self, buffer: Tensor) -> Tensor:
        """Return a copy of ``buffer`` in memory that this communicator moves best, now and in later
        generations, or ``buffer`` itself where all memory is alike.
        """
        ...

    def open(self) -> None:
        """Form what the communicator and its forks need, with all ranks: now, not at the first operation.

        Raises:
            CollectiveTimeout: members are missing at the deadline; names them.
            CollectiveError: closed, failed, aborted, or the store is out of reach.
        """
        ...

    def close(self) -> None:
        """Release the communicator and its forks. Never blocks on a peer; idempotent."""
        ...


@runtime_checkable
class ElasticCollectives(Collectives, Protocol):
    """Collectives whose groups can be broken off and formed anew. Torch can, plain Horovod cannot."""

    @property
    def generation(self) -> Generation:
        """The present members by name."""
        ...

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> ElasticCollectives | None:
        """Make a communicator over some of the ranks, numbered in this order; None for a rank outside of it.

        All ranks call it alike, those outside too, in the same order as forks. It goes on with the members that are
        left when groups are formed anew. Raises as `fork` does, and ValueError for no ranks, or such that are not here.
        """
        ...

    def reconfigure(self, generation: Generation) -> None:
        """Abort what is pending here and in all forks, and form the groups of ``generation``; of the
        root only. Blocks until the members have; raises as `open` does.
        """
        ...

    def abort(self) -> None:
        """Fail everything pending, here and in all forks, at once, on this rank; peers notice by themselves."""
        ...


NATIVE = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""What torch's Gloo, NCCL and MPI reduce alike. Gloo's bool sum would store a 2; its int16 does not exist."""


def check_buffer(buffer: Tensor) -> None:
    """Raise ValueError unless the transport can work on the tensor's memory in place."""
    if not buffer.is_contiguous():
        raise ValueError(f"collectives work in place on contiguous tensors; got strides {buffer.stride()}.")
    if (buffer.requires_grad and not buffer.is_leaf) or buffer.is_sparse:
        raise ValueError("collectives take dense tensors outside of the autograd graph; detach() it.")


def check_rows(buffer: Tensor, world_size: int) -> None:
    """Raise ValueError unless the buffer has one row per rank."""
    check_buffer(buffer)
    if buffer.dim() == 0 or buffer.shape[0] != world_size:
        raise ValueError(f"the first dimension must be world_size={world_size}; got shape {tuple(buffer.shape)}.")


def room_for(row: Tensor, world_size: int, out: Tensor | None) -> Tensor:
    """Return ``out``, or a new tensor, with one row like ``row`` per rank; raise ValueError where ``out`` is unlike
    that."""
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
    """Return a flat uint8 view of the same memory, for operations that only move."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def reducible(
    buffer: Tensor, op: ReduceOp, native: frozenset[torch.dtype] = NATIVE
) -> tuple[Tensor, ReduceOp, Callable[[Tensor], None]]:
    """Return what to reduce in place of ``buffer``: ``(wire, op, narrow)``; ``narrow(wire)`` writes the result back.

    Bools are reduced as bytes (SUM and MAX are "any", MIN is "all"), complex numbers as pairs of reals, types that
    are not ``native`` to the backend as fp32 or int64.
    """
    flat = buffer.detach().reshape(-1)
    if flat.dtype is torch.bool:
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
    """Reduce over the first dimension, one row after the other; half types in fp32, rounded once."""
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
