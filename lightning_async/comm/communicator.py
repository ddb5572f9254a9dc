"""What the package's own transports have in common: names, branches, and failures that stick.

A communicator's branches are its forks, over the same ranks, and its splits, over some of them.
"""

from __future__ import annotations

import abc
from collections.abc import Collection
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.operation import Where
from lightning_async.errors import CollectiveError, CollectiveTimeout

__all__ = ["Communicator", "ElasticCommunicator", "Wrapper"]

C = TypeVar("C", bound="Communicator")  # typing.Self is not in Python 3.10
E = TypeVar("E", bound="ElasticCommunicator")


class Communicator(abc.ABC, Generic[C]):
    """The part of `Collectives` that moves no bytes."""

    def __init__(self, where: Where, timeout: timedelta) -> None:
        self._where, self._timeout = where, timeout
        self._among: frozenset[str] | None = None  # the names a split was made for, here now or not
        self._branches: list[C] = []
        self._names: set[str] = set()
        self._exchanged: dict[int, int] = {}
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
        """Deadline of an operation."""
        return self._timeout

    def open(self) -> None:
        """Form the group and its forks' with all members; does nothing where that is done.

        Raises:
            CollectiveTimeout: members are missing at the deadline; names them.
            CollectiveError: closed, failed, aborted, or the store is out of reach.
        """
        self._open()
        for branch in self._branches:
            branch.open()

    def fork(self, name: str, timeout: timedelta | None = None) -> C:
        """See `Collectives`. Opens the fork at once where this communicator is open.

        Raises:
            ValueError: the name is taken.
            CollectiveError: this communicator is closed or has failed.
        """
        return self._branch(Where(self._take(name), self.generation), self._among, timeout)

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> C | None:
        """See `Collectives`, and `fork`.

        Raises:
            ValueError: the name is taken, or ``ranks`` are none, or not of this communicator.
            CollectiveError: this communicator is closed or has failed.
        """
        if not ranks or not all(rank in range(self.world_size) for rank in ranks):
            raise ValueError(
                f"{self._where}: `split(ranks={sorted(ranks)})` must name at least one rank, each in "
                f"[0, {self.world_size})."
            )
        path, among = self._take(name), frozenset(self.generation.name_of(rank) for rank in ranks)
        generation = self.generation.only(among)
        return None if generation is None else self._branch(Where(path, generation), among, timeout)

    def registered(self, buffer: Tensor) -> Tensor:
        """See `Collectives`. All memory is alike."""
        return buffer

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _open(self) -> object:
        """Form this communicator's own group."""

    @abc.abstractmethod
    def _child(self, where: Where, timeout: timedelta) -> C:
        """Make a branch."""

    def _is_open(self) -> bool:
        """Whether branches are to be opened at once."""
        return False

    def _take(self, name: str) -> str:
        """The path of a new branch. A split takes its name on the ranks outside of it, too."""
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

    def _num_collectives(self) -> int:
        """Operations so far that all ranks took part in: equal on all of them, unlike `_seq`."""
        return self._seq - sum(self._exchanged.values())

    def _check_usable(self) -> None:
        if self._closed:
            raise CollectiveError(f"{self._where}: closed.")

    def _check_peer(self, rank: int, argument: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self._where}: `{argument}={rank}` must be a rank in [0, {self.world_size}).")


class Wrapper:
    """What stands around another communicator, and says the same of itself."""

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
    """The part of `ElasticCollectives` that moves no bytes.

    After a failure every operation raises, until `reconfigure` of the root. Branches are independent of each other and
    of the root in this; `abort` and `reconfigure` take them along.
    """

    def __init__(self, where: Where, timeout: timedelta) -> None:
        super().__init__(where, timeout)
        self._failure: CollectiveError | None = None

    def abort(self) -> None:
        """See `ElasticCollectives`. Peers that wait for this rank fail too, as its connections close."""
        self._fail(CollectiveError(f"{self._where}: aborted."))
        for branch in self._branches:
            branch.abort()

    def reconfigure(self, generation: Generation) -> None:
        """See `ElasticCollectives`; blocks until the members have formed the new groups.

        Raises:
            ValueError: it is another member's view of a generation, or one that is not newer.
            CollectiveTimeout, CollectiveError: as `open`.
        """
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
        self._failure, self._exchanged, self._seq = None, {}, 0
        for branch in self._branches:
            branch._renew(generation)
