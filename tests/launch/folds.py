"""A user's cross-validation on three ranks: rank 1, or that in DIES, is killed in the second fold, at its first start.

That fold goes on until all three have trained together for a while; with SHORT=1 it ends before the rank can be back,
and the third one goes on for so long. With ONE=1 there is one Trainer and one model for all folds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_async import AsyncAveragingStrategy, AsyncGradientStrategy, EveryNSteps, ParameterServerStrategy
from lightning_async.membership.launcher_channel import came_back
from lightning_async.trainer.namespace import pl

FOLDS = 3
SHORT = os.environ.get("SHORT") == "1"
ONE = os.environ.get("ONE") == "1"
DIES = os.environ.get("DIES", "1")
STRATEGIES: Any = {
    "averaging": lambda: AsyncAveragingStrategy(schedule=EveryNSteps(5), min_replicas=1),
    "gradients": lambda: AsyncGradientStrategy(min_replicas=1),
    "server": lambda: ParameterServerStrategy(min_replicas=1),
}


class Model(pl.LightningModule):
    def __init__(self, fold: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fold = fold
        self.together = 0
        self.was_short = came_back() is not None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.01)
        world_size = self.trainer.world_size
        if self.fold == 1 and came_back() is None and os.environ["RANK"] == DIES and batch_idx == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        self.was_short |= world_size < 3
        self.together += self.was_short and world_size == 3
        waits = self.fold == (2 if SHORT else 1)
        if self.together == 20 or (batch_idx == 20 and not waits):
            self.trainer.should_stop = True
        return (self.layer(batch[0]) - batch[1]).pow(2).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", (self.layer(batch[0]) - batch[1]).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make(folder: Path, strategy: str, fold: int) -> tuple[Any, Any, Any]:
    checkpoint = pl.callbacks.ModelCheckpoint(folder / f"fold{fold}", monitor="error")
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](), accelerator="cpu", devices=3, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint],
    )  # fmt: skip
    return trainer, Model(fold), checkpoint


def main(folder: Path, strategy: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 2)
    y = (x @ torch.tensor([[1.0], [-2.0]])) + 0.1 * torch.randn(3000, 1)
    data = TensorDataset(x, y)
    results: list[Any] = []
    trainer, model, checkpoint = make(folder, strategy, 0)
    for fold in range(FOLDS):
        held_out = range(fold * 1000, (fold + 1) * 1000)
        train = Subset(data, [i for i in range(3000) if i not in held_out] * 100)
        test = DataLoader(Subset(data, held_out), batch_size=100)
        if fold > 0 and not ONE:
            trainer, model, checkpoint = make(folder, strategy, fold)
        model.fold = fold
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(model, DataLoader(train, batch_size=2, shuffle=True), test)
        world_size = trainer.world_size
        (last,) = trainer.validate(model, test, verbose=False)
        (best,) = trainer.test(model, test, ckpt_path="best", verbose=False)
        logged = float(trainer.callback_metrics["error"])
        predicted = trainer.predict(model, test)
        with torch.no_grad():
            by_hand = float((model.layer(x[held_out]) - y[held_out]).pow(2).mean())
        path = str(Path(checkpoint.best_model_path).relative_to(folder))
        results.append([last["error"], best["error"], logged, by_hand, path, trainer.current_epoch])
        print("DONE", os.environ["RANK"], fold, world_size, sum(map(len, predicted or [])), flush=True)
    print("RESULTS", os.environ["RANK"], json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
