"""Scenarios of corrections for the delay of windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import DelayCompensation, EstimateCommit, WeightPrediction
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.gradient_windows import Saves, strategy
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import Net, fit, loader, make_trainer, rank, scenario, shard

CORRECTIONS = {"predicted": WeightPrediction(1.5), "estimated": EstimateCommit()}


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


def train(name: str, **options: Any) -> Any:
    """A warm-up, a gate within each epoch, two epochs whose last windows are short."""
    module = Halves(adam if name == "estimated" else momentum)
    told = fit(
        strategy(2, correction=CORRECTIONS[name], warmup_steps=1), loader(shard((13, 13), (3, 9))), module,
        max_epochs=2, val=loader(shard((2, 2))), val_check_interval=8, **options,
    )  # fmt: skip
    return told | {"computed": module.computed, "seen": module.seen, "lr": module.optimizers().param_groups[0]["lr"]}


@scenario
def predicted() -> Any:
    return train("predicted")


@scenario
def estimated() -> Any:
    return train("estimated", gradient_clip_val=0.2)


def uneven(name: str, accumulate: Any) -> Any:
    """Rank 0 has no data for long, and takes every step that rank 1 takes."""
    module = Halves(adam)
    return fit(
        strategy(accumulate, correction=CORRECTIONS[name]), loader(shard((4, 17))), module,
        val=loader(shard((2, 2))), max_epochs=2, gradient_clip_val=0.2,
    )  # fmt: skip


@scenario
def predicted_uneven() -> Any:
    return [uneven("predicted", 3), uneven("predicted", "until_reduced")]


@scenario
def estimated_uneven() -> Any:
    return [uneven("estimated", 3), uneven("estimated", "until_reduced")]


class Overflows(Halves):
    """Rank 1's loss overflows in one batch.

    Args:
        at: which.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if rank() == 1 and batch_idx == self.at else loss


@scenario
def scaled() -> Any:
    """Windows of two: the first, the second and the third of them are dropped in turn."""
    told = []
    for at in (1, 3, 5):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)  # pyright: ignore
        plugin = pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)
        module = Overflows(at)
        done = fit(strategy(2, correction=EstimateCommit()), loader(shard((8, 8))), module, plugins=[plugin])
        told.append(done | {"scale": scaler.get_scale()})
    return told


@scenario
def limited() -> Any:
    """To a number of steps; each of them has two windows but for the last one."""
    return fit(strategy(1, correction=EstimateCommit()), loader(shard((20, 20))), Halves(), max_epochs=-1, max_steps=4)


@scenario
def resumed(folder: Path) -> Any:
    """From the end of an epoch, and from a validation within a window, as if it had gone on."""
    data, val, told = loader(shard((10, 10))), loader(shard((2, 2))), {}
    for name, correction in CORRECTIONS.items():
        path = folder / f"{name}.ckpt"
        first = make_trainer(strategy(2, correction=correction))
        straight = fit(strategy(2, correction=correction), data, Halves(adam), max_epochs=2, val=val)
        first.fit(Halves(adam), data, val)
        first.save_checkpoint(path)
        module, second = Halves(adam), make_trainer(strategy(2, correction=correction), max_epochs=2)
        second.fit(module, data, val, ckpt_path=path)
        told[name] = [straight["digest"], problem.digest(module), straight["global_step"], second.global_step]
    return told


@scenario
def resumed_with_another(folder: Path) -> Any:
    """A checkpoint within an epoch is gone on with by another correction, which begins anew."""
    data, val, kinds = loader(shard((10, 10))), loader(shard((2, 2))), {**CORRECTIONS, "late": DelayCompensation()}
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
