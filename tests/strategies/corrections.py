"""Scenarios of corrections for the delay of windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import DelayCompensation, WeightPrediction
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.gradient_windows import Saves, strategy
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import Net, fit, loader, make_trainer, scenario, shard

PREDICTED = WeightPrediction(1.5)


class Halves(Net):
    """Learning rates that a scheduler halves; notes where gradients are computed, and what hooks see in between."""

    def __init__(self, optimizer: Any = momentum) -> None:
        super().__init__(optimizer=optimizer)
        self.computed: list[float] = []
        self.seen: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.computed.append(problem.flat(self)[0])
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(problem.flat(self)[0])


@scenario
def predicted() -> Any:
    """A warm-up, a sync point within each epoch, two epochs whose last windows are short."""
    module = Halves()
    told = fit(
        strategy(2, correction=PREDICTED, warmup_steps=1), loader(shard((13, 13), (3, 9))), module,
        max_epochs=2, val=loader(shard((2, 2))), val_check_interval=8,
    )  # fmt: skip
    return told | {"computed": module.computed, "seen": module.seen, "lr": module.optimizers().param_groups[0]["lr"]}


def uneven(accumulate: Any) -> Any:
    """Rank 0 has no data for long, and takes every step that rank 1 takes."""
    module = Halves(adam)
    return fit(
        strategy(accumulate, correction=PREDICTED), loader(shard((4, 17))), module,
        val=loader(shard((2, 2))), max_epochs=2, gradient_clip_val=0.2,
    )  # fmt: skip


@scenario
def predicted_uneven() -> Any:
    return [uneven(3), uneven("until_reduced")]


@scenario
def resumed(folder: Path) -> Any:
    """From the end of an epoch, and from a validation within a window, as if it had gone on."""
    data, val, path = loader(shard((10, 10))), loader(shard((2, 2))), folder / "predicted.ckpt"
    first = make_trainer(strategy(2, correction=PREDICTED))
    straight = fit(strategy(2, correction=PREDICTED), data, Halves(adam), max_epochs=2, val=val)
    first.fit(Halves(adam), data, val)
    first.save_checkpoint(path)
    module, second = Halves(adam), make_trainer(strategy(2, correction=PREDICTED), max_epochs=2)
    second.fit(module, data, val, ckpt_path=path)
    return straight["digest"], problem.digest(module), straight["global_step"], second.global_step


@scenario
def resumed_with_another(folder: Path) -> Any:
    """A checkpoint within an epoch is gone on with by another correction, which begins anew."""
    data, val = loader(shard((10, 10))), loader(shard((2, 2)))
    kinds = {"predicted": PREDICTED, "late": DelayCompensation()}
    for name, correction in kinds.items():
        saves = Saves(folder / name)
        first = make_trainer(strategy(4, correction=correction), callbacks=[saves], val_check_interval=6)
        first.fit(Net(), data, val)
    told = {}
    for name in kinds:
        for other, correction in kinds.items():
            module, second = Net(), make_trainer(strategy(4, correction=correction))
            second.fit(module, data, val, ckpt_path=folder / name)
            told[f"{name}, then {other}"] = [problem.digest(module), second.global_step]
    return told


class Fails(Halves):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 7:
            raise ValueError(f"computed {self.seen[-1] != problem.flat(self)[0]}")
        return super().training_step(batch, batch_idx)


class Looks(pl.Callback):
    """At what is there when training has failed."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        exception.args = (f"{exception} seen {pl_module.seen[-1] == problem.flat(pl_module)[0]}",)


@scenario
def failed() -> Any:
    """Within a batch whose gradients are computed elsewhere."""
    fit(strategy(2, correction=WeightPrediction()), loader(shard((12, 12))), Fails(), callbacks=[Looks()])


class Clamps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-1.0, 1.0)
        return super().training_step(batch, batch_idx)


@scenario
def clamped() -> Any:
    fit(strategy(2, correction=WeightPrediction()), loader(shard((12, 12))), Clamps(optimizer=momentum))
