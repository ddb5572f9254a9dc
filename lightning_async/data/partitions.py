"""Who takes which samples of an epoch: pure functions, alike on all replicas, for any number of them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_async.arguments import check_int

__all__ = ["ByKey", "Partition", "Random", "Sequential", "Weighted", "largest_remainder", "rendezvous"]


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    r"""Whole shares of a total, as near to these weights as can be.

    .. math:: n_i = \Big\lfloor \frac{w_i}{\sum_j w_j} n \Big\rfloor + [i \text{ has one of the largest remainders}]

    Exact for any floats; of equal remainders the first ones win.

    Raises:
        ValueError: a weight is negative or not finite, or none is positive.

    Source: the method of Hamilton, as in Balinski and Young, "Fair Representation", 1982

    >>> largest_remainder(10, [1, 1, 1]), largest_remainder(10, [1.0, 2.5, 0.0])
    ([4, 3, 3], [3, 7, 0])
    """
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"`largest_remainder(weights={list(weights)})` must be >= 0 and finite, one of them > 0.")
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * each / sum(exact) for each in exact]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def rendezvous(key: object, members: Sequence[str], seed: int = 0) -> int:
    r"""The place among ``members`` of the one that a key belongs to.

    .. math:: \arg\max_m h(\text{seed}, \text{key}, m)

    Where a member goes, its keys alone move; where one comes, it takes its part from all. The same in every process.

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
    """What makes the parts of an epoch: each sample is in exactly one, whoever the replicas are.

    One of your own states `owners`; for streams, `dealer`.
    """

    shuffle: bool = True
    seed: int = 0

    @abstractmethod
    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        """The place among ``members`` of who takes each of these indices.

        Args:
            order: indices of samples, as they are taken in this epoch.
            members: the replicas, by the names that they have for life.
        """
        ...

    def dealer(self, members: Sequence[str]) -> Callable[[Any], int]:
        """The same for a stream: called with each sample in turn.

        Raises:
            TypeError: this partition is not one of streams.
        """
        raise TypeError(f"`{self!r}` needs to know all indices: it cannot divide a stream.")

    def order(self, length: int, epoch: int) -> Tensor:
        """The order of an epoch: shuffled by seed and epoch, or as the data is."""
        if not self.shuffle:
            return torch.arange(length)
        return torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def part(self, length: int, members: Sequence[str], me: int, epoch: int) -> Tensor:
        """What the replica at place ``me`` takes in an epoch, in order."""
        order = self.order(length, epoch)
        return order[self.owners(order, members) == me]


@dataclass(frozen=True)
class Sequential(Partition):
    r"""Each replica has one block of the data, in its order.

    .. math:: \{ i : b_r \le i < b_{r+1} \}, \quad b_r = r \lfloor L / N \rfloor + \min(r, L \bmod N)

    For data that is read from disk in its order, and for series in time.

    >>> Sequential().part(7, ["0", "1", "2"], me=0, epoch=3)
    tensor([0, 1, 2])
    """

    shuffle = False

    def owners(self, order: Tensor, members: Sequence[str]) -> Tensor:
        return _blocks(largest_remainder(len(order), [1.0] * len(members)))


@dataclass(frozen=True)
class Random(Partition):
    r"""Each epoch shuffled, and dealt out in turn.

    .. math:: \{ \pi(p) : p \bmod N = r \}

    As torch's `DistributedSampler`, whose parts are equal as some samples are taken twice; these differ by one at most.

    Args:
        seed: of :math:`\pi`, together with the epoch. Default 0.

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
    r"""Shares of unequal size: for replicas of unequal speed.

    .. math:: \Big| n_r - \frac{w_r}{\sum_j w_j} L \Big| < 1

    The sizes are those of `largest_remainder`. Of a stream, every beginning is divided so, nearly.

    Args:
        weights: by the number that a replica was started with, such as its samples per second; others have 1.
        shuffle: default True; else each has one block of the data, in its order.
        seed: of the shuffling, together with the epoch. Default 0.

    Raises:
        TypeError, ValueError: weights are not numbers >= 0.

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
        credit, total = [Fraction(0)] * len(members), sum(weights)

        def deal(sample: Any) -> int:
            for i, weight in enumerate(weights):
                credit[i] += weight
            most = max(range(len(members)), key=lambda i: (credit[i], -i))
            credit[most] -= total
            return most

        return deal

    def _of(self, members: Sequence[str]) -> list[float]:
        """All equal where those that are left have none."""
        found = [float(self.weights.get(int(name), 1.0)) for name in members]
        return found if any(found) else [1.0] * len(members)


@dataclass(frozen=True)
class ByKey(Partition):
    r"""All samples of a key on one replica: users, documents, shards of a file.

    .. math:: \{ i : \text{rendezvous}(\text{key}(i)) = r \}

    Few keys move where replicas are lost or come, see `rendezvous`. Parts are as unequal as keys are.

    Args:
        key: of the index of a sample, such as ``users.__getitem__``; in a stream, of the sample itself. An int, a
            string, or another value whose ``repr`` is the same in every process.
        shuffle: the order within each part. Default True.
        seed: of keys' places, and of the shuffling, together with the epoch. Default 0.

    Raises:
        TypeError: ``key`` is no function.

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
        if len(self._keys) != len(order):  # what may take long is done once
            self._keys[:] = [self.key(index) for index in range(len(order))]
        found = self.dealer(members, of=lambda key: key)
        of_index = torch.tensor([found(key) for key in self._keys], dtype=torch.int64)
        return of_index[order]

    def dealer(self, members: Sequence[str], of: Callable[[Any], object] | None = None) -> Callable[[Any], int]:
        known: dict[str, int] = {}

        def deal(sample: Any) -> int:
            key = (of or self.key)(sample)
            text = repr(key)
            if text not in known:
                known[text] = rendezvous(key, members, self.seed)
            return known[text]

        return deal


def _blocks(sizes: Sequence[int]) -> Tensor:
    """So many of each number, in turn."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
