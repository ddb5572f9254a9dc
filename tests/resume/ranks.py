"""Scenarios on two ranks: each has its own share of the data, its own random states, and its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, DeltaMean, EveryNSteps, Mean, Synchronous
from tests.resume.problem import Sized, Training, goes_on
from tests.strategies.workers import rank, scenario

POINTS = ["batch 1:2", "validation 0:2", "epoch 1:4"]


def _goes_on(folder: Path, strategy: Any, **settings: Any) -> list[str]:
    own = folder / str(rank())
    own.mkdir()
    trainer = {"devices": 2, "val_check_interval": 2, "max_epochs": 2, **settings}

    def loader() -> Any:
        return DataLoader(Sized(), batch_size=3, shuffle=True)

    return goes_on(Training(loader, trainer=trainer, strategy=strategy, seed=1 + rank()), own, POINTS)


@scenario
def ddp(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: "ddp")


@scenario
def ddp_accumulates(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: "ddp", accumulate_grad_batches=3)


@scenario
def synchronous(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: AsyncAveragingStrategy(DeltaMean(), Synchronous()))


@scenario
def without_overlap(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: AsyncAveragingStrategy(Mean(), EveryNSteps(2), overlap=False))
