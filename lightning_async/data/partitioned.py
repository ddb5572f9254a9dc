"""One replica's part of a dataset, or of a stream, by a `Partition`: each sample once an epoch over all replicas."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from lightning_async.arguments import check_protocol
from lightning_async.data.partitions import Partition, Random
from lightning_async.data.streams import Told, place_in

__all__ = ["PartitionedSampler", "PartitionedStream", "yet_to_be_numbered"]

_HOROVODS = (
    ("HOROVOD_SIZE", "HOROVOD_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"),
)  # fmt: skip
_LAUNCHERS = (*_HOROVODS, ("WORLD_SIZE", "RANK"))
"""What launchers tell ranks."""
_looked_for: ContextVar[bool] = ContextVar("looked_for", default=False)


@contextmanager
def yet_to_be_numbered() -> Iterator[None]:
    """A strategy looks for samplers, to tell each its part: what they have within this need not be equal."""
    token = _looked_for.set(True)
    try:
        yield
    finally:
        _looked_for.reset(token)


class _Place:
    """Which part is this replica's.

    Args:
        num_replicas, rank: where both are None: those of the strategy, of torch.distributed, or of the launcher.
    """

    def __init__(self, owner: str, num_replicas: int | None, rank: int | None) -> None:
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"`{owner}(num_replicas={num_replicas}, rank={rank})`: give both or none of the two.")
        if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"`{owner}(num_replicas={num_replicas}, rank={rank})`: a rank is from 0 on, and below.")
        self.members: Sequence[str] | None = None if num_replicas is None else tuple(map(str, range(num_replicas)))
        self.rank = rank or 0

    def known(self) -> tuple[Sequence[str], int]:
        """All replicas, and the place of this one."""
        if self.members is not None:
            return self.members, self.rank
        if dist.is_available() and dist.is_initialized():
            return tuple(map(str, range(dist.get_world_size()))), dist.get_rank()
        for size, rank in _LAUNCHERS:
            if size in os.environ and rank in os.environ:
                return tuple(map(str, range(int(os.environ[size])))), int(os.environ[rank])
        return ("0",), 0

    @property
    def in_step(self) -> bool:
        """Whether those who have the parts take every step together: no strategy of ours has numbered them, nor the
        user, and torch.distributed or Horovod has."""
        if self.members is not None or _looked_for.get():
            return False
        together = dist.is_available() and dist.is_initialized()
        return together or any(size in os.environ and rank in os.environ for size, rank in _HOROVODS)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is started anew, and cannot ask who it belongs to: a worker of a loader."""
        members, rank = self.known()
        return {"members": members, "rank": rank}


class _Numbered:
    """Whoever has a part, and can be told another one."""

    _place: _Place

    @property
    def num_replicas(self) -> int:
        """How many parts there are."""
        return len(self._place.known()[0])

    @property
    def is_numbered(self) -> bool:
        """Whether it was told which part."""
        return self._place.members is not None

    def number(self, members: Sequence[str], rank: int) -> None:
        """These replicas are there from here on, by the numbers that they were started with."""
        self._place.members, self._place.rank = tuple(members), rank


class PartitionedSampler(_Numbered, DistributedSampler[Any]):  # pyright: ignore[reportIncompatibleVariableOverride]
    r"""The indices that are this replica's, in an epoch; without padding, so that parts may be unequal.

    Lightning leaves it as it is. Under `AsyncAveragingStrategy` it is numbered by the strategy, anew where replicas are
    lost or come; what a lost one had left of an epoch the others train on. Ranks that take every step together (DDP,
    Horovod) need equal parts: unequal ones are refused where an epoch begins. Where their numbers of batches are equal
    none the less, say so by ``num_replicas`` and ``rank``.

    Args:
        dataset: a map-style dataset, or anything with a length.
        partition: `Random` (default), `Sequential`, `Weighted`, `ByKey`, or one of your own.
        num_replicas, rank: which part. Default: as the strategy, torch.distributed or the launcher has it; else all.

    Raises:
        TypeError: ``partition`` is none.
        ValueError: one of ``num_replicas`` and ``rank``, or a rank out of range; where an epoch begins, unequal parts
            of ranks that take every step together.

    >>> sampler = PartitionedSampler(range(8), Random(seed=1), num_replicas=2, rank=1)
    >>> sampler.set_epoch(3)
    >>> len(sampler), len(set(sampler))
    (4, 4)
    """

    def __init__(
        self, dataset: Any, partition: Partition | None = None, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.partition: Partition = Random() if partition is None else partition
        check_protocol("PartitionedSampler", "partition", self.partition, Partition, "a partition such as Random()")
        self.dataset, self.epoch, self.drop_last = dataset, 0, False
        self.shuffle, self.seed = self.partition.shuffle, self.partition.seed
        self._place = _Place("PartitionedSampler", num_replicas, rank)
        self._made: tuple[Any, list[int]] | None = None

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which one is this replica's."""
        return self._place.known()[1]

    def indices(self) -> list[int]:
        """Of this epoch."""
        members, rank = self._place.known()
        wanted = (len(self.dataset), tuple(members), rank, self.epoch)
        if self._made is None or self._made[0] != wanted:
            self._made = wanted, self.partition.part(*wanted).tolist()
        return self._made[1]

    def __iter__(self) -> Iterator[int]:
        if self._place.in_step:
            self._check_equal()
        return iter(self.indices())

    def _check_equal(self) -> None:
        """The one with the smallest part would end first, and the others wait for it until they fail.

        Raises:
            ValueError: parts are unequal.
        """
        members, _ = self._place.known()
        whole, epoch = len(self.dataset), self.epoch
        owners = self.partition.owners(self.partition.order(whole, epoch), members)
        sizes = torch.bincount(owners, minlength=len(members)).tolist()
        if len(set(sizes)) > 1:
            raise ValueError(
                f"`PartitionedSampler(partition={self.partition!r})`: its parts of {whole} samples are unequal "
                f"({', '.join(map(str, sizes))}), and ranks under DDP and Horovod take every step together. Take "
                "`AsyncAveragingStrategy`, or parts that are equal, or Lightning's DistributedSampler. Where batches "
                "come out equal in number, pass `num_replicas=trainer.world_size, rank=trainer.global_rank`."
            )

    def __len__(self) -> int:
        return len(self.indices())


class PartitionedStream(_Numbered, IterableDataset[Any]):
    """The samples of a stream that are this replica's, each sample once over all replicas and all their workers.

    Every worker of every replica reads the whole stream, which must be the same for all, and leaves what is not its
    own: for streams that are cheap to read, or whose samples are cheap until they are decoded behind this. Where
    replicas are lost it is divided anew with the next epoch. What these had left of the epoch under way the others
    train on at its end, for which they read the stream once more: within an epoch it must yield the same again.

    Args:
        stream: any iterable over samples that can be iterated over again.
        partition: `Random` (default: in turn), `Weighted`, `ByKey`, or one of your own with a `dealer`.
        num_replicas, rank: as of `PartitionedSampler`.

    Raises:
        TypeError: ``partition`` is none, or none of streams; ``stream`` is a generator, which ends with an epoch.
        ValueError: as of `PartitionedSampler`.

    >>> [list(PartitionedStream(range(5), num_replicas=2, rank=rank)) for rank in (0, 1)]
    [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        stream: Iterable[Any],
        partition: Partition | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if isinstance(stream, Generator):
            raise TypeError(
                f"`PartitionedStream(stream={stream!r})` must begin anew with every epoch, as an "
                "IterableDataset does: of a generator the second epoch would be empty."
            )
        self.stream, self.partition = stream, Random() if partition is None else partition
        check_protocol("PartitionedStream", "partition", self.partition, Partition, "a partition such as Random()")
        self.partition.dealer(("0",))
        self._place = _Place("PartitionedStream", num_replicas, rank)
        self._rest: Told | None = None

    def part(self) -> dict[str, Any]:
        """Which one is this replica's, in plain values."""
        members, rank = self._place.known()
        return {"members": list(members), "rank": rank}

    def rest(self, told: Told) -> PartitionedStream:
        """The same stream, of which this replica has that part of what others had left."""
        found = copy.copy(self)
        found._rest = told
        return found

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine, own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        place_of = place_in(self.partition, self._rest or self.part())
        for sample in self.stream:
            place = place_of(sample)
            if place is not None and place % own == mine:
                yield sample
