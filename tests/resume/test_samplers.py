"""What is left of an epoch, for any numbers of ranks before and after, and again before its end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_async.data.redistribution import (
    deal,
    deal_steps,
    describe,
    divide,
    in_the_last_step,
    rest,
    share,
    told_of,
)
from lightning_async.trainer.data.samplers import SamplerResize, batches_left, resized
from lightning_async.trainer.namespace import pl
from tests.resume.problem import Endless, Sized
from tests.resume.test_loaders import StatefulDataLoader

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
    parts = [divide(left, rank, after, 3) for rank in range(after)]
    assert {len(part) for part in parts} == {-(-len(left) // after)}
    assert {index for part in parts for index in part} == set(left)

    told = [describe(loaders[0], torch.tensor(part)) for part in parts]
    again = rest([{"taken": 1, "drawn": {}, "share": share} for share in told])
    assert set(again) == set(left) - {index for part in parts for index in part[:3]}


def test_none_is_left() -> None:
    positions = [{"taken": 3, "drawn": {}, "share": describe(distributed(rank, 3), None)} for rank in range(3)]
    assert rest(positions) == divide([], 0, 2, 3) == []


def test_samplers_of_which_nothing_is_known() -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * LENGTH, LENGTH)
    data: Any = range(LENGTH)
    assert describe(DataLoader(data, 3, sampler=weighted), None) is None
    assert describe(DataLoader(data, batch_size=None), None) is None


@pytest.mark.parametrize("left", [0, 1, 4, 5, 7, 11, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_padding_and_for_ranks_that_step_together(left: int, ranks: int, size: int) -> None:
    indices = [*range(100, 100 + left)]
    assert sorted(x for rank in range(ranks) for x in deal(indices, rank, ranks, size)) == indices
    parts = [deal_steps(indices, rank, ranks, size) for rank in range(ranks)]
    steps = {-(-len(part) // size) for part in parts}
    assert len(steps) == 1, "all take equally many"
    if left == 0:
        return
    counts = in_the_last_step(left, ranks, size)
    last = (max(steps) - 1) * size
    counted = [*(x for part in parts for x in part[:last])]
    counted += [x for part, count in zip(parts, counts, strict=True) for x in part[last : last + count]]
    assert sorted(counted) == indices, "each counts once"
    assert all(len(part) - last == max(1, count) for part, count in zip(parts, counts, strict=True))


def test_batches_stay_full_where_the_others_are_dropped() -> None:
    data: Any = range(LENGTH)
    loaders = [
        DataLoader(data, 3, sampler=DistributedSampler(data, 2, rank), drop_last=True)  # pyright: ignore
        for rank in range(2)
    ]
    states = [
        {"loaders": [{"taken": 1, "drawn": {}, "share": describe(loader, None)}], "random": {"torch": b""}}
        for loader in loaders
    ]
    for state in states:
        state["unsaved"] = {}
    for ranks in (1, 2, 3):
        found = [resized(states, rank, ranks) for rank in range(ranks)]
        sizes = [len(state["loaders"][0]["share"]["indices"]) for state in found]
        assert sizes == [(LENGTH - 6) // (3 * ranks) * 3] * ranks
        assert [batches_left(state) for state in found] == [sizes[0] // 3] * ranks


def test_batches_of_unequal_sizes_go_on_with_one_as_they_are_on_average() -> None:
    """With that of the slow rank there would be more batches than the epoch of a loader has."""
    shares, states = torch.arange(60).split((10, 25, 25)), []
    for size, indices in zip((2, 5, 5), shares, strict=True):
        told = {"kind": "given", "length": 60, "batch_size": size, "full_batches": False, "indices": indices}
        position = {"taken": 1, "made": 1, "drawn": {}, "share": told}
        states.append({"loaders": [position], "random": {"torch": b""}, "unsaved": {}})
    found = [resized(states, rank, 2)["loaders"][0]["share"] for rank in range(2)]
    assert [each["batch_size"] for each in found] == [4, 4]
    left = [index for each in found for index in each["indices"].tolist()]
    assert sorted(left) == [*range(2, 10), *range(15, 35), *range(40, 60)]


class Stream(Endless):
    """As Hugging Face's."""

    _distributed: Any = None


Stream.__module__ = "datasets.iterable_dataset"


class Wrapping(DataLoader[Any]):
    pass


def prepare(rank: int, *loaders: Any) -> list[Any]:
    """Have Lightning prepare loaders on one of two ranks, each of which has a random state of its own."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    connector = trainer._data_connector
    there: Any = SimpleNamespace(
        world_size=2, is_global_zero=rank == 0, strategy=None, overfit_batches=0, _data_connector=connector,
        _accelerator_connector=SimpleNamespace(use_distributed_sampler=True, is_distributed=True),
        distributed_sampler_kwargs={"num_replicas": 2, "rank": rank}, state=trainer.state,
    )  # fmt: skip
    connector.trainer = there
    resize = SamplerResize(there, there)
    return [resize._prepare(connector._prepare_dataloader, loader, True, "train") for loader in loaders]


def test_a_random_sampler_of_torchdata_is_divided_as_torchs() -> None:
    (one,) = prepare(0, StatefulDataLoader(Sized(20), 3))
    (other,) = prepare(1, StatefulDataLoader(Sized(20), 3))
    assert sorted([*one.batch_sampler.sampler, *other.batch_sampler.sampler]) == list(range(20))
    told, batches = told_of(one)
    assert told is not None and (told["kind"], told["shuffle"], batches) == ("distributed", True, 4)


def test_data_that_ranks_do_not_divide_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    batches: Any = BatchSampler(RandomSampler(range(20)), 5, False)
    split = Stream()
    split._distributed = (0, 2)
    usual = [DataLoader(Sized(20), 3, shuffle=True), DataLoader(split, 3), DataLoader(Endless(), 3)]
    caplog.set_level(logging.WARNING)
    prepare(0, *usual, DataLoader(Sized(20), batch_size=None, sampler=batches))
    assert not caplog.records
    wrapping = Wrapping(Sized(20), batch_size=None, sampler=batches)
    prepare(0, DataLoader(Stream(), 3), DataLoader(Stream(), 3), wrapping, wrapping)
    stream, sampler = (record.getMessage() for record in caplog.records)
    assert "each rank reads all of it. Use `datasets.distributed.split_dataset_by_node(stream, " in stream
    assert "The sampler of a Wrapping yields batches" in sampler and "use_distributed_sampler=False" in sampler
    caplog.clear()
    prepare(1, DataLoader(Stream(), 3))
    assert not caplog.records
