"""What an epoch's ranks have not taken yet, divided among other ranks: each sample of the epoch is still seen once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

__all__ = ["describe", "divide", "rest", "share"]

Position = dict[str, Any]


def describe(loader: Any, given: list[int] | None) -> dict[str, Any] | None:
    """Which indices a loader takes in this epoch, in plain values; None where that cannot be told without it.

    Args:
        loader: a DataLoader.
        given: its indices, where they are what was left of an epoch.
    """
    sampler = loader.sampler
    if loader._dataset_kind == _DatasetKind.Iterable or type(loader.batch_sampler) is not BatchSampler:
        return None
    if given is None and type(sampler) not in (DistributedSampler, RandomSampler, SequentialSampler):
        return None
    common = {"length": len(loader.dataset), "batch_size": loader.batch_sampler.batch_size}
    if given is not None:
        return {**common, "kind": "given", "indices": torch.tensor(given, dtype=torch.int64)}
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


def divide(indices: list[int], rank: int, ranks: int) -> list[int]:
    """One rank's part; as with torch's DistributedSampler, the first ones again where they do not divide evenly."""
    padding = -len(indices) % ranks
    return [*indices, *itertools.islice(itertools.cycle(indices or [0]), padding)][rank::ranks]
