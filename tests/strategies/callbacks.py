"""Scenarios of Lightning's own callbacks on drifting replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DiLoCo,
    EveryNSteps,
    Mean,
    ParameterServerStrategy,
)
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.workers import (
    PATIENT,
    Net,
    Recorder,
    fit,
    loader,
    logged,
    make_trainer,
    rank,
    report,
    scenario,
    shard,
    together,
)


def diloco() -> AsyncAveragingStrategy:
    return together(DiLoCo(), EveryNSteps(3), overlap=False, timeouts=PATIENT)


class Tuned(Net):
    """Its learning rate is an attribute."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(optimizer=lambda ps: torch.optim.SGD(ps, lr=self.lr))
        self.lr = lr


class AtEpochs(pl.callbacks.LearningRateFinder):
    """As in Lightning's documentation: looks again at the start of some epochs."""

    def __init__(self, epochs: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.epochs, self.found = epochs, []

    def on_fit_start(self, *args: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.epochs:
            self.lr_find(trainer, pl_module)
            self.found.append(pl_module.lr)


def _train(module: Net, *callbacks: Any, folder: Path, **options: Any) -> Any:
    recorder = Recorder()
    defaults = {"max_epochs": 3, "default_root_dir": folder}
    trainer = make_trainer(diloco(), callbacks=[*callbacks, recorder], **(defaults | options))
    trainer.fit(module, loader(shard((7, 7))))
    return report(trainer, module, recorder) | {"state": trainer.strategy.saved._last["round"]}


@scenario
def lr_finder(folder: Path) -> Any:
    """The same training, with the rate that was found, once without looking for it."""
    module = Tuned()
    found = _train(module, pl.callbacks.LearningRateFinder(num_training_steps=20), folder=folder)
    return {"found": found, "plain": _train(Tuned(module.lr), folder=folder), "lr": module.lr}


@scenario
def lr_finder_at_epochs(folder: Path) -> Any:
    """It looks within training; `Same` finds the rate that is there already, so that training goes on as without it."""

    class Same(AtEpochs):
        def lr_find(self, trainer: Any, pl_module: Any) -> None:
            super().lr_find(trainer, pl_module)
            pl_module.lr = trainer.optimizers[0].param_groups[0]["lr"] = 0.05

    finder = Same((0, 2), num_training_steps=10)
    found = _train(Tuned(), finder, folder=folder)
    return {"found": found, "plain": _train(Tuned(), folder=folder), "looked": len(finder.found)}


@scenario
def lr_finder_of_one_noisy_rank(folder: Path) -> Any:
    """One rank's losses jump in the search, first those of rank 1 and then those of rank 0; and the same with DDP."""

    class Jumps(Tuned):
        noisy = 1
        searched = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.searched += 1
            loss = super().training_step(batch, batch_idx)
            return loss + 1000.0 if rank() == self.noisy and batch_idx >= 4 else loss

    strategies = {
        "averaging": lambda: together(Mean(), EveryNSteps(3), overlap=False, timeouts=PATIENT),
        "gradients": lambda: AsyncGradientStrategy(1, delay=0, timeouts=PATIENT),
        "server": lambda: ParameterServerStrategy("async", timeouts=PATIENT),
        "ddp": lambda: "ddp",
    }
    told: dict[str, Any] = {}
    for name, make in strategies.items():
        for noisy in (1, 0):
            module = Jumps()
            module.noisy = noisy
            tuner = pytorch("tuner").Tuner(make_trainer(make(), default_root_dir=folder))
            found = tuner.lr_find(module, loader(shard((24, 24))), num_training=20, update_attr=False)
            told[f"{name} {noisy}"] = found.results | {"searched": module.searched, "suggestion": found.suggestion()}
    return told


# ---- averages of the model over time ----


class Seen(pl.Callback):
    """Stands behind the averaging callback, and sees what that has put into the module."""

    def __init__(self) -> None:
        self.validated: list[list[float]] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(problem.flat(pl_module))


def _averaged(callback: Any, numbers: tuple[int, int], folder: Path, **options: Any) -> Any:
    """Rounds after every third step, validations after every sixth, all deterministic."""
    seen = Seen()
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="end", save_on_train_epoch_end=True)
    strategy = together(Mean(), EveryNSteps(3), overlap=False, weighting="steps", timeouts=PATIENT)
    told = fit(
        strategy, loader(shard(numbers)), val=loader(shard((1, 1))), callbacks=[callback, seen, checkpoint],
        enable_checkpointing=True, **{"val_check_interval": 6, **options},
    )  # fmt: skip
    saved = torch.load(folder / "end.ckpt", weights_only=True)
    return told | {
        "validated": seen.validated,
        "n_averaged": int(callback._average_model.n_averaged),
        "saved": torch.cat([t.flatten() for t in saved["state_dict"].values()]).tolist(),
    }


@scenario
def ema(folder: Path) -> Any:
    return _averaged(pl.callbacks.EMAWeightAveraging(decay=0.8), (14, 14), folder)


@scenario
def mean_of_all_steps(folder: Path) -> Any:
    return _averaged(pl.callbacks.WeightAveraging(), (14, 14), folder)


@scenario
def ema_without_data(folder: Path) -> Any:
    """Rank 0 has no batch: the average is rank 1's."""
    return _averaged(pl.callbacks.EMAWeightAveraging(decay=0.8), (0, 14), folder, val_check_interval=1.0)


@scenario
def average_of_unlike_starts() -> Any:
    """The ranks build different weights; the sanity check before the first step sees rank 0's, on all."""
    torch.manual_seed(rank())
    seen = Seen()
    callback = pl.callbacks.EMAWeightAveraging(update_starting_at_step=100)
    module = Net(network=lambda: nn.Sequential(nn.Linear(problem.FEATURES, 1)))
    fit(
        None,
        loader(shard((3, 3))),
        module,
        val=loader(shard((1, 1))),
        callbacks=[callback, seen],
        num_sanity_val_steps=1,
    )
    return {"validated": seen.validated}


@scenario
def swa_with_batch_norm() -> Any:
    """The epoch after the last takes no step, and fills BatchNorm's statistics from the batches of all ranks."""
    module = Net(network=problem.normalised)
    callback = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)
    told = fit(
        together(schedule=EveryNSteps(2)), loader(shard((4, 6), (3, 5))), module, callbacks=[callback],
        max_epochs=3,
    )  # fmt: skip
    norm: Any = module.net[0]  # pyright: ignore[reportIndexIssue]
    return told | {
        "mean": norm.running_mean.tolist(),
        "var": norm.running_var.tolist(),
        "batches": int(norm.num_batches_tracked),
        "momentum": norm.momentum,
    }


# ---- spikes ----


@scenario
def spike(folder: Path) -> Any:
    """The loss of rank 1 jumps in its batch 12."""

    class Spiking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 1e4 if rank() == 1 and batch_idx == 12 else loss

    detection = pl.callbacks.SpikeDetection(warmup=3, atol=100.0, exclude_batches_path=folder / "skip.json")
    module = Spiking()
    trainer = make_trainer(together(schedule=EveryNSteps(4)), callbacks=[detection])
    error = ""
    with logged() as messages:
        try:
            trainer.fit(module, loader(shard((3000, 3000), 1)))
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "digest": problem.digest(module),
        "warnings": [m for m in messages if "between two sync points" in m],
        "skip": json.loads((folder / "skip.json").read_text()) if rank() == 0 else None,
    }
