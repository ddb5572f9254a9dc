"""What is left of an epoch, for any numbers of ranks before and after, and again before its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_async.data.samplers import describe, divide, rest, share

LENGTH = 23


def distributed(rank: int, ranks: int, **settings: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(range(LENGTH), ranks, rank, **settings)  # pyright: ignore[reportArgumentType]
    sampler.set_epoch(3)
    return DataLoader(range(LENGTH), batch_size=3, sampler=sampler)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("before", [2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_once(before: int, after: int, shuffle: bool) -> None:
    loaders = [distributed(rank, before, shuffle=shuffle, seed=5) for rank in range(before)]
    positions = [{"taken": 1, "drawn": {}, "share": describe(loader, None)} for loader in loaders]
    seen = [index for loader in loaders for index in list(loader.sampler)[:3]]
    assert [share(position) for position in positions] == [list(loader.sampler) for loader in loaders]
    left = rest(positions)
    assert sorted(seen + left) == list(range(LENGTH))
    parts = [divide(left, rank, after) for rank in range(after)]
    assert {len(part) for part in parts} == {-(-len(left) // after)}
    assert {index for part in parts for index in part} == set(left)

    told = [describe(loaders[0], part) for part in parts]
    again = rest([{"taken": 1, "drawn": {}, "share": share} for share in told])
    assert set(again) == set(left) - {index for part in parts for index in part[:3]}


def test_none_is_left() -> None:
    positions = [{"taken": 3, "drawn": {}, "share": describe(distributed(rank, 3), None)} for rank in range(3)]
    assert rest(positions) == divide([], 0, 2) == []


def test_samplers_of_which_nothing_is_known() -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * LENGTH, LENGTH)
    data: Any = range(LENGTH)
    assert describe(DataLoader(data, 3, sampler=weighted), None) is None
    assert describe(DataLoader(data, batch_size=None), None) is None
