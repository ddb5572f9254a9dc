"""Scenarios on two ranks: each has its own share of the data, its own random states, and its own file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_async import DeltaMean, EveryNSteps, Mean, Synchronous
from tests.resume.problem import Sized, Training, goes_on
from tests.strategies.workers import rank, scenario, together

POINTS = ["batch 1:2", "validation 0:2", "epoch 1:4"]


def epoch_loader() -> Any:
    return DataLoader(Sized(), batch_size=3, shuffle=True)


def _goes_on(folder: Path, strategy: Any, **settings: Any) -> list[str]:
    own = folder / str(rank())
    own.mkdir()
    trainer = {"devices": 2, "val_check_interval": 2, "max_epochs": 2, **settings}

    return goes_on(Training(epoch_loader, trainer=trainer, strategy=strategy, seed=1 + rank()), own, POINTS)


@scenario
def ddp(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: "ddp")


@scenario
def ddp_accumulates(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: "ddp", accumulate_grad_batches=3)


@scenario
def synchronous(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: together(DeltaMean(), Synchronous()))


@scenario
def without_overlap(folder: Path) -> list[str]:
    return _goes_on(folder, lambda: together(Mean(), EveryNSteps(2), overlap=False))


@scenario
def two_ranks(folder: Path) -> list[int]:
    """Leaves its states for a fit of one rank; the samples that this rank has seen."""
    training = Training(epoch_loader, trainer={"devices": 2, "max_epochs": 2}, strategy=lambda: "ddp", seed=1 + rank())
    _, follow, loader = training.fit(folder, wanted=lambda name: name == "batch 1:2")
    (point,) = follow.points
    torch.save([point.state, point.checkpoint], folder / f"{rank()}.pt")
    return loader.dataset.fetched[12 : 12 + 6]


@scenario
def one_rank_then_two(folder: Path) -> tuple[list[int], list[int]]:
    """The samples of the second epoch that one rank has seen, and those that this one of two has seen after it."""
    own = folder / str(rank())
    own.mkdir()
    training = Training(epoch_loader, trainer={"devices": 1, "max_epochs": 2})
    _, follow, loader = training.fit(own, wanted=lambda name: name == "batch 1:4")
    point = replace(follow.points[0], others=[follow.points[0].state])
    training = Training(epoch_loader, trainer={"devices": 2, "max_epochs": 2}, strategy=lambda: "ddp")
    _, follow, second = training.fit(own, point, wanted=lambda name: False)
    return loader.dataset.fetched[23 : 23 + 12], second.dataset.fetched
