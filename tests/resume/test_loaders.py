"""Going on in the middle of an epoch, for loaders and samplers of many kinds."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data import WeightedRandomSampler as Weighted

from lightning_async.data.random_states import reseed
from lightning_async.data.stateful_loader import sources_of
from lightning_async.trainer.namespace import pytorch
from tests.resume.problem import FEATURES, Endless, Net, Saves, Sized, Training, draw, goes_on

Combined: Any = pytorch("utilities.combined_loader").CombinedLoader


class Counted(Endless):
    def __len__(self) -> int:
        return self.length


class Uneven(IterableDataset[torch.Tensor]):
    """One worker has less than the others."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info is not None else 0
        for index in range((6, 16, 10)[worker]):
            yield draw() * 0.1 + index + 100 * worker


class Own(Dataset[torch.Tensor]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.augment = {"numpy": np.random.default_rng(3), "python": random.Random(4)}
        self.torch = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(FEATURES, generator=self.torch)
        return noise + float(self.augment["numpy"].random()) + self.augment["python"].random() + index


class Keeps(Endless):
    """As Hugging Face's datasets: begins every iteration at a loaded state, as long as its epoch is the same."""

    epoch, loaded, at = 0, None, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        share = random.Random(self.epoch).sample(range(self.length), self.length)[worker::workers]
        self.at = self.loaded["at"] if self.loaded is not None and self.loaded["epoch"] == self.epoch else 0
        while self.at < len(share):
            self.at += 1
            yield draw() * 0.1 + share[self.at - 1]


class KeepsWithin(Endless):
    """Another one around it."""

    def __init__(self) -> None:
        super().__init__()
        self.within = Keeps()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.within)

    def state_dict(self) -> dict[str, int]:
        return self.within.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.within.load_state_dict(state)


class KeepsInSight(Keeps):
    """Shows what was loaded at once."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded, self.at, self.epoch = state, state["at"], state["epoch"]


class CountsEpochs(Keeps):
    """And begins at a loaded state once."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.loaded is not None:
            self.epoch = self.loaded["epoch"]
        samples = super().__iter__()
        for sample in samples:
            self.loaded = None
            yield sample
        self.loaded, self.epoch, self.at = None, self.epoch + 1, 0


class CountsBeginnings(Keeps):
    """Counts an epoch as it begins, but for the one that a loaded state is in, which it looks for as it begins."""

    epoch = -1

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch = self.epoch + 1 if self.loaded is None else self.loaded["epoch"]
        for sample in super().__iter__():
            self.loaded = None
            yield sample
        self.loaded = None


class BufferShuffledExamplesIterable(Endless):
    """As the one of Hugging Face's: its samples come from a buffer, which is not in the state."""


class Shuffled(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self._ex_iterable = BufferShuffledExamplesIterable()

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples, held = super().__iter__(), list[torch.Tensor]()
        for sample in samples:
            held.append(sample)
            if len(held) == 4:
                yield held.pop(1)
        yield from held


class OfOtherArguments(Endless):
    """As litdata's dataset."""

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class Batches:
    """No DataLoader at all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in random.sample(range(8), 8):
            yield torch.stack([draw() * 0.1 + index for _ in range(3)])


class SavingBatches(Batches):
    """And it knows where it is."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 8:
            self.at += 1
            yield torch.stack([draw() * 0.1 + self.at for _ in range(3)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class UntilItsEnd(DataLoader[Any]):
    """As litdata's: has its own iterator, and begins at a loaded state until it has come to its end."""

    def __init__(self) -> None:
        super().__init__(Sized(), 3)
        self.restore, self.current_epoch, self.at, self.loaded = False, 0, 0, dict[str, int]()

    def _get_iterator(self) -> Any:
        return super()._get_iterator()

    def state_dict(self) -> dict[str, int]:
        self.loaded.update({"epoch": self.current_epoch, "at": self.at})
        return self.loaded

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.restore, self.loaded, self.current_epoch = True, state, state["epoch"]

    def __iter__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.restore:
            self.current_epoch, self.loaded = self.current_epoch + 1, {"epoch": 0, "at": 0}
        self.at = self.loaded["at"]
        order = random.Random(self.current_epoch).sample(range(23), 23)
        while self.at < 23:
            self.at += 3
            yield torch.stack([draw() * 0.1 + index for index in order[self.at - 3 : self.at]])
        self.restore = False


class Once(DataLoader[Any]):
    """As torchdata's: the next iterator begins at a loaded state, also of one of which no more is read."""

    state: Any = None
    at = 0

    def _get_iterator(self) -> Any:
        return super()._get_iterator()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "dataset": self.dataset.state_dict()}  # pyright: ignore

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self)["state"] = state

    def __iter__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, vars(self)["state"], vars(self)["at"] = self.state, None, 0
        if state is not None:
            self.dataset.load_state_dict(state["dataset"])  # pyright: ignore
            vars(self)["at"] = state["at"]
        return self._batches(iter(self.dataset), self.at)

    def _batches(self, samples: Iterator[torch.Tensor], at: int) -> Iterator[torch.Tensor]:
        while batch := list(itertools.islice(samples, 3)):
            vars(self)["at"] += 1
            yield torch.stack(batch)


class OrderOfItsOwn(Sampler[int]):
    """As torchdata's `RandomSampler`: seeded once, from the process's generator."""

    replacement = False

    def __init__(self, data: Any) -> None:
        self.num_samples = len(data)
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_samples, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.num_samples


class StatefulDataLoader(DataLoader[Any]):
    """As torchdata's: its state has neither the order nor random states, and it asks its iterator for `_finished`."""

    begin = 0

    def __init__(self, dataset: Any, batch_size: int = 1, sampler: Any = None, **settings: Any) -> None:
        super().__init__(dataset, batch_size, sampler=sampler or OrderOfItsOwn(dataset), **settings)

    def _get_iterator(self) -> Any:
        batches: Any = super()._get_iterator()
        batches._finished = False
        for _ in range(self.begin):
            next(batches)
        vars(self)["begin"] = 0
        return batches

    def __iter__(self) -> Any:
        vars(self)["_iterator"] = batches = self._get_iterator()
        return self._get_iterator() if batches._finished else batches

    def state_dict(self) -> dict[str, int]:
        return {"begin": self._iterator._num_yielded if self._iterator is not None else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self)["begin"] = state["begin"]


for kind, name in ((OrderOfItsOwn, "RandomSampler"), (StatefulDataLoader, "StatefulDataLoader")):
    kind.__module__ = "torchdata.stateful_dataloader"
    kind.__name__ = name


class KeepsBatches(SavingBatches):
    """Begins every iteration at a loaded state."""

    begin = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for at in range(self.begin + 1, 9):
            self.at = at
            yield torch.stack([draw() * 0.1 + self.at for _ in range(3)])


class Lazy(Sampler[int]):
    """Draws each index when it is asked for, from the generators that training draws from too."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            yield int(torch.randint(23, ())) if random.random() < 0.5 else int(np.random.randint(23))

    def __len__(self) -> int:
        return 23


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def sized(length: int = 23, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Sized(length), **({"batch_size": 3, "shuffle": True} | settings))


def sampled(sampler: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Sized(), batch_size=3, sampler=sampler, **settings)


LOADERS: dict[str, Callable[[], Any]] = {
    "a generator given to the loader": lambda: sized(generator=generator()),
    "a generator given to the loader, workers": lambda: sized(generator=generator(), num_workers=2),
    "a generator given to the sampler": lambda: sampled(RandomSampler(range(23), generator=generator())),
    "with replacement": lambda: sampled(RandomSampler(range(23), replacement=True, generator=generator())),
    "weighted": lambda: sampled(Weighted([1.0] * 20 + [4.0] * 3, 23)),
    "weighted, workers": lambda: sampled(Weighted([1.0] * 20 + [4.0] * 3, 23), num_workers=2),
    "a lazy sampler": lambda: sampled(Lazy()),
    "a lazy sampler, workers": lambda: sampled(Lazy(), num_workers=2, prefetch_factor=1),
    "a batch sampler": lambda: DataLoader(Sized(), batch_sampler=BatchSampler(RandomSampler(range(23)), 3, False)),
    "without batches": lambda: DataLoader(Sized(8), batch_size=None, sampler=BatchSampler(range(8), 3, False)),
    "a dataset with generators": lambda: DataLoader(Own(), batch_size=3, shuffle=True),
    "a dataset with generators, workers": lambda: DataLoader(Own(), batch_size=3, shuffle=True, num_workers=2),
    "three workers": lambda: sized(num_workers=3, prefetch_factor=1),
    "persistent workers": lambda: sized(num_workers=2, persistent_workers=True),
    "persistent workers, iterable": lambda: DataLoader(Endless(), 3, num_workers=2, persistent_workers=True),
    "persistent workers, saves": lambda: DataLoader(Saves(), 3, num_workers=2, persistent_workers=True),
    "an iterable with a length": lambda: DataLoader(Counted(), batch_size=3),
    "an iterable with a length, workers": lambda: DataLoader(Counted(), batch_size=3, num_workers=2),
    "max_size, saves": lambda: Combined([DataLoader(Saves(), 3), DataLoader(Saves(11), 3)], "max_size"),
    "uneven workers": lambda: DataLoader(Uneven(), batch_size=2, num_workers=3),
    "torchdata's": lambda: StatefulDataLoader(Sized(), 3),
    "torchdata's, in parallel": lambda: StatefulDataLoader(Sized(), 3, num_workers=2),
    "torchdata's, persistently": lambda: StatefulDataLoader(Sized(), 3, num_workers=2, persistent_workers=True),
    "no DataLoader": Batches,
    "no DataLoader, saves": SavingBatches,
    "min_size": lambda: Combined({"a": sized(), "b": sized(15)}, "min_size"),
    "max_size": lambda: Combined({"a": sized(), "b": sized(9)}, "max_size"),
    "max_size_cycle": lambda: {"a": sized(), "b": sized(9)},
    "max_size_cycle, workers": lambda: {"a": sized(num_workers=2), "b": sized(9, num_workers=1)},
    "max_size_cycle, iterable": lambda: [DataLoader(Endless(), 3), sized(9), DataLoader(Saves(9), 3)],
}  # fmt: skip


KEEPING = {
    "keeps": Keeps, "keeps within": KeepsWithin, "keeps in sight": KeepsInSight, "counts epochs": CountsEpochs,
    "counts beginnings": CountsBeginnings, "a shuffle buffer": Shuffled, "a state of other arguments": OfOtherArguments,
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2, "persistent"])
@pytest.mark.parametrize("kind", KEEPING)
def test_a_dataset_with_a_state_begins_each_later_epoch_as_without_a_resume(
    kind: str, workers: Any, tmp_path: Path
) -> None:
    settings = {"num_workers": 2, "persistent_workers": True} if workers == "persistent" else {"num_workers": workers}
    training = Training(lambda: DataLoader(KEEPING[kind](), batch_size=3, **settings), validates=False)
    goes_on(training, tmp_path, ["batch 0:5", "batch 0:8", "epoch 1:8", "batch 1:1", "batch 1:6"])


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("kind", "is_sized", "workers"),
    [
        each
        for each in itertools.product(["keeps", "counts epochs", "counts beginnings"], [False, True], [0, 2])
        if each != ("counts epochs", True, 0)
    ],
)
def test_a_dataset_whose_last_batch_is_full_begins_each_later_epoch_as_without_a_resume(
    kind: str, is_sized: bool, workers: int, tmp_path: Path
) -> None:
    """Its state is that of an epoch which has not come to its end, and it looks at a loaded one as it begins."""
    dataset, settings = KEEPING[kind], {"num_workers": workers, "persistent_workers": workers > 0}
    if is_sized:  # nobody asks for more than its length, so one that counts at its end never does in this process
        dataset = type("Sized", (dataset, Counted), {})
    training = Training(lambda: DataLoader(dataset(24), batch_size=3, **settings), validates=False)
    goes_on(training, tmp_path, ["batch 0:8", "epoch 1:8", "batch 1:8", "epoch 2:8"])


WITH_STATES: dict[str, Callable[[], Any]] = {
    "until its end": UntilItsEnd,
    "once": lambda: Once(Keeps()),
    "keeps batches": KeepsBatches,
}


@pytest.mark.parametrize("limit", [1.0, 6])
@pytest.mark.parametrize("kind", WITH_STATES)
def test_a_loader_with_a_state_begins_each_later_epoch_as_without_a_resume(
    kind: str, limit: float, tmp_path: Path
) -> None:
    training = Training(WITH_STATES[kind], validates=False, trainer={"limit_train_batches": limit})
    last = "8" if limit == 1.0 else "6"
    goes_on(training, tmp_path, ["batch 0:5", "batch 1:4", f"epoch 1:{last}"])


class Tells(Net):
    """Its epoch, to its dataset."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)  # pyright: ignore


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Keeps, Shuffled])
def test_a_dataset_that_is_told_its_epoch(dataset: Any, workers: int, tmp_path: Path) -> None:
    """By a hook that is not called again within the epoch."""
    training = Training(lambda: DataLoader(dataset(), 3, num_workers=workers), Tells, validates=False)
    goes_on(training, tmp_path, ["batch 1:4", "epoch 1:8"])


UNUSUAL = {
    "max_size_cycle, workers": ["batch 1:4"],
    "uneven workers": ["batch 1:13", "batch 1:7"],
    "without batches": ["batch 1:2", "epoch 2:3"],
    "min_size": ["batch 1:2", "epoch 1:5"],
}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader(kind: str, tmp_path: Path) -> None:
    usual = ["batch 1:4", "epoch 1:8"] if "workers" in kind else ["batch 1:4", "batch 0:1", "epoch 1:8"]
    wanted = UNUSUAL.get(kind, usual)
    assert len(goes_on(Training(LOADERS[kind], validates=False), tmp_path, wanted)) == len(wanted)


SETTINGS: dict[str, dict[str, Any]] = {
    "limited": {"limit_train_batches": 6},
    "limited by share": {"limit_train_batches": 0.8},
    "steps": {"max_steps": 19, "max_epochs": -1},
    "steps, accumulated": {"max_steps": 7, "max_epochs": -1, "accumulate_grad_batches": 3},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "reloaded every second epoch": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4},
    "validated twice an epoch": {"val_check_interval": 0.5},
    "validated every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "sanity check": {"num_sanity_val_steps": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting(setting: str, tmp_path: Path) -> None:
    last = "6" if "limited" in setting else "8"
    wanted = ["batch 1:4", f"batch 1:{last}", f"epoch 1:{last}"]
    goes_on(Training(sized, trainer=SETTINGS[setting]), tmp_path, wanted)


@pytest.mark.processes
@pytest.mark.parametrize(
    "make", [lambda: sized(num_workers=2, persistent_workers=True), lambda: DataLoader(Endless(), 3)]
)
def test_limited_where_batches_are_fetched_ahead(make: Any, tmp_path: Path) -> None:
    goes_on(Training(make, trainer={"limit_train_batches": 5}), tmp_path, ["batch 1:4", "batch 0:5", "epoch 1:5"])


class Shifted(Sized):
    def __init__(self, length: int, by: int) -> None:
        super().__init__(length)
        self.by = by

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(index) + self.by


class Reloads(Net):
    """Makes its loaders for the epoch that they are asked for in."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def train_dataloader(self) -> Any:
        self.asked.append(self.current_epoch)
        return DataLoader(Shifted(23, self.current_epoch), batch_size=3, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Shifted(5, self.current_epoch), batch_size=3)


def test_loaders_that_are_made_every_second_epoch_are_those_of_the_epoch_that_they_were_made_in(tmp_path: Path) -> None:
    training = Training(lambda: None, Reloads, trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5})
    goes_on(training, tmp_path, ["batch 1:4", "batch 3:4", "epoch 2:8", "epoch 3:8"])
    asked: dict[str, list[int]] = {}

    def module() -> Reloads:
        made = Reloads()
        asked["last"] = made.asked
        return made

    _, follow, _ = replace(training, module=module).fit(tmp_path, wanted=lambda name: name == "batch 3:4")
    assert asked["last"] == [0, 2, 4]
    replace(training, module=module).fit(tmp_path, follow.points[0], wanted=lambda name: False)
    assert asked["last"] == [2, 4]


@pytest.mark.parametrize("make", [sized, Batches, SavingBatches])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_loader_that_is_followed_can_be_pickled_and_copied(make: Any, how: Any) -> None:
    """Whoever has the copy reads it, and the position that is saved stays that of the loader."""
    loader = make()
    (source,) = sources_of([loader])
    batches = iter(source.stand_in)
    next(batches)
    before = source.position(before=False, ended=False)["taken"]
    again = how(source.stand_in)
    assert type(again) is type(loader)
    assert "_get_iterator" not in vars(again) or vars(again)["_get_iterator"].__self__ is again
    assert len(list(again)) == (7 if make is SavingBatches else 8)
    assert source.position(before=False, ended=False)["taken"] == before
    assert len(list(batches)) == 7
    source.detach()


def test_manual_optimization(tmp_path: Path) -> None:
    goes_on(Training(sized, lambda: Net(manual=3)), tmp_path, ["batch 1:4", "batch 0:8", "epoch 1:8"])


def test_adam(tmp_path: Path) -> None:
    goes_on(Training(sized, lambda: Net(adam=True)), tmp_path, ["batch 1:4"])


def test_what_was_trained_on_is_not_fetched_again(tmp_path: Path) -> None:
    for make in (sized, lambda: DataLoader(Saves(), 3)):
        training = Training(make, validates=False, trainer={"max_epochs": 1})
        _, follow, first = training.fit(tmp_path, wanted=lambda name: name == "batch 0:5")
        _, _, second = training.fit(tmp_path, follow.points[0])
        assert len(first.dataset.fetched) == 23
        assert second.dataset.fetched == first.dataset.fetched[15:]


@pytest.mark.processes
def test_a_second_interruption(tmp_path: Path) -> None:
    """What was taken from a fit that itself went on."""
    training = Training(lambda: sized(num_workers=2))
    rows, follow, _ = training.fit(tmp_path, wanted=lambda name: name == "batch 1:2")
    again, follow, _ = training.fit(tmp_path, follow.points[0], wanted=lambda name: name == "batch 1:5")
    last, _, _ = training.fit(tmp_path, follow.points[0])
    assert last == rows[len(rows) - len(last) :]
    assert again == rows[len(rows) - len(again) :]


def test_a_loader_that_has_ended_keeps_up_with_random_states_as_long_as_others_go_on() -> None:
    """Those go on for longer (`max_size`), and each of their batches asks this loader, too."""
    (first,), (source,) = sources_of([DataLoader(Sized(6), 3)]), sources_of([DataLoader(Sized(6), 3)])
    list(first.stand_in)
    source.begin_at(first.position(before=False, ended=False))
    batches = iter(source.stand_in)
    for _ in range(2):
        now = torch.get_rng_state().numpy().tobytes()
        assert next(batches, None) is None
        assert source.position(before=True, ended=False)["random"]["torch"] == now
        torch.rand(1)
    source.detach()


def iterated(
    loader: DataLoader[Any], ended: dict[int, list[int]], told: bool = True, locked: bool = False
) -> list[Any]:
    """Two epochs of batches, and what this process draws beside; SIGTERM has ended these workers ahead of fetches.

    Where they have ``locked``, they held the lock of the event that all share.
    """
    (source,) = sources_of([loader])
    source.told = lambda: told
    reseed(5)
    rows: list[Any] = []
    iterators: list[Any] = []
    for _ in range(2):
        iterator = iter(source.stand_in)
        while True:
            if locked and len(rows) in ended:
                assert iterator._workers_done_event._cond.acquire(timeout=20.0)
            for worker in ended.get(len(rows), ()):
                if iterator._workers[worker].is_alive():  # else nobody has missed it yet
                    os.kill(iterator._workers[worker].pid, signal.SIGTERM)
                    iterator._workers[worker].join(20.0)
            try:
                rows.append((next(iterator).tolist(), random.random(), float(torch.rand(()))))
            except StopIteration:
                break
        iterators.append(iterator)
    for iterator in iterators:
        iterator._shutdown_workers()  # they may persist
    return rows


@pytest.fixture
def quiet_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handler of SIGCHLD raises wherever the main thread is; in a fit see `Preemption`."""
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._error_if_any_worker_fails", lambda: None)


ENDED = [
    name for name in LOADERS if isinstance(LOADERS[name](), DataLoader) and LOADERS[name]().num_workers
]  # fmt: skip


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("kind", ENDED)
def test_workers_that_a_signal_to_the_group_ends_are_replaced(kind: str, quiet_children: None) -> None:
    def loader() -> Any:
        reseed(1)  # a sampler may draw its seed as it is made
        return LOADERS[kind]()

    whole = iterated(loader(), {})
    assert iterated(loader(), {0: [0, 1], 3: [1], 5: [0, 1], 12: [0]}) == whole


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["three workers", "persistent workers"])
def test_workers_that_end_with_their_lock_are_replaced_all_the_same(kind: str, quiet_children: None) -> None:
    whole = iterated(LOADERS[kind](), {})
    assert iterated(LOADERS[kind](), {3: [0, 1]}, locked=True) == whole


@pytest.mark.processes
def test_workers_that_end_while_nobody_was_told_are_missed(quiet_children: None) -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        iterated(sized(num_workers=2), {3: [0, 1]}, told=False)
