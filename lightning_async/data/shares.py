"""Who has which batches of an epoch, and who takes those of a rank that is lost: pure functions, alike on all ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async.data.partitioned import PartitionedStream
from lightning_async.data.samplers import describe
from lightning_async.data.streams import dealt as dealt_streams
from lightning_async.data.workers import stateful

__all__ = [
    "Batches", "Dealt", "Joined", "Share", "before", "distributed", "inherited", "joined", "stream_of", "streamed",
    "told_of", "unheard",
]  # fmt: skip

Joined = Mapping[Any, tuple[list[Tensor], Tensor]]
"""Indices one behind the other, by where those lie that they were made of, which are kept, too."""


class Share(NamedTuple):
    """What one rank has of an epoch: plain values.

    Args:
        first: the number, in this rank's epoch, of the first batch.
        end: the number behind its last one; infinite for what is left of a stream.
        skipped: how many batches its loaders have before the first.
        cycles: a loader that ends before others begins again; else it has nothing more.
        loaders: what each takes, see `samplers.describe`, and how many batches that is; None where it cannot be told.
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
        """Whether it is a part of one stream that others can read, too: its samples can be told, not how many."""
        return len(self.loaders) == 1 and (self.loaders[0][0] or {}).get("kind") == "stream"

    @property
    def lengths(self) -> list[int]:
        """Of the loaders' datasets, where they are known."""
        return [told["length"] for told, _ in self.loaders if told is not None]


def told_of(loader: Any) -> tuple[dict[str, Any] | None, int]:
    """What a loader takes in the epoch that begins, as a `Share` has it."""
    if not isinstance(loader, DataLoader) or stateful(loader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None, 0
    if type(loader)._get_iterator is not DataLoader._get_iterator or (told := describe(loader, None)) is None:
        return None, 0
    of_all = told["kind"] != "distributed" or len(loader.batch_sampler.sampler.dataset) == told["length"]  # pyright: ignore
    return (told if of_all else None), len(loader)


def stream_of(loader: Any) -> dict[str, Any] | None:
    """Which part of a stream a loader takes in the epoch that begins; None where others could not tell its samples."""
    if not isinstance(loader, DataLoader) or stateful(loader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    stream = loader.dataset
    if not isinstance(stream, PartitionedStream) or type(stream).__iter__ is not PartitionedStream.__iter__:
        return None
    if type(loader)._get_iterator is not DataLoader._get_iterator or not getattr(loader, "in_order", True):
        return None
    size, workers = loader.batch_size or 1, max(1, loader.num_workers)
    return {"kind": "stream", **stream.part(), "batch_size": size, "workers": workers}


def distributed(told: dict[str, Any]) -> Tensor:
    """The indices of a rank's whole epoch, as torch's DistributedSampler has them.

    >>> told = {"length": 5, "num_replicas": 2, "rank": 1, "shuffle": False, "seed": 0, "epoch": 0, "drop_last": False}
    >>> distributed(told).tolist()
    [1, 3, 0]
    """
    length, ranks, rank = told["length"], told["num_replicas"], told["rank"]
    order = _order(length, told["seed"] + told["epoch"] if told["shuffle"] else None)
    count = length // ranks if told["drop_last"] else -(-length // ranks)
    mine = order[rank::ranks][:count]  # no copy yet, of what may be millions
    padding = torch.arange(rank + len(mine) * ranks, rank + count * ranks, ranks) % max(1, length)
    return torch.cat([mine, order[padding]]) if len(mine) < count else mine


@functools.lru_cache(maxsize=1)
def _order(length: int, seed: int | None) -> Tensor:
    """Of all indices; kept, as all ranks wait while the shares of all are looked at, which are of one epoch."""
    if seed is None:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class Batches(NamedTuple):
    """Batches of several shares, one behind the other: as tensors, for all ranks wait while they are dealt out.

    Args:
        indices: of each loader, all that there are.
        starts, lengths: of each loader and batch, where in these it lies.
    """

    indices: list[Tensor]
    starts: list[Tensor]
    lengths: list[Tensor]

    @classmethod
    def of(cls, shares: Iterable[tuple[Share, int]], already: Joined | None = None) -> Batches:
        """Of each share those from the batch with this number on; without what a sampler repeats to even ranks out."""
        cut = [found for each, begin in shares if (found := _columns(each, begin))]
        columns = [_join(column, already or {}) for column in zip(*cut, strict=True)]
        if not columns:
            return cls([], [], [])
        kept = torch.stack([lengths for _, _, lengths in columns]).any(0)
        return cls(*map(list, zip(*[(i, starts[kept], lengths[kept]) for i, starts, lengths in columns], strict=True)))

    def __len__(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(self.starts[0]) if self.starts else 0

    def take(self, column: int, numbers: Tensor) -> Tensor:
        """The indices of one loader's batches with these numbers."""
        starts, lengths = self.starts[column][numbers], self.lengths[column][numbers]
        size = int(lengths.max()) if len(lengths) else 0
        if bool((lengths == size).all()):  # the same, sooner
            return self.indices[column][(starts[:, None] + torch.arange(size)).reshape(-1)]
        before = lengths.cumsum(0) - lengths
        return self.indices[column][
            torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))
        ]


class Dealt(Mapping[str, Share]):
    """Batches dealt out, by who has which: each share is made when it is looked at, as all ranks wait for their own.

    Args:
        left: all of these batches.
        takers: by name, the number of the batch that each would train on next.
        like: the loaders of one whose batches some of them were.
    """

    def __init__(self, left: Batches, takers: Mapping[str, int], like: list[tuple[dict[str, Any] | None, int]]) -> None:
        self._left, self._like = left, like
        self._takers = {name: (i, first) for i, (name, first) in enumerate(takers.items()) if len(left) > i}
        self._every, self._made = len(takers), dict[str, Share]()

    def __getitem__(self, name: str) -> Share:
        if name not in self._made:  # by two threads at once, at worst: they make the same
            number, first = self._takers[name]
            mine = torch.arange(number, len(self._left), self._every)
            self._made[name] = _given(self._left, mine, first, self._like)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._takers)

    def __len__(self) -> int:
        return len(self._takers)


def joined(shares: Iterable[Share]) -> Joined:
    """What `inherited` has to put together of these, however much of each is left."""
    cut = [found for each in shares if each.is_known and (found := _columns(each, each.first))]
    found = [[indices for indices, _, _ in column] for column in zip(*cut, strict=True)]
    return {_places(indices): (indices, torch.cat(indices)) for indices in found}


def inherited(shares: Iterable[tuple[Share, int]], takers: Mapping[str, int], already: Joined | None = None) -> Dealt:
    """What is left of lost ranks' shares, dealt out by whole batches: each once, a taker has one more than another.

    Where ranks have batches of unequal sizes, those of the smallest, for which all takers have room.

    >>> told = {"kind": "given", "length": 9, "batch_size": 2, "indices": torch.arange(9)}
    >>> dealt = inherited([(Share(0, 5, 0, False, [(told, 5)]), 2)], {"0": 5, "2": 7})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(5, 7, [4, 5, 8]), (7, 8, [6, 7])]

    Args:
        shares: of those that are lost, each with the number of the first batch that is in no agreement.
        takers: by name, the number of the batch that each would train on next.
        already: what was `joined` beforehand.
    """
    known = [(each, begin) for each, begin in shares if each.is_known]
    like = min((each.loaders for each, _ in known), key=_sizes, default=[])
    return Dealt(Batches.of(known, already), takers, like)


def streamed(shares: Iterable[tuple[Share, int]], takers: Mapping[str, tuple[Share, int]]) -> dict[str, Share]:
    """What is left of lost ranks' parts of a stream, dealt out by samples; how many there are, nobody knows.

    Args:
        shares: of those that are lost, each with the number of the first batch that is in no agreement.
        takers: by name, what each has had, and the number of the batch that it would train on next.
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
    return {name: Share(takers[name][1], math.inf, 0, False, [(dict(told), 0)]) for name, told in found.items()}


def before(one: Share, others: Iterable[Share]) -> Share:
    """What is left of a lost rank's share where one that was started again goes on in it, from a place of its own."""
    told = [each for each, _ in one.loaders]
    if not one.is_known or any(each["kind"] != "distributed" for each in told if each is not None):
        return one
    same = [each.skipped for each in others if each.is_known and [other for other, _ in each.loaders] == told]
    return one._replace(end=min([one.end, *(max(0, place - one.skipped) + one.first for place in same)]))


def unheard(shares: Iterable[Share]) -> list[Share]:
    """Of ranks that were counted when an epoch was dealt out, and were lost before they said what they have.

    Args:
        shares: of those that did say.
    """
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


def _columns(of: Share, begin: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    numbers = range(of.skipped + max(begin, of.first) - of.first, of.skipped + int(of.end) - of.first)
    return [_cut(told, count, numbers, of.cycles) for told, count in of.loaders if told is not None and len(numbers)]


def _cut(told: dict[str, Any], count: int, numbers: range, cycles: bool) -> tuple[Tensor, Tensor, Tensor]:
    size, is_given = told["batch_size"], told["kind"] == "given"
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


def _given(left: Batches, mine: Tensor, first: int, like: list[tuple[dict[str, Any] | None, int]]) -> Share:
    """These batches as one rank's; those that are not full come last, or loaders would move the others' borders."""
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
    return Share(first, first + max(count for _, count in loaders), 0, False, loaders)
