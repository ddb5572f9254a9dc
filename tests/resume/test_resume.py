"""A fit that goes on from a safe point is bit-equal with one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy
from lightning_async.trainer.namespace import pl
from tests.resume.problem import Endless, Net, Saves, Sized, Training, goes_on
from tests.strategies.conftest import alone as alone

DATASETS: dict[str, Any] = {"sized": Sized, "iterable": Endless, "saves": Saves}
MIDDLE, LAST = "batch 0:5", "batch 1:8"
POINTS = [MIDDLE, "batch 0:4", "batch 0:8", "validation 0:8", "epoch 1:8", "validation 1:4", LAST]


def loader(dataset: str, workers: int = 0, **settings: Any) -> DataLoader[Any]:
    shuffle = dataset == "sized"
    return DataLoader(DATASETS[dataset](), batch_size=3, shuffle=shuffle, num_workers=workers, **settings)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", DATASETS)
def test_each_kind_of_safe_point(dataset: str, workers: int, tmp_path: Path) -> None:
    """In the middle of an epoch and of an accumulation, at an epoch's last batch, at and within validations."""
    settings = {"accumulate_grad_batches": 3, "val_check_interval": 4, "check_val_every_n_epoch": None}
    goes_on(
        Training(lambda: loader(dataset, workers), trainer=settings | {"max_epochs": 2}),
        tmp_path,
        POINTS if workers == 0 else POINTS[::2],
    )


class Watched(Net):
    """Its metric gets no better in epoch 1, and better again."""

    def on_validation_epoch_end(self) -> None:
        self.log("watched", [5.0, 5.0, 4.0, 3.0, 2.0, 1.0][self.current_epoch])


def test_a_stop_that_waits_for_min_epochs(tmp_path: Path) -> None:
    training = Training(
        lambda: loader("sized"),
        Watched,
        trainer={"min_epochs": 4, "max_epochs": 6},
        callbacks=lambda: [pl.callbacks.EarlyStopping("watched", patience=1)],
    )
    goes_on(training, tmp_path, ["batch 1:4", "epoch 1:8", "batch 2:4", "epoch 2:8", "batch 3:8", "epoch 3:8"])


class Short(Sized):
    """Has fewer samples than it says."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if index < 17 else next(iter(()))


@pytest.mark.usefixtures("alone")
def test_an_epoch_that_is_shorter_than_its_loader_says(tmp_path: Path) -> None:
    training = Training(
        lambda: DataLoader(Short(), batch_size=3),
        strategy=AsyncAveragingStrategy,
        trainer={"devices": 1, "val_check_interval": 4, "max_epochs": 2, "use_distributed_sampler": False},
    )
    goes_on(training, tmp_path, ["batch 0:5", "epoch 1:5", "batch 1:5"])
