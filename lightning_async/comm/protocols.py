"""The interface to communication: what every transport offers, whatever moves the bytes.

A ``Collectives`` is one communicator: a fixed set of ranks with its own total order of operations. Every
operation is asynchronous and returns a ``Pending``; nothing blocks without a deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from datetime import timedelta
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from lightning_async.comm.membership.generation import Generation

__all__ = ["Collectives", "ElasticCollectives", "Pending", "ReduceOp"]

T_co = TypeVar("T_co", covariant=True)


class ReduceOp(enum.Enum):
    """How `all_reduce` and `reduce_scatter` combine the ranks' elements."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


@runtime_checkable
class Pending(Protocol[T_co]):
    """An operation under way. Its tensors must not be touched until it is done."""

    def done(self) -> bool:
        """Whether it has ended, well or badly. Never blocks."""
        ...

    def wait(self, timeout: timedelta) -> bool:
        """Block for at most ``timeout`` and return `done`. Neither raises for, nor cancels, the operation."""
        ...

    def result(self, timeout: timedelta | None = None) -> T_co:
        """The operation's result, waited for until the deadline (default: the communicator's own timeout).

        Raises:
            CollectiveTimeout: the deadline passed; the communicator must be re-formed.
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
        """Of this generation, as `world_size` is: to be asked, not kept, where groups can be formed anew."""
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
        """Every rank's ``buffer``, stacked along a new first dimension: shape ``[world_size, *buffer.shape]``.

        ``out``: where to; by default a new tensor."""
        ...

    def reduce_scatter(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        """Row ``rank`` of the reduction of ``buffer``, whose first dimension is ``world_size``."""
        ...

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Row ``i`` of ``buffer`` goes to rank ``i``; row ``j`` of the result came from rank ``j``.

        ``out``: where to, not ``buffer``; by default a new tensor."""
        ...

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        """Overwrite ``buffer`` with rank ``src``'s."""
        ...

    def exchange(self, buffer: Tensor, peer: int) -> Pending[Tensor]:
        """Swap with one peer, which calls it with this rank: the peer's buffer, as a new tensor."""
        ...

    def barrier(self) -> Pending[None]:
        """Done when every rank has called it."""
        ...

    def fork(self, name: str, timeout: timedelta | None = None) -> Collectives:
        """A new communicator over the same ranks with an order of its own. All ranks fork in the same order."""
        ...

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> Collectives | None:
        """A new communicator over some of the ranks, numbered in the order of these; None for a rank outside of it.

        All ranks call it alike, those outside too, in the same order as forks; disjoint groups are splits of several
        names. It goes on with the members that are left when groups are formed anew."""
        ...

    def registered(self, buffer: Tensor) -> Tensor:
        """A copy of ``buffer`` in memory that this communicator moves best, now and in later generations, or
        ``buffer`` itself where all memory is alike."""
        ...

    def open(self) -> None:
        """Form what the communicator and its branches need, with all ranks: now, rather than at the first operation."""
        ...

    def close(self) -> None:
        """Release the communicator and its branches. Never blocks on a peer; idempotent."""
        ...


@runtime_checkable
class ElasticCollectives(Collectives, Protocol):
    """Collectives whose groups can be broken off and formed anew. Torch can, plain Horovod cannot."""

    @property
    def generation(self) -> Generation:
        """Who is in it now, by name: of a communicator over some of the ranks, those."""
        ...

    def reconfigure(self, generation: Generation) -> None:
        """Abort what is pending here and in all branches, and form the groups of ``generation``; of the root only.

        Forks have all its members, splits those of theirs that are in it, newcomers none. Numbers are the new ones."""
        ...

    def abort(self) -> None:
        """Fail everything pending, here and in all branches, at once, on this rank; peers notice by themselves."""
        ...
