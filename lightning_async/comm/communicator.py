"""What the package's own transports have in common: names, forks, and failures that stick."""

from __future__ import annotations

import abc
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch import Tensor

from lightning_async.comm.operation import Where
from lightning_async.comm.protocols import Quorum
from lightning_async.errors import CollectiveError, CollectiveTimeout

__all__ = ["Communicator", "ElasticCommunicator", "Wrapper"]

C = TypeVar("C", bound="Communicator")  # typing.Self is not in Python 3.10
E = TypeVar("E", bound="ElasticCommunicator")


class Communicator(abc.ABC, Generic[C]):
    """The part of `Collectives` that moves no bytes."""

    def __init__(self, where: Where, timeout: timedelta) -> None:
        self._where, self._timeout = where, timeout
        self._member = where.rank
        self._forks: list[C] = []
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
    def generation(self) -> int:
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
        for fork in self._forks:
            fork.open()

    def fork(self, name: str, timeout: timedelta | None = None) -> C:
        """See `Collectives`.

        Raises:
            ValueError: the name is taken.
            CollectiveError: this communicator is closed or has failed.
        """
        self._check_usable()
        where = Where(self.rank, self.world_size, f"{self.name}/{name}", self.generation)
        if any(fork.name == where.name for fork in self._forks):
            raise ValueError(f"{self._where}: there is a fork '{where.name}' already.")
        child = self._child(where, self._timeout if timeout is None else timeout)
        child._member = self._member
        self._forks.append(child)
        return child

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
        """Make a fork."""

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
    def generation(self) -> int:
        return self.inner.generation

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout


class ElasticCommunicator(Communicator[E]):
    """The part of `ElasticCollectives` that moves no bytes.

    After a failure every operation raises, until `reconfigure` of the root. Forks are independent of each other and of
    the root in this; `abort` and `reconfigure` take the forks along.
    """

    def __init__(self, where: Where, timeout: timedelta) -> None:
        super().__init__(where, timeout)
        self._failure: CollectiveError | None = None

    def abort(self) -> None:
        """See `ElasticCollectives`. Peers that wait for this rank fail too, as its connections close."""
        self._fail(CollectiveError(f"{self._where}: aborted."))
        for fork in self._forks:
            fork.abort()

    def reconfigure(self, quorum: Quorum) -> None:
        """See `ElasticCollectives`; blocks until the members have formed the new groups.

        Raises:
            ValueError: this rank is not in the quorum, or the generation is not newer.
            CollectiveTimeout, CollectiveError: as `open`.
        """
        if self._member not in quorum.ranks:
            raise ValueError(f"{self._where}: {quorum} does not contain this rank (member {self._member}).")
        if quorum.generation <= self.generation:
            raise ValueError(f"{self._where}: {quorum} is not newer than the present generation.")
        if self._closed:
            raise CollectiveError(f"{self._where}: closed.")
        self.abort()
        self._renew(quorum)
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

    def _renew(self, quorum: Quorum) -> None:
        self._enter(Where(quorum.ranks.index(self._member), len(quorum.ranks), self.name, quorum.generation))
        self._failure, self._exchanged, self._seq = None, {}, 0
        for fork in self._forks:
            fork._renew(quorum)
