"""What is left of an epoch, dealt out by steps: in each, every rank has a batch of a size of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_async.data.partitions import largest_remainder
from lightning_async.data.shares import Batches, Share

__all__ = ["by_steps"]


def by_steps(
    left: Iterable[tuple[Share, int]], takers: Mapping[str, int], sizes: Mapping[str, int], whole: bool = False
) -> dict[str, Share]:
    r"""Each sample once, and in each step the samples that it would have with equal batches of as many in all.

    Step :math:`s` has the samples :math:`sn` to :math:`(s+1)n` of what is left, in the order in which ranks that take
    every step together would come to them; :math:`n` is the sum of all sizes. Of the last step, which has fewer, every
    rank has its part, as near to its size as can be. None has a share where there is not one sample for each.

    Args:
        left: shares of a loader, each with the number of the first batch that is left of it.
        takers: by name, the number of the batch that each would train on next.
        sizes: by name, of their batches.
        whole: a last step that has fewer is left out, as `DataLoader(drop_last=True)` does. Default: False.

    >>> told = {"kind": "given", "length": 9, "batch_size": 3, "indices": torch.arange(9)}
    >>> dealt = by_steps([(Share(0, 3, 0, False, [(told, 3)]), 1)], {"0": 4, "1": 4}, {"0": 3, "1": 1})
    >>> [(each.first, each.end, each.loaders[0][0]["indices"].tolist()) for each in dealt.values()]
    [(4, 6, [3, 4, 5, 7]), (4, 6, [6, 8])]
    """
    known = [(each, begin) for each, begin in left if each.is_known]
    if not known:
        return {}
    samples, all_ = _once(_in_order(known)), [sizes[name] for name in takers]
    total = sum(all_)
    steps, rest = divmod(len(samples), total)
    last = [0] * len(all_) if whole else _of_the_last(rest, all_)
    if not all(steps + more for more in last):
        return {}
    length, full, ends = known[0][0].lengths[0], samples[: steps * total].view(steps, total), samples[steps * total :]
    dealt, each_begins, last_begins = {}, _begins(all_), _begins(last)
    for i, (name, first) in enumerate(takers.items()):
        within, behind = each_begins[i], last_begins[i]
        mine = torch.cat([full[:, within : within + all_[i]].reshape(-1), ends[behind : behind + last[i]]])
        told = {"kind": "given", "length": length, "batch_size": all_[i], "full_batches": whole, "indices": mine}
        count = -(-len(mine) // all_[i])
        dealt[name] = Share(first, first + count, 0, False, [(told, count)])
    return dealt


def _of_the_last(rest: int, sizes: list[int]) -> list[int]:
    """Where there are as many samples as ranks, each has one at least, so that none is done before the others."""
    one = 1 if rest >= len(sizes) else 0
    room = [size - one for size in sizes]
    more = largest_remainder(rest - one * len(sizes), room) if any(room) else [0] * len(sizes)
    return [one + each for each in more]


def _begins(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths[:-1], initial=0))


def _in_order(left: list[tuple[Share, int]]) -> Tensor:
    """By the number of the batch, and of one number by rank."""
    batches = Batches.of(left)
    lengths = [len(Batches.of([each])) for each in left]
    numbers = [max(begin, each.first) + torch.arange(n) for (each, begin), n in zip(left, lengths, strict=True)]
    if not len(batches):
        return torch.empty(0, dtype=torch.int64)
    return batches.take(0, torch.cat(numbers).argsort(stable=True))


def _once(samples: Tensor) -> Tensor:
    """Without those that come again: what a sampler, or a checkpoint of other ranks, repeats to even ranks out."""
    if not (samples.bincount() > 1).any():  # the same, sooner: all ranks wait, and sorting millions takes long
        return samples
    _, places = samples.unique(return_inverse=True)
    first = torch.full((len(samples),), len(samples)).scatter_reduce(0, places, torch.arange(len(samples)), "amin")
    return samples[first[first < len(samples)].sort().values]
