"""What each replica of `test_slurm` and `test_kubernetes` trains: until there is a file ``stop``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, EveryNSteps, FaultTolerantCheckpoint

FOLDER, NUMBER = Path(os.environ.get("SLURM_SUBMIT_DIR", ".")), os.environ.get("NODE_RANK", "0")


class Trained(pl.LightningModule):
    """Writes down, in a line for each step: process, replicas, step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with (FOLDER / f"steps-{NUMBER}").open("a") as file:
            file.write(f"{os.getpid()} {self.trainer.world_size} {self.trainer.global_step}\n")
        time.sleep(0.05)
        self.trainer.should_stop |= (FOLDER / "stop").exists()
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    strategy = AsyncAveragingStrategy(schedule=EveryNSteps(5), min_replicas=1)
    trainer = pl.Trainer(
        num_nodes=3, devices=1, accelerator="cpu", strategy=strategy, max_epochs=-1, logger=False,
        callbacks=[FaultTolerantCheckpoint(FOLDER / "saved")], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.arange(3000.0).unsqueeze(1)
    trainer.fit(Trained(), DataLoader(data, batch_size=2))
    print(f"replica {NUMBER} ended as rank {trainer.global_rank} of {trainer.world_size}", flush=True)
