"""Trains on hosts with short timeouts, until there is a file named "stop"."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_async import AsyncAveragingStrategy, EveryNSteps, Timeouts
from lightning_async.algorithms import DeltaMean
from tests.strategies.problem import batches
from tests.strategies.workers import Net, loader


class UntilToldToStop(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.01)
        if trainer.global_step == 20:
            print("TRAINING", flush=True)
        trainer.should_stop = trainer.should_stop or Path("stop").exists()


if __name__ == "__main__":
    torch.manual_seed(0)
    timeouts = Timeouts(
        payload=timedelta(seconds=3), dead_after=timedelta(seconds=4), reform=timedelta(seconds=30), attempts=5
    )
    strategy = AsyncAveragingStrategy(DeltaMean(), schedule=EveryNSteps(8), min_replicas=1, timeouts=timeouts)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=3, max_epochs=-1, strategy=strategy, callbacks=[UntilToldToStop()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Net((0.0, 0.0, 0.0)), loader(batches(0, 1000)))
    print(f"ENDED world size {trainer.world_size}", flush=True)
