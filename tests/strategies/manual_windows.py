"""Scenarios of windows of gradients in manual optimization: two optimizers, each with steps of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_async import AsyncGradientStrategy, WeightPrediction
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.errors import PeerLost
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import Interrupted, interrupt
from tests.strategies import problem
from tests.strategies.workers import PATIENT, fit, loader, scenario, shard


def strategy(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, min_replicas=2, timeouts=PATIENT, **options)


class Two(pl.LightningModule):
    """One network learns the data, in every batch, and another one the first, in every other batch.

    Args:
        gathers: batches whose gradients the first one adds up by itself.
        bare: `loss.backward()`.
    """

    def __init__(self, gathers: int = 1, bare: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = problem.network(), problem.network(4)
        self.gathers, self.bare = gathers, bare
        self.stepped: list[int] = []
        self.updates: list[bool] = []
        self.before_step: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()  # pyright: ignore
        loss = F.mse_loss(self.first(x), y)
        self.losses.append(float(loss.detach()))
        self._backward(loss / self.gathers)
        if (batch_idx + 1) % self.gathers == 0:
            first.step()
            first.zero_grad()
        if batch_idx % 2:
            second.zero_grad()
            second.step(closure=lambda: self._backward(F.mse_loss(self.second(x), self.first(x).detach())))

    def _backward(self, loss: Tensor) -> None:
        loss.backward() if self.bare else self.manual_backward(loss)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self.trainer.strategy.optimizers.index(optimizer))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stepped.append(self.trainer.global_step)
        self.updates.append(self.trainer.strategy.is_update_step)  # pyright: ignore

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self.first(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.first.parameters(), lr=0.05, momentum=0.9),
            torch.optim.SGD(self.second.parameters(), lr=0.02),
        ]


def train(strategy: Any, module: Two, **options: Any) -> Any:
    told = fit(strategy, loader(shard((12, 12), (3, 9))), module, **{"max_epochs": 2, **options})
    return told | {"stepped": module.stepped, "updates": module.updates, "before_step": module.before_step}


@scenario
def no_delay() -> Any:
    return train(strategy(3, delay=0), Two())


@scenario
def delayed() -> Any:
    return train(strategy(2), Two())


@scenario
def gathers_by_itself() -> Any:
    """A validation in mid-epoch finds gradients that no optimizer has asked for a step with."""
    return train(strategy(2), Two(gathers=2), val=loader(shard((2, 2))), val_check_interval=5)


@scenario
def bare() -> Any:
    return train(strategy(2), Two(bare=True))


@scenario
def until_reduced() -> Any:
    return train(strategy("until_reduced"), Two())


@scenario
def compressed() -> Any:
    return train(strategy(2, compression="bf16", correction=WeightPrediction()), Two())


@scenario
def limited() -> Any:
    return train(strategy(2), Two(), max_epochs=-1, max_steps=6)


@scenario
def uneven() -> Any:
    """Rank 0 has no data for long."""
    module = Two()
    told = fit(strategy(2), loader(shard((3, 12))), module, val=loader(shard((1, 1))), max_epochs=2)
    return told | {"before_step": module.before_step}


@scenario
def goes_on(folder: Path) -> Any:
    """Interrupted within an accumulation of its own, within a window, with another one in flight."""
    whole = Two(gathers=2)
    train(strategy(2), whole)

    class Stops(Two):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if len(self.losses) == 12 + 7:
                interrupt()

    def saved() -> Any:
        return [FaultTolerantCheckpoint(folder, every_n_train_steps=1, busy="wait", save_on_exception=False)]

    with contextlib.suppress(Interrupted, PeerLost):
        train(strategy(2), Stops(gathers=2), callbacks=saved(), enable_checkpointing=True)
    rest = Two(gathers=2)
    told = train(strategy(2), rest, callbacks=saved(), enable_checkpointing=True)
    return told | {
        "losses": [a == b for a, b in zip(whole.losses[-len(rest.losses) :], rest.losses, strict=True)],
        "equal": problem.digest(whole) == problem.digest(rest),
    }


@scenario
def shared() -> None:
    class Shared(Two):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.second.parameters(), lr=0.1)]

    train(strategy(2), Shared())


@scenario
def one_optimizer_twice() -> Any:
    """As PPO steps."""

    class Twice(Two):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()  # pyright: ignore
            for target in (batch[1], -batch[1]):
                first.zero_grad()
                self.manual_backward(F.mse_loss(self.first(batch[0]), target))
                first.step()

    train(strategy(1, delay=0), Twice())
