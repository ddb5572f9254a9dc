"""The samples of an epoch that each rank has, and who takes those of a lost rank: pure functions."""

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

from lightning_async.data.partition import PartitionedSampler, PartitionedStream, largest_remainder
from lightning_async.data.partition import dealt as dealt_streams
from lightning_async.data.random_states import stateful

Position = dict[str, Any]
Division = Callable[[list[int], int, int, int], list[int]]
"""Returns one rank's part of indices: those, for this rank of so many, in batches of this size."""
_AT_ONCE = 4096


class Given:
    """Samples these indices, in this order: made to be numbers as they are asked for, as all wait for the first."""

    def __init__(self, indices: Tensor) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        for part in self._indices.split(_AT_ONCE):
            yield from part.tolist()

    def __len__(self) -> int:
        return len(self._indices)


def describe(loader: Any, given: Tensor | None, size: int | None = None) -> dict[str, Any] | None:
    """Return the indices that a loader takes in this epoch, which may be ``given``; None where they cannot be told."""
    if loader._dataset_kind == _DatasetKind.Iterable or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler  # the loader's is another one, where it was given a `batch_sampler`
    if given is None and isinstance(sampler, PartitionedSampler):  # its partition may be a function: not to be told
        given = torch.tensor(sampler.indices(), dtype=torch.int64)
    if given is None and type(sampler) not in (DistributedSampler, RandomSampler, SequentialSampler):
        return None
    batches = loader.batch_sampler
    size = size or batches.batch_size
    common = {"length": len(loader.dataset), "batch_size": size, "full_batches": batches.drop_last}
    if given is not None:
        return {**common, "kind": "given", "indices": given}
    if type(sampler) is DistributedSampler:
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        return {**common, "kind": "distributed", "epoch": sampler.epoch, **{n: getattr(sampler, n) for n in names}}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == common["length"]:
        return {**common, "kind": "random"}
    return {**common, "kind": "sequential"} if type(sampler) is SequentialSampler else None


def share(position: Position) -> list[int]:
    """Return the indices of one rank's whole epoch."""
    told = position["share"]
    everything = range(position["share"]["length"])
    if told["kind"] == "given":
        return told["indices"].tolist()
    if told["kind"] == "distributed":
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        sampler = DistributedSampler(everything, **{name: told[name] for name in names})  # pyright: ignore[reportArgumentType]
        sampler.set_epoch(told["epoch"])
        return list(sampler)
    if told["kind"] == "sequential" or not position["drawn"]:
        return list(everything)
    # The first call that drew: torch's generator for a seed, or the generator that the sampler was given.
    states = position["drawn"][min(position["drawn"])]
    own = [state for name, state in states.items() if name.startswith("own:")]
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(own[0] if own else states["torch"]), dtype=torch.uint8))
    if not own:
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()))
    return list(RandomSampler(everything, generator=generator))


def length_of(loader: Any) -> int | None:
    """Return how many samples a loader's dataset has, where it has indices."""
    return None if loader._dataset_kind == _DatasetKind.Iterable else len(loader.dataset)


def size_of(loader: Any) -> int | None:
    """Return how many samples a loader's batches have, where that is told."""
    return getattr(loader.batch_sampler, "batch_size", loader.batch_size)


def workers_of(loader: Any) -> int | None:
    """Return how many workers read an iterable dataset, which may divide its samples among them; None for others."""
    return loader.num_workers if loader._dataset_kind == _DatasetKind.Iterable else None


def kept(indices: list[int], length: int, as_many: bool) -> list[int]:
    """Return those of ``indices`` that a dataset of this length has.

    With ``as_many``, the first ones come again in place of what is missing, as other ranks take as many.

    >>> kept([4, 1, 7, 2], 5, False), kept([4, 1, 7, 2], 5, True)
    ([4, 1, 2], [4, 1, 2, 4])
    """
    found = [index for index in indices if index < length]
    missing = len(indices) - len(found) if as_many and length else 0
    return [*found, *itertools.islice(itertools.cycle(found or [0]), missing)]


def rest(positions: Sequence[Position]) -> list[int]:
    """Return what no rank has taken, each index once, in the order in which the ranks would have taken it."""
    shares = [share(position) for position in positions]
    counts = [position["taken"] * position["share"]["batch_size"] for position in positions]
    seen = {index for indices, count in zip(shares, counts, strict=True) for index in indices[:count]}
    left = [indices[count:] for indices, count in zip(shares, counts, strict=True)]
    found = []
    for index in itertools.chain.from_iterable(itertools.zip_longest(*left)):
        if index is not None and index not in seen:
            seen.add(index)
            found.append(index)
    return found


def divide(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return one rank's part; as with DistributedSampler, the first ones again where they do not divide evenly."""
    padding = -len(indices) % ranks
    return [*indices, *itertools.islice(itertools.cycle(indices or [0]), padding)][rank::ranks]


def deal(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return one rank's part, each index once: for ranks that may take unequal numbers of steps."""
    return indices[rank::ranks]


def deal_steps(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """Return the same for ranks that take every step together.

    One that has nothing in the last step has one index once more, which does not count, see `in_the_last_step`.

    >>> [deal_steps([0, 1, 2, 3, 4], rank, 2, 2) for rank in range(2)]
    [[0, 2, 4], [1, 3, 3]]
    """
    part = indices[rank::ranks]
    longest = -(-len(indices) // ranks)
    idle = -(-len(part) // batch_size) < -(-longest // batch_size)
    return [*part, (part or indices)[-1]] if idle else part


def in_the_last_step(left: int, ranks: int, batch_size: int) -> list[int]:
    """Return how many of ``left`` indices, dealt out by `deal_steps`, are each rank's in the last step.

    >>> in_the_last_step(5, 2, 2), in_the_last_step(7, 2, 2)
    ([1, 0], [2, 1])
    """
    steps = -(-left // (ranks * batch_size))
    return [-(-(left - rank) // ranks) - (steps - 1) * batch_size for rank in range(ranks)]


Joined = Mapping[Any, tuple[list[Tensor], Tensor]]
"""Indices one behind the other, by where those lie that they were made of, which are kept, too."""


class DataShard(NamedTuple):
    """The part of one rank in an epoch: plain values.

    Args:
        first: the number, in this rank's epoch, of the first batch.
        end: the number behind its last one; infinite for what is left of a stream.
        skipped: how many batches its loaders have before the first.
        cycles: a loader that ends before others begins again; else it has nothing more.
        loaders: what each takes, see `describe`, and how many batches that is; None where it cannot be told.
    """

    first: int
    end: float
    skipped: int
    cycles: bool
    loaders: list[tuple[dict[str, Any] | None, int]]

    @property
    def is_known(self) -> bool:
        """Whether its batches can be told from the outside."""
        return all(told is not None and told["kind"] in ("distributed", "given") for told, _ in self.loaders)

    @property
    def is_of_stream(self) -> bool:
        """Whether it is a part of a stream that others can read, too: its samples can be told, not how many."""
        return len(self.loaders) == 1 and (self.loaders[0][0] or {}).get("kind") == "stream"

    @property
    def lengths(self) -> list[int]:
        return [told["length"] for told, _ in self.loaders if told is not None]


def told_of(loader: Any) -> tuple[dict[str, Any] | None, int]:
    """Return what a loader takes in the epoch that begins, as a `DataShard` has it."""
    if not _is_plain(loader) or (told := describe(loader, None)) is None:
        return None, 0
    of_all = told["kind"] != "distributed" or len(loader.batch_sampler.sampler.dataset) == told["length"]  # pyright: ignore
    return (told if of_all else None), len(loader)


def stream_of(loader: Any) -> dict[str, Any] | None:
    """Return which part of a stream a loader takes in the epoch that begins; None where others could not tell it."""
    if not _is_plain(loader) or not getattr(loader, "in_order", True):
        return None
    stream = loader.dataset
    if not isinstance(stream, PartitionedStream) or type(stream).__iter__ is not PartitionedStream.__iter__:
        return None
    workers = max(1, loader.num_workers)
    return {"kind": "stream", **stream.part(), "batch_size": loader.batch_size or 1, "workers": workers}


def _is_plain(loader: Any) -> bool:
    """Return whether batches come as torch's DataLoader makes them, and from nowhere else."""
    if not isinstance(loader, DataLoader) or stateful(loader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return type(loader)._get_iterator is DataLoader._get_iterator


def distributed(told: dict[str, Any]) -> Tensor:
    """Return the indices of a rank's whole epoch, as torch's DistributedSampler has them.

    >>> told = {"length": 5, "num_replicas": 2, "rank": 1, "shuffle": False, "seed": 0, "epoch": 0, "drop_last": False}
    >>> distributed(told).tolist()
    [1, 3, 0]
    """
    length = told["length"]
    ranks = told["num_replicas"]
    rank = told["rank"]
    order = _order(length, told["seed"] + told["epoch"] if told["shuffle"] else None)
    count = length // ranks if told["drop_last"] else -(-length // ranks)
    mine = order[rank::ranks][:count]  # no copy yet, of what may be millions
    padding = torch.arange(rank + len(mine) * ranks, rank + count * ranks, ranks) % max(1, length)
    return torch.cat([mine, order[padding]]) if len(mine) < count else mine


@functools.lru_cache(maxsize=1)
def _order(length: int, seed: int | None) -> Tensor:
    """Return all indices; kept, as all ranks wait while the shares of all are looked at, which are of one epoch."""
    if seed is None:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class JoinedBatches(NamedTuple):
    """Batches of several shares, one behind the other: where each lies among the indices of each loader."""

    indices: list[Tensor]
    starts: list[Tensor]
    lengths: list[Tensor]

    @classmethod
    def of(cls, shares: Iterable[tuple[DataShard, int]], already: Joined | None = None) -> JoinedBatches:
        """Join each share's batches from this number on, without what a sampler repeats to even ranks out."""
        cut = [found for each, begin in shares if (found := _columns(each, begin))]
        columns = [_join(column, already or {}) for column in zip(*cut, strict=True)]
        if not columns:
            return cls([], [], [])
        kept = torch.stack([lengths for _, _, lengths in columns]).any(0)
        return cls(*map(list, zip(*[(i, starts[kept], lengths[kept]) for i, starts, lengths in columns], strict=True)))

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(self.starts[0]) if self.starts else 0

    def take(self, column: int, numbers: Tensor) -> Tensor:
        starts = self.starts[column][numbers]
        lengths = self.lengths[column][numbers]
        size = int(lengths.max()) if len(lengths) else 0
        if bool((lengths == size).all()):  # the same, sooner
            return self.indices[column][(starts[:, None] + torch.arange(size)).reshape(-1)]
        before = lengths.cumsum(0) - lengths
        return self.indices[column][
            torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))
        ]


class Dealt(Mapping[str, DataShard]):
    """Batches dealt out, by who has which: each share is made when it is looked at, as all ranks wait for their own."""

    def __init__(
        self, left: JoinedBatches, takers: Mapping[str, int], like: list[tuple[dict[str, Any] | None, int]]
    ) -> None:
        self._left = left
        self._like = like
        self._takers = {name: (i, first) for i, (name, first) in enumerate(takers.items()) if len(left) > i}
        self._every = len(takers)
        self._made = dict[str, DataShard]()

    def __getitem__(self, name: str) -> DataShard:
        if name not in self._made:  # by two threads at once, at worst: they make the same
            number, first = self._takers[name]
            mine = torch.arange(number, len(self._left), self._every)
            self._made[name] = _given(self._left, mine, first, self._like)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._takers)

    def __len__(self) -> int:
        return len(self._takers)


def joined(shares: Iterable[DataShard]) -> Joined:
    """Join what `inherited` has to put together of these, however much of each is left."""
    cut = [found for each in shares if each.is_known and (found := _columns(each, each.first))]
    found = [[indices for indices, _, _ in column] for column in zip(*cut, strict=True)]
    return {_places(indices): (indices, torch.cat(indices)) for indices in found}


def inherited(
    shares: Iterable[tuple[DataShard, int]], takers: Mapping[str, int], already: Joined | None = None
) -> Dealt:
    """Deal out what is left of lost ranks' shares, by whole batches: each once, a taker has one more than another.

    Each share comes with the number of the first batch that is in no agreement, each taker with that of the batch that
    it would train on next; ``already`` was `joined` beforehand. Of ranks with batches of unequal sizes the smallest
    size counts, for which all takers have room.

    >>> told = {"kind": "given", "length": 9, "batch_size": 2, "indices": torch.arange(9)}
    >>> dealt = inherited([(DataShard(0, 5, 0, False, [(told, 5)]), 2)], {"0": 5, "2": 7})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(5, 7, [4, 5, 8]), (7, 8, [6, 7])]
    """
    known = [(each, begin) for each, begin in shares if each.is_known]
    like = min((each.loaders for each, _ in known), key=_sizes, default=[])
    return Dealt(JoinedBatches.of(known, already), takers, like)


def streamed(
    shares: Iterable[tuple[DataShard, int]], takers: Mapping[str, tuple[DataShard, int]]
) -> dict[str, DataShard]:
    """Deal out what is left of lost ranks' parts of a stream, by samples; how many there are, nobody knows.

    The arguments are those of `inherited`, but that takers have what they had, too.
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
    """Return what is left of a lost rank's share where one that was started again goes on in it, from its own place."""
    told = [each for each, _ in one.loaders]
    if not one.is_known or any(each["kind"] != "distributed" for each in told if each is not None):
        return one
    same = [each.skipped for each in others if each.is_known and [other for other, _ in each.loaders] == told]
    return one._replace(end=min([one.end, *(max(0, place - one.skipped) + one.first for place in same)]))


def unheard(shares: Iterable[DataShard]) -> list[DataShard]:
    """Return the shares of ranks that were counted when an epoch was dealt out, and lost before they said theirs."""
    there = list(shares)
    told = [each for one in there for each, _ in one.loaders if each is not None and each["kind"] == "distributed"]
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
    if not is_given and not told["drop_last"] and not told["full_batches"]:  # else it would be dropped
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
    """Return these batches as one rank's; the ones that are not full come last, as loaders cut whole batches."""
    sizes = _sizes(like)
    columns = [lengths[mine] == size for lengths, size in zip(left.lengths, sizes, strict=True)]
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


def by_steps(
    left: Iterable[tuple[DataShard, int]], takers: Mapping[str, int], sizes: Mapping[str, int], whole: bool = False
) -> dict[str, DataShard]:
    r"""Deal out each sample once, and in each step the samples that it would have with equal batches of as many in all.

    Step :math:`s` has the samples :math:`sn` to :math:`(s+1)n` of what is left, in the order in which ranks that take
    every step together would come to them; :math:`n` is the sum of all ``sizes``. Of the last step, which has fewer,
    every rank has its part, as near to its size as can be; with ``whole`` it is left out, as with ``drop_last``. None
    has a share where there is not one sample for each. Other arguments are those of `inherited`.

    >>> told = {"kind": "given", "length": 9, "batch_size": 3, "indices": torch.arange(9)}
    >>> dealt = by_steps([(DataShard(0, 3, 0, False, [(told, 3)]), 1)], {"0": 4, "1": 4}, {"0": 3, "1": 1})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(4, 6, [3, 4, 5, 7]), (4, 6, [6, 8])]
    """
    known = [(each, begin) for each, begin in left if each.is_known]
    if not known:
        return {}
    samples = _once(_in_order(known))
    all_ = [sizes[name] for name in takers]
    total = sum(all_)
    steps, rest = divmod(len(samples), total)
    last = [0] * len(all_) if whole else _of_the_last(rest, all_)
    if not all(steps + more for more in last):
        return {}
    length = known[0][0].lengths[0]
    full = samples[: steps * total].view(steps, total)
    ends = samples[steps * total :]
    dealt = {}
    each_begins = _begins(all_)
    last_begins = _begins(last)
    for i, (name, first) in enumerate(takers.items()):
        within = each_begins[i]
        behind = last_begins[i]
        mine = torch.cat([full[:, within : within + all_[i]].reshape(-1), ends[behind : behind + last[i]]])
        told = {"kind": "given", "length": length, "batch_size": all_[i], "full_batches": whole, "indices": mine}
        count = -(-len(mine) // all_[i])
        dealt[name] = DataShard(first, first + count, 0, False, [(told, count)])
    return dealt


def _of_the_last(rest: int, sizes: list[int]) -> list[int]:
    """Divide the last step's samples: where there are as many as ranks, each has one, so that none is done first."""
    one = 1 if rest >= len(sizes) else 0
    room = [size - one for size in sizes]
    more = largest_remainder(rest - one * len(sizes), room) if any(room) else [0] * len(sizes)
    return [one + each for each in more]


def _begins(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths[:-1], initial=0))


def _in_order(left: list[tuple[DataShard, int]]) -> Tensor:
    batches = JoinedBatches.of(left)
    lengths = [len(JoinedBatches.of([each])) for each in left]
    numbers = [max(begin, each.first) + torch.arange(n) for (each, begin), n in zip(left, lengths, strict=True)]
    if not len(batches):
        return torch.empty(0, dtype=torch.int64)
    return batches.take(0, torch.cat(numbers).argsort(stable=True))


def _once(samples: Tensor) -> Tensor:
    """Leave out those that come again: what a sampler, or a checkpoint of other ranks, repeats to even ranks out."""
    if not (samples.bincount() > 1).any():  # the same, sooner: all ranks wait, and sorting millions takes long
        return samples
    _, places = samples.unique(return_inverse=True)
    first = torch.full((len(samples),), len(samples)).scatter_reduce(0, places, torch.arange(len(samples)), "amin")
    return samples[first[first < len(samples)].sort().values]
