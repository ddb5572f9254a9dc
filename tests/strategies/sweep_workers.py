"""Ranks of a script that fits several times, catches exceptions of some fits, and goes on."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import AsyncAveragingStrategy, AsyncGradientStrategy, ParameterServerStrategy
from lightning_async.trainer.namespace import pl

STRATEGIES: dict[str, Any] = {
    "averaging": AsyncAveragingStrategy,
    "gradients": AsyncGradientStrategy,
    "servers": ParameterServerStrategy,
}
RANKS = 2
WEIGHT = torch.arange(1.0, 3.0)


class Numbered(pl.LightningModule):
    """Notes the samples that it sees; raises in the hook ``where``, and in `training_step` at the batch ``batch``."""

    def __init__(self, where: str = "", batch: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.where = where
        self.batch = batch
        self.seen: list[int] = []

    def _raise_in(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError("diverged")

    def on_train_start(self) -> None:
        self._raise_in("on_train_start")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.batch:
            self._raise_in("training_step")
        self.seen += batch[0].int().flatten().tolist()
        return self.layer(batch[0]).pow(2).mean() * 1e-6

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._raise_in("validation_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Copying(Numbered):
    """Copies an optimizer, the loops, the callbacks and the Trainer in the middle of an epoch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 3:
            optimizer: Any = copy.deepcopy(self.optimizers())
            optimizer.zero_grad()
            for thing in (self.trainer.fit_loop, self.trainer.callbacks, self.trainer):
                copy.deepcopy(thing)


def loader(samples: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(samples)).unsqueeze(1)), batch_size=4)


def fit(strategy: str, module: Numbered, **options: Any) -> dict[str, Any]:
    """Fit once; return what became of it."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=STRATEGIES[strategy](**options),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, max_epochs=1,
    )  # fmt: skip
    error = ""
    try:
        trainer.fit(module, loader(32), loader(8))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "seen": sorted(module.seen), "size": trainer.world_size, "rank": trainer.global_rank}


def sweep(strategy: str) -> list[dict[str, Any]]:
    """Fit in turn with an exception of all ranks, at other places or at steps of their own, and without."""
    own = int(os.environ["RANK"])
    told = []
    for where, batch in (("training_step", 1), ("training_step", own), ("validation_step", 0), ("on_train_start", 0)):
        told.append(fit(strategy, Numbered(where, batch)))
        told.append(fit(strategy, Numbered()))
    return told


def raise_alone(culprit: int) -> list[dict[str, Any]]:
    """Raise on one rank in the first of two fits, which the others complete; that rank goes on with the second."""
    own = int(os.environ["RANK"])
    first = fit("averaging", Numbered("training_step" if own == culprit else "", 2))
    return [first, fit("averaging", Numbered())]


def try_again_alone(culprit: int) -> list[dict[str, Any]]:
    """Raise on one rank, which tries again; the other one completes the only fit that it makes."""
    own = int(os.environ["RANK"])
    told = [fit("averaging", Numbered("training_step" if own == culprit else "", 2))]
    return [*told, fit("averaging", Numbered())] if told[0]["error"] else told


def copies(strategy: str) -> dict[str, Any]:
    return fit(strategy, Copying())


def gather_after_training() -> dict[str, Any]:
    """Gather with a gradient after training, and return the gradient of this rank's value."""
    own = int(os.environ["RANK"])
    module = Numbered()
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=AsyncAveragingStrategy(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, loader(8))
    value = torch.ones(1, requires_grad=True)
    rows: Any = trainer.strategy.all_gather(value, sync_grads=True)
    ((own + 1) * (rows.flatten() * WEIGHT).sum()).backward()
    assert value.grad is not None
    return {"gradient": value.grad.item()}
