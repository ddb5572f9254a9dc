"""The samples of an epoch that each rank has, and the redistribution of a lost rank's samples, as pure functions.

A share (`DataShard`) describes the batches of one rank in an epoch, so that other ranks can compute them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

from lightning_async.data.partition import PartitionedSampler, PartitionedStream
from lightning_async.data.partition import dealt as dealt_streams

Position = dict[str, Any]
Division = Callable[[list[int], int, int, int], list[int]]
"""A function of indices, a rank, the number of ranks and the batch size that returns the rank's part."""
# Number of indices that `Given` converts at a time.
_AT_ONCE = 4096


class Given:
    """A sampler that yields given indices in the given sequence.

    Indices are converted to Python numbers a few at a time, as they are needed. To convert all of them first would
    delay the first batch, for which all ranks wait.
    """

    def __init__(self, indices: Tensor) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        for part in self._indices.split(_AT_ONCE):
            yield from part.tolist()

    def __len__(self) -> int:
        return len(self._indices)


class EachOnce(DistributedSampler[Any]):
    """A part of an evaluation's samples: of all samples, each is in the part of one rank, and once.

    Its base repeats samples so that all ranks have equally many. Here the length is still that of the longest part, so
    that all ranks announce equal numbers of batches, also a rank without any sample.

    >>> parts = [EachOnce([10, 11, 12, 13], 3, rank, shuffle=False) for rank in range(3)]
    >>> [list(part) for part in parts], [len(part) for part in parts]
    ([[0, 3], [1], [2]], [2, 2, 2])
    """

    def __iter__(self) -> Iterator[Any]:
        length = len(self.dataset)  # pyright: ignore[reportArgumentType]
        return itertools.islice(super().__iter__(), len(range(self.rank, length, self.num_replicas)))


def describe(loader: Any, given: Tensor | None, size: int | None = None) -> dict[str, Any] | None:
    """Return a description of the indices that a loader takes in this epoch, in plain values.

    Args:
        loader: The loader.
        given: Indices that the loader takes instead of its sampler's. None: it takes its sampler's.
        size: Batch size for ``given``, in place of the loader's own. Default: None.

    Returns:
        The description; None if other ranks could not compute the indices from it.
    """
    if loader._dataset_kind == _DatasetKind.Iterable or not is_of_torch(loader.batch_sampler, BatchSampler):
        return None
    sampler: Any = loader.batch_sampler.sampler  # with a `batch_sampler`, the loader's own sampler is not used
    # A partition may hold a function, which plain values cannot describe: its indices are listed.
    if given is None and isinstance(sampler, PartitionedSampler):
        given = torch.tensor(sampler.indices(), dtype=torch.int64)
    if given is None and not is_of_torch(sampler, DistributedSampler, EachOnce, RandomSampler, SequentialSampler):
        return None
    batches = loader.batch_sampler
    size = size or batches.batch_size
    common = {"length": len(loader.dataset), "batch_size": size, "full_batches": batches.drop_last}
    if given is not None:
        return {**common, "kind": "given", "indices": given}
    if isinstance(sampler, DistributedSampler):
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        return {**common, "kind": "distributed", "epoch": sampler.epoch, **{n: getattr(sampler, n) for n in names}}
    if is_of_torch(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == common["length"]:
        return {**common, "kind": "random"}
    return {**common, "kind": "sequential"} if type(sampler) is SequentialSampler else None


def share(position: Position) -> list[int]:
    """Return all indices that one rank takes in the epoch of its saved ``position``.

    They include the indices that the rank took before the position.
    """
    told = position["share"]
    everything = range(position["share"]["length"])
    if told["kind"] == "given":
        return told["indices"].tolist()
    if told["kind"] == "distributed":
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        sampler = DistributedSampler(everything, **{name: told[name] for name in names})  # pyright: ignore[reportArgumentType]
        # The order of a shuffled epoch depends on its number.
        sampler.set_epoch(told["epoch"])
        return list(sampler)
    if told["kind"] == "sequential" or not position["drawn"]:
        return list(everything)
    # The first call that drew random numbers: from torch's generator, for a seed, or from the sampler's own.
    states = position["drawn"][min(position["drawn"])]
    own = [state for name, state in states.items() if name.startswith("own:")]
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(own[0] if own else states["torch"]), dtype=torch.uint8))
    if not own:
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()))
    return list(RandomSampler(everything, generator=generator))


def length_of(loader: Any) -> int | None:
    """Return the number of samples of a loader's dataset; None for an iterable dataset."""
    return None if loader._dataset_kind == _DatasetKind.Iterable else len(loader.dataset)


def size_of(loader: Any) -> int | None:
    return getattr(loader.batch_sampler, "batch_size", loader.batch_size)


def workers_of(loader: Any) -> int | None:
    """Return the number of workers of an iterable dataset's loader, among which the dataset may divide its samples.

    For other datasets, return None.
    """
    return loader.num_workers if loader._dataset_kind == _DatasetKind.Iterable else None


def kept(indices: list[int], length: int, as_many: bool) -> list[int]:
    """Return those of ``indices`` that a dataset of this length has.

    Args:
        indices: Indices of samples.
        length: Length of the dataset.
        as_many: Whether missing indices are replaced by the first ones, so that all ranks keep equal numbers of
            indices.

    >>> kept([4, 1, 7, 2], 5, False), kept([4, 1, 7, 2], 5, True)
    ([4, 1, 2], [4, 1, 2, 4])
    """
    found = [index for index in indices if index < length]
    missing = len(indices) - len(found) if as_many and length else 0
    return [*found, *itertools.islice(itertools.cycle(found or [0]), missing)]


def rest(positions: Sequence[Position]) -> list[int]:
    """Return the indices that no rank has taken, each once.

    Their sequence is that in which the ranks would have taken them. ``positions`` are the ranks' saved positions.
    """
    shares = [share(position) for position in positions]
    counts = [position["taken"] * position["share"]["batch_size"] for position in positions]
    # A set, because padding gives some indices to two ranks.
    seen = {index for indices, count in zip(shares, counts, strict=True) for index in indices[:count]}
    left = [indices[count:] for indices, count in zip(shares, counts, strict=True)]
    found = []
    # In turn over the ranks: this is the sequence in which ranks would have trained on the samples.
    for index in itertools.chain.from_iterable(itertools.zip_longest(*left)):
        if index is not None and index not in seen:
            seen.add(index)
            found.append(index)
    return found


def divide(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return one rank's part of the indices: every ``ranks``-th one, with repetitions.

    If the indices do not divide evenly, some are repeated, as in DistributedSampler. ``batch_size`` has no effect.
    """
    padding = -len(indices) % ranks
    return [*indices, *itertools.islice(itertools.cycle(indices or [0]), padding)][rank::ranks]


def deal(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return one rank's part of the indices: every ``ranks``-th one, without repetitions.

    Ranks may therefore get unequal numbers of batches. ``batch_size`` has no effect.
    """
    return indices[rank::ranks]


def deal_steps(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return one rank's part of the indices, for ranks that take every step together.

    Each index belongs to one part. A rank that would have no index in the last step gets one of its indices a second
    time, so that it can take the step, too. `in_the_last_step` does not count this repetition.

    >>> [deal_steps([0, 1, 2, 3, 4], rank, 2, 2) for rank in range(2)]
    [[0, 2, 4], [1, 3, 3]]
    """
    part = indices[rank::ranks]
    longest = -(-len(indices) // ranks)
    idle = -(-len(part) // batch_size) < -(-longest // batch_size)
    return [*part, (part or indices)[-1]] if idle else part


def in_the_last_step(left: int, ranks: int, batch_size: int) -> list[int]:
    """Return the number of indices that each rank has in the last step, if `deal_steps` divides ``left`` indices.

    >>> in_the_last_step(5, 2, 2), in_the_last_step(7, 2, 2)
    ([1, 0], [2, 1])
    """
    steps = -(-left // (ranks * batch_size))
    return [-(-(left - rank) // ranks) - (steps - 1) * batch_size for rank in range(ranks)]


Joined = Mapping[Any, tuple[list[Tensor], Tensor]]
"""Concatenated indices, by the memory of their parts; the parts are kept, so that the memory stays theirs."""


class DataShard(NamedTuple):
    """The share of one rank in an epoch: a sequence of batches, described by plain values.

    Args:
        first: Number of the share's first batch, counted in this rank's epoch.
        end: Number of the share's last batch, plus one; infinite for a part of a stream.
        skipped: Number of batches that this rank's loaders yield before batch ``first``, but that are not in the share.
        cycles: Whether a loader that ends before others begins again. If False, it has no more batches.
        loaders: For each loader, a description of its indices, see `describe`, and its number of batches. The
            description is None if the indices cannot be known.
    """

    first: int
    end: float
    skipped: int
    cycles: bool
    loaders: list[tuple[dict[str, Any] | None, int]]

    @property
    def is_known(self) -> bool:
        """Whether other ranks can compute the share's batches."""
        return all(told is not None and told["kind"] in ("distributed", "given") for told, _ in self.loaders)

    @property
    def is_of_stream(self) -> bool:
        """Whether the share is a part of a stream that other ranks can read, too. Its number of samples is unknown."""
        return len(self.loaders) == 1 and (self.loaders[0][0] or {}).get("kind") == "stream"

    @property
    def lengths(self) -> list[int]:
        """The length of each loader's dataset."""
        return [told["length"] for told, _ in self.loaders if told is not None]


def told_of(loader: Any) -> tuple[dict[str, Any] | None, int]:
    """Return a description of a loader's indices in this epoch, for other ranks, and the loader's number of batches.

    If the indices cannot be described, return None and 0.
    """
    if not is_plain(loader) or (told := describe(loader, None)) is None:
        return None, 0
    of_all = told["kind"] != "distributed" or len(loader.batch_sampler.sampler.dataset) == told["length"]  # pyright: ignore
    return (told if of_all else None), len(loader)


def stream_of(loader: Any) -> dict[str, Any] | None:
    """Return a description of the part of a stream (an iterable dataset) that a loader reads in this epoch.

    If this rank is lost, the other ranks read the rest of the part by this description. Returns None if the data cannot
    be described.
    """
    if not is_plain(loader) or not getattr(loader, "in_order", True):
        return None
    stream = loader.dataset
    if not isinstance(stream, PartitionedStream) or type(stream).__iter__ is not PartitionedStream.__iter__:
        return None
    workers = max(1, loader.num_workers)
    return {"kind": "stream", **stream.part(), "batch_size": loader.batch_size or 1, "workers": workers}


def is_plain(loader: Any) -> bool:
    """Return whether a loader's batches are made by torch's DataLoader alone, or by torchdata's `StatefulDataLoader`.

    torchdata's loader makes the same batches. Its own state lacks the order of most samplers, and random states.
    """
    kind = type(loader)
    of_torchdata = (c for c in kind.__mro__ if _is_of_torchdata(c) and c.__name__ == "StatefulDataLoader")
    base = next(of_torchdata, DataLoader)
    names = ("__iter__", "_get_iterator", "state_dict", "load_state_dict")
    return issubclass(kind, base) and all(getattr(kind, name, None) is getattr(base, name, None) for name in names)


def is_of_torch(value: Any, *kinds: type) -> bool:
    """Return whether an object's class is one of torch's ``kinds``, or torchdata's class of the same name."""
    kind = type(value)
    return kind in kinds or (_is_of_torchdata(kind) and kind.__name__ in {each.__name__ for each in kinds})


def _is_of_torchdata(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torchdata"


def distributed(told: dict[str, Any]) -> Tensor:
    """Return the indices that a rank takes in a whole epoch, as torch's DistributedSampler computes them.

    ``told`` has the attributes of the sampler.

    >>> told = {"length": 5, "num_replicas": 2, "rank": 1, "shuffle": False, "seed": 0, "epoch": 0, "drop_last": False}
    >>> distributed(told).tolist()
    [1, 3, 0]
    """
    length = told["length"]
    ranks = told["num_replicas"]
    rank = told["rank"]
    order = _order(length, told["seed"] + told["epoch"] if told["shuffle"] else None)
    count = length // ranks if told["drop_last"] else -(-length // ranks)
    mine = order[rank::ranks][:count]  # a view, because there may be millions of indices
    # As DistributedSampler does: the first indices are repeated, so that all ranks have equally many.
    padding = torch.arange(rank + len(mine) * ranks, rank + count * ranks, ranks) % max(1, length)
    return torch.cat([mine, order[padding]]) if len(mine) < count else mine


@functools.lru_cache(maxsize=1)
def _order(length: int, seed: int | None) -> Tensor:
    """Return all indices in the order of an epoch, shuffled by ``seed``; None: in ascending order.

    The last result is cached: all ranks' shares of an epoch are computed from the same order, while all ranks wait.
    """
    if seed is None:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class JoinedBatches(NamedTuple):
    """The batches of several shares, one share after the other.

    Args:
        indices: Sample indices of all shares, for each loader.
        starts: Position of each batch's first index in ``indices``, for each loader.
        lengths: Number of indices of each batch, for each loader.
    """

    indices: list[Tensor]
    starts: list[Tensor]
    lengths: list[Tensor]

    @classmethod
    def of(cls, shares: Iterable[tuple[DataShard, int]], already: Joined | None = None) -> JoinedBatches:
        """Join the batches of shares.

        Indices that a sampler repeats as padding, so that all ranks have equally many, are left out.

        Args:
            shares: Each share, with the number of the first batch to take from it.
            already: Sample indices of the shares, if `joined` has concatenated them before. Default: None.
        """
        cut = [found for each, begin in shares if (found := _columns(each, begin))]
        columns = [_join(column, already or {}) for column in zip(*cut, strict=True)]
        if not columns:
            return cls([], [], [])
        kept = torch.stack([lengths for _, _, lengths in columns]).any(0)
        return cls(*map(list, zip(*[(i, starts[kept], lengths[kept]) for i, starts, lengths in columns], strict=True)))

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(self.starts[0]) if self.starts else 0

    def take(self, column: int, numbers: Tensor) -> Tensor:
        """Return the sample indices of some batches, for one loader.

        Args:
            column: Number of the loader.
            numbers: Numbers of the batches.
        """
        starts = self.starts[column][numbers]
        lengths = self.lengths[column][numbers]
        size = int(lengths.max()) if len(lengths) else 0
        if bool((lengths == size).all()):  # the same result, faster
            return self.indices[column][(starts[:, None] + torch.arange(size)).reshape(-1)]
        before = lengths.cumsum(0) - lengths
        return self.indices[column][
            torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))
        ]


class Dealt(Mapping[str, DataShard]):
    """The shares into which batches are divided, by name of the rank that gets the share.

    All ranks wait while a rank computes shares. Therefore each share is computed only when it is first read, and no
    rank computes shares that it does not need.

    Args:
        left: Batches to divide.
        takers: For each rank that gets a share, by name, the number of its next batch.
        like: Description of the loaders that the shares are for.
    """

    def __init__(
        self, left: JoinedBatches, takers: Mapping[str, int], like: list[tuple[dict[str, Any] | None, int]]
    ) -> None:
        self._left = left
        self._like = like
        # With fewer batches than takers, the last ones get none.
        self._takers = {name: (i, first) for i, (name, first) in enumerate(takers.items()) if len(left) > i}
        self._every = len(takers)
        self._made = dict[str, DataShard]()

    def __getitem__(self, name: str) -> DataShard:
        if name not in self._made:  # without a lock: two threads would make the same share
            number, first = self._takers[name]
            mine = torch.arange(number, len(self._left), self._every)
            self._made[name] = _given(self._left, mine, first, self._like)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._takers)

    def __len__(self) -> int:
        return len(self._takers)


def joined(shares: Iterable[DataShard]) -> Joined:
    """Concatenate all indices of these shares ahead of time, so that `inherited` is faster while all ranks wait."""
    cut = [found for each in shares if each.is_known and (found := _columns(each, each.first))]
    found = [[indices for indices, _, _ in column] for column in zip(*cut, strict=True)]
    return {_places(indices): (indices, torch.cat(indices)) for indices in found}


def inherited(
    shares: Iterable[tuple[DataShard, int]], takers: Mapping[str, int], already: Joined | None = None
) -> Dealt:
    """Divide the remaining batches of lost ranks' shares among the live ranks, each batch once.

    The numbers of batches that two live ranks get differ by one at most. If lost ranks had batches of unequal sizes,
    the new shares have batches of the smallest size, because every rank has enough memory for that size.

    Args:
        shares: Each lost rank's share, with the number of the first batch that the rank has not trained on.
        takers: Number of the next batch of each live rank, by name.
        already: Sample indices of the shares, if `joined` has concatenated them before. Default: None.

    >>> told = {"kind": "given", "length": 9, "batch_size": 2, "indices": torch.arange(9)}
    >>> dealt = inherited([(DataShard(0, 5, 0, False, [(told, 5)]), 2)], {"0": 5, "2": 7})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(5, 7, [4, 5, 8]), (7, 8, [6, 7])]
    """
    known = [(each, begin) for each, begin in shares if each.is_known]
    # A rank with larger batches has enough memory for small ones, but not the other way round.
    like = min((each.loaders for each, _ in known), key=_sizes, default=[])
    return Dealt(JoinedBatches.of(known, already), takers, like)


def streamed(
    shares: Iterable[tuple[DataShard, int]], takers: Mapping[str, tuple[DataShard, int]]
) -> dict[str, DataShard]:
    """Divide the rest of lost ranks' parts of a stream among the live ranks, sample by sample.

    The number of remaining samples is unknown, so the new shares have no end.

    Args:
        shares: Each lost rank's share, with the number of the first batch that the rank has not trained on.
        takers: Share of each live rank, with the number of its next batch, by name.
    """
    left = [
        (told, one.skipped + max(begin, one.first) - one.first)
        for one, begin in shares if one.is_of_stream for told, _ in one.loaders if told is not None
    ]  # fmt: skip
    own = {
        name: told
        for name, (one, _) in takers.items() if one.is_of_stream for told, _ in one.loaders if told is not None
    }  # fmt: skip
    found = dealt_streams(left, own) if left else {}
    return {name: DataShard(takers[name][1], math.inf, 0, False, [(dict(told), 0)]) for name, told in found.items()}


def before(one: DataShard, others: Iterable[DataShard]) -> DataShard:
    """Return the first part of a lost rank's share, which ends where the restarted process of the rank continues.

    Without a restarted process, return the whole share.

    Args:
        one: Share of the lost rank.
        others: Shares of all ranks now. One of them may be the rest of the same share, for the restarted process.
    """
    told = [each for each, _ in one.loaders]
    if not one.is_known or any(each["kind"] != "distributed" for each in told if each is not None):
        return one
    same = [each.skipped for each in others if each.is_known and [other for other, _ in each.loaders] == told]
    return one._replace(end=min([one.end, *(max(0, place - one.skipped) + one.first for place in same)]))


def unheard(shares: Iterable[DataShard]) -> list[DataShard]:
    """Return the shares of ranks that were lost at the start of an epoch, before they could describe their shares.

    These shares are computed from the shares that the other ranks have described.

    Args:
        shares: Shares of the other ranks.
    """
    there = list(shares)
    told = [each for one in there for each, _ in one.loaders if each is not None and each["kind"] == "distributed"]
    # Only the first division of an epoch shows, by its number of ranks, who is missing.
    if any(one.first or one.skipped for one in there) or len(told) < sum(len(one.loaders) for one in there):
        return []
    missing = set(range(told[0]["num_replicas"])) - {each["rank"] for each in told}
    like = there[0]
    return [
        like._replace(loaders=[({**each, "rank": rank}, count) for each, count in like.loaders if each is not None])
        for rank in sorted(missing)
    ]


def _sizes(loaders: list[tuple[dict[str, Any] | None, int]]) -> list[int]:
    return [told["batch_size"] for told, _ in loaders if told is not None]


def _columns(of: DataShard, begin: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    numbers = range(of.skipped + max(begin, of.first) - of.first, of.skipped + int(of.end) - of.first)
    return [_cut(told, count, numbers, of.cycles) for told, count in of.loaders if told is not None and len(numbers)]


def _cut(told: dict[str, Any], count: int, numbers: range, cycles: bool) -> tuple[Tensor, Tensor, Tensor]:
    size = told["batch_size"]
    is_given = told["kind"] == "given"
    indices = told["indices"] if is_given else distributed(told)
    # Padding is removed; with `drop_last`, there is none, or it would be dropped.
    if not is_given and not told["drop_last"] and not told["full_batches"]:
        is_padding = (len(indices) - 1) * told["num_replicas"] + told["rank"] >= told["length"]
        indices = indices[:-1] if is_padding else indices
    here = torch.arange(numbers.start, numbers.stop)
    starts = (here % count if cycles and count else here) * size
    lengths = (len(indices) - starts).clamp(0, size)
    return indices, starts, lengths


def _places(indices: Sequence[Tensor]) -> Any:
    return tuple((each.data_ptr(), each.stride(), len(each)) for each in indices)


def _join(columns: Sequence[tuple[Tensor, Tensor, Tensor]], already: Joined) -> tuple[Tensor, Tensor, Tensor]:
    indices, starts, lengths = (list(each) for each in zip(*columns, strict=True))
    before = itertools.accumulate(map(len, indices), initial=0)
    starts = [each + behind for each, behind in zip(starts, before, strict=False)]
    _, all_ = already.get(_places(indices)) or ([], torch.cat(indices))
    return all_, torch.cat(starts), torch.cat(lengths)


def _given(left: JoinedBatches, mine: Tensor, first: int, like: list[tuple[dict[str, Any] | None, int]]) -> DataShard:
    """Return the batches of ``left`` with the numbers ``mine`` as one rank's share.

    A loader cuts the indices of a share into full batches. Therefore batches that are not full come last in the share.

    Args:
        left: Batches that lost ranks have not trained on.
        mine: Numbers of the batches that this rank gets.
        first: Number of the rank's next batch.
        like: Description of the rank's loaders.
    """
    sizes = _sizes(like)
    columns = [lengths[mine] == size for lengths, size in zip(left.lengths, sizes, strict=True)]
    # A batch counts as full only if all loaders have their whole part of it.
    full = torch.stack(columns).all(0)
    parts = mine[full], mine[~full]
    loaders: list[tuple[dict[str, Any] | None, int]] = []
    for column, (told, _) in enumerate(like):
        assert told is not None
        indices = torch.cat([left.take(column, part) for part in parts])
        given = {
            "kind": "given", "length": told["length"], "batch_size": told["batch_size"], "indices": indices,
        }  # fmt: skip
        loaders.append((given, -(-len(indices) // told["batch_size"])))
    return DataShard(first, first + max(count for _, count in loaders), 0, False, loaders)
