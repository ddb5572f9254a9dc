"""Going on with batches of another size, or another number of samples: the position counts samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from lightning_async.data.stateful_loader import recounted, sources_of
from tests.resume.problem import FEATURES, Endless, Net, Saves, Sized, draw
from tests.resume.problem import Training as Usual

LENGTH = 23


class Plain(Net):
    """Takes batches of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 1))


class OwnBatches(BatchSampler):
    """A sampler of batches of which nobody knows the samples."""


def Training(loader: Callable[[], Any], **settings: Any) -> Usual:
    return Usual(loader, Plain, validates=False, **settings)


class Reads(Endless):
    """In order, and remembers what was read."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.fetched: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            self.fetched.append(index)
            yield draw() * 0.1 + index


class Counted(Reads):
    def __len__(self) -> int:
        return self.length


class SavesCounted(Saves):
    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at %= self.length  # nobody asks for more than its length, so that it does not come to its end
        return super().__iter__()


def weighted(size: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Sized(), size, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH, replacement=False))


def distributed(size: int, **settings: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(range(LENGTH), 1, 0, seed=3)  # pyright: ignore[reportArgumentType]
    return DataLoader(Sized(), size, sampler=sampler, **settings)


Make = Callable[..., Any]
KNOWN: dict[str, Make] = {
    "in order": lambda size, **settings: DataLoader(Sized(), size, **settings),
    "shuffled": lambda size, **settings: DataLoader(Sized(), size, shuffle=True, **settings),
    "with a generator": lambda size, **settings: DataLoader(
        Sized(), size, shuffle=True, generator=torch.Generator().manual_seed(7), **settings
    ),
    "given as batches": lambda size, **settings: DataLoader(
        Sized(), batch_sampler=BatchSampler(RandomSampler(range(LENGTH)), size, False)
    ),
    "distributed": distributed,
    "weighted": weighted,
    "knows its place": lambda size, **settings: DataLoader(Saves(), size),
    "knows its place and length": lambda size, **settings: DataLoader(SavesCounted(), size),
}


def resumed(first: Any, second: Any, folder: Path, name: str, **settings: Any) -> tuple[list[int], list[int], Any]:
    """What was fetched until this point, from there, and the rows of that."""
    trainer = {"max_epochs": 2, **settings}
    training = Training(lambda: first, trainer=trainer)
    _, follow, _ = training.fit(folder, wanted=lambda at: at == name)
    (point,) = follow.points
    rows, _, _ = Training(lambda: second, trainer=trainer).fit(folder, point, wanted=lambda at: False)
    return first.dataset.fetched, second.dataset.fetched, rows


def numbers(rows: Any, epoch: int) -> list[int]:
    return [row[2] for row in rows if row[0] == "train" and row[1] == epoch]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KNOWN)
def test_with_batches_of_another_size_each_sample_of_the_epoch_is_seen_once(
    kind: str, size: int, tmp_path: Path
) -> None:
    first, second, rows = resumed(KNOWN[kind](4), KNOWN[kind](size), tmp_path, "batch 0:3")
    assert second[: LENGTH - 12] == first[12:LENGTH], "in the same order"
    assert len(second) == LENGTH - 12 + LENGTH and set(second[LENGTH - 12 :]) == set(range(LENGTH))
    total, left = -(-LENGTH // size), -(-(LENGTH - 12) // size)
    begin = 12 // size if "place" in kind else total - left
    assert numbers(rows, 0) == list(range(begin, begin + left))
    assert numbers(rows, 1) == list(range(total))


@pytest.mark.parametrize("kind", ["shuffled", "distributed"])
@pytest.mark.parametrize("before", [False, True])
def test_with_another_drop_last(kind: str, before: bool, tmp_path: Path) -> None:
    loaders = [KNOWN[kind](4, drop_last=drop) for drop in (before, not before)]
    _, second, rows = resumed(loaders[0], loaders[1], tmp_path, "batch 0:3")
    order, end = KNOWN[kind](4), LENGTH if before else 20
    torch.manual_seed(1)
    whole = resumed(order, KNOWN[kind](4), tmp_path, "batch 0:3")[0]
    assert second[: end - 12] == whole[12:end]
    assert numbers(rows, 0) == list(range(3, 6 if before else 5))
    assert len(second) == end - 12 + end


def test_with_another_size_and_drop_last_what_does_not_fill_a_batch_is_dropped(tmp_path: Path) -> None:
    make = KNOWN["shuffled"]
    first, second, _ = resumed(make(4, drop_last=True), make(3, drop_last=True), tmp_path, "batch 0:3")
    assert second[: 20 - 12 + 1] == [*first[12:20], second[8]] and len(set(first[:12] + second[:9])) == 21


@pytest.mark.parametrize("sizes", [(4, 2, 3), (2, 4, 8)])
def test_three_sizes_in_one_epoch(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    make, seen, points = KNOWN["shuffled"], list[int](), list[Any]()
    for number, size in enumerate(sizes):
        loader = make(size)
        training = Training(lambda loader=loader: loader, trainer={"max_epochs": 1})
        start = points[-1] if points else None
        _, follow, _ = training.fit(tmp_path, start, wanted=lambda at: at.startswith("batch"))
        last = number == len(sizes) - 1
        seen += loader.dataset.fetched if last else loader.dataset.fetched[: 2 * size]
        points.append(follow.points[1])
    assert sorted(seen) == list(range(LENGTH))


def test_a_limit_in_batches_counts_what_was_seen(tmp_path: Path) -> None:
    make = KNOWN["shuffled"]
    _, second, rows = resumed(make(4), make(2), tmp_path, "batch 0:3", limit_train_batches=5)
    assert numbers(rows, 0) == [] and numbers(rows, 1) == list(range(5)) and len(second) == 10
    _, second, rows = resumed(make(4), make(2), tmp_path, "batch 0:1", limit_train_batches=5)
    assert numbers(rows, 0) == [2, 3, 4]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightning_async.data")]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [15, 30])
def test_with_another_number_of_samples_the_epoch_is_that_which_was_begun(
    length: int, shuffle: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaders = [DataLoader(Sized(n), 4, shuffle=shuffle) for n in (LENGTH, length)]
    with caplog.at_level(logging.WARNING, "lightning_async"):
        first, second, _ = resumed(loaders[0], loaders[1], tmp_path, "batch 0:2")
    left = [index for index in first[8:LENGTH] if index < length]
    assert second[: len(left)] == left
    assert sorted(second[len(left) :]) == list(range(length))
    (line,) = told(caplog)
    assert f"has {length} samples, and had {LENGTH}" in line and f"with the {len(left)} samples" in line


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("dataset", [Reads, Counted])
@pytest.mark.parametrize(("size", "again"), [(2, 0), (8, 4), (5, 2)])
def test_a_stream_that_is_read_again(
    dataset: Any, size: int, again: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No sample is skipped; how many come again is told."""
    loaders = [DataLoader(dataset(), each) for each in (4, size)]
    with caplog.at_level(logging.WARNING, "lightning_async"):
        _, second, rows = resumed(loaders[0], loaders[1], tmp_path, "batch 0:3")
    begin = (12 - again) // size
    assert second == [*range(LENGTH), *range(LENGTH)]
    assert numbers(rows, 0) == list(range(begin, -(-LENGTH // size)))
    lines = [line for line in told(caplog) if "come again" in line]
    assert len(lines) == (again > 0)
    assert not again or f"the 12 samples that were trained on in this epoch the last {again} come again" in lines[0]


@pytest.mark.processes
def test_workers_read_as_many_samples_again_as_each_had(tmp_path: Path) -> None:
    loaders = [DataLoader(Endless(), each, num_workers=2) for each in (2, 4)]
    training = Training(lambda: loaders[0], trainer={"max_epochs": 1})
    _, follow, _ = training.fit(tmp_path, wanted=lambda at: at == "batch 0:4")
    again = Training(lambda: loaders[1], trainer={"max_epochs": 1})
    rows, _, _ = again.fit(tmp_path, follow.points[0], wanted=lambda at: False)
    assert numbers(rows, 0) == [2, 3, 4, 5]


def test_what_cannot_be_told_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Batches of a sampler of one's own, and several loaders."""
    own = [
        DataLoader(Sized(n), batch_sampler=OwnBatches(RandomSampler(range(n)), 4, False)) for n in (LENGTH, LENGTH + 8)
    ]
    with caplog.at_level(logging.WARNING, "lightning_async"):
        resumed(own[0], own[1], tmp_path, "batch 0:2")
    (line,) = told(caplog)
    assert "of 31 samples" in line and "of 23 samples when" in line and "after the same number of batches (2)" in line
    caplog.clear()
    several = [[DataLoader(Sized(), size), DataLoader(Sized(), 4)] for size in (4, 2)]
    training = Training(lambda: several[0], trainer={"max_epochs": 1})
    _, follow, _ = training.fit(tmp_path, wanted=lambda at: at == "batch 0:2")
    with caplog.at_level(logging.WARNING, "lightning_async"):
        Training(lambda: several[1], trainer={"max_epochs": 1}).fit(tmp_path, follow.points[0], wanted=lambda at: False)
    (line,) = told(caplog)
    assert "train dataloader 0 has batches of 2" in line and "(2)" in line


class Shares(Endless):
    """Divides its samples among workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        for index in range(self.length)[info.id :: info.num_workers] if info is not None else range(self.length):
            yield torch.full((FEATURES,), float(index))


class SharesAndSaves(Saves):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in super().__iter__():
            yield torch.full((FEATURES,), float(self.fetched[-1]))


class SharesWithALength(Shares):
    def __len__(self) -> int:
        return self.length


class OwnIterator(DataLoader[Any]):
    """Its position is found by fetching again."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Lists(Plain):
    """Which samples it had, by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx >= 0:
            self.rows.append(("samples", self.current_epoch, [int(value) for value in batch[:, 0]]))
        return super().training_step(batch, batch_idx)


def samples_of(rows: Any, epoch: int) -> list[int]:
    return [sample for row in rows if row[:2] == ("samples", epoch) for sample in row[2]]


def between(first: Any, second: Any, folder: Path, at: str) -> tuple[list[int], Any]:
    """The samples of an epoch until this point, and the rows of a training that goes on from there."""
    trainings = [Usual(lambda loader=loader: loader, Lists, validates=False) for loader in (first, second)]
    trainings = [replace(each, trainer={"max_epochs": 2}) for each in trainings]
    rows, follow, _ = trainings[0].fit(folder, wanted=lambda name: name == at)
    (point,) = follow.points
    again, _, _ = trainings[1].fit(folder, point, wanted=lambda name: False)
    return samples_of(rows[: point.rows], point.epoch), again


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 0), (0, 2), (3, 1)])
@pytest.mark.parametrize("dataset", [Shares, SharesAndSaves, SharesWithALength])
def test_a_stream_that_other_workers_divide_begins_its_epoch_anew(
    dataset: Any, before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (DataLoader(dataset(24), 2, num_workers=workers) for workers in (before, after))
    with caplog.at_level(logging.WARNING, "lightning_async"):
        seen, rows = between(first, second, tmp_path, "batch 0:5")
    assert len(seen) == 10
    assert sorted(samples_of(rows, 0)) == sorted(samples_of(rows, 1)) == list(range(24)), "none is left out"
    assert numbers(rows, 0) == numbers(rows, 1) == list(range(12))
    (line,) = told(caplog)
    assert f"has num_workers={after} and batch_size=2, and had num_workers={before} and batch_size=2" in line
    assert "5 batches (10 samples) that were trained on come again" in line


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("dataset", [Shares, SharesAndSaves])
def test_a_stream_that_one_worker_reads_goes_on(
    dataset: Any, before: int, after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (DataLoader(dataset(24), 2, num_workers=workers) for workers in (before, after))
    with caplog.at_level(logging.WARNING, "lightning_async"):
        seen, rows = between(first, second, tmp_path, "batch 0:5")
    assert [*seen, *samples_of(rows, 0)] == samples_of(rows, 1) == list(range(24))
    assert numbers(rows, 0) == list(range(5, 12))
    told_of_it = [line for line in told(caplog) if f"num_workers={after}, and had num_workers={before} when" in line]
    assert len(told_of_it) == (dataset is Shares)
    assert all("after 5 batches (10 samples)" in line for line in told_of_it)


@pytest.mark.processes
@pytest.mark.parametrize("at", ["epoch 1:12", "batch 0:12"])
def test_other_workers_from_the_next_epoch_on_are_nothing_to_tell(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (DataLoader(SharesAndSaves(24), 2, num_workers=workers) for workers in (2, 3))
    with caplog.at_level(logging.WARNING, "lightning_async"):
        seen, rows = between(first, second, tmp_path, at)
    assert at[0] == "e" or sorted(seen) == list(range(24))
    assert sorted(samples_of(rows, 1)) == list(range(24)) and samples_of(rows, 0) == []
    assert told(caplog) == []


@pytest.mark.processes
@pytest.mark.parametrize("other", [{"num_workers": 3}, {"batch_size": 3}])
def test_a_loader_with_an_iterator_of_its_own_begins_its_epoch_anew(
    other: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"num_workers": 2, "batch_size": 2}
    loaders = [OwnIterator(Shares(24), **each) for each in (sizes, sizes | other)]  # pyright: ignore
    with caplog.at_level(logging.WARNING, "lightning_async"):
        _, rows = between(loaders[0], loaders[1], tmp_path, "batch 0:5")
    assert sorted(samples_of(rows, 0)) == list(range(24))
    lines = [line for line in told(caplog) if "had num_workers=2 and batch_size=2" in line]
    assert len(lines) == 1 and "5 batches (10 samples)" in lines[0]


@pytest.mark.processes
@pytest.mark.parametrize("dataset", [Shares, SharesAndSaves])
def test_one_of_several_streams_that_other_workers_divide(
    dataset: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    several = [[DataLoader(dataset(24), 2, num_workers=workers), DataLoader(Sized(24), 2)] for workers in (2, 3)]
    training = Training(lambda: several[0], trainer={"max_epochs": 1})
    _, follow, _ = training.fit(tmp_path, wanted=lambda at: at == "batch 0:5")
    again = Training(lambda: several[1], trainer={"max_epochs": 1})
    with caplog.at_level(logging.WARNING, "lightning_async"):
        rows, _, _ = again.fit(tmp_path, follow.points[0], wanted=lambda at: False)
    assert numbers(rows, 0) == list(range(5, 12))
    lines = [line for line in told(caplog) if "one of 2 train dataloaders" in line]
    assert len(lines) == 1 and "batches of 2 by 3 workers, and had batches of 2 by 2 workers when" in lines[0]
    assert "(5)" in lines[0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [5, 15, 30])
def test_a_dataset_of_another_length_on_another_number_of_ranks(
    length: int, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What two ranks had left of the epoch, one goes on with, as far as it is there."""
    loaders = [DataLoader(Sized(LENGTH), 2, sampler=DistributedSampler(range(LENGTH), 2, n)) for n in (0, 1)]  # pyright: ignore
    settings = {"max_epochs": 2, "use_distributed_sampler": False}
    points = []
    for loader in loaders:
        training = Training(lambda loader=loader: loader, trainer=settings)
        points += training.fit(tmp_path, wanted=lambda name: name == "batch 0:2")[1].points
    seen = [index for loader in loaders for index in loader.dataset.fetched[:4]]  # pyright: ignore
    second = DataLoader(Sized(length), size)
    point = replace(points[0], others=[each.state for each in points])
    with caplog.at_level(logging.WARNING, "lightning_async"):
        rows, _, _ = Training(lambda: second, trainer=settings).fit(tmp_path, point, wanted=lambda name: False)
    left = sorted(index for index in set(range(LENGTH)) - set(seen) if index < length)
    fetched = second.dataset.fetched  # pyright: ignore
    assert sorted(fetched[: len(left)]) == left
    assert sorted(fetched[len(left) :]) == list(range(length))
    assert len(numbers(rows, 0)) == -(-len(left) // 2), "in batches of the size that it was divided for"
    (line,) = [line for line in told(caplog) if "samples, and had" in line]
    assert f"has {length} samples, and had {LENGTH}" in line and f"with the {len(left)} samples" in line
    assert len([line for line in told(caplog) if "divided among another number of ranks" in line]) == (size != 2)


def test_ranks_with_another_dataset_take_equally_many_of_what_is_left() -> None:
    indices = torch.arange(8)
    given = {"kind": "given", "length": 16, "batch_size": 2, "full_batches": True, "indices": indices, "left": 16}
    position = {"taken": 0, "made": 0, "drawn": {}, "share": given, "batch_size": 2, "length": 16}
    for length, expected in ((5, [0, 1, 2, 3, 4, 0, 1, 2]), (0, [])):
        (source,) = sources_of([DataLoader(Sized(length), 2)])
        (found,) = recounted([source], [position])
        assert found["share"]["indices"].tolist() == expected
        (same,) = recounted([source], [found])
        assert same is found, "nothing is told twice"
        source.detach()


class Ordered(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), float(index))


class Means(Plain):
    """Its gradient is the mean of the samples behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(("train", self.current_epoch, batch_idx))
        return self.layers(batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight: Any = self.layers[0].weight
        self.rows.append(("step", round(float(weight.grad[0, 0]), 4)))


@pytest.mark.parametrize(
    ("at", "size", "steps", "windows"),
    [
        (4, 4, 3, 3),  # as it was
        (4, 2, 3, 3),  # 4 samples, then 2: the mean of 12 to 17
        (1, 8, 3, 3),  # the next batch begins a window
        (3, 8, 3, 3),  # nothing was in accumulation, and the next batch is the second one of a window
        (5, 4, 3, 2),  # another `accumulate_grad_batches`
    ],
)
def test_gradients_in_accumulation_count_as_the_batches_in_whose_place_they_stand(
    at: int, size: int, steps: int, windows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (
        Usual(lambda size=size: DataLoader(Ordered(48), size), Means, validates=False, trainer=settings)
        for size, settings in (
            (4, {"max_epochs": 1, "accumulate_grad_batches": steps}),
            (size, {"max_epochs": 1, "accumulate_grad_batches": windows}),
        )
    )
    _, follow, _ = first.fit(tmp_path, wanted=lambda name: name == f"batch 0:{at}")
    with caplog.at_level(logging.WARNING, "lightning_async"):
        rows, _, _ = second.fit(tmp_path, follow.points[0], wanted=lambda name: False)
    expected = {
        (4, 4): (17.5, None),
        (4, 2): (14.5, "of 1 batches that were in accumulation count as 2 of the 3 batches"),
        (1, 8): (15.5, "of 1 batches that were in accumulation are lost"),
        (3, 8): (round((15.5 + 23.5) / 3, 4), "has those of 2 batches, divided by 3"),
        (5, 4): (round((15.5 + 21.5) / 2, 4), "of 2 batches that were in accumulation count as 1 of the 2 batches"),
    }
    mean, words = expected[at, size]
    assert next(row[1] for row in rows if row[0] == "step") == mean
    lines = [each.getMessage() for each in caplog.records if "accumulation" in each.getMessage()]
    assert len(lines) == (words is not None) and all(words in line for line in lines)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_a_stream_with_a_length_is_read_to_its_end_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Its data begins again, and so do its batches."""
    first, second = (
        Usual(lambda: DataLoader(SharesWithALength(24), 2), Lists, validates=False, trainer={"max_epochs": 1})
        for _ in range(2)
    )
    _, follow, _ = first.fit(tmp_path, wanted=lambda name: name == "batch 0:5")
    point = replace(follow.points[0], others=[follow.points[0].state] * 2)
    rows, _, _ = second.fit(tmp_path, point, wanted=lambda name: False)
    assert samples_of(rows, 0) == list(range(24))
    assert numbers(rows, 0) == list(range(12))
