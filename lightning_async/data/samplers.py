"""What an epoch's ranks have not taken yet, divided among other ranks: each sample of the epoch is still seen once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

from lightning_async.data.partitioned import PartitionedSampler

__all__ = [
    "Division", "Given", "deal", "deal_steps", "describe", "divide", "in_the_last_step", "kept", "length_of", "rest",
    "share", "size_of", "workers_of",
]  # fmt: skip

Position = dict[str, Any]
Division = Callable[[list[int], int, int, int], list[int]]
"""One rank's part of what is left: of these indices, for this rank of so many, in batches of this size."""
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
    """Which indices a loader takes in this epoch, in plain values; None where that cannot be told without it.

    Args:
        loader: a DataLoader.
        given: its indices, where they are what was left of an epoch.
        size: of its batches, where it is another one in this epoch.
    """
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
    """The indices of one rank's whole epoch."""
    told, everything = position["share"], range(position["share"]["length"])
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
    """How many samples a loader's dataset has, where it has indices."""
    return None if loader._dataset_kind == _DatasetKind.Iterable else len(loader.dataset)


def size_of(loader: Any) -> int | None:
    """How many samples a loader's batches have, where that is told."""
    return getattr(loader.batch_sampler, "batch_size", loader.batch_size)


def workers_of(loader: Any) -> int | None:
    """Return how many workers read an iterable dataset, which may divide its samples among them; None for others."""
    return loader.num_workers if loader._dataset_kind == _DatasetKind.Iterable else None


def kept(indices: list[int], length: int, as_many: bool) -> list[int]:
    """Those of ``indices`` that a dataset of this length has.

    Args:
        as_many: the first ones again in place of what is missing, as other ranks take as many.

    >>> kept([4, 1, 7, 2], 5, False), kept([4, 1, 7, 2], 5, True)
    ([4, 1, 2], [4, 1, 2, 4])
    """
    found = [index for index in indices if index < length]
    missing = len(indices) - len(found) if as_many and length else 0
    return [*found, *itertools.islice(itertools.cycle(found or [0]), missing)]


def rest(positions: Sequence[Position]) -> list[int]:
    """What no rank has taken, each index once, in the order in which the ranks would have taken it."""
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
    """One rank's part; as with torch's DistributedSampler, the first ones again where they do not divide evenly."""
    padding = -len(indices) % ranks
    return [*indices, *itertools.islice(itertools.cycle(indices or [0]), padding)][rank::ranks]


def deal(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """One rank's part, each index once: for ranks that may take unequal numbers of steps."""
    return indices[rank::ranks]


def deal_steps(indices: list[int], rank: int, ranks: int, batch_size: int) -> list[int]:
    """The same for ranks that take every step together: one that has nothing in the last step has one index once more,
    which does not count, see `in_the_last_step`.

    >>> [deal_steps([0, 1, 2, 3, 4], rank, 2, 2) for rank in range(2)]
    [[0, 2, 4], [1, 3, 3]]
    """
    part, longest = indices[rank::ranks], -(-len(indices) // ranks)
    idle = -(-len(part) // batch_size) < -(-longest // batch_size)
    return [*part, (part or indices)[-1]] if idle else part


def in_the_last_step(left: int, ranks: int, batch_size: int) -> list[int]:
    """How many of ``left`` indices, dealt out by `deal_steps`, are each rank's in the last step.

    >>> in_the_last_step(5, 2, 2), in_the_last_step(7, 2, 2)
    ([1, 0], [2, 1])
    """
    steps = -(-left // (ranks * batch_size))
    return [-(-(left - rank) // ranks) - (steps - 1) * batch_size for rank in range(ranks)]
