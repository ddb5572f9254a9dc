"""One replica's part of a dataset or a stream, by a `Partition`: each sample once an epoch, over all replicas."""

from __future__ import annotations

import copy
import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from lightning_async._checks import check_int, check_number, check_protocol

__all__ = ["ByKey", "Partition", "Random", "Sequential", "Weighted", "largest_remainder", "rendezvous"]


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    r"""Return integer shares of a total, as close to the weights as possible.

    .. math:: n_i = \Big\lfloor \frac{w_i}{\sum_j w_j} n \Big\rfloor + [i \text{ has one of the largest remainders}]

    The result is exact for all floats. Of equal remainders, the first ones count as larger.

    Args:
        total: :math:`n`, the total to divide.
        weights: :math:`w_i`, the weight of each share.

    Raises:
        ValueError: A weight is negative or not finite, or none is positive.

    Source: the method of Hamilton, as in Balinski and Young, "Fair Representation", 1982

    >>> largest_remainder(10, [1, 1, 1]), largest_remainder(10, [1.0, 2.5, 0.0])
    ([4, 3, 3], [3, 7, 0])
    """
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"`largest_remainder(weights={list(weights)})` must be >= 0 and finite, one of them > 0.")
    # Fractions, so that all processes round alike.
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * each / sum(exact) for each in exact]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def rendezvous(key: object, members: Sequence[str], seed: int = 0) -> int:
    r"""Return the position in ``members`` of the member to which a key belongs.

    .. math:: \arg\max_m h(\text{seed}, \text{key}, m)

    When a member leaves, only its keys move to other members. When a member joins, some keys of all others move to it.
    Every process computes the same result.

    Args:
        key: Any value whose ``repr`` is the same in every process.
        members: Names of the members.
        seed: Seed of the hash. Default: 0.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998

    >>> owners = [rendezvous(key, ["0", "1", "2"]) for key in range(30)]
    >>> fewer = [rendezvous(key, ["0", "2"]) for key in range(30)]
    >>> all(("0", "2")[now] == str(was) for was, now in zip(owners, fewer) if was != 1)
    True
    """
    text = f"{seed}|{key!r}|"
    return max(
        range(len(members)), key=lambda i: hashlib.blake2b(f"{text}{members[i]}".encode(), digest_size=8).digest()
    )


@runtime_checkable
class Partition(Protocol):
    """An interface for the division of an epoch among replicas: each sample belongs to exactly one part.

    A partition of your own defines `owners`. To divide streams, it also defines `dealer`.
    """

    shuffle: bool = True
    seed: int = 0

    @abstractmethod
    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        """Return, for each index in ``order``, the position in ``members`` of the replica that takes the sample.

        Args:
            order: Indices of samples, in the order of this epoch.
            members: Stable ids of the replicas.
        """
        ...

    def dealer(self, members: Sequence[str]) -> Callable[[Any], int]:
        """Return a function that assigns the samples of a stream to replicas.

        The function must be called with each sample of the stream in turn. It returns the position in ``members`` of
        the replica that takes the sample.

        Args:
            members: Stable ids of the replicas.

        Raises:
            TypeError: This partition cannot divide streams.
        """
        raise TypeError(f"`{self!r}` needs to know all indices: it cannot divide a stream.")

    def order(self, length: int, epoch: int) -> Tensor:
        """Return the indices of all samples in the order of an epoch: shuffled by seed and epoch, or ascending."""
        if not self.shuffle:
            return torch.arange(length)
        return torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def part(self, length: int, members: Sequence[str], me: int, epoch: int) -> Tensor:
        """Return the indices that the replica ``members[me]`` takes in an epoch, in the order of the epoch."""
        order = self.order(length, epoch)
        return order[self.owners(order, members) == me]


@dataclass(frozen=True)
class Sequential(Partition):
    r"""A partition into one block of the data for each replica, in the data's order.

    .. math:: \{ i : b_r \le i < b_{r+1} \}, \quad b_r = r \lfloor L / N \rfloor + \min(r, L \bmod N)

    Use it for data that is read from disk in its order, and for time series.

    >>> Sequential().part(7, ["0", "1", "2"], me=0, epoch=3)
    tensor([0, 1, 2])
    """

    shuffle = False

    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        return _blocks(largest_remainder(len(order), [1.0] * len(members)))


@dataclass(frozen=True)
class Random(Partition):
    r"""A partition of a shuffled epoch, whose samples go to the replicas in turn.

    .. math:: \{ \pi(p) : p \bmod N = r \}

    torch's `DistributedSampler` makes parts equal by taking some samples twice. Here no sample is taken twice, and
    sizes differ by one at most.

    Args:
        seed: Seed of :math:`\pi`, together with the epoch. Default: 0.

    >>> parts = [Random().part(7, ["0", "1"], me, epoch=0).tolist() for me in (0, 1)]
    >>> [len(part) for part in parts], sorted(parts[0] + parts[1])
    ([4, 3], [0, 1, 2, 3, 4, 5, 6])
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_int(self, "seed", at_least=0)

    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        return torch.arange(len(order)) % len(members)

    def dealer(self, members: Sequence[str]) -> Callable[[Any], int]:
        taken = 0

        def deal(sample: Any) -> int:
            nonlocal taken
            taken += 1
            return (taken - 1) % len(members)

        return deal


@dataclass(frozen=True)
class Weighted(Partition):
    r"""A partition into shares of unequal size, for replicas of unequal speed.

    .. math:: \Big| n_r - \frac{w_r}{\sum_j w_j} L \Big| < 1

    :math:`n_r` is the number of samples of replica :math:`r`, :math:`w_r` is its weight, and :math:`L` is the number
    of all samples. The sizes are those of `largest_remainder`. At any point of a stream, the samples before it are
    divided in nearly the same proportions.

    Args:
        weights: Weight of each replica, such as its samples per second, by its stable id as a number. Replicas that
            are not named have weight 1.
        shuffle: Whether an epoch is shuffled. Default: True. If False, each replica has one block of the data, in
            order.
        seed: Seed of the shuffling, together with the epoch. Default: 0.

    Raises:
        TypeError: Weights are not a mapping.
        ValueError: A weight is not a finite number >= 0.

    >>> [len(Weighted({1: 3.0}).part(10, ["0", "1"], me, epoch=0)) for me in (0, 1)]
    [3, 7]
    """

    weights: Mapping[int, float]
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_int(self, "seed", at_least=0)
        shown = f"`Weighted(weights={self.weights!r})`"
        if not isinstance(self.weights, Mapping):
            raise TypeError(f"{shown} must be a mapping from the numbers of replicas to numbers.")
        if not all(isinstance(each, int | float) and 0 <= each < float("inf") for each in self.weights.values()):
            raise ValueError(f"{shown} must be finite numbers >= 0.")

    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        return _blocks(largest_remainder(len(order), self._of(members)))

    def dealer(self, members: Sequence[str]) -> Callable[[Any], int]:
        weights = [Fraction(each) for each in self._of(members)]
        credit = [Fraction(0)] * len(members)
        total = sum(weights)

        def deal(sample: Any) -> int:
            for i, weight in enumerate(weights):
                credit[i] += weight
            most = max(range(len(members)), key=lambda i: (credit[i], -i))
            # The one that takes a sample pays for all, so that credits stay bounded.
            credit[most] -= total
            return most

        return deal

    def _of(self, members: Sequence[str]) -> list[float]:
        """Return the weights of these members; 1 for each of them if none has a positive weight."""
        found = [float(self.weights.get(int(name), 1.0)) for name in members]
        return found if any(found) else [1.0] * len(members)


@dataclass(frozen=True)
class ByKey(Partition):
    r"""A partition that keeps all samples of a key together: users, documents, shards of a file.

    .. math:: \{ i : \text{rendezvous}(\text{key}(i)) = r \}

    Few keys move when replicas are lost or join, see `rendezvous`. Parts are as unequal as keys are.

    Args:
        key: Function that returns the key of an index, such as ``users.__getitem__``, or, for streams, of a sample. A
            key is an int, a string, or another value whose ``repr`` is the same in every process.
        shuffle: Whether the order within each part is shuffled. Default: True.
        seed: Seed of the assignment of keys to replicas, and, together with the epoch, of the shuffling. Default: 0.

    Raises:
        TypeError: ``key`` is not a function.

    >>> parts = [ByKey(lambda i: i % 5).part(20, ["0", "1"], me, epoch=0).tolist() for me in (0, 1)]
    >>> {i % 5 for i in parts[0]} & {i % 5 for i in parts[1]}
    set()
    """

    key: Callable[[Any], object]
    shuffle: bool = True
    seed: int = 0
    _keys: list[object] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int(self, "seed", at_least=0)
        if not callable(self.key):
            raise TypeError(f"`ByKey(key={self.key!r})` must be a function of an index.")

    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        if len(self._keys) != len(order):  # a key may take long to compute, so it is computed once
            self._keys[:] = [self.key(index) for index in range(len(order))]
        found = self.dealer(members, of=lambda key: key)
        of_index = torch.tensor([found(key) for key in self._keys], dtype=torch.int64)
        return of_index[order]

    def dealer(self, members: Sequence[str], of: Callable[[Any], object] | None = None) -> Callable[[Any], int]:
        # A hash for each member and key is slow, and keys repeat.
        known: dict[str, int] = {}

        def deal(sample: Any) -> int:
            key = (of or self.key)(sample)
            text = repr(key)
            # Kept by text, because a key need not be hashable.
            if text not in known:
                known[text] = rendezvous(key, members, self.seed)
            return known[text]

        return deal


def _blocks(sizes: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


Told = Mapping[str, Any]
"""The description of one rank's part of a stream, in plain values.

It has ``batch_size`` and ``workers`` of the rank's loader. For a part of the whole stream, it also has ``members`` and
``rank``. For a part of the samples that lost ranks have not trained on, it has the number ``parts`` of such parts, the
number ``place`` of this part, and in ``left`` the description of each lost rank's part, with the number of the first
batch that the rank has not trained on.
"""


def place_in(partition: Partition, told: Told) -> Callable[[Any], int | None]:
    """Return a function that numbers the samples of a stream within one part of this stream.

    The function must be called with each sample of the stream in turn. It returns the sample's number within the part,
    or None if the sample does not belong to the part. ``told`` describes the part, see `Told`.
    """
    if "left" in told:
        return _place_in_rest(partition, told)
    owner = partition.dealer(told["members"])
    rank = told["rank"]
    taken = 0

    def place(sample: Any) -> int | None:
        nonlocal taken
        if owner(sample) != rank:
            return None
        taken += 1
        return taken - 1

    return place


def _place_in_rest(partition: Partition, told: Told) -> Callable[[Any], int | None]:
    lost = [(place_in(partition, each), each, begin) for each, begin in told["left"]]
    mine = told["place"]
    parts = told["parts"]
    taken = 0

    def place(sample: Any) -> int | None:
        nonlocal taken
        places = [(each(sample), of, begin) for each, of, begin in lost]  # each function must see every sample
        if not any(at is not None and _batch(at, of) >= begin for at, of, begin in places):
            return None
        taken += 1
        return (taken - 1) // parts if (taken - 1) % parts == mine else None

    return place


def _batch(place: int, of: Told) -> int:
    """Return the number of the batch that contains sample number ``place`` of a part of a stream.

    ``of`` describes the loader of the part. The loader's workers take samples in turn, and yield batches in turn.

    >>> [_batch(place, {"workers": 2, "batch_size": 2}) for place in range(7)]
    [0, 1, 0, 1, 2, 3, 2]
    """
    turn, worker = divmod(place, of["workers"])
    return turn // of["batch_size"] * of["workers"] + worker


def dealt(left: Iterable[tuple[Told, int]], takers: Mapping[str, Told]) -> dict[str, Told]:
    """Divide, among live ranks, the samples of a stream that lost ranks have not trained on.

    The samples are divided one by one, in turn.

    Args:
        left: Description of each lost rank's part of the stream, with the number of the first batch that the rank has
            not trained on.
        takers: For each rank that gets samples, by name, the description of the rank's own part.

    Returns:
        For each rank that gets samples, by name, the description of the rank's additional part.
    """
    lost = [(dict(each), begin) for each, begin in left]
    return {
        name: {
            "kind": "stream", "batch_size": own["batch_size"], "workers": own["workers"], "left": lost, "place": i,
            "parts": len(takers),
        }
        for i, (name, own) in enumerate(takers.items())
    }  # fmt: skip


_HOROVODS = (
    ("HOROVOD_SIZE", "HOROVOD_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"),
)  # fmt: skip
_LAUNCHERS = (*_HOROVODS, ("WORLD_SIZE", "RANK"))
"""Names of the variables in which launchers give the number of ranks, and a rank's number."""
_looked_for: ContextVar[bool] = ContextVar("looked_for", default=False)


@contextmanager
def yet_to_be_numbered() -> Iterator[None]:
    """Suspend, within the block, the check that the parts of partitioned samplers are equal.

    Within the block, the strategy has not yet set which part each sampler yields.
    """
    # A context variable: other threads may use samplers at the same time.
    token = _looked_for.set(True)
    try:
        yield
    finally:
        _looked_for.reset(token)


class _Place:
    """The stable ids of all replicas, and the position of this replica among them.

    Args:
        owner: Name of the class that has this place, for error messages.
        num_replicas: Number of replicas. None: the number that the strategy, torch.distributed or the launcher gives.
        rank: Number of this replica. None: the number from the same source.
    """

    def __init__(self, owner: str, num_replicas: int | None, rank: int | None) -> None:
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"`{owner}(num_replicas={num_replicas}, rank={rank})`: give both or none of the two.")
        if num_replicas is not None and rank is not None:
            check_number(owner, "num_replicas", num_replicas, at_least=1)
            check_number(owner, "rank", rank, at_least=0)
            if rank >= num_replicas:
                raise ValueError(f"`{owner}(num_replicas={num_replicas}, rank={rank})`: a rank is below the number.")
        self.members: Sequence[str] | None = None if num_replicas is None else tuple(map(str, range(num_replicas)))
        self.rank = rank or 0

    def known(self) -> tuple[Sequence[str], int]:
        """Return the stable ids of all replicas, and the position of this replica among them."""
        if self.members is not None:
            return self.members, self.rank
        if dist.is_available() and dist.is_initialized():
            return tuple(map(str, range(dist.get_world_size()))), dist.get_rank()
        # Last: once torch.distributed runs, its numbers are those that count.
        for size, rank in _LAUNCHERS:
            if size in os.environ and rank in os.environ:
                return tuple(map(str, range(int(os.environ[size])))), int(os.environ[rank])
        return ("0",), 0

    @property
    def in_step(self) -> bool:
        """Whether ranks take every step together.

        This is so if the rank numbers come from torch.distributed or Horovod.
        """
        if self.members is not None or _looked_for.get():
            return False
        together = dist.is_available() and dist.is_initialized()
        return together or any(size in os.environ and rank in os.environ for size, rank in _HOROVODS)

    def __getstate__(self) -> dict[str, Any]:
        """Return the ids of all replicas and this replica's number, for a pickle.

        A loader's worker process gets the pickle. The process itself could not find out the ids and the number.
        """
        members, rank = self.known()
        return {"members": members, "rank": rank}


class _Numbered:
    """A base of classes that yield one replica's part of a dataset or a stream. `number` sets which part it is."""

    _place: _Place

    @property
    def num_replicas(self) -> int:
        return len(self._place.known()[0])

    @property
    def is_numbered(self) -> bool:
        """Whether the strategy or the user has said which part this is."""
        return self._place.members is not None

    def number(self, members: Sequence[str], rank: int) -> None:
        """Set which part this object yields from now on: the part of the replica ``members[rank]``.

        Args:
            members: Stable ids of all replicas.
            rank: Number of this replica among them.
        """
        self._place.members = tuple(members)
        self._place.rank = rank


class PartitionedSampler(_Numbered, DistributedSampler[Any]):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A sampler of this replica's indices in an epoch, without padding, so that parts may be unequal.

    Lightning does not replace it by another sampler. `AsyncAveragingStrategy` sets the sampler's part, and changes it
    when replicas are lost or join. Within the epoch, the other replicas train on the samples that a lost replica has
    not trained on. Ranks that take every step together (DDP, Horovod) need equal parts, and unequal parts raise
    ValueError when an epoch begins. If unequal parts have equal numbers of batches, pass ``num_replicas`` and ``rank``,
    which skips this check.

    Args:
        dataset: A map-style dataset, or any object with a length.
        partition: `Random` (default), `Sequential`, `Weighted`, `ByKey`, or a partition of your own.
        num_replicas: Number of parts. Default: None, the number that the strategy, torch.distributed or the launcher
            gives, or 1 if none of them does.
        rank: Number of this part. Default: None, the number from the same source.

    Raises:
        TypeError: ``partition`` is not a partition.
        ValueError: Only one of ``num_replicas`` and ``rank`` is given, or the rank is out of range; or, when an epoch
            begins, ranks that take every step together have unequal parts.

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
        self.dataset = dataset
        self.epoch = 0
        self.drop_last = False
        self.shuffle = self.partition.shuffle
        self.seed = self.partition.seed
        self._place = _Place("PartitionedSampler", num_replicas, rank)
        self._made: tuple[Any, list[int]] | None = None

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of this replica."""
        return self._place.known()[1]

    def indices(self) -> list[int]:
        """Return the indices of the samples that this replica takes in the present epoch."""
        members, rank = self._place.known()
        wanted = (len(self.dataset), tuple(members), rank, self.epoch)
        if self._made is None or self._made[0] != wanted:
            # Kept, because `len` and iteration both need the indices, and an epoch may have millions.
            self._made = wanted, self.partition.part(*wanted).tolist()
        return self._made[1]

    def __iter__(self) -> Iterator[int]:
        if self._place.in_step:
            self._check_equal()
        return iter(self.indices())

    def _check_equal(self) -> None:
        """Raise ValueError if the parts of ranks that take every step together are unequal.

        Ranks with more batches would wait for ranks that have ended, until the wait fails.
        """
        members, _ = self._place.known()
        whole = len(self.dataset)
        owners = self.partition.owners(self.partition.order(whole, self.epoch), members)
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
    """The samples of a stream that belong to this replica: each sample once, over all replicas and all their workers.

    Every worker of every replica reads the whole stream, which must be the same for all, and skips the others' samples.
    Use this class for streams that are cheap to read. If decoding is costly, decode the samples that this class yields,
    and not those of ``stream``. When replicas are lost, the stream is divided again from the next epoch on. At the end
    of the current epoch, the other replicas train on the samples that the lost replicas have not trained on. For this
    they read the stream once more, so the stream must yield the same samples again within an epoch.

    Args:
        stream: Any iterable over samples that can be iterated over again.
        partition: `Random` (default, samples in turn), `Weighted`, `ByKey`, or a `Partition` of your own that defines
            `dealer`.
        num_replicas: Number of parts, see `PartitionedSampler`. Default: None.
        rank: Number of this part, see `PartitionedSampler`. Default: None.

    Raises:
        TypeError: ``partition`` is not a partition, or cannot divide streams; or ``stream`` is a generator, which can
            be read for one epoch only.
        ValueError: Only one of ``num_replicas`` and ``rank`` is given, or the rank is out of range.

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
        self.stream = stream
        self.partition = Random() if partition is None else partition
        check_protocol("PartitionedStream", "partition", self.partition, Partition, "a partition such as Random()")
        # Raises here, and not in a worker, if the partition cannot divide streams.
        self.partition.dealer(("0",))
        self._place = _Place("PartitionedStream", num_replicas, rank)
        self._rest: Told | None = None

    def part(self) -> dict[str, Any]:
        """Return the description of the part of the stream that this replica reads, see `Told`."""
        members, rank = self._place.known()
        return {"members": list(members), "rank": rank}

    def rest(self, told: Told) -> PartitionedStream:
        """Return a copy of this stream that yields one part of the samples that lost ranks have not trained on.

        ``told`` describes this part.
        """
        found = copy.copy(self)
        found._rest = told
        return found

    def __iter__(self) -> Iterator[Any]:
        # Read here, in the worker's process: the loader's process has none.
        worker = get_worker_info()
        mine, own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        place_of = place_in(self.partition, self._rest or self.part())
        for sample in self.stream:
            place = place_of(sample)
            if place is not None and place % own == mine:
                yield sample
