"""A fit that goes on from a safe point is bit-equal with one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.resume.problem import Endless, Saves, Sized, Training, goes_on

DATASETS: dict[str, Any] = {"sized": Sized, "iterable": Endless, "saves": Saves}
MIDDLE, LAST = "batch 0:5", "batch 1:8"
POINTS = [MIDDLE, "batch 0:4", "batch 0:8", "validation 0:8", "epoch 1:8", "validation 1:4", LAST]


def loader(dataset: str, workers: int = 0, **settings: Any) -> DataLoader[Any]:
    shuffle = dataset == "sized"
    return DataLoader(DATASETS[dataset](), batch_size=3, shuffle=shuffle, num_workers=workers, **settings)


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
