"""A user's script for three ranks: sample 37 raises an exception, always, or once if the argument names a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_async import AsyncAveragingStrategy, EveryNSteps
from lightning_async.trainer.namespace import pl


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Tensor:
        if index == 37 and not any(Path(name).exists() for name in sys.argv[1:]):
            for name in sys.argv[1:]:
                Path(name).touch()
            raise ValueError("it is no picture")
        return torch.full((2,), index / 120)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=AsyncAveragingStrategy(schedule=EveryNSteps(2), min_replicas=1),
        accelerator="cpu", devices=3, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(Samples(), batch_size=4, shuffle=True))
    print("DONE", flush=True)
