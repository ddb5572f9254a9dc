"""Each sample of an epoch is in one part, whoever the replicas are; and where a part stands is in checkpoints."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_async import FaultTolerantCheckpoint
from lightning_async.data.partition import (
    ByKey,
    Partition,
    PartitionedSampler,
    PartitionedStream,
    Random,
    Sequential,
    Weighted,
    largest_remainder,
    rendezvous,
)
from lightning_async.data.redistribution import deal, describe, share
from lightning_async.trainer.data.samplers import SamplerResize, resized
from lightning_async.trainer.namespace import pl
from tests.callbacks.problem import Line, trainer

ALL: list[Partition] = [
    Random(),
    Sequential(),
    Weighted({1: 2.5, 3: 0.1}),
    Weighted({0: 3.0}, shuffle=False),
    ByKey(lambda i: i % 11),
    ByKey(lambda i: f"user {i // 7}", shuffle=False, seed=4),
]


@pytest.mark.parametrize("partition", ALL, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("members", [["0"], ["0", "1", "2", "3"], ["1", "3", "17"]], ids=str)
@pytest.mark.parametrize("length", [0, 1, 7, 100])
def test_each_sample_is_in_one_part(partition: Partition, members: list[str], length: int):
    for epoch in (0, 5):
        parts = [partition.part(length, members, me, epoch).tolist() for me in range(len(members))]
        assert sorted(index for part in parts for index in part) == list(range(length))
        if isinstance(partition, Random | Sequential):
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if length == 100 and partition.shuffle:
        assert partition.part(length, members, 0, 0).tolist() != partition.part(length, members, 0, 1).tolist()


def test_shares_are_the_nearest_whole_ones_to_the_weights():
    for total in (0, 1, 10, 97, 10**9 + 7):
        for weights in ([1.0, 1.0, 1.0], [0.1, 0.2, 0.7], [1e-9, 1.0], [0.0, 5.0, 3.3]):
            shares = largest_remainder(total, weights)
            assert sum(shares) == total
            assert all(abs(n - total * w / sum(weights)) < 1.001 for n, w in zip(shares, weights, strict=True))
    for weights in ([0.0, 0.0], [-1.0, 2.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="must be >= 0 and finite"):
            largest_remainder(3, weights)


def test_few_keys_move_where_a_replica_goes_or_comes():
    before = {key: rendezvous(key, ["0", "1", "2", "3"]) for key in range(4000)}
    after = {key: ("0", "2", "3")[rendezvous(key, ["0", "2", "3"])] for key in range(4000)}
    assert {key for key in before if str(before[key]) != after[key]} == {key for key in before if before[key] == 1}
    assert all(900 < n < 1100 for n in Counter(before.values()).values())


def test_beginnings_of_a_stream_have_the_shares_of_the_whole():
    deal, weights = Weighted({0: 2.0, 1: 1.0, 2: 0.5}).dealer(["0", "1", "2"]), [4 / 7, 2 / 7, 1 / 7]
    counts = [0, 0, 0]
    for n in range(1, 200):
        counts[deal(None)] += 1
        assert all(abs(count - n * w) < 1.0 for count, w in zip(counts, weights, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize(
    "partition", [Random(), Weighted({1: 3.0}), ByKey(lambda sample: sample % 7)], ids=lambda each: type(each).__name__
)
def test_workers_of_all_replicas_have_each_sample_of_a_stream_once(partition: Partition):
    found: list[int] = []
    for rank in (0, 1, 2):
        stream = PartitionedStream(range(50), partition, num_replicas=3, rank=rank)
        part = [int(each) for each in DataLoader(stream, batch_size=None, num_workers=2 * (rank == 1))]
        assert sorted(part) == list(PartitionedStream(range(50), partition, num_replicas=3, rank=rank))
        found += part
    assert sorted(found) == list(range(50))


def test_a_stream_that_ends_with_its_first_epoch_is_refused():
    with pytest.raises(TypeError, match="of a generator the second epoch would be empty"):
        PartitionedStream(each for each in range(5))


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_goes_to_a_worker_that_is_started_anew_knows_its_part(wrapped: bool, monkeypatch: pytest.MonkeyPatch):
    """It is not told what the launcher has told the rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    stream = PartitionedStream(range(7))
    sent = pickle.dumps([stream] if wrapped else stream)
    monkeypatch.delenv("RANK")
    there = pickle.loads(sent)
    assert list(there[0] if wrapped else there) == [1, 3, 5]


class Wrapped(IterableDataset[Any]):
    def __init__(self, inner: PartitionedStream) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def test_parts_within_a_sampler_of_batches_and_within_a_dataset_are_numbered_anew():
    """As all are, where ranks are lost; and nothing else is."""
    sampler, stream = PartitionedSampler(range(6)), PartitionedStream(range(6))
    data: Any = range(6)
    loaders = [
        DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)),
        DataLoader(Wrapped(stream)), DataLoader(data),
    ]  # fmt: skip
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders), setup_data=lambda: None)
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}, live_ranks=None, shrinks=False
    )
    fit = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(setup_data=lambda: None)), **vars(loop))
    connector = SimpleNamespace(_prepare_dataloader=None)
    trainer = SimpleNamespace(fit_loop=fit, strategy=strategy, _data_connector=connector)
    SamplerResize(cast(Any, strategy), trainer).install()
    fit.setup_data()
    assert (sampler.num_replicas, sampler.rank, stream.num_replicas) == (2, 1, 2)


class Noting(Line):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch[:, 0].int().tolist()
        return super().training_step(batch, batch_idx)


class Dies(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.current_epoch == 1:
            raise KeyError("dies")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_goes_on_where_a_checkpoint_has_it(workers: int, tmp_path: Path):
    data: Any = torch.arange(60.0).unsqueeze(1).expand(60, 4)

    def fit(*callbacks: Any) -> list[int]:
        module, sampler = Noting(), PartitionedSampler(data, Weighted({1: 2.0}), num_replicas=2, rank=1)
        loader = DataLoader(data, 5, sampler=sampler, num_workers=workers)
        try:
            trainer(*callbacks, max_epochs=2, enable_checkpointing=len(callbacks) > 0).fit(module, loader)
        except KeyError:
            module.seen = module.seen[: 40 + 15]
        return module.seen

    saves = FaultTolerantCheckpoint(tmp_path, every_n_train_steps=100)
    assert fit(saves, Dies()) + fit(FaultTolerantCheckpoint(tmp_path, every_n_train_steps=100)) == fit()


def test_what_is_left_of_parts_is_divided_among_another_number_of_ranks():
    data: Any = list(range(50))
    states, taken = [], {0: 2, 1: 1, 2: 3}
    seen: list[int] = []
    for rank, batches in taken.items():
        sampler = PartitionedSampler(data, ByKey(lambda i: i % 8), num_replicas=3, rank=rank)
        position = {
            "taken": batches,
            "made": 0,
            "drawn": {},
            "share": describe(DataLoader(data, 3, sampler=sampler), None),
        }
        states.append({"loaders": [position], "unsaved": {}, "random": {}})
        seen += list(sampler)[: 3 * batches]
    for rank in (0, 1):
        (position,) = resized(states, rank, 2, own=states[0], division=deal)["loaders"]
        seen += share(position)
    assert sorted(seen) == list(range(50))


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"PartitionedSampler\(partition='random'\)` must be a partition"):
        PartitionedSampler([1], "random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give both or none"):
        PartitionedSampler([1], num_replicas=2)
    with pytest.raises(ValueError, match="rank=2"):
        PartitionedStream([1], num_replicas=2, rank=2)
    with pytest.raises(TypeError, match=r"Sequential\(.*\)` needs to know all indices"):
        PartitionedStream([1], Sequential())
    with pytest.raises(TypeError, match="key=3"):
        ByKey(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite numbers >= 0"):
        Weighted({0: -1.0})


def test_which_part_is_this_ranks_is_known_from_the_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "RANK", "HOROVOD_SIZE", "HOROVOD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert list(PartitionedSampler([1, 2], Sequential())) == [0, 1]  # alone
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    sampler = PartitionedSampler([1, 2, 3, 4], Sequential())
    assert list(sampler) == [2, 3]
    uneven = PartitionedSampler([1, 2, 3, 4, 5], Sequential())
    with pytest.raises(ValueError, match=r"parts of 5 samples are unequal \(\d, \d\), and ranks under DDP and Horovod"):
        iter(uneven)
    assert list(PartitionedSampler([1, 2, 3, 4, 5], Sequential(), 2, 0)) == [0, 1, 2]  # batches are equal, says who
    sampler.number(["0", "4", "7"], 2)
    assert (list(sampler), len(sampler), sampler.num_replicas, sampler.rank) == ([3], 1, 3, 2)
