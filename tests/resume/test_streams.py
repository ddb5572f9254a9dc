"""What is left of lost ranks' parts of a stream, for those that read it again: each sample once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_async.data.partition import ByKey, Partition, PartitionedStream, Random, Weighted
from lightning_async.data.redistribution import DataShard, stream_of, streamed
from lightning_async.data.stateful_loader import sources_of


def batches(stream: PartitionedStream, told: dict[str, Any]) -> list[list[int]]:
    """As torch's DataLoader gives them: each worker's own, in turn, while it has any."""
    part = list(stream.rest(told))
    size, workers = told["batch_size"], told["workers"]
    own = [part[worker::workers] for worker in range(workers)]
    each = [[mine[at : at + size] for at in range(0, len(mine), size)] for mine in own]
    return [of[turn] for turn in range(len(part)) for of in each if turn < len(of)]


@pytest.mark.parametrize(
    "partition", [Random(), Weighted({1: 3.0}), ByKey(lambda sample: sample % 7)], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("length", [60, 61, 71])
def test_whoever_is_lost_each_sample_of_a_stream_is_taken_once(partition: Partition, length: int) -> None:
    chance, stream, names = random.Random(length), PartitionedStream(range(length), partition), list("01234")
    held: dict[str, DataShard] = {}
    for rank, name in enumerate(names):
        told = {"kind": "stream", "members": names, "rank": rank, "batch_size": 1 + rank % 3, "workers": 1 + rank % 2}
        held[name] = DataShard(0, 1, 0, False, [(told, 0)])
    counted: list[int] = []
    ready = dict.fromkeys(names, 0)
    while held:
        of = {name: batches(stream, share.loaders[0][0] or {}) for name, share in held.items()}
        lost = sorted(chance.sample(sorted(held), 2)) if len(held) > 2 else []
        left = []
        for name, share in held.items():
            done = chance.randint(0, len(of[name])) if name in lost else len(of[name])
            counted += [sample for batch in of[name][:done] for sample in batch]
            ready[name] = share.first + done
            if name in lost:
                left.append((share, ready[name]))
        held = streamed(left, {name: (held[name], ready[name]) for name in held if name not in lost})
    assert sorted(counted) == list(range(length))


def all_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_a_stream_is_gone_on_with_where_it_was_saved_and_the_next_epoch_is_its_own(workers: int) -> None:
    """Others that have it in a checkpoint need not know who was lost."""
    stream = PartitionedStream(range(40), num_replicas=2, rank=0)
    loader: DataLoader[Any] = DataLoader(stream, 3, num_workers=workers)
    own = stream_of(loader)
    assert own is not None
    lost = {**own, "rank": 1, "workers": 2, "batch_size": 4}
    held = {"0": (DataShard(0, 1, 0, False, [(own, 0)]), 7)}
    (share,) = streamed([(DataShard(0, 1, 0, False, [(lost, 0)]), 2)], held).values()
    assert share.first == 7
    told = share.loaders[0][0] or {}
    rest = list(range(1, 40, 2))[8:]  # behind a batch of each of two workers
    (source,) = sources_of([loader])
    source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": told})
    begun = iter(loader)
    first = [next(begun).tolist() for _ in range(2)]
    position = source.position(before=False, ended=False)
    assert position["share"] == told and position["taken"] == 2
    del begun
    source.begin_at(position)
    whole = first + all_of(loader)
    assert sorted(sample for batch in whole for sample in batch) == rest
    assert whole == batches(stream, {**told, "workers": max(1, workers)})
    assert sorted(sample for batch in all_of(loader) for sample in batch) == list(range(0, 40, 2))


class Behind(PartitionedStream):
    """A stream with an iteration of its own."""

    def __iter__(self) -> Any:
        return iter([0])


def test_streams_whose_samples_others_could_not_tell() -> None:
    stream = PartitionedStream(range(8), num_replicas=2, rank=1)
    assert stream_of(DataLoader(stream, 2, num_workers=2)) == {
        "kind": "stream", "members": ["0", "1"], "rank": 1, "batch_size": 2, "workers": 2,
    }  # fmt: skip
    assert stream_of(DataLoader(Behind(range(8)), 2)) is None
    assert stream_of(DataLoader(range(8), 2)) is None  # pyright: ignore[reportArgumentType]
