"""Scenarios of Lightning's own callbacks on drifting replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import AsyncAveragingStrategy, DiLoCo, EveryNSteps
from lightning_async.namespace import pl
from tests.strategies.workers import Net, Recorder, loader, make_trainer, report, scenario, shard


def diloco() -> AsyncAveragingStrategy:
    return AsyncAveragingStrategy(DiLoCo(), EveryNSteps(3), overlap=False)


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
    return report(trainer, module, recorder) | {"state": trainer.strategy._saved._last["round"]}


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
