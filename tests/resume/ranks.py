"""Scenarios on two ranks: each has its own share of the data, its own random states, and its own file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_async import DeltaMean, EveryNSteps, Mean, ParameterServerStrategy, Synchronous
from tests.resume.problem import FEATURES, Net, Sized, Training, goes_on
from tests.strategies.workers import rank, scenario, together

POINTS = ["batch 1:2", "validation 0:2", "epoch 1:4"]
LAST_BATCH = ["batch 0:4"]


def epoch_loader() -> Any:
    return DataLoader(Sized(), batch_size=3, shuffle=True)


class Plain(Net):
    """Without a part that differs between ranks that step together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))


def _goes_on(folder: Path, strategy: Any, module: Any = Net, points: list[str] = POINTS, **settings: Any) -> list[str]:
    own = folder / str(rank())
    own.mkdir()
    trainer = {"devices": 2, "val_check_interval": 2, "max_epochs": 2, **settings}
    training = Training(epoch_loader, module, trainer=trainer, strategy=strategy, seed=1 + rank())
    return goes_on(training, own, points)


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
def synchronous_last_batch(folder: Path) -> list[str]:
    """The validation that is due with it is yet to come, where all ranks have ended the epoch."""
    return _goes_on(folder, lambda: together(DeltaMean(), Synchronous()), Plain, LAST_BATCH)


class WithoutALoss(Plain):
    """Has no loss of rank 1's second batch in each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if rank() == 1 and batch_idx == 1 else loss


@scenario
def none_in_step(folder: Path) -> list[str]:
    strategy = lambda: together(DeltaMean(), Synchronous())  # noqa: E731
    return _goes_on(folder, strategy, WithoutALoss, ["batch 1:2"], accumulate_grad_batches=4, val_check_interval=4)


@scenario
def none_on_servers(folder: Path) -> list[str]:
    strategy = lambda: ParameterServerStrategy("sync", min_replicas=2)  # noqa: E731
    return _goes_on(folder, strategy, WithoutALoss, ["batch 1:2"], accumulate_grad_batches=4, val_check_interval=4)


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
