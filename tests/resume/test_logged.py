"""Values logged over an epoch, monitors of them, and schedulers that follow them, where the epoch was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch.utils.data import DataLoader

from tests.resume.problem import Net, Sized, Training, goes_on


class Logs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.all = torchmetrics.CatMetric()
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.scratch += 1  # pyright: ignore[reportOperatorIssue]
        self.mean(loss.detach())
        self.all.update(batch.mean())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("top", loss, on_epoch=True, on_step=False, reduce_fx=max)
        self.log("scratch", self.scratch, on_epoch=True, reduce_fx="sum")
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("once", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val", batch.mean(), on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.rows.append(("all", self.all.compute().tolist()))
        self.all.reset()

    def on_train_epoch_start(self) -> None:
        self._tell()

    def on_train_end(self) -> None:
        self._tell()

    def _tell(self) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        bar = {name: float(value) for name, value in self.trainer.progress_bar_metrics.items()}
        self.rows.append(("metrics", metrics, bar))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


def test_what_was_logged_over_an_interrupted_epoch(tmp_path: Path) -> None:
    training = Training(lambda: DataLoader(Sized(), 3), Logs, trainer={"val_check_interval": 3})
    names = ["batch 0:1", "batch 1:4", "batch 1:8", "validation 1:3", "epoch 1:8"]
    assert len(goes_on(training, tmp_path, names)) == len(names) + 2  # the validation: at its start, and each batch


def test_each_value_is_there(tmp_path: Path) -> None:
    rows, _, _ = Training(lambda: DataLoader(Sized(), 3), Logs, trainer={"max_epochs": 1}).fit(tmp_path)
    names = next(row for row in reversed(rows) if row[0] == "metrics")[1]
    assert {"loss_step", "loss_epoch", "top", "scratch", "mean", "once", "val"} <= names.keys()
