"""Who has which batches of an epoch, and who takes those of a rank that is lost: pure functions, alike on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_async.data.samplers import describe, share
from lightning_async.data.workers import stateful

__all__ = ["Share", "batches_of", "before", "inherited", "told_of", "unheard"]

Batch = tuple[list[int], ...]
"""The indices of one batch, for each loader."""


class Share(NamedTuple):
    """What one rank has of an epoch: plain values.

    Args:
        first: the number, in this rank's epoch, of the first batch.
        end: the number behind its last one.
        skipped: how many batches its loaders have before the first.
        cycles: a loader that ends before others begins again; else it has nothing more.
        loaders: what each takes, see `samplers.describe`, and how many batches that is; None where it cannot be told.
    """

    first: int
    end: int
    skipped: int
    cycles: bool
    loaders: list[tuple[dict[str, Any] | None, int]]

    @property
    def is_known(self) -> bool:
        """Whether its batches can be told from the outside."""
        return all(told is not None and told["kind"] in ("distributed", "given") for told, _ in self.loaders)

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
    of_all = told["kind"] != "distributed" or len(loader.sampler.dataset) == told["length"]  # pyright: ignore
    return (told if of_all else None), len(loader)


def batches_of(of: Share, begin: int) -> list[Batch]:
    """From the batch with this number on; without what a sampler repeats so that all ranks have equally many, but where
    a loader takes full batches only."""
    numbers = range(of.skipped + max(begin, of.first) - of.first, of.skipped + of.end - of.first)
    columns = [_cut(told, count, numbers, of.cycles) for told, count in of.loaders if told is not None and len(numbers)]
    return [batch for batch in zip(*columns, strict=True) if any(batch)]


def inherited(shares: Iterable[tuple[Share, int]], takers: Mapping[str, int]) -> dict[str, Share]:
    """What is left of lost ranks' shares, dealt out by whole batches: each once, a taker has one more than another.

    >>> told = {"kind": "given", "length": 9, "batch_size": 2, "indices": torch.arange(9)}
    >>> dealt = inherited([(Share(0, 5, 0, False, [(told, 5)]), 2)], {"0": 5, "2": 7})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(5, 7, [4, 5, 8]), (7, 8, [6, 7])]

    Args:
        shares: of those that are lost, each with the number of the first batch that is in no agreement.
        takers: by name, the number of the batch that each would train on next.
    """
    known = [(each, begin) for each, begin in shares if each.is_known]
    left = [batch for each, begin in known for batch in batches_of(each, begin)]
    loaders = known[0][0].loaders if known else []
    return {
        name: _given(left[number :: len(takers)], first, loaders)
        for number, (name, first) in enumerate(takers.items())
        if len(left) > number
    }


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


def _cut(told: dict[str, Any], count: int, numbers: range, cycles: bool) -> list[list[int]]:
    size, indices = told["batch_size"], share({"share": told})
    if told["kind"] == "distributed" and not told["drop_last"] and not told["full_batches"]:  # else it would be dropped
        is_padding = (len(indices) - 1) * told["num_replicas"] + told["rank"] >= told["length"]
        indices = indices[:-1] if is_padding else indices
    numbers_here = [number % count if cycles and count else number for number in numbers]
    return [indices[number * size : (number + 1) * size] for number in numbers_here]


def _given(batches: Sequence[Batch], first: int, like: list[tuple[dict[str, Any] | None, int]]) -> Share:
    """These batches as one rank's; those that are not full come last, or loaders would move the others' borders."""
    sizes = [told["batch_size"] for told, _ in like if told is not None]
    full = [all(len(part) == size for part, size in zip(batch, sizes, strict=True)) for batch in batches]
    ordered = sorted(range(len(batches)), key=lambda number: not full[number])
    loaders: list[tuple[dict[str, Any] | None, int]] = []
    for column, (told, _) in enumerate(like):
        assert told is not None
        indices = list(itertools.chain.from_iterable(batches[number][column] for number in ordered))
        given = {
            "kind": "given", "length": told["length"], "batch_size": told["batch_size"],
            "indices": torch.tensor(indices, dtype=torch.int64),
        }  # fmt: skip
        loaders.append((given, -(-len(indices) // told["batch_size"])))
    return Share(first, first + max(count for _, count in loaders), 0, False, loaders)
